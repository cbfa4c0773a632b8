"""Answers of our own: of the paths that this server answers itself, and errors in place of an engine's answer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from semantickv.edge.exchange import ClientSide
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


async def send_error(send: Send, error: ApiError) -> None:
    """Send an error in OpenAI's shape."""
    await send_json(send, error.body(), error.status, _write_headers(error))


def answer_error(client: ClientSide, error: ApiError, request_id: str = "") -> None:
    """Answer a request that is not forwarded, or was in vain, with an error in OpenAI's shape."""
    body = json.dumps(error.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += _write_headers(error)
    if request_id:
        headers.append((b"x-request-id", request_id.encode("latin-1")))
    client.start(error.status, headers)
    client.write(body, is_last=True)


def _write_headers(error: ApiError) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in error.headers().items()]
