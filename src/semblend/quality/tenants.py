"""Which quality a request has: its own, its tenant's, or the server's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from semblend.errors import InputError
from semblend.quality.scale import parse_quality, show_value


@lru_cache(maxsize=64)
def parse_tenant_qualities(text: str) -> Mapping[str, str]:
    """Qualities by tenant from ``TENANT=QUALITY`` pairs with spaces between them.

    >>> dict(parse_tenant_qualities("acme=0.05 bolt=exact"))
    {'acme': '0.05', 'bolt': 'exact'}
    """
    found: dict[str, str] = {}
    for pair in text.split():
        tenant, sign, quality = pair.rpartition("=")
        if not sign or not tenant:
            raise InputError(f"{show_value(pair)} is no TENANT=QUALITY pair", hint="acme=0.05 bolt=exact")
        if tenant in found:
            raise InputError(f"tenant {show_value(tenant)} has two qualities", hint="give each tenant one")
        found[tenant] = parse_quality(quality)
    return MappingProxyType(found)


def choose_quality(own: str | None, tenant: str | None, server: str) -> str:
    """The quality of a request: its own, else its tenant's, else the server's.

    >>> choose_quality(None, "0.05", "balanced"), choose_quality("fast", "0.05", "balanced")
    ('0.05', 'fast')
    """
    return own or tenant or server
