"""Who is asking: an API key, or a trusted front's word, becomes a tenant.

The key decides. ``X-Tenant-ID`` is believed only from the addresses of configured fronts, which have checked the
caller themselves; from anyone else the header is ignored. Keys come from a file, from variables and from the command
line. A file is TOML, one table a key::

    [[keys]]
    tenant = "acme"
    key = "sk-…"            # or key_sha256 = the SHA-256 of the key, in hex
    trusted = true          # its prompts may spell control tokens; left out: they may not

    [[keys]]
    admin = true
    key_sha256 = "…"
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from semblend.errors import ConfigError
from semblend.wire.errors import ApiError

LONGEST_TENANT = 128
_FIELDS: Mapping[str, type] = {"tenant": str, "admin": bool, "trusted": bool, "key": str, "key_sha256": str}
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


# -- where keys come from ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeyRing:
    """Keys, and what their reader should tell a person about where they were."""

    keys: tuple[ApiKey, ...] = ()
    warnings: tuple[str, ...] = ()

    def __add__(self, other: KeyRing) -> KeyRing:
        return KeyRing(self.keys + other.keys, self.warnings + other.warnings)


def read_keys_file(path: str | Path) -> KeyRing:
    """Read a file of keys. Others who may read it are a warning, others who may change it an error."""
    import tomllib

    path = Path(path).expanduser()
    try:
        with path.open("rb") as file:
            warnings = _check_permissions(path, os.fstat(file.fileno()))
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint="check --keys-file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", hint="write [[keys]] tables") from None
    entries = table.get("keys")
    if set(table) != {"keys"} or not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise ConfigError(f"{path} is not a list of keys", hint="write [[keys]] above each key, and nothing else")
    return KeyRing(tuple(_parse_entry(entry, f"{path}, key {n}") for n, entry in enumerate(entries, 1)), warnings)


def read_pairs(pairs: Iterable[str], admin_keys: Iterable[str], source: str) -> KeyRing:
    """Read ``TENANT=KEY`` pairs and admin keys; ``source`` names the flag or the variable in errors.

    >>> read_pairs(["acme=sk-1"], [], "--api-key").keys[0].identity.tenant
    'acme'
    """
    keys = []
    for pair in pairs:
        tenant, separator, key = pair.partition("=")
        if not separator or not tenant or not key:
            raise ConfigError(f"{source} {tenant[:20]}… is not TENANT=KEY", hint="for example acme=secret")
        keys.append(ApiKey.of(key, Identity(tenant)))
    return KeyRing((*keys, *(ApiKey.of(key, Identity(admin=True)) for key in admin_keys)))


def _parse_entry(entry: Mapping[str, Any], where: str) -> ApiKey:
    """Read one table; messages never hold the key."""
    for name, value in entry.items():
        if name not in _FIELDS or type(value) is not _FIELDS[name]:
            known = ", ".join(_FIELDS)
            raise ConfigError(f"{where}: {name} is unknown or of the wrong type", hint=f"a key has {known}")
    admin, tenant = entry.get("admin", False), entry.get("tenant", "")
    if admin == bool(tenant):
        raise ConfigError(f"{where} is not one tenant's or an admin's", hint='write tenant = "name" or admin = true')
    if ("key" in entry) == ("key_sha256" in entry):
        raise ConfigError(f"{where} needs key or key_sha256", hint="one of them, not both")
    identity = Identity(tenant, admin=admin, trusted=entry.get("trusted", False))
    if "key" in entry:
        return ApiKey.of(entry["key"], identity)
    try:
        digest = bytes.fromhex(entry["key_sha256"])
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise ConfigError(f"{where}: key_sha256 is not a SHA-256", hint="64 hex digits: printf %s KEY | sha256sum")
    return ApiKey(digest, identity)


def _check_permissions(path: Path, status: os.stat_result) -> tuple[str, ...]:
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"others may change {path} and give themselves keys", hint=f"chmod 600 {path}")
    if status.st_mode & (stat.S_IRGRP | stat.S_IROTH):  # a mounted secret often is: not an error
        return (f"others may read the keys in {path} (hint: chmod 600 {path})",)
    return ()
