"""The core that everything here forwards with: the router, the telemetry proxy, `collect` and the Dynamo pin gateway.

::

    ProxyApp.__call__ ─▶ Intake ─▶ open_call ─▶ ProxyCall
    Forwarding.run:   ┌─▶ ProxyCall.place ─▶ Upstream.send ─▶ take_head ─▶ client ◀─ pieces ─ observe
                      └── end_attempt: before the first byte, and if it says so ──┘
                      in the end, whatever became of it: ProxyCall.end

An application says where a request goes and what it wants to know of the answer. Reading bodies, passing bytes on,
clients that leave, servers that stop, and errors in place of an answer are here, once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from semantickv.edge.headers import select_response_headers
from semantickv.edge.intake import Intake, IntakeLimits
from semantickv.edge.upstream_call import CLIENT_LEFT, STOPPED, Fault, OutgoingRequest, Upstream, UpstreamAnswer
from semblend.errors import SemBlendError
from semblend.wire.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Receive, Scope, Send

LARGE_BODY_BYTES = 256 << 10
"""From here on a body is read in a thread: parsing megabytes would hold up everybody else's requests."""
log = logging.getLogger("semantickv")
CLIENT_LEFT_STATUS = 499
NOT_FOUND = ApiError(404, "no such path", hint="see docs/guides/proxy.md and docs/guides/router.md for the paths")
NOT_OPERATOR = ApiError(403, "this path is the operator's", hint="send SEMANTICKV_ADMIN_KEY as a bearer token")
_FAILED = ApiError(500, "this server failed", hint="its log says why", code="internal_error")
Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request goes next, and as what."""

    upstream: Upstream
    request: OutgoingRequest


class ProxyCall(Protocol):
    """One request under way, as its application sees it. Each method but `observe` is called once for each attempt."""

    body: bytes

    @property
    def request_id(self) -> str:
        """The id that answers carry; empty where they carry none."""

    def place(self) -> Place | ApiError:
        """Choose where the request goes next, or say why it goes nowhere."""

    def take_head(self, answer: UpstreamAnswer) -> Headers | Fault:
        """Return headers to add for the client; or a fault, to drop this answer and end the attempt with that."""

    def observe(self, piece: bytes) -> None:
        """See bytes that were passed on."""

    def end_attempt(self, fault: Fault | None) -> bool:
        """The attempt is over, well or with a fault; return whether there is to be another one."""

    def end(self, status: int, fault: Fault | None) -> None:
        """The request is over; ``status`` is what its client was told, 0 where it was told nothing."""


class Forwarding:
    """A request between its client and the engines; it ends once. `interrupt` ends an attempt from outside."""

    __slots__ = ("_interruption", "_is_ending", "_is_placed", "_status", "_task", "_timeout_s", "call")

    def __init__(self, call: ProxyCall, timeout_s: float) -> None:
        self.call = call
        self._timeout_s = timeout_s
        self._status = 0
        self._interruption: Fault | None = None
        self._is_placed = self._is_ending = False
        self._task: asyncio.Task[Any] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the client has had the head of an answer."""
        return self._status != 0

    def interrupt(self, fault: Fault) -> None:
        """End the attempt that runs with this fault. Where the client has had nothing, it may be tried elsewhere."""
        if self._task is not None and self._interruption is None and not self._is_ending:
            self._interruption = fault
            self._task.cancel()

    async def run(self, receive: Receive, send: Send) -> None:
        """Forward the request, and answer its client."""
        self._task = asyncio.current_task()
        watch = asyncio.ensure_future(self._watch(receive))
        fault: Fault | None = STOPPED
        try:
            fault = await self._forward(send)
        except asyncio.CancelledError:
            fault = self._take_interruption()  # the client left while it was told of an error
            if fault is None:
                fault = STOPPED
                raise
        except Exception:
            log.exception("a request could not be forwarded")
            if not self._status:
                self._status, self._is_ending = _FAILED.status, True
                await send_error(send, _FAILED, self.call.request_id)
        finally:
            self._task = None
            watch.cancel()
            if self._is_placed:
                self.call.end_attempt(fault)
            self.call.end(self._status, fault)

    async def _forward(self, send: Send) -> Fault | None:
        fault: Fault | None = None
        while True:
            place = self.call.place()
            if isinstance(place, ApiError):
                error = place if fault is None else fault.as_api_error()
                break
            self._is_placed = True
            fault = await self._try(place, send)
            self._is_placed = False
            goes_on = self.call.end_attempt(fault)
            if fault is None or fault is CLIENT_LEFT or self._status:
                return fault
            if not goes_on:
                error = fault.as_api_error()
                break
        self._status, self._is_ending = error.status, True
        await send_error(send, error, self.call.request_id)
        return fault

    async def _try(self, place: Place, send: Send) -> Fault | None:
        """Make one attempt; None if the whole answer was passed on."""
        answer: UpstreamAnswer | Fault | None = None
        try:
            answer = await place.upstream.send(place.request, self._timeout_s)
            return answer if isinstance(answer, Fault) else await self._pass_on(answer, send)
        except BaseException as error:
            if isinstance(answer, UpstreamAnswer):
                answer.close()
            if isinstance(error, asyncio.CancelledError) and (fault := self._take_interruption()) is not None:
                return fault
            raise

    async def _pass_on(self, answer: UpstreamAnswer, send: Send) -> Fault | None:
        # The head goes out with the first piece: an engine may send a head long before it has computed anything, and
        # until then another one can take the request.
        piece = await answer.read()
        if isinstance(piece, Fault):
            return piece.before_answer
        added = self.call.take_head(answer)
        if isinstance(added, Fault):
            answer.close()
            return added
        headers = select_response_headers(answer.headers, (name for name, _ in added)) + added
        self._status = answer.status
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        while True:
            self._is_ending = answer.is_over  # from here on the server may report the client gone: it has its answer
            await send({"type": "http.response.body", "body": piece, "more_body": not self._is_ending})
            self.call.observe(piece)
            if self._is_ending:
                return None
            found = await answer.read()
            if isinstance(found, Fault):
                return found
            piece = found

    def _take_interruption(self) -> Fault | None:
        fault, self._interruption = self._interruption, None
        if fault is not None and self._task is not None:
            self._task.uncancel()
        return fault

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.interrupt(CLIENT_LEFT)


