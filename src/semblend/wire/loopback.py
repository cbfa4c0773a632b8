"""Which names mean this machine: servers that answer to one person ask it of addresses and of Host headers."""

from __future__ import annotations

import ipaddress


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
