"""Who is asking: an API key, or a trusted front's word, becomes a tenant.

The key decides. ``X-Tenant-ID`` is believed only from the addresses of configured fronts, which have checked the
caller themselves; from anyone else the header is ignored.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from semblend.errors import ConfigError
from semblend.wire.errors import ApiError

LONGEST_TENANT = 128
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Identity:
    """A tenant sees its own requests, by counts. An admin is the operator: sees all requests and donors, and may flush.

    Donor ids, spans and places in a prompt are shown to an admin only, in answers and on the dashboard. Control tokens
    that a ``trusted`` caller spells in a prompt count as such. In a chat they never do, whoever asks.
    """

    tenant: str = ""
    admin: bool = False
    trusted: bool = False

    def may_see(self, tenant: str) -> bool:
        return self.admin or tenant == self.tenant


_OPERATOR = Identity("", admin=True, trusted=True)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key, by the SHA-256 of its bytes, and whose it is: a tenant's or an admin's.

    >>> ApiKey.of("sk-1", Identity("acme")).identity.tenant
    'acme'
    """

    sha256: bytes = field(repr=False)
    identity: Identity

    @classmethod
    def of(cls, key: str, identity: Identity) -> ApiKey:
        """A key from its text."""
        if not isinstance(key, str) or not key.strip():
            raise ConfigError("an API key is empty", hint="remove it, or give it a value")
        return cls(_digest(key), identity)

    def __post_init__(self) -> None:
        if not self.identity.admin:
            _check(self.identity.tenant)


class Tenants:
    """The key ring. Without keys and without fronts everyone is the one nameless tenant, and admin.

    Such a server is meant for its operator's own machine: whoever reaches it sees receipts with donors and places.

    >>> Tenants({"sk-1": "acme"}).identify("sk-1").tenant
    'acme'
    """

    def __init__(
        self,
        keys: Mapping[str, str] | None = None,
        *,
        admin_keys: Iterable[str] = (),
        fronts: Iterable[str] = (),
        ring: Iterable[ApiKey] = (),
        trusted: Iterable[str] = (),
    ) -> None:
        self._trusted = frozenset(trusted)
        named = [ApiKey.of(key, Identity(tenant)) for key, tenant in (keys or {}).items()]
        named += [ApiKey.of(key, _OPERATOR) for key in admin_keys]
        self._keys = tuple(self._trust(key) for key in (*named, *ring))
        if len({key.sha256 for key in self._keys}) != len(self._keys):
            raise ConfigError("an API key is given twice", hint="give every tenant and the admin a key of their own")
        self._fronts = tuple(_network(front) for front in fronts)
        unknown = self._trusted - {key.identity.tenant for key in self._keys}
        if unknown and not self._fronts:  # a front may name any tenant
            raise ConfigError(f"no key has the trusted tenant {min(unknown)!r}", hint="give it a key, or mend the name")

    @property
    def is_open(self) -> bool:
        """Whether everyone who reaches the server is its admin."""
        return not self._keys and not self._fronts

    @property
    def need_key(self) -> bool:
        return bool(self._keys)

    def identify(self, key: str | None, *, address: str = "", claimed: str | None = None) -> Identity:
        """``address`` is the peer of the connection itself, ``claimed`` its X-Tenant-ID."""
        if key is not None and self._keys:
            return self._by_key(key)
        trusted = self._is_front(address)
        if trusted and claimed:
            return self._name(_check_claim(claimed))
        if self._keys:
            raise ApiError(401, "no API key", hint="send 'Authorization: Bearer <key>'", code="missing_api_key")
        return Identity() if self._fronts else _OPERATOR

    def _name(self, tenant: str) -> Identity:
        return Identity(tenant, trusted=tenant in self._trusted)

    def _trust(self, key: ApiKey) -> ApiKey:
        """The key with what its tenant is trusted with: by this ring, or already by who made the key."""
        identity = key.identity
        trusted = identity.admin or identity.trusted or identity.tenant in self._trusted
        return replace(key, identity=replace(identity, trusted=trusted))

    def _by_key(self, key: str) -> Identity:
        # Digests have one length, and all of them are compared: the time tells nothing of how close a guess was.
        digest, found = _digest(key), None
        for one in self._keys:
            if hmac.compare_digest(one.sha256, digest):
                found = one.identity
        if found is None:
            raise ApiError(401, "unknown API key", hint="check the key", code="invalid_api_key")
        return found

    def _is_front(self, address: str) -> bool:
        if not self._fronts:
            return False
        try:
            peer = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False  # a Unix socket, or a test client without an address
        if isinstance(peer, ipaddress.IPv6Address) and peer.ipv4_mapped is not None:
            peer = peer.ipv4_mapped
        return any(peer in front for front in self._fronts)


def bearer(authorization: str | None, api_key: str | None = None) -> str | None:
    """The key from ``Authorization: Bearer …``, or from ``X-API-Key``.

    >>> bearer("Bearer sk-1")
    'sk-1'
    """
    if authorization:
        scheme, _, key = authorization.partition(" ")
        return key.strip() if scheme.lower() == "bearer" else ""
    return api_key


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _network(front: str) -> _Network:
    try:
        return ipaddress.ip_network(front, strict=False)
    except ValueError:
        raise ConfigError(
            f"front {front!r} is not an address", hint="write an IP address or a network such as 10.0.0.0/24"
        ) from None


def _check(tenant: str) -> str:
    if not isinstance(tenant, str) or not tenant or len(tenant) > LONGEST_TENANT or not tenant.isprintable():
        raise ConfigError(
            f"tenant {tenant!r} cannot be used", hint=f"1 to {LONGEST_TENANT} printable characters, not empty"
        )
    return tenant


def _check_claim(tenant: str) -> str:
    try:
        return _check(tenant)
    except ConfigError as error:
        raise ApiError(400, f"X-Tenant-ID: {error.message}", hint=error.hint, param="X-Tenant-ID") from None
