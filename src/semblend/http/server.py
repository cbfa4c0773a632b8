"""Accepts connections, runs an ASGI application on them, and ends in good order when a signal comes.

::

    listen ──▶ accept ──▶ GuardedProtocol ──▶ the application
                 │ full: the connection that kept us waiting longest is closed
    a signal ──▶ no new connections, idle ones are closed, requests have ``drain_s`` to end
    drain over, or a second signal ──▶ what still runs ends with an error event or a 503
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import logging
import signal
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import formatdate
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from semblend.errors import ConfigError, MissingDependencyError
from semblend.http.connections import Connections, Deadlines, Phase, RareLines, plan_limit
from semblend.wire.errors import ApiError

if TYPE_CHECKING:
    from uvicorn.config import Config

    from semblend.http.protocol import GuardedProtocol

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger("semblend.server.edge")
_CALMED = ("semblend.server.edge", "uvicorn.error", "asyncio")
BACKLOG = 2048
WANTED_DESCRIPTORS = 8192
"""Two for each request at once: its client and its engine."""
ACCEPTS_AT_ONCE = 32
RETRY_ACCEPT_S = 0.1
LAST_WORDS_S = 5.0
"""Time for error events and 503s to leave, once the drain is over."""
POLL_S = 0.02
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
HANGUP = getattr(signal, "SIGHUP", signal.SIGTERM)
STOP_SIGNALS = tuple(dict.fromkeys((signal.SIGINT, signal.SIGTERM, HANGUP)))
"""Each of them drains: a closed terminal, too, must not cut answers."""
_UNFINISHED = "ASGI callable returned without completing response."


DEADLINES = Deadlines(header_s=10.0, idle_s=75.0, write_s=60.0)


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """How long a client may take, how many connections may be open, and how long requests have after a signal."""

    deadlines: Deadlines = DEADLINES
    connections: int = 4096
    drain_s: float = 30.0


# -- where to listen -------------------------------------------------------------------------------------------------


def listen(host: str, port: int) -> socket.socket:
    """A socket that clients can reach from now on; `ConfigError` where the address is taken or not ours."""
    if not 0 <= port <= 65_535:  # the resolver would take it modulo that
        raise ConfigError(f"cannot listen on {host}:{port}: no such port", hint="0 to 65535; 0 takes a free one")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {_name_reason(error)}",
            hint="choose another --host or --port; --port 0 takes a free one",
        ) from None


def write_url(sock: socket.socket, host: str, *, tls: bool = False) -> str:
    """The address of a listening socket as a client writes it, with the port that the system chose."""
    named = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{named}:{sock.getsockname()[1]}"


def _name_reason(error: OSError) -> str:
    """Why it failed, without the address, which `socket.create_server` adds."""
    return str(error.strerror or error).partition(" (while")[0]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A certificate with its chain, and its private key, both PEM."""

    certificate: str
    key: str | None = None

    def check(self) -> None:
        """`ConfigError` if the files are missing or do not belong together."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"{self.certificate} cannot be used for HTTPS: {getattr(error, 'strerror', None) or error}",
                hint="a certificate and its key without a password, as PEM: --tls-cert chain.pem --tls-key key.pem",
            ) from None

    def load(self) -> ssl.SSLContext:
        """The context that a server speaks HTTPS with."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        return context


# -- the end of a server ---------------------------------------------------------------------------------------------

STOPPING = ApiError(
    503, "the server is shutting down", hint="ask again in a moment", code="shutting_down", retry_after_s=5
)


class Drain:
    """The requests that run. `begin` refuses new ones; `end` stops those that still run."""

    def __init__(self) -> None:
        self.has_begun = False
        self.has_ended = False
        self.tasks: set[asyncio.Task[object]] = set()

    def begin(self) -> None:
        self.has_begun = True

    def end(self) -> None:
        """Interrupt every request; each tells its client so (see `DrainRequests`)."""
        self.has_begun = self.has_ended = True
        for task in self.tasks:
            task.cancel()


class DrainRequests:
    """Refuses requests while the server drains, and gives those that it ends their last words.

    A stream ends with an error event and ``[DONE]``, a whole answer becomes a 503. The interrupted request itself gives
    back its place and stops the engine, as it does when its client leaves.
    """

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        reply = _Reply(send)
        task = asyncio.current_task()
        if self._drain.has_begun or task is None:
            await reply.end_with(STOPPING)
            return
        self._drain.tasks.add(task)
        try:
            await self._app(scope, receive, reply.send)
        except asyncio.CancelledError:
            if not self._drain.has_ended:
                raise
            task.uncancel()
            with suppress(asyncio.CancelledError):  # the server waits no longer for a client that does not read
                await reply.end_with(STOPPING)
        finally:
            self._drain.tasks.discard(task)


