"""A scripted engine and an application of the edge on real sockets, each in a thread, for tests with real clients."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from typing import Any

from semblend.http.server import DEADLINES, HttpServer, ServerLimits, listen
from tests.fakes.scripted_engine import Behaviour, ScriptedEngine

PATIENCE_S = 120


class EngineThread:
    """A scripted engine in an event loop of its own."""

    def __init__(self, *plan: Behaviour, default: Behaviour | None = None, **known: Any) -> None:
        self.engine = ScriptedEngine(**known)
        if default is not None:
            self.engine.default = default
        self.engine.plan(*plan)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def __enter__(self) -> ScriptedEngine:
        self.thread.start()
        self.run(self.engine.start())
        return self.engine

    def __exit__(self, *_: object) -> None:
        self.run(self.engine.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(PATIENCE_S)
        self.loop.close()


@contextmanager
def serve(app: Any, drain_s: float = 5, **known: Any):
    """Serve an application in a thread, as our commands do; yield its address and the server."""
    deadlines, connections = known.pop("deadlines", DEADLINES), known.pop("connections", 1024)
    sock = listen("127.0.0.1", 0)
    limits = ServerLimits(deadlines, connections, drain_s)
    server = HttpServer(app, sock, limits, date_header=False, **known)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    address = f"http{'s' if known.get('tls') else ''}://127.0.0.1:{sock.getsockname()[1]}"
    assert server.started.wait(PATIENCE_S)
    try:
        yield address, server
    finally:
        server.stop()
        thread.join(PATIENCE_S)
        sock.close()
    assert not thread.is_alive()
