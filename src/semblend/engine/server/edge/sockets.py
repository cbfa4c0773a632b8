"""Binds the socket of a server before anything long is loaded: a taken port costs a second, not a model."""

from __future__ import annotations

import socket

from semblend.errors import ConfigError

BACKLOG = 2048


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
