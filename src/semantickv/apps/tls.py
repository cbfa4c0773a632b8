"""The files with which a server speaks HTTPS, checked before it starts."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from semblend.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A certificate with its chain, and its private key, both PEM."""

    certificate: str
    key: str | None = None

    def check(self) -> None:
        """`ConfigError` if the files are missing or do not belong together."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"{self.certificate} cannot be used for HTTPS: {getattr(error, 'strerror', None) or error}",
                hint="a certificate and its key without a password, as PEM: --tls-cert chain.pem --tls-key key.pem",
            ) from None
