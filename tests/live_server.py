"""A real server on a real socket, for tests: the application in a thread, and words to talk to it byte by byte."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI

from semblend.engine.server.config import ServeConfig
from semblend.engine.server.routes import create_app, make_server
from semblend.engine.server.serving import ServingEngine
from semblend.http.server import HttpServer, listen

PATIENCE_S = 120


@dataclass(frozen=True, slots=True)
class LiveServer:
    """A server that runs, and where."""

    server: HttpServer
    app: FastAPI
    host: str
    port: int
    thread: threading.Thread
    wires: list[socket.socket] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def connect(self) -> socket.socket:
        """A connection; it is closed with the server, if not before."""
        self.wires.append(wire := socket.create_connection((self.host, self.port), timeout=PATIENCE_S))
        return wire


@contextmanager
def run_server(engine: ServingEngine, **limits: Any) -> Iterator[LiveServer]:
    """Serve an engine until the block ends; whatever still runs then is ended."""
    app = create_app(engine, ServeConfig(**limits))
    sock = listen("127.0.0.1", 0)
    server = make_server(app, sock)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert server.started.wait(PATIENCE_S)
    live = LiveServer(server, app, *sock.getsockname(), thread)
    try:
        yield live
    finally:
        for wire in live.wires:
            wire.close()
        for _ in range(3):
            server.stop()
        thread.join(PATIENCE_S)
        sock.close()
    assert not thread.is_alive()


def post_bytes(path: str, body: Any, headers: str = "") -> bytes:
    """A POST request with a JSON body, as bytes on the wire."""
    sent = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent


def read_to_end(wire: socket.socket) -> bytes:
    """Whatever comes until the other side closes."""
    got = b""
    while True:
        try:
            part = wire.recv(65536)
        except ConnectionResetError:
            return got
        if not part:
            return got
        got += part


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for a fact in the server's thread; each look gives that thread its turn."""
    patience = threading.Event()
    for _ in range(PATIENCE_S * 200):
        if holds():
            return
        patience.wait(0.005)
    raise AssertionError("it did not come to that")
