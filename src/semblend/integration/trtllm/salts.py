"""Salts for one request: they keep approximate KV out of TensorRT-LLM's reuse tree.

TensorRT-LLM enters the blocks of a prompt into its own tree when they are complete, under their tokens and the
request's ``cache_salt``. A connector can neither stop that nor change the salt. So a request whose KV may be
approximate comes with a salt that no other request has. In front of it stands the tenant, which is what decides who
sees whose donors.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

_MARK, _SEPARATOR = "semblend", ":"
_MIN_NONCE = 16


@dataclass(frozen=True, slots=True)
class Salt:
    """A request's ``cache_salt``: whose donors it sees, and whether anybody else can find its blocks."""

    tenant: str
    is_one_time: bool


def make_one_time_salt(tenant: str = "") -> str:
    """A ``cache_salt`` for one request of a tenant; a new one at every call.

    >>> first, second = make_one_time_salt("acme"), make_one_time_salt("acme")
    >>> first != second, read_salt(first) == read_salt(second) == Salt("acme", True)
    (True, True)
    """
    return _SEPARATOR.join((_MARK, tenant, secrets.token_hex(_MIN_NONCE)))


def read_salt(salt: str | None) -> Salt:
    """What a ``cache_salt`` says; one that we did not make stands for a tenant as a whole.

    >>> read_salt("acme"), read_salt(None), read_salt("semblend:acme:short")
    (Salt(tenant='acme', is_one_time=False), Salt(tenant='', is_one_time=False), Salt(tenant='semblend:acme:short', \
is_one_time=False))
    """
    mark, _, rest = (salt or "").partition(_SEPARATOR)
    tenant, _, nonce = rest.rpartition(_SEPARATOR)
    if mark == _MARK and len(nonce) >= _MIN_NONCE:
        return Salt(tenant, True)
    return Salt(salt or "", False)