class _Reply:
    """What was sent of an answer so far."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_begun = self._has_ended = self._is_stream = False

    async def send(self, message: Message) -> None:
        await self._send(message)  # noted only when it was written: an interrupted send wrote nothing
        if message["type"] == "http.response.start":
            self._has_begun = True
            kinds = [value for name, value in message.get("headers", ()) if name.lower() == b"content-type"]
            self._is_stream = any(kind.startswith(b"text/event-stream") for kind in kinds)
        elif not message.get("more_body", False):
            self._has_ended = True

    async def end_with(self, error: ApiError) -> None:
        """Complete the answer with an error, as far as its shape allows."""
        if not self._has_begun:
            body = json.dumps(error.body(), separators=(",", ":")).encode()
            named = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
            headers = [(name.lower().encode(), value.encode()) for name, value in (named | error.headers()).items()]
            await self._send({"type": "http.response.start", "status": error.status, "headers": headers})
            await self._send({"type": "http.response.body", "body": body})
        elif self._is_stream and not self._has_ended:
            last = f"data: {json.dumps(error.body(), separators=(',', ':'))}\n\ndata: [DONE]\n\n"
            await self._send({"type": "http.response.body", "body": last.encode()})


# -- the server ------------------------------------------------------------------------------------------------------


class Acceptor:
    """Takes connections off a listening socket as long as there is room for them.

    asyncio's own server accepts as many as wait before it looks at one, and writes a log line for each that it has no
    descriptor for.
    """

    def __init__(
        self,
        sock: socket.socket,
        connections: Connections,
        make_protocol: Callable[[], GuardedProtocol],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._sock = sock
        self._connections = connections
        self._make_protocol = make_protocol
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_open = True
        self._is_reading = False
        sock.setblocking(False)
        connections.on_room = self.resume
        self.resume()

    def resume(self) -> None:
        """Accept again, after there was no room."""
        if self._is_open and not self._is_reading:
            self._is_reading = True
            self._loop.add_reader(self._sock.fileno(), self._accept)

    def close(self) -> None:
        """Accept nothing more; whoever waits in the backlog is turned away by the system."""
        self._pause()
        self._is_open = False
        self._sock.close()

    def _pause(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._sock.fileno())

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            if not self._connections.can_take_one:
                self._pause()  # every connection waits for us: the next that ends, or waits for its client, resumes
                return
            try:
                accepted, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_DESCRIPTOR:
                    raise
                log.warning("no connection can be accepted: %s", error.strerror)
                self._pause()
                self._loop.call_later(RETRY_ACCEPT_S, self.resume)
                return
            self._connections.make_room()
            self._hand_over(accepted)

    def _hand_over(self, accepted: socket.socket) -> None:
        protocol = self._make_protocol()
        self._connections.enter(protocol, Phase.HEADER)
        task = self._loop.create_task(self._connect(accepted, protocol))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, accepted: socket.socket, protocol: GuardedProtocol) -> None:
        try:
            accepted.setblocking(False)
            # asyncio sets it only where the socket's protocol number is known, which accept does not tell: small
            # writes then wait 40 ms for the client's acknowledgement.
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(lambda: protocol, accepted, ssl=self._tls)
        except (OSError, asyncio.CancelledError):  # it was gone before we got to it, or spoke no TLS
            accepted.close()
            self._connections.remove(protocol)


class HttpServer:
    """One application on one socket. `run` in the main thread listens to signals; `stop` does what a signal does.

    ``drain`` is the application's own, where it refuses requests inside of itself; else it is done here. With
    ``lifespan`` the application is told when the server starts and ends. An application that passes on the answers of
    other servers has their ``date`` header.
    """

    def __init__(
        self,
        app: ASGIApp,
        sock: socket.socket,
        limits: ServerLimits | None = None,
        *,
        drain: Drain | None = None,
        tls: TlsFiles | None = None,
        lifespan: bool = True,
        date_header: bool = True,
    ) -> None:
        self.limits = limits or ServerLimits()
        self.connections = Connections(plan_limit(self.limits.connections))
        self.started = threading.Event()
        self.drain = drain or Drain()
        self._app = app if drain is not None else DrainRequests(app, self.drain)
        self._sock = sock
        self._tls = tls
        self._lifespan = lifespan
        self._date_header = date_header
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signals: list[signal.Signals] = []
        self._stops = 0
        self._stopped = asyncio.Event()

    def run(self) -> signal.Signals | None:
        """Serve until `stop`; returns the first signal that came, if one did."""
        factory = None
        if find_spec("uvloop"):
            import uvloop

            factory = uvloop.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            # Not `runner.run`: its own handler of Ctrl-C would cancel us in the moment before we listen to signals.
            runner.get_loop().run_until_complete(self._run())
        return self._signals[0] if self._signals else None

    def stop(self) -> None:
        """Begin to drain; called again, end the drain. From any thread."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                loop.call_soon_threadsafe(self._note_stop)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        with self._listen_to_signals(self._loop):  # one that comes while the application starts is no exception in it
            try:
                from uvicorn.config import Config
                from uvicorn.lifespan.off import LifespanOff
                from uvicorn.lifespan.on import LifespanOn
            except ImportError:
                hint = "pip install 'semblend-suite[edge]'"
                raise MissingDependencyError("uvicorn is not installed", hint=hint) from None
            settings = Config(self._app, proxy_headers=False, log_level="warning", ws="none", lifespan="off")
            settings.load()
            lifespan = (LifespanOn if self._lifespan else LifespanOff)(settings)
            await lifespan.startup()
            if not lifespan.should_exit:
                await self._serve(settings, lifespan.state)
            await lifespan.shutdown()

    async def _serve(self, settings: Config, app_state: dict[str, Any]) -> None:
        from uvicorn.server import ServerState

        from semblend.http.protocol import GuardedProtocol

        state = ServerState()
        make = partial(GuardedProtocol, settings, state, self.connections, self.limits.deadlines, app_state)
        acceptor = Acceptor(self._sock, self.connections, make, None if self._tls is None else self._tls.load())
        with _calm_logs():
            self.started.set()
            while not self._stops:
                if self._date_header:
                    state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopped.wait(), 1.0)
            acceptor.close()
            await self._end(state.tasks)

    async def _end(self, tasks: set[asyncio.Task[None]]) -> None:
        """Let the requests end, then make them end, then close whatever is still open."""
        self.drain.begin()
        for connection in self.connections.list_all():
            connection.shutdown()
        if tasks:
            log.warning("stopping: %d requests have %g s to end", len(tasks), self.limits.drain_s)
        if not await self._wait_for_clients(self.limits.drain_s):
            self.drain.end()
            if not await self._say_last_words():
                log.warning("%d connections are cut: their clients do not read", len(self.connections))
        for connection in self.connections.list_all():
            connection.evict()
        if tasks:
            await asyncio.wait(tasks, timeout=LAST_WORDS_S)

    async def _wait_for_clients(self, seconds: float) -> bool:
        """Wait until every connection has closed; False where time, or a second signal, came first."""
        end = time.monotonic() + seconds
        while len(self.connections) and time.monotonic() < end and self._stops < 2:
            await asyncio.sleep(POLL_S)
        return not len(self.connections)

    async def _say_last_words(self) -> bool:
        """Wait for the interrupted requests to be told so. Counted in looks, not in time: a busy machine gets more."""
        for _ in range(int(LAST_WORDS_S / POLL_S)):
            if not len(self.connections) or self._stops > 2:
                break
            await asyncio.sleep(POLL_S)
        return not len(self.connections)

    def _note_stop(self, number: signal.Signals | None = None) -> None:
        self._stops += 1
        self._stopped.set()
        if number is not None:
            self._signals.append(number)

    @contextlib.contextmanager
    def _listen_to_signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        if before.get(HANGUP) == signal.SIG_IGN:  # nohup: it is to outlive its terminal
            del before[HANGUP]
        for number in before:
            loop.add_signal_handler(number, self._note_stop, number)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)


