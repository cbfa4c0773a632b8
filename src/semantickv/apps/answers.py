"""Answers of our own, as ASGI messages."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from semblend.wire.errors import ApiError

if TYPE_CHECKING:
    from starlette.types import Send

NOT_FOUND = ApiError(404, "no such path", hint="see docs/guides/proxy.md and docs/guides/router.md for the paths")
NOT_OPERATOR = ApiError(
    403,
    "this path is the operator's",
    hint="send SEMANTICKV_ADMIN_KEY as a bearer token",
)


async def send_bytes(
    send: Send, status: int, body: bytes, kind: bytes, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """Send a whole answer."""
    own = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": own})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, value: Any, status: int = 200, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """Send JSON."""
    await send_bytes(send, status, json.dumps(value).encode(), b"application/json", headers)


async def send_error(send: Send, error: ApiError, request_id: str = "") -> None:
    """Send an error in OpenAI's shape."""
    headers = [(name.lower().encode(), value.encode()) for name, value in error.headers().items()]
    if request_id:
        headers.append((b"x-request-id", request_id.encode("latin-1")))
    await send_json(send, error.body(), error.status, headers)
