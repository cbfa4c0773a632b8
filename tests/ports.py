"""Ports of the loopback interface that stay what a test takes them for, whatever other processes open meanwhile."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

PORTS = range(16_000, 32_000)
"""Below those that the kernel hands out: a port of its own range could be anybody's before a server has bound it, and
while a server is down a client that tries it could be connected to itself."""


def find_port() -> int:
    """A free port for a server that binds it later, or again."""
    for port in random.SystemRandom().sample(PORTS, 100):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise AssertionError("no port is free")


@contextmanager
def closed_ports(count: int) -> Iterator[list[int]]:
    """Ports that refuse every connection until the block ends: they are bound, and nobody listens."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in held:
            sock.bind(("127.0.0.1", 0))
        yield [sock.getsockname()[1] for sock in held]
