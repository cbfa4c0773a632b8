"""Headers that say who calls. Each may come once: of two, a server and a front could believe different ones."""

from __future__ import annotations

from collections.abc import Sequence

from semblend.wire.errors import ApiError

CALLER_HEADERS = (b"authorization", b"x-api-key", b"x-tenant-id")


def find_repeated(headers: Sequence[tuple[bytes, bytes]]) -> ApiError | None:
    """The refusal of a request that names its caller twice; None for every other. Names in lower case, as in ASGI.

    >>> find_repeated([(b"x-tenant-id", b"victim"), (b"x-tenant-id", b"mine")]).message
    'the header X-Tenant-Id was sent twice'
    """
    names = [name for name, _ in headers]
    for name in CALLER_HEADERS:
        if names.count(name) > 1:
            title = name.decode().title()
            return ApiError(
                400,
                f"the header {title} was sent twice",
                hint="send it once; a front replaces what its callers send, it does not add to it",
                param=title,
                code="repeated_header",
            )
    return None
