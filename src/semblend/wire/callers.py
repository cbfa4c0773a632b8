"""Who calls: headers that name a caller, and names that mean this machine.

Each header may come once: of two, a server and a front could believe different ones. Servers that answer to one person
ask of addresses and of Host headers whether they mean this machine.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from semblend.wire.errors import ApiError

CALLER_HEADERS = (b"authorization", b"x-api-key", b"x-tenant-id")


def find_repeated(headers: Sequence[tuple[bytes, bytes]]) -> ApiError | None:
    """The refusal of a request that names its caller twice; None for every other. Names in lower case, as in ASGI.

    >>> find_repeated([(b"x-tenant-id", b"victim"), (b"x-tenant-id", b"mine")]).message
    'the header X-Tenant-Id was sent twice'
    """
    names = [name for name, _ in headers]
    for name in CALLER_HEADERS:
        if names.count(name) > 1:
            title = name.decode().title()
            return ApiError(
                400,
                f"the header {title} was sent twice",
                hint="send it once; a front replaces what its callers send, it does not add to it",
                param=title,
                code="repeated_header",
            )
    return None


def is_loopback(host: str) -> bool:
    """Whether a name or address can only mean this machine.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("a.localhost"), is_loopback("localhost.example")
    (True, True, True, False)
    """
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
