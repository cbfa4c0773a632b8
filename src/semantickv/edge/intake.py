"""How much this server takes at once: requests, and the bytes of their bodies. The rest is told to come again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from semantickv.edge.headers import RawHeaders, find_header
from semantickv.edge.upstream_call import CLIENT_LEFT, Fault
from semblend.wire.errors import ApiError

if TYPE_CHECKING:
    from starlette.types import Receive


@dataclass(frozen=True, slots=True)
class IntakeLimits:
    """Most requests at once, most bytes of one body and of all together, and seconds in which a body must come."""

    requests: int = 4096
    body_bytes: int = 16 << 20
    all_bytes: int = 1 << 30
    body_s: float = 60.0


class Intake:
    """The places of a server. Who `enter`s must `leave`."""

    def __init__(self, limits: IntakeLimits) -> None:
        self.limits = limits
        self.running = 0
        self.held_bytes = 0
        self.refused = 0

    def enter(self) -> ApiError | None:
        """Take a place, or return the error for the client."""
        if self.running >= self.limits.requests:
            return self.refuse(f"{self.running} requests are running")
        self.running += 1
        return None

    def leave(self, body: bytes) -> None:
        """Give a place back, and the room of a body."""
        self.running -= 1
        self.held_bytes -= len(body)

    async def read_body(self, headers: RawHeaders, receive: Receive) -> bytes | ApiError | Fault:
        """Read the body of a request that has a place; whoever got bytes gives them back with `leave`."""
        body = IncomingBody(self)
        try:
            error = body.check_length(headers)
            async with asyncio.timeout(self.limits.body_s):
                while error is None:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return CLIENT_LEFT
                    error = body.add(message.get("body", b""))
                    if error is None and not message.get("more_body", False):
                        return body.join()
                return error
        except TimeoutError:
            return BODY_LATE
        finally:
            body.drop()

    def refuse(self, reason: str) -> ApiError:
        """Count a refusal, and return it."""
        self.refused += 1
        return ApiError(503, reason, hint="try again in a moment", code="overloaded", retry_after_s=1)


class IncomingBody:
    """A body that comes in parts. Its room is kept until `drop`, or handed out with the bytes by `join`."""

    __slots__ = ("_intake", "_parts", "_taken")

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._parts: list[bytes] = []
        self._taken = 0

    def check_length(self, headers: RawHeaders) -> ApiError | None:
        """Refuse a body whose announced length is too large, before any of it is read."""
        limit = self._intake.limits.body_bytes
        announced = find_header(headers, b"content-length")
        if announced.isdecimal() and (len(announced) > 15 or int(announced) > limit):
            return _refuse_large(limit)
        return None

    def add(self, part: bytes) -> ApiError | None:
        """Take the next part, or return why it is refused."""
        intake = self._intake
        if self._taken + len(part) > intake.limits.body_bytes:
            return _refuse_large(intake.limits.body_bytes)
        if intake.held_bytes + len(part) > intake.limits.all_bytes:
            return intake.refuse("the bodies of the running requests fill the memory for them")
        self._parts.append(part)
        self._taken += len(part)
        intake.held_bytes += len(part)
        return None

    def join(self) -> bytes:
        """Hand the whole body out: its room is given back with `Intake.leave` from now on."""
        self._taken = 0
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def drop(self) -> None:
        """Give back the room of what was not handed out."""
        self._intake.held_bytes -= self._taken
        self._taken = 0
        self._parts = []


BODY_LATE = ApiError(408, "the body did not come in time", hint="send it in one go", code="timeout")


def _refuse_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes", hint="send less", code="body_too_large")
