"""What can go wrong between a client and an engine, as a value with a reason."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from semblend.wire.errors import ApiError


class FaultKind(StrEnum):
    """Where an exchange ended before its end."""

    REFUSED = "refused"
    """No connection to the engine."""
    CONNECT_TIMEOUT = "connect_timeout"
    """The engine's machine did not accept a connection in time."""
    CLOSED_EARLY = "closed_early"
    """The engine closed the connection before the first byte of its answer."""
    GARBAGE = "garbage"
    """The engine sent something that is not HTTP/1.1."""
    BUSY = "busy"
    """The engine answered 503, and another one may have room."""
    NO_ANSWER = "no_answer"
    """The engine took the request and sent no answer in time."""
    STALLED = "stalled"
    """The engine stopped sending in the middle of its answer."""
    CUT_OFF = "cut_off"
    """The connection ended in the middle of the answer."""
    CLIENT_LEFT = "client_left"
    """The client closed its connection."""
    STOPPED = "stopped"
    """This server was stopped while the exchange ran."""


# Sent again to another engine, or on another connection. Not NO_ANSWER: the engine may still compute, and a second
# copy of the same long prompt would add to the load that made the first one late.
_RETRIED = frozenset(
    {FaultKind.REFUSED, FaultKind.CONNECT_TIMEOUT, FaultKind.CLOSED_EARLY, FaultKind.GARBAGE, FaultKind.BUSY}
)
_OF_ENGINE = frozenset(FaultKind) - {FaultKind.BUSY, FaultKind.CLIENT_LEFT, FaultKind.STOPPED}


@dataclass(frozen=True, slots=True)
class Fault:
    """Why an exchange has no whole answer. ``is_mid_answer``: the first byte had come.

    >>> Fault(FaultKind.REFUSED, "nobody listens").may_retry, Fault(FaultKind.GARBAGE, "", is_mid_answer=True).may_retry
    (True, False)
    """

    kind: FaultKind
    detail: str = ""
    is_mid_answer: bool = False

    @property
    def may_retry(self) -> bool:
        """Whether the request may be sent again: nothing of the answer has been passed on."""
        return self.kind in _RETRIED and not self.is_mid_answer

    @property
    def blames_engine(self) -> bool:
        """Whether this fault counts against the engine's health."""
        return self.kind in _OF_ENGINE

    def as_api_error(self) -> ApiError:
        """The answer for the client, where it has had none yet."""
        status = 504 if self.kind in (FaultKind.NO_ANSWER, FaultKind.CONNECT_TIMEOUT) else 502
        if self.kind is FaultKind.STOPPED:
            status = 503
        return ApiError(
            status, f"the engine did not answer: {self.kind.value}", hint="try again in a moment", code=self.kind.value
        )
