"""The explorer over HTTP: the standard library's server, the files of its page and a small JSON API.

It is meant for one person on one machine. It listens on loopback unless told otherwise; on loopback it
answers only to loopback names, so that a page from elsewhere cannot reach it through a rebound DNS name, and
a request that changes something must be JSON, which a foreign page cannot send without asking first.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

from semblend._version import __version__
from semblend.errors import CapacityError, InputError, SemBlendError
from semblend.explorer.app import ExplorerApp, NotFoundError
from semblend.web.site import HEADERS, build_explorer
from semblend.wire.loopback import is_loopback

LOG = logging.getLogger(__name__)
MAX_BODY_BYTES = 4 * 1024 * 1024
SOCKET_TIMEOUT_S = 30.0
PAGE_FILES = build_explorer()
DONOR_PREFIX = "/api/donors/"


class HttpError(SemBlendError):
    """An answer other than 200, with its status."""

    def __init__(self, status: int, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status


class ExplorerServer(ThreadingHTTPServer):
    """Listens at once; ``serve_forever`` answers. ``port=0`` takes a free port, see ``url``."""

    daemon_threads = True
    request_queue_size = 128  # the standard library's 5 resets connections as soon as a page asks for a few things

    def __init__(self, app: ExplorerApp, host: str = "127.0.0.1", port: int = 8765) -> None:
        self.app = app
        self.host = host
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), ExplorerHandler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise InputError(
                f"cannot listen on {host} port {port}: {reason}", hint="choose another --port; 0 takes any free one"
            ) from None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}/"

    @property
    def on_loopback(self) -> bool:
        return is_loopback(self.host)


class ExplorerHandler(BaseHTTPRequestHandler):
    """Finds the route, reads the body within its limit, and turns every error into JSON."""

    server: ExplorerServer
    protocol_version = "HTTP/1.1"
    server_version = f"semblend/{__version__}"
    sys_version = ""
    timeout = SOCKET_TIMEOUT_S

    GET: ClassVar[dict[str, Callable[[ExplorerApp], dict[str, Any]]]] = {
        "/health": ExplorerApp.health,
        "/api/donors": ExplorerApp.donors,
        "/api/examples": ExplorerApp.examples,
        "/api/stats": ExplorerApp.stats,
        "/api/events": ExplorerApp.events,
    }
    POST: ClassVar[dict[str, Callable[[ExplorerApp, dict[str, Any]], dict[str, Any]]]] = {
        "/api/donors": ExplorerApp.add_donor,
        "/api/explain": ExplorerApp.explain,
    }

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_HEAD(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def do_DELETE(self) -> None:
        self._answer(self._delete)

    def _get(self, path: str) -> tuple[int, str, bytes]:
        if path in PAGE_FILES:
            body, content_type = PAGE_FILES[path]
            return 200, content_type, body
        if path in self.GET:
            return _json(200, self.GET[path](self.server.app))
        raise self._wrong(path)

    def _post(self, path: str) -> tuple[int, str, bytes]:
        if path not in self.POST:
            raise self._wrong(path)
        return _json(200, self.POST[path](self.server.app, self._body()))

    def _delete(self, path: str) -> tuple[int, str, bytes]:
        if not path.startswith(DONOR_PREFIX):
            raise self._wrong(path)
        return _json(200, self.server.app.forget_donor(unquote(path.removeprefix(DONOR_PREFIX))))

    def _wrong(self, path: str) -> HttpError:
        if path in PAGE_FILES or path in self.GET or path in self.POST or path.startswith(DONOR_PREFIX):
            return HttpError(405, f"{self.command} is not possible on {path}", hint="see docs/reference/cli.md")
        return HttpError(404, f"nothing at {path}", hint="the page is at /")

    def _answer(self, route: Callable[[str], tuple[int, str, bytes]]) -> None:
        try:
            self._check_host()
            status, content_type, body = route(urlsplit(self.path).path)
        except SemBlendError as error:
            status, content_type, body = _json(_status_of(error), {"error": error.message, "hint": error.hint})
        except (ConnectionError, TimeoutError):  # the browser went away, or stopped sending
            self.close_connection = True
            return
        except Exception as error:  # a fault of ours: the page is told, the log has the traceback
            LOG.exception("%s %s failed", self.command, self.path)
            status, content_type, body = _json(500, {"error": f"internal error: {error!r}", "hint": "see the terminal"})
        self._send(status, content_type, body)

    def _send(self, status: int, content_type: str, body: bytes) -> None:
        if status >= 400:
            self.close_connection = True  # part of the body may be unread
        try:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            if self.close_connection:
                self.send_header("Connection", "close")
            for name, value in HEADERS.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
        except (ConnectionError, TimeoutError):  # the browser did not wait for the answer
            self.close_connection = True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class refuses by itself (a broken request line, an unknown method), in JSON like the rest."""
        del explain
        self._send(*_json(code, {"error": message or f"status {int(code)}", "hint": "the page is at /"}))

    def _check_host(self) -> None:
        if not self.server.on_loopback:
            return
        try:
            name = urlsplit("//" + self.headers.get("Host", "")).hostname or ""
        except ValueError:
            name = ""
        if not is_loopback(name):
            raise HttpError(403, f"this explorer does not answer to the name {name!r}", hint=f"open {self.server.url}")

    def _body(self) -> dict[str, Any]:
        content_type = self.headers.get_content_type()
        if content_type != "application/json":
            raise HttpError(415, f"the body is {content_type}", hint="send Content-Type: application/json")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 20):
            raise HttpError(411, "the request does not tell its length", hint="send a Content-Length header")
        if int(length) > MAX_BODY_BYTES:
            raise HttpError(413, f"the body is {length} bytes", hint=f"the limit is {MAX_BODY_BYTES} bytes")
        raw = self.rfile.read(int(length))
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            raise HttpError(400, "the body is not JSON", hint='send JSON such as {"text": "..."}') from None
        if not isinstance(body, dict):
            raise HttpError(400, "the body is not a JSON object", hint='send JSON such as {"text": "..."}')
        return body

    def log_message(self, format: str, *args: Any) -> None:
        """One line per request would drown the terminal; errors reach the page."""


def _status_of(error: SemBlendError) -> int:
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


def _json(status: int, body: dict[str, Any]) -> tuple[int, str, bytes]:
    # ASCII only: a lone surrogate in a prompt must not stop the answer from being encoded.
    return status, "application/json", json.dumps(body, ensure_ascii=True, allow_nan=False).encode("ascii")
