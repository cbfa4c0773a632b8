"""Log lines of engines, split into their parts, and the events that a parser may find in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum, StrEnum
from typing import Any

from semblend.errors import InputError

# -- lines -----------------------------------------------------------------------------------------------------------
# Splits a log line into header (process, time, level, source) and message. A level counts only in the header.
#
# Engines write prompts and answers into their logs, and those may hold anything: the word ERROR, a traceback, even
# a line that claims reuse. So a level is believed only at its own place, and a message only from its first letter.


class Level(Enum):
    """How serious a record is; lines without a level are plain."""

    PLAIN = 0
    WARNING = 1
    ERROR = 2


@dataclass(frozen=True, slots=True)
class LogLine:
    """One log line, split into its parts.

    ``header`` is all that stands before the message; lines that share a header with a level belong to one record.
    ``rank`` is the tensor-parallel rank of the process, where the line tells it. A line that ``opens_record`` has a
    time or a level of its own; others continue the record before them.
    """

    number: int
    text: str
    header: str
    level: Level
    message: str
    rank: int | None = None
    opens_record: bool = False
    timed: bool = False

    @property
    def repeats_rank_zero(self) -> bool:
        """Tensor-parallel ranks do the same work and print the same lines; rank 0 speaks for all of them."""
        return bool(self.rank)

    @property
    def opens_traceback(self) -> bool:
        return self.message.endswith("Traceback (most recent call last):")


_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d+)?"
_DATE_TIME = rf"\d{{4}}[-/]\d\d[-/]\d\d[ T]{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?"
_PREFIX = re.compile(
    rf"""
    \([A-Za-z][\w.-]*(?:\ [\w=.-]+)*\ pid=\d+[^)]*\)\ ?    # (EngineCore_DP0 pid=12): vLLM tells the process
    | \[{_DATE_TIME}(?:\ [A-Z]+\d+)*\]\s*                 # [2026-08-01 23:40:01 DP0 TP0]: SGLang, LMCache
    | \[\d\d/\d\d/\d{{4}}-{_CLOCK}\]\s*                   # [06/22/2026-18:00:00]: TensorRT-LLM
    | {_DATE_TIME}(?:\s*[-|]\s*|\s+)                      # 2026-08-01 23:40:01,123 - : Python logging, containers
    | LMCache\s+(?=[A-Z]+:)                               # the logger's name before its level
    | \[TRT-LLM\]\s*
    | \[RANK\ \d+\]\s*
    | std(?:out|err)\ [FP]\ (?=.)                          # the container runtime, in a log file of the node
    """,
    re.VERBOSE,
)
_WORDS = "TRACE|DEBUG|INFO|NOTICE|WARNING|WARN|ERROR|CRITICAL|FATAL"
_LEVEL = re.compile(
    rf"""
    (?P<word>{_WORDS})(?:
        :\s*                                              # uvicorn, LMCache, logging.basicConfig
      | \s+\d\d-\d\d\ {_CLOCK}\ \[[^\]\s]+\]\s?           # INFO 08-21 10:29:12 [core.py:12]: vLLM
      | \s*[-|]\s+
      | \s+(?=\[|SemBlend\ )                              # our own line has neither colon nor time
    )
    | \[(?P<bracket>{_WORDS})\]\s*
    | \[(?P<letter>[TVDIWEF])\]\s*                        # TensorRT-LLM
    | (?P<glog>[IWEF])\d{{4}}\ {_CLOCK}\s+\d+\s+[^\]\s]+\]\s*
    """,
    re.VERBOSE,
)
_TIMED = re.compile(_CLOCK)
_SPACED_WORD = re.compile(rf"(?P<word>{_WORDS})\s+")
_RANK = re.compile(r"TP[_ ]?(\d+)\b|\brank=(\d+)|\[RANK (\d+)\]")
_SERIOUS = {"ERROR", "CRITICAL", "FATAL", "E", "F"}
_WARNING = {"WARNING", "WARN", "W"}


def read_line(number: int, text: str) -> LogLine:
    """Split one line into its parts.

    >>> read_line(1, "(APIServer pid=7) ERROR 08-21 10:29:12 [core.py:12] it broke").level
    <Level.ERROR: 2>
    >>> read_line(2, "(APIServer pid=7) INFO 08-21 10:29:12 [core.py:12] prompt: 'ERROR it broke'").level
    <Level.PLAIN: 0>
    """
    text = text.rstrip("\r\n")
    at = 0
    while (prefix := _PREFIX.match(text, at)) is not None:
        at = prefix.end()
    # A word and a space are a level only after a time; at the start of a line they may be the start of a sentence.
    timed = _TIMED.search(text[:at]) is not None
    found = _LEVEL.match(text, at) or (_SPACED_WORD.match(text, at) if timed else None)
    word = next((value for value in found.groupdict().values() if value), "") if found else ""
    end = found.end() if found else at
    header = text[:end]
    rank = _RANK.search(header)
    return LogLine(
        number=number,
        text=text,
        header=header,
        level=_parse_level(word),
        message=text[end:],
        rank=int(next(group for group in rank.groups() if group)) if rank else None,
        opens_record=timed or found is not None,
        timed=_TIMED.search(header) is not None,
    )


_STAMP = re.compile(rf"(?:(\d{{4}})[-/])?(\d\d)[-/](\d\d)[ T]({_CLOCK})(Z|[+-]\d\d:?\d\d)?")


def read_time(line: LogLine, record: dict[str, Any] | None = None) -> float | None:
    """Return when a line was written, in Unix seconds; None if it does not tell.

    A time without a zone is local time, one without a year (vLLM's) belongs to the last twelve months.

    >>> read_time(read_line(1, "[2026-08-01T23:40:01Z] ready"))
    1785627601.0
    """
    told = (record or {}).get("time_unix_s")
    if isinstance(told, (int, float)) and not isinstance(told, bool):
        return float(told)
    stamp = _STAMP.search(line.header)
    if stamp is None:
        return None
    year, month, day, clock, zone = stamp.groups()
    now = datetime.now(UTC).astimezone()
    text = f"{year or now.year}-{month}-{day}T{clock.replace(',', '.')}{zone or ''}"
    try:
        found = datetime.fromisoformat(text).astimezone()
        if year is None and found > now + timedelta(days=1):
            found = found.replace(year=found.year - 1)
    except ValueError:
        return None
    return found.timestamp()


def _parse_level(word: str) -> Level:
    if word.upper() in _SERIOUS:
        return Level.ERROR
    return Level.WARNING if word.upper() in _WARNING else Level.PLAIN


def parse_object(line: LogLine, where: str, *, audit: bool = True) -> dict[str, Any] | None:
    """Return the JSON object of a line, or None if the line is no record.

    In an ``audit`` a record that is cut or damaged is refused: an audit with holes proves nothing. In a log, where
    anything may open a brace, it is just text.
    """
    if not line.message.startswith('{"'):
        return None
    try:
        value = json.loads(line.message)
    except (ValueError, RecursionError):
        if not audit:
            return None
        raise InputError(
            f"{where}, line {line.number}: not a whole JSON object",
            hint="the line was cut or edited; --skip-bad counts such lines and goes on",
        ) from None
    return value if isinstance(value, dict) else None


def read_level(value: dict[str, Any]) -> Level:
    """Return the level that a JSON log record states."""
    for name in ("level", "levelname", "severity"):
        if isinstance(value.get(name), str):
            return _parse_level(value[name])
    return Level.PLAIN


_FIELD = re.compile(r"(?:^|[\s,])(\w+)=(.*?)(?=[\s,]+\w+=|$)")


def parse_fields(text: str) -> dict[str, str]:
    """Return the ``name=value`` pairs of a message. A value runs to the next name; the first of two equal names counts.

    >>> parse_fields("donor_id=a,b similarity=0.97 reason=too short latency_ms=3")
    {'donor_id': 'a,b', 'similarity': '0.97', 'reason': 'too short', 'latency_ms': '3'}
    """
    pairs: dict[str, str] = {}
    for name, value in _FIELD.findall(text):
        pairs.setdefault(name, value.rstrip())
    return pairs


def read_number(pairs: dict[str, str], *names: str) -> int | None:
    """Return the first of ``names`` that holds digits; thousands separators are allowed."""
    for name in names:
        digits = re.match(r"[\d,]*\d", pairs.get(name, ""))
        if digits:
            return int(digits[0].replace(",", ""))
    return None


# -- events ----------------------------------------------------------------------------------------------------------
# The events that a parser may find in an engine's log; they are the same for every engine.


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


def make_event(
    line: LogLine, kind: EngineEventKind, request_id: str | None, *same: object, tokens: int = 0, units: int = 0,
    reason: str = "", rope_corrected: bool = False,
) -> EngineEvent:  # fmt: skip
    """Return an event of a request; another line of it with equal ``same`` is the same event.

    Without a request id every line counts.
    """
    key = None if request_id is None else (request_id, *same)
    return EngineEvent(kind, line.number, key, request_id, tokens, units, reason, rope_corrected)


class LogParser:
    """Parses the lines of one engine. It may hold a line back until a later one tells whether both are one event."""

    counted_once = ""
    """Why two lines of this engine are one event, for the summary and the docs."""
    caveat = ""
    """What the lines cannot prove; empty if there is no such thing."""
    receipt_suffices = False
    """Whether a materialized event is semantic by itself, or needs a semantic hit beside it."""

    def __init__(self, where: str) -> None:
        self.where = where

    def feed(self, line: LogLine) -> Iterable[EngineEvent]:
        raise NotImplementedError

    def finish(self) -> Iterable[EngineEvent]:
        """Yield what was held back, at the end of the log."""
        return ()

    def read_count(self, line: LogLine, record: dict[str, Any], name: str, default: int = 0) -> int:
        """Return a whole number of 0 or more from a record; the error about anything else names line and field."""
        found = record.get(name)
        if found is None:
            return default
        if isinstance(found, bool):
            return int(found)
        if isinstance(found, int) and found >= 0:
            return found
        raise InputError(
            f"{self.where}, line {line.number}, field {name}: {json.dumps(found)[:60]} is not a count",
            hint="a count is a whole number, 0 or more; --skip-bad goes on without the line",
        )
