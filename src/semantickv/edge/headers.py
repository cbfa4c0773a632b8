"""Which headers go through and which belong to one connection alone (RFC 9110, 7.6.1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

RawHeaders = Sequence[tuple[bytes, bytes]]
"""Names in lower case, as ASGI has them."""

HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
})  # fmt: skip
_NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"expect"}


def select_request_headers(headers: RawHeaders, dropped: Iterable[bytes] = ()) -> list[tuple[bytes, bytes]]:
    """Return the headers that go on to the engine; our own connection writes host and length.

    >>> select_request_headers([(b"host", b"a"), (b"authorization", b"Bearer k"), (b"connection", b"x-gone"), (b"x-gone", b"1")])
    [(b'authorization', b'Bearer k')]
    """  # noqa: E501
    hidden = _NOT_FORWARDED.union(_list_named(headers), dropped)
    return [(name, value) for name, value in headers if name not in hidden]


def select_response_headers(headers: RawHeaders, dropped: Iterable[bytes] = ()) -> list[tuple[bytes, bytes]]:
    """Return the headers that go back to the client, the length among them: the bytes are the same."""
    hidden = HOP_BY_HOP.union(_list_named(headers), dropped)
    return [(name, value) for name, value in headers if name not in hidden]


def find_header(headers: RawHeaders, name: bytes) -> str:
    """Return the first value of a header as text, or an empty string."""
    return next((value.decode("latin-1") for one, value in headers if one == name), "")


def _list_named(headers: RawHeaders) -> set[bytes]:
    """The names that a Connection header lists: they too belong to one connection alone."""
    return {
        word.strip().lower()
        for name, value in headers
        if name == b"connection"
        for word in value.split(b",")
        if word.strip()
    }
