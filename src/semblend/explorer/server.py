"""The explorer over HTTP: the files of its page and a small JSON API, on the server that everything here listens with.

It is meant for one person on one machine. It listens on loopback unless told otherwise; on loopback it
answers only to loopback names, so that a page from elsewhere cannot reach it through a rebound DNS name, and
a request that changes something must be JSON, which a foreign page cannot send without asking first.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from semblend.errors import CapacityError, ConfigError, InputError, SemBlendError
from semblend.explorer.app import ExplorerApp, NotFoundError
from semblend.http.connections import Deadlines
from semblend.http.server import HttpServer, Receive, Scope, Send, ServerLimits, listen, write_url
from semblend.web.site import HEADERS, build_explorer
from semblend.wire.loopback import is_loopback

LOG = logging.getLogger(__name__)
MAX_BODY_BYTES = 4 * 1024 * 1024
LIMITS = ServerLimits(Deadlines(header_s=30.0, idle_s=30.0, write_s=30.0), connections=256, drain_s=0.0)
BODY_S = 30.0
PAGE_FILES = build_explorer()
DONOR_PREFIX = "/api/donors/"
GET: dict[str, Callable[[ExplorerApp], dict[str, Any]]] = {
    "/health": ExplorerApp.health,
    "/api/donors": ExplorerApp.donors,
    "/api/examples": ExplorerApp.examples,
    "/api/stats": ExplorerApp.stats,
    "/api/events": ExplorerApp.events,
}
POST: dict[str, Callable[[ExplorerApp, dict[str, Any]], dict[str, Any]]] = {
    "/api/donors": ExplorerApp.add_donor,
    "/api/explain": ExplorerApp.explain,
}
Answer = tuple[int, str, bytes]


class HttpError(SemBlendError):
    """An answer other than 200, with its status."""

    def __init__(self, status: int, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status


class ExplorerServer:
    """Listens at once; ``serve_forever`` answers. ``port=0`` takes a free port, see ``url``."""

    def __init__(self, app: ExplorerApp, host: str = "127.0.0.1", port: int = 8765) -> None:
        self.app = app
        self.host = host
        try:
            self._sock = listen(host, port)
        except ConfigError as error:
            raise InputError(error.message, hint="choose another --port; 0 takes any free one") from None
        self.server_address = self._sock.getsockname()
        self.url = write_url(self._sock, host) + "/"
        self._server = HttpServer(self, self._sock, LIMITS, lifespan=False)

    def __enter__(self) -> ExplorerServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    @property
    def on_loopback(self) -> bool:
        return is_loopback(self.host)

    def serve_forever(self) -> None:
        """Answer until a signal comes, or `shutdown` is called."""
        self._server.run()

    def shutdown(self) -> None:
        """Stop answering; from another thread."""
        self._server.started.wait()
        self._server.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; every error is JSON."""
        try:
            status, kind, body = await self._answer(scope, receive)
        except SemBlendError as error:
            status, kind, body = _json(_find_status(error), {"error": error.message, "hint": error.hint})
        except ConnectionError:  # the browser went away
            return
        except Exception as error:  # a fault of ours: the page is told, the log has the traceback
            LOG.exception("%s %s failed", scope["method"], scope["path"])
            status, kind, body = _json(500, {"error": f"internal error: {error!r}", "hint": "see the terminal"})
        named = {"content-type": kind, "content-length": str(len(body)), **HEADERS}
        headers = [(name.lower().encode(), value.encode()) for name, value in named.items()]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    async def _answer(self, scope: Scope, receive: Receive) -> Answer:
        """Find the route, and do its work in a thread: lookups take milliseconds."""
        headers = dict(scope["headers"])
        self._check_host(headers.get(b"host", b"").decode("latin-1"))
        method, path = scope["method"], scope["path"]
        if method in ("GET", "HEAD"):
            if path in PAGE_FILES:
                body, kind = PAGE_FILES[path]
                return 200, kind, body
            if path in GET:
                return _json(200, await asyncio.to_thread(GET[path], self.app))
        elif method == "POST" and path in POST:
            asked = await _read_body(headers, receive)
            return _json(200, await asyncio.to_thread(POST[path], self.app, asked))
        elif method == "DELETE" and path.startswith(DONOR_PREFIX):
            name = unquote(scope["raw_path"].decode("latin-1").removeprefix(DONOR_PREFIX))
            return _json(200, await asyncio.to_thread(self.app.forget_donor, name))
        if path in PAGE_FILES or path in GET or path in POST or path.startswith(DONOR_PREFIX):
            raise HttpError(405, f"{method} is not possible on {path}", hint="see docs/reference/cli.md")
        raise HttpError(404, f"nothing at {path}", hint="the page is at /")

    def _check_host(self, given: str) -> None:
        if not self.on_loopback:
            return
        try:
            name = urlsplit("//" + given).hostname or ""
        except ValueError:
            name = ""
        if not is_loopback(name):
            raise HttpError(403, f"this explorer does not answer to the name {name!r}", hint=f"open {self.url}")


async def _read_body(headers: dict[bytes, bytes], receive: Receive) -> dict[str, Any]:
    kind = headers.get(b"content-type", b"text/plain").decode("latin-1").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpError(415, f"the body is {kind}", hint="send Content-Type: application/json")
    announced = headers.get(b"content-length", b"0")
    if announced.isdigit() and (len(announced) > 15 or int(announced) > MAX_BODY_BYTES):
        raise HttpError(
            413, f"the body is {announced[:20].decode()} bytes", hint=f"the limit is {MAX_BODY_BYTES} bytes"
        )
    raw, is_whole = b"", False
    try:
        async with asyncio.timeout(BODY_S):
            while not is_whole:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ConnectionError
                raw += message.get("body", b"")
                is_whole = not message.get("more_body", False)
                if len(raw) > MAX_BODY_BYTES:
                    raise HttpError(413, "the body is too large", hint=f"the limit is {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise HttpError(408, "the body did not come in time", hint="send it in one go") from None
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise HttpError(400, "the body is not JSON", hint='send JSON such as {"text": "..."}') from None
    if not isinstance(body, dict):
        raise HttpError(400, "the body is not a JSON object", hint='send JSON such as {"text": "..."}')
    return body


def _find_status(error: SemBlendError) -> int:
    match error:
        case HttpError():
            return error.status
        case NotFoundError():
            return 404
        case InputError():
            return 400
        case CapacityError():
            return 507
        case _:
            return 500


def _json(status: int, body: dict[str, Any]) -> Answer:
    # ASCII only: a lone surrogate in a prompt must not stop the answer from being encoded.
    return status, "application/json", json.dumps(body, ensure_ascii=True, allow_nan=False).encode("ascii")
