"""How much this server takes at once: requests, and the bytes of their bodies. The rest is told to come again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from semantickv.edge.faults import Fault
from semantickv.edge.forward import CLIENT_LEFT
from semantickv.edge.headers import RawHeaders, find_header
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
            return self._refuse(f"{self.running} requests are running")
        self.running += 1
        return None

    def leave(self, body: bytes) -> None:
        """Give a place back, and the room of a body."""
        self.running -= 1
        self.held_bytes -= len(body)

    async def read_body(self, headers: RawHeaders, receive: Receive) -> bytes | ApiError | Fault:
        """Read the body of a request that has a place; whoever got bytes gives them back with `leave`."""
        limit = self.limits.body_bytes
        announced = find_header(headers, b"content-length")
        if announced.isdecimal() and (len(announced) > 15 or int(announced) > limit):
            return _refuse_large(limit)
        parts: list[bytes] = []
        taken = 0
        try:
            async with asyncio.timeout(self.limits.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return CLIENT_LEFT
                    part = message.get("body", b"")
                    if taken + len(part) > limit:
                        return _refuse_large(limit)
                    if self.held_bytes + len(part) > self.limits.all_bytes:
                        return self._refuse("the bodies of the running requests fill the memory for them")
                    parts.append(part)
                    taken += len(part)
                    self.held_bytes += len(part)
                    if not message.get("more_body", False):
                        body, taken = b"".join(parts) if len(parts) > 1 else part, 0
                        return body
        except TimeoutError:
            return ApiError(408, "the body did not come in time", hint="send it in one go", code="timeout")
        finally:
            self.held_bytes -= taken  # 0 where the body was handed out

    def _refuse(self, reason: str) -> ApiError:
        self.refused += 1
        return ApiError(503, reason, hint="try again in a moment", code="overloaded", retry_after_s=1)


def _refuse_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes", hint="send less", code="body_too_large")
