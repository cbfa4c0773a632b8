"""API keys from a file, from variables and from the command line, as the key ring of `Tenants`.

A file is TOML, one table a key::

    [[keys]]
    tenant = "acme"
    key = "sk-…"            # or key_sha256 = the SHA-256 of the key, in hex
    trusted = true          # its prompts may spell control tokens; left out: they may not

    [[keys]]
    admin = true
    key_sha256 = "…"
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semblend.engine.server.tenants import ApiKey, Identity
from semblend.errors import ConfigError

_FIELDS: Mapping[str, type] = {"tenant": str, "admin": bool, "trusted": bool, "key": str, "key_sha256": str}


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
