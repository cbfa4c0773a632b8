"""The events that a parser may find in an engine's log; they are the same for every engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from sembench.witnesses.parsers.line import LogLine


class EngineEventKind(StrEnum):
    """What an engine says it did. Only `MATERIALIZED` is reuse."""

    DONOR_REGISTERED = "donor_registered"
    SEMANTIC_HIT = "semantic_hit"
    LOAD_ADVERTISED = "load_advertised"
    MATERIALIZED = "materialized"
    REJECTED = "rejected"
    ENGINE_BOUNDARY = "engine_boundary"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """One statement of an engine.

    Two events with equal kind and ``key`` are the same event and count once. An event without a key always counts.
    """

    kind: EngineEventKind
    line: int
    key: tuple[object, ...] | None = None
    request_id: str | None = None
    tokens: int = 0
    units: int = 0
    reason: str = ""
    rope_corrected: bool = False


def make_key(request_id: str | None, *rest: object) -> tuple[object, ...] | None:
    """Return the key by which two lines are one event; None without a request id: then every line counts."""
    return None if request_id is None else (request_id, *rest)


class LogParser(Protocol):
    """Parses the lines of one engine. It may hold a line back until a later one tells whether both are one event."""

    # Why two lines of this engine are one event, for the summary and the docs.
    counted_once: str
    # What the lines cannot prove; empty if there is no such thing.
    caveat: str
    # Whether a materialized event is semantic by itself, or needs a semantic hit beside it.
    receipt_suffices: bool

    def feed(self, line: LogLine) -> Iterable[EngineEvent]: ...

    def finish(self) -> Iterable[EngineEvent]: ...
