"""Accepts connections, runs an application on them, and ends in good order when a signal comes.

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
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI

from semblend.engine.server.config import ServeConfig
from semblend.engine.server.edge.connections import Connections, Deadlines, Phase, RareLines, plan_limit
from semblend.engine.server.edge.drain import Drain

if TYPE_CHECKING:
    from semblend.engine.server.edge.protocol import GuardedProtocol, MakesProtocol

log = logging.getLogger("semblend.server.edge")
_CALMED = ("semblend.server.edge", "uvicorn.error", "asyncio")
ACCEPTS_AT_ONCE = 32
RETRY_ACCEPT_S = 0.1
LAST_WORDS_S = 5.0
"""Time for error events and 503s to leave, once the drain is over."""
POLL_S = 0.02
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def serve(app: FastAPI, sock: socket.socket) -> signal.Signals | None:
    """Run until a signal has ended it, and return that signal. The application is one that `create_app` made.

    Forwarded-for headers are not believed: the peer's address decides who is a front.
    """
    return HttpServer(app, sock).run()


class Acceptor:
    """Takes connections off a listening socket as long as there is room for them.

    asyncio's own server accepts as many as wait before it looks at one, and writes a log line for each that it has no
    descriptor for.
    """

    def __init__(self, sock: socket.socket, connections: Connections, make_protocol: MakesProtocol) -> None:
        self._sock = sock
        self._connections = connections
        self._make_protocol = make_protocol
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
            await self._loop.connect_accepted_socket(lambda: protocol, accepted)
        except (OSError, asyncio.CancelledError):  # it was gone before we got to it
            accepted.close()
            self._connections.remove(protocol)


class HttpServer:
    """One application on one socket. `run` in the main thread listens to signals; `stop` does what a signal does."""

    def __init__(self, app: FastAPI, sock: socket.socket) -> None:
        config: ServeConfig = app.state.service.config
        self.connections = Connections(plan_limit(config.max_connections))
        self.started = threading.Event()
        self._app = app
        self._sock = sock
        self._config = config
        self._drain: Drain = app.state.drain
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signals: list[signal.Signals] = []
        self._stops = 0
        self._stopped = asyncio.Event()

    def run(self) -> signal.Signals | None:
        """Serve until `stop`; returns the first signal that came, if one did."""
        asyncio.run(self._run())
        return self._signals[0] if self._signals else None

    def stop(self) -> None:
        """Begin to drain; called again, end the drain. From any thread."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                loop.call_soon_threadsafe(self._note_stop)

    async def _run(self) -> None:
        from uvicorn.config import Config
        from uvicorn.server import ServerState

        from semblend.engine.server.edge.protocol import GuardedProtocol

        self._loop, config = asyncio.get_running_loop(), self._config
        settings = Config(self._app, proxy_headers=False, log_level="warning", ws="none", lifespan="off")
        settings.load()
        state = ServerState()
        deadlines = Deadlines(config.header_timeout_s, config.idle_timeout_s, config.write_timeout_s)
        acceptor = Acceptor(
            self._sock, self.connections, partial(GuardedProtocol, settings, state, self.connections, deadlines)
        )
        with self._listen_to_signals(self._loop), _calm_logs():
            self.started.set()
            while not self._stops:
                state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopped.wait(), 1.0)
            acceptor.close()
            await self._end(state.tasks)

    async def _end(self, tasks: set[asyncio.Task[None]]) -> None:
        """Let the requests end, then make them end, then close whatever is still open."""
        self._drain.begin()
        for connection in self.connections.list_all():
            connection.shutdown()
        if tasks:
            log.warning("stopping: %d requests have %g s to end", len(tasks), self._config.drain_s)
        if not await self._wait_for_clients(self._config.drain_s):
            self._drain.end()
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
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
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
    calm = RareLines()
    loggers = [logging.getLogger(name) for name in _CALMED]
    for logger in loggers:
        logger.addFilter(calm)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(calm)