class ProxyApp:
    """An ASGI application that forwards. Subclasses say what, where to, and what to do beside."""

    def __init__(self, *, max_requests: int, timeout_s: float, limits: IntakeLimits | None = None) -> None:
        self.intake = Intake(limits or IntakeLimits(requests=max_requests))
        self.timeout_s = timeout_s
        self.running: set[Forwarding] = set()
        self._reader = ThreadPoolExecutor(1, "large-bodies")
        self._tasks: list[asyncio.Task[None]] = []

    # -- what a subclass says --------------------------------------------------------------------------------------

    def is_forwarded(self, method: str, path: str) -> bool:
        """Whether a request goes to an engine; the rest goes to `answer_here`."""
        raise NotImplementedError

    def open_call(self, scope: Scope, body: bytes, began: float) -> ProxyCall | ApiError:
        """Read a request whose body has come. For a large one this runs in a thread: it changes nothing shared."""
        raise NotImplementedError

    async def answer_here(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that is not forwarded."""
        del scope, receive
        await send_error(send, NOT_FOUND)

    def note_start(self, call: ProxyCall, scope: Scope) -> None:
        """A call begins, on the event loop."""

    def note_unforwarded(self, path: str, status: int) -> None:
        """A request was refused here, or its client left before it was whole (499)."""

    def list_jobs(self) -> Sequence[Coroutine[Any, Any, None]]:
        """What runs beside the requests as long as the server does."""
        return ()

    def warm_up(self) -> None:
        """Load what takes seconds and what the first request must not wait for."""

    async def close(self) -> None:
        """The server ends, and no request runs any more."""

    # -- ASGI --------------------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            if self.is_forwarded(scope["method"], scope["path"]):
                await self._forward(scope, receive, send)
            else:
                await self.answer_here(scope, receive, send)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        refused = self.intake.enter()
        if refused is not None:
            await self._refuse(scope, send, refused)
            return
        body = b""
        try:
            found = await self.intake.read_body(scope["headers"], receive)
            if isinstance(found, bytes):
                body = found
                call = await self._open(scope, body, began)
                if not isinstance(call, ApiError):
                    await self._run(call, scope, receive, send)
                    return
                found = call
            if isinstance(found, ApiError):
                await self._refuse(scope, send, found)
            else:
                self.note_unforwarded(scope["path"], CLIENT_LEFT_STATUS)
        finally:
            self.intake.leave(body)

    async def _open(self, scope: Scope, body: bytes, began: float) -> ProxyCall | ApiError:
        try:
            if len(body) < LARGE_BODY_BYTES:
                return self.open_call(scope, body, began)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._reader, self.open_call, scope, body, began)
        except ApiError as error:
            return error
        except Exception:  # a defect of ours costs this request, and is seen in the log
            log.exception("a request could not be read")
            return _FAILED

    async def _run(self, call: ProxyCall, scope: Scope, receive: Receive, send: Send) -> None:
        self.note_start(call, scope)
        forwarding = Forwarding(call, self.timeout_s)
        self.running.add(forwarding)
        try:
            await forwarding.run(receive, send)
        finally:
            self.running.discard(forwarding)

    async def _refuse(self, scope: Scope, send: Send, error: ApiError) -> None:
        self.note_unforwarded(scope["path"], error.status)
        await send_error(send, error)

    async def _live(self, receive: Receive, send: Send) -> None:
        """Start what runs beside the requests, and end it when the server ends."""
        await receive()
        self.warm_up()
        self._tasks = [asyncio.ensure_future(job) for job in self.list_jobs()]
        await send({"type": "lifespan.startup.complete"})
        await receive()
        for forwarding in list(self.running):
            forwarding.interrupt(STOPPED)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._reader.shutdown(wait=False, cancel_futures=True)
        await self.close()
        await send({"type": "lifespan.shutdown.complete"})


class LazyApp:
    """An application that is built from its settings when a server starts it, so that importing it needs none."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build
        self._app: Any = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            try:
                self._app = self._build()
            except SemBlendError as error:
                if scope["type"] != "lifespan":
                    raise
                await receive()
                await send({"type": "lifespan.startup.failed", "message": f"error: {error}"})
                return
        await self._app(scope, receive, send)


# -- answers of our own ------------------------------------------------------------------------------------------------


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


def write_target(scope: Mapping[str, Any]) -> str:
    """The path of a request with its query, as its client wrote them."""
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return (path + (b"?" + query if query else b"")).decode("latin-1")
