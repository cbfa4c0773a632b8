"""The address of an engine, read once and checked."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import cache
from urllib.parse import urlsplit

from semblend.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine listens. ``path`` is put in front of every path that is asked of it.

    >>> EngineAddress.parse("http://localhost:8001/").url
    'http://localhost:8001'
    """

    scheme: str
    host: str
    port: int
    path: str = ""

    @classmethod
    def parse(cls, url: str) -> EngineAddress:
        """Read a URL; `ConfigError` if it is none that can be forwarded to."""
        try:
            parts = urlsplit(url.strip())
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"{url!r} is not the address of an engine", hint="for example http://127.0.0.1:8001")
        if parts.username or parts.password:
            raise ConfigError("the address of an engine holds a password", hint="send an Authorization header instead")
        if not (parts.hostname + parts.path).isprintable() or " " in parts.path:
            raise ConfigError(f"{url!r} is not the address of an engine", hint="for example http://127.0.0.1:8001")
        return cls(
            parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80), parts.path.rstrip("/")
        )

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"

    @property
    def tls(self) -> ssl.SSLContext | None:
        return _default_tls() if self.scheme == "https" else None


@cache
def _default_tls() -> ssl.SSLContext:
    return ssl.create_default_context()