@contextlib.contextmanager
def _calm_logs() -> Iterator[None]:
    """Let nobody fill the log by sending nonsense."""
    calm = RareLines(hidden=(_UNFINISHED,))  # an answer that was cut because its engine died; metrics count these
    loggers = [logging.getLogger(name) for name in _CALMED]
    for logger in loggers:
        logger.addFilter(calm)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(calm)


def run_server(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    announce: Callable[[str], None],
    drain_s: float = 30.0,
    tls: TlsFiles | None = None,
    date_header: bool = True,
    on_start: Callable[[HttpServer], None] | None = None,
) -> int:
    """Serve an application until SIGINT, SIGTERM or SIGHUP: no new connections then, and ``drain_s`` for the requests.

    ``announce`` is given the address once clients can reach it; `ConfigError` where it is taken. ``on_start`` gets the
    server, for whoever wants to stop it.
    """
    if drain_s < 0:
        raise ConfigError(f"--drain {drain_s} is no time", hint="seconds, 0 or more")
    if tls is not None:
        tls.check()
    room = plan_limit(WANTED_DESCRIPTORS)
    if room < WANTED_DESCRIPTORS:
        log.warning("file descriptors for %d requests at once; raise the limit (ulimit -n) for more", room // 2)
    warm_up = getattr(app, "warm_up", None)
    if warm_up is not None:
        warm_up()
    # What is loaded by now stays for good: a collection that walks through it holds up every stream for some 50 ms.
    gc.collect()
    gc.freeze()
    with listen(host, port) as sock:
        limits = ServerLimits(connections=room // 2, drain_s=drain_s)
        server = HttpServer(app, sock, limits, tls=tls, date_header=date_header)
        if on_start is not None:
            on_start(server)
        announce(write_url(sock, host, tls=tls is not None))
        server.run()
    return 0 if server.started.is_set() else 1
