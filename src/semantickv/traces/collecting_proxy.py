"""A small proxy for `semantickv collect`: forwards OpenAI-compatible requests unchanged and records them.

Standard library only. One thread for each request; what comes from the upstream is passed on at once, byte for byte. A
prompt that cannot be recorded is forwarded all the same: recording must not cost an answer.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from semantickv.traces.collection import Collector, Recording
from semblend.errors import InputError

RECORDED = ("/v1/chat/completions", "/v1/completions")
MAX_BODY_BYTES = 64 << 20
CLIENT_TIMEOUT_S = 60.0
"""How long a client may neither send nor read: its thread is let go then."""
PIECE = 1 << 16
_HOP = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailers", "transfer-encoding",
    "upgrade", "host", "content-length", "accept-encoding",
}  # fmt: skip


class CollectingProxy(ThreadingHTTPServer):
    """Listens on ``host``:``port`` (0: any free one), forwards to ``upstream``, at most ``most`` requests at once."""

    daemon_threads = True

    def __init__(
        self, upstream: str, collector: Collector, *, host: str = "127.0.0.1", port: int = 0, timeout_s: float = 600.0,
        most: int = 64,
    ) -> None:  # fmt: skip
        parts = urlsplit(upstream)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"upstream {upstream!r} is no address", hint="for example http://127.0.0.1:8001")
        self.upstream, self.collector, self.timeout_s = parts, collector, timeout_s
        self.room = threading.BoundedSemaphore(most)
        self.unrecorded = 0
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise InputError(
                f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}",
                hint="pass another --port",
            ) from None

    @property
    def address(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}"

    def connect(self) -> http.client.HTTPConnection:
        """Open a connection to the upstream."""
        kind = http.client.HTTPSConnection if self.upstream.scheme == "https" else http.client.HTTPConnection
        return kind(str(self.upstream.hostname), self.upstream.port, timeout=self.timeout_s)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: CollectingProxy
    timeout = CLIENT_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Write no line for each request on standard error."""

    def do_GET(self) -> None:  # the name that http.server calls
        self._forward(b"")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 20):
            self._refuse(411, "the request needs a Content-Length")
        elif int(length) > MAX_BODY_BYTES:
            self._refuse(413, f"the request is longer than {MAX_BODY_BYTES} bytes")
        elif len(body := self.rfile.read(int(length))) < int(length):
            self.close_connection = True  # the client left in mid-sentence: half a request is none
        else:
            self._forward(body)

    def _forward(self, body: bytes) -> None:
        """Forward the request and record it; refuse it if too many are running."""
        if not self.server.room.acquire(blocking=False):
            self._refuse(503, "too many requests at once")
            return
        try:
            with ExitStack() as stack:
                recording = self._start_recording(body)
                if recording is not None:
                    stack.enter_context(recording)
                self._exchange(body, recording)
        except _NotAnswered as error:
            self._refuse(502, str(error))
        except (ConnectionError, TimeoutError):
            self.close_connection = True  # the client has left; the recording is given up
        finally:
            self.server.room.release()

    def _start_recording(self, body: bytes) -> Recording | None:
        """Begin a recording; None if the request is not one to record or cannot be read."""
        if self.command != "POST" or self.path.split("?")[0] not in RECORDED:
            return None
        try:
            request = json.loads(body)
            if not isinstance(request, Mapping):
                raise InputError("the body is no object")
            return self.server.collector.begin(
                request,
                session=self.headers.get("X-Session-ID", ""),
                tenant=self.headers.get("X-Tenant-ID", ""),
            )
        except Exception:  # whatever a body holds: the upstream answers it
            self.server.unrecorded += 1
            return None

    def _exchange(self, body: bytes, recording: Recording | None) -> None:
        """Send the request to the upstream and pass its answer on."""
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
        connection = self.server.connect()
        try:
            try:
                connection.request(
                    self.command, self.server.upstream.path.rstrip("/") + self.path, body or None, headers
                )
                answer = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                raise _NotAnswered(f"the upstream did not answer: {error}") from None
            self._pass_on(answer, recording)
        finally:
            connection.close()

    def _pass_on(self, answer: http.client.HTTPResponse, recording: Recording | None) -> None:
        """Send the upstream's answer to the client piece by piece, and show it to the recording."""
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _HOP:
                self.send_header(name, value)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        reader = _ResponseReader(recording, "event-stream" in (answer.getheader("Content-Type") or ""))
        try:
            while piece := answer.read1(PIECE):
                reader.feed(piece)
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        except (OSError, http.client.HTTPException):
            self.close_connection = True  # no closing chunk: the client sees that the answer was cut off
            raise ConnectionResetError from None
        self.wfile.write(b"0\r\n\r\n")
        reader.end()
        if answer.status >= 400 and recording is not None:
            raise ConnectionAbortedError  # passed on whole, but an error is no request served

    def _refuse(self, status: int, message: str) -> None:
        """Answer with an error of our own."""
        text = json.dumps({"error": {"message": message, "type": "semantickv_collect"}}).encode()
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


class _NotAnswered(Exception):  # noqa: N818  # not an error of ours
    pass


class _ResponseReader:
    """Reads the passing answer for its usage and its first token; never delays the bytes."""

    def __init__(self, recording: Recording | None, events: bool) -> None:
        self.recording, self.events, self.held = recording, events, b""

    def feed(self, piece: bytes) -> None:
        """Take the next bytes of the answer."""
        if self.recording is None or len(self.held) > MAX_BODY_BYTES:
            return
        self.held += piece
        if self.events:
            *lines, self.held = self.held.split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    self._note_json(line[5:].strip(), part=True)

    def end(self) -> None:
        """Take the end of the answer."""
        if self.recording is not None and not self.events:
            self._note_json(self.held, part=False)

    def _note_json(self, text: bytes, *, part: bool) -> None:
        """Hand a JSON text to the recording; ignore what is not JSON."""
        assert self.recording is not None
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return  # [DONE], or an answer that is no JSON
        (self.recording.note_part if part else self.recording.note_answer)(value)
