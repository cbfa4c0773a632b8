"""Only names and addresses of this machine are loopback."""

from __future__ import annotations

from semblend.wire.callers import is_loopback


def test_loopback_names_are_known() -> None:
    assert all(is_loopback(name) for name in ("localhost", "127.0.0.1", "127.9.9.9", "::1", "x.localhost"))
    assert not any(is_loopback(name) for name in ("", "0.0.0.0", "example.org", "localhost.evil.org", "10.0.0.1"))
