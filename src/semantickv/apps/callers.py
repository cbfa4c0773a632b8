"""Who calls: the API key decides the namespace. X-Tenant-ID is a label and is believed by nobody."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from random import getrandbits
from typing import Any

from semantickv.edge.headers import RawHeaders, find_header
from semblend.quality import EDIT_HEADER, read_base
from semblend.wire.callers import is_loopback

LONGEST_LABEL = 128


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller as the edge knows it. ``namespace`` is a digest of the key; ``session`` and ``tenant`` are labels."""

    namespace: bytes
    session: str
    tenant: str
    request_id: str

    def with_session(self, given: Any) -> Caller:
        """The same caller, with the session that the body names where no header does."""
        if self.session or not isinstance(given, str) or not 0 < len(given) <= LONGEST_LABEL:
            return self
        return replace(self, session=given)


def identify_caller(headers: RawHeaders, secret: str = "") -> Caller:
    """Identify the caller of a request; without a key all callers share one namespace.

    >>> one = identify_caller([(b"authorization", b"Bearer a"), (b"x-tenant-id", b"t")])
    >>> two = identify_caller([(b"authorization", b"Bearer b"), (b"x-tenant-id", b"t")])
    >>> one.namespace == two.namespace
    False
    """
    first = dict(reversed(headers))
    key = first.get(b"authorization") or first.get(b"x-api-key", b"")
    return Caller(
        make_namespace(key, secret),
        _read_label(first, b"x-session-id"),
        _read_label(first, b"x-tenant-id"),
        _read_label(first, b"x-request-id") or f"{getrandbits(128):032x}",
    )


@lru_cache(4096)
def make_namespace(key: bytes, secret: str) -> bytes:
    """Digest an API key: what separates its prompts from everybody else's."""
    return hashlib.blake2b(key, digest_size=16, key=secret.encode()[:64], person=b"semantickv.edge").digest()


def make_salt(secret: str, namespace: bytes, given: Any) -> str:
    """Make the cache salt of a request: from our secret, the caller's namespace and the salt that it sent itself."""
    own = given if isinstance(given, str) else ""
    message = namespace + own.encode("utf-8", "surrogatepass")
    return hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()[:32]


def declare_edit(headers: RawHeaders, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The field that tells a vLLM which request this one was edited from, where the caller says so in a header.

    >>> declare_edit([(b"x-semblend-edit", b"chatcmpl-7f")], {})
    {'kv_transfer_params': {'semblend': {'edit': {'base': 'chatcmpl-7f'}}}}
    """
    base = read_base({"base": find_header(headers, EDIT_HEADER.encode())})
    params = fields.get("kv_transfer_params") or {}
    ours = params.get("semblend") or {} if isinstance(params, Mapping) else None
    if not base or not isinstance(ours, Mapping) or "edit" in ours:
        return {}
    return {"kv_transfer_params": {**params, "semblend": {**ours, "edit": {"base": base}}}}


def write_fields(fields: Mapping[str, Any], added: Mapping[str, Any]) -> bytes:
    """Write the body again, with fields of ours in place of the caller's."""
    return json.dumps({**fields, **added}, separators=(",", ":")).encode()


def add_fields(body: bytes, fields: Mapping[str, Any], added: Mapping[str, Any]) -> bytes:
    """Add fields of ours to a body that was read as ``fields``; where it has none of them, its own bytes stay.

    >>> add_fields(b'{"seed": 1e2}', {"seed": 100.0}, {"cache_salt": "s"})
    b'{"seed": 1e2,"cache_salt":"s"}'
    """
    if not fields or fields.keys() & added.keys():
        return write_fields(json.loads(body), added)
    inside = body[: body.rindex(b"}")]
    return b"%b,%b" % (inside, json.dumps(added, separators=(",", ":")).encode()[1:])


def is_operator(headers: RawHeaders, peer: str, admin_key: str) -> bool:
    """Whether this is the operator: by its key or, where none is set, because it calls from this machine."""
    if admin_key:
        scheme, _, key = find_header(headers, b"authorization").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else ""
        return hmac.compare_digest(given.encode("latin-1"), admin_key.encode("utf-8"))
    return is_loopback(peer)


def _read_label(headers: Mapping[bytes, bytes], name: bytes) -> str:
    text = headers.get(name, b"").decode("latin-1")
    return text if len(text) <= LONGEST_LABEL and text.isprintable() else ""
