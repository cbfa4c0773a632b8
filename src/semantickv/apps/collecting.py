"""What `semantickv collect` serves: forwards requests unchanged to one engine and records the prompts among them.

A prompt that cannot be recorded is forwarded all the same: recording must not cost an answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from semantickv.apps.proxy import Headers, Place, ProxyApp, write_target
from semantickv.edge.headers import find_header, select_request_headers
from semantickv.edge.intake import IntakeLimits
from semantickv.edge.upstream_call import EngineAddress, Fault, OutgoingRequest, Upstream, UpstreamAnswer
from semantickv.traces.collection import Collector, Recording
from semblend.errors import InputError
from semblend.wire.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Scope

RECORDED = ("/v1/chat/completions", "/v1/completions")
MAX_BODY_BYTES = 64 << 20
LIMITS = IntakeLimits(requests=64, body_bytes=MAX_BODY_BYTES)


class CollectingApp(ProxyApp):
    """Forwards to ``upstream`` and records with ``collector``; ``on_recorded`` is called after each line."""

    def __init__(
        self,
        upstream: str,
        collector: Collector,
        *,
        timeout_s: float = 600.0,
        on_recorded: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(max_requests=LIMITS.requests, timeout_s=timeout_s, limits=LIMITS)
        self.upstream = Upstream(EngineAddress.parse(upstream))
        self.collector = collector
        self.unrecorded = 0
        self.on_recorded = on_recorded

    def is_forwarded(self, method: str, path: str) -> bool:
        del path
        return method in ("GET", "POST")

    def open_call(self, scope: Scope, body: bytes, began: float) -> CollectedCall | ApiError:
        del began
        headers = select_request_headers(scope["headers"], (b"accept-encoding",))
        request = OutgoingRequest(scope["method"], write_target(scope), headers, body)
        return CollectedCall(self, body, request, self._start_recording(scope, body))

    def _start_recording(self, scope: Scope, body: bytes) -> Recording | None:
        """Begin a recording; None if the request is not one to record or cannot be read."""
        if scope["method"] != "POST" or scope["path"] not in RECORDED:
            return None
        try:
            request = json.loads(body)
            if not isinstance(request, Mapping):
                raise InputError("the body is no object")
            return self.collector.begin(
                request,
                session=find_header(scope["headers"], b"x-session-id"),
                tenant=find_header(scope["headers"], b"x-tenant-id"),
            )
        except Exception:  # whatever a body holds: the upstream answers it
            self.unrecorded += 1
            return None

    async def close(self) -> None:
        await self.upstream.close()


@dataclass(slots=True)
class CollectedCall:
    """One request under way, and its recording."""

    app: CollectingApp
    body: bytes
    request: OutgoingRequest
    recording: Recording | None
    request_id: str = ""
    _is_stream: bool = False
    _held: bytes = b""
    """What was not read yet: half an event, or all of an answer that is not streamed."""

    def place(self) -> Place:
        return Place(self.app.upstream, self.request)

    def take_head(self, answer: UpstreamAnswer) -> Headers:
        self._is_stream = "event-stream" in find_header(answer.headers, b"content-type")
        return []

    def observe(self, piece: bytes) -> None:
        if self.recording is None or len(self._held) > MAX_BODY_BYTES:
            return
        self._held += piece
        if self._is_stream:
            *lines, self._held = self._held.split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    self._note(line[5:].strip(), self.recording.note_part)

    def end_attempt(self, fault: Fault | None) -> bool:
        del fault
        return False

    def end(self, status: int, fault: Fault | None) -> None:
        """Write the line; an error, or half an answer, is no request that was served."""
        if self.recording is None:
            return
        if not self._is_stream:
            self._note(self._held, self.recording.note_answer)
        is_served = fault is None and 0 < status < 400
        self.recording.__exit__(None if is_served else InterruptedError)
        if is_served and self.app.on_recorded is not None:
            self.app.on_recorded()

    def _note(self, text: bytes, note: Callable[[object], object]) -> None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return  # [DONE], or an answer that is no JSON
        note(value)
