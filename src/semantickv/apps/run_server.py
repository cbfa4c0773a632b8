"""Serves an application with uvicorn until a signal ends it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

from semantickv.apps.tls import TlsFiles
from semblend.cli.output import say
from semblend.engine.server.edge.connections import Connections, Deadlines, plan_limit
from semblend.engine.server.edge.sockets import listen, write_url
from semblend.errors import ConfigError, MissingDependencyError

BACKLOG = 2048
DRAIN_S = 30
WANTED_DESCRIPTORS = 8192
"""Two for each request at once: its client and its engine."""
DEADLINES = Deadlines(header_s=10.0, idle_s=75.0, write_s=60.0)
_UNFINISHED = "ASGI callable returned without completing response."


def run_server(
    app: Any,
    host: str,
    port: int,
    *,
    announce: Callable[[str], None],
    drain_s: int = DRAIN_S,
    tls: TlsFiles | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM: no new connections then, and ``drain_s`` seconds for the requests that run.

    ``announce`` is given the address once clients can reach it; `ConfigError` where it is taken.
    """
    if drain_s < 0:
        raise ConfigError(f"--drain {drain_s} is no time", hint="seconds, 0 or more")
    if tls is not None:
        tls.check()
    room = plan_limit(WANTED_DESCRIPTORS)
    if room < WANTED_DESCRIPTORS:
        say(f"note: file descriptors for {room // 2} requests at once; raise the limit (ulimit -n) for more")
    server = make_server(app, host, port, drain_s=drain_s, connections=room // 2, tls=tls)
    if hasattr(app, "warm_up"):
        app.warm_up()
    # What is loaded by now stays for good: a collection that walks through it holds up every stream for some 50 ms.
    gc.collect()
    gc.freeze()
    sock = listen(host, port)
    announce(write_url(sock, host, tls=tls is not None))
    try:
        server.run(sockets=[sock])
    except SystemExit as end:  # the application did not start; uvicorn has said so
        return int(end.code or 1)
    finally:
        sock.close()
    return 0 if server.started else 1


def make_server(
    app: Any,
    host: str,
    port: int,
    *,
    drain_s: int = DRAIN_S,
    connections: int = WANTED_DESCRIPTORS // 2,
    deadlines: Deadlines = DEADLINES,
    tls: TlsFiles | None = None,
) -> Any:
    """Make the uvicorn server of an application: the fast parser and the fast loop, and nobody's word about addresses.

    ``drain_s`` counts from the signal; what still runs then is cut.
    """
    try:
        import uvicorn

        from semantickv.edge.client_connection import ClientConnection
    except ImportError:
        raise MissingDependencyError("uvicorn is not installed", hint="pip install 'semblend-suite[edge]'") from None
    logging.getLogger("uvicorn.error").addFilter(_hide_unfinished)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="uvloop" if find_spec("uvloop") else "asyncio",
        http=partial(  # type: ignore[arg-type]
            ClientConnection,
            books=Connections(connections),
            deadlines=deadlines,
            direct=app if hasattr(app, "forward") else None,
        ),
        timeout_keep_alive=int(deadlines.idle_s),
        ws="none",
        lifespan="on",
        backlog=BACKLOG,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,  # the engine's own headers go through
        timeout_graceful_shutdown=drain_s,
        ssl_certfile=tls.certificate if tls else None,
        ssl_keyfile=tls.key if tls else None,
    )
    return uvicorn.Server(config)


def _hide_unfinished(record: logging.LogRecord) -> bool:
    """Hide uvicorn's line about an answer that was cut because its engine died: metrics count these by kind."""
    return record.getMessage() != _UNFINISHED
