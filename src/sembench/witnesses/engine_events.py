"""Summarizes an engine's log: each event counts once, errors count by their level, user text counts for nothing.

An error is a record whose *level* says so, or a Python traceback; a multi-line record is one error. The same word in
a prompt or an answer is no error. Semantic events are believed only from the first letter of a message.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from sembench.files import open_text
from sembench.witnesses.audit import strip_id
from sembench.witnesses.log_lines import (
    EngineEvent,
    EngineEventKind,
    Level,
    LogLine,
    LogParser,
    parse_object,
    read_level,
    read_line,
    read_time,
)
from sembench.witnesses.parsers import PARSERS
from semblend.errors import InputError

SUMMARY_VERSION = "sembench.engine_events.v1"
ENGINES = tuple(PARSERS)
_EXAMPLES = 5
_EXAMPLE_CHARS = 300
_FRAME = re.compile(r'^\s+File "')
_RUN = re.compile(r"\bsb-[0-9a-f]{8}\b")


@dataclass
class ErrorCounter:
    """Counts error and warning records. Further lines of a record, and a traceback below it, belong to it."""

    errors: int = 0
    warnings: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)
    _record: tuple[str, Level] = ("", Level.PLAIN)
    _suspect: LogLine | None = None

    def feed(self, line: LogLine) -> None:
        suspect, self._suspect = self._suspect, None
        # A traceback counts only if a frame follows: its first line may also stand in a prompt.
        if suspect is not None and _FRAME.match(line.message) and self._record[1] is not Level.ERROR:
            self.add_error(suspect.number, suspect.text)
            self._record = (self._record[0], Level.ERROR)
        if line.opens_record and not self._is_same_record(line):
            self._open_record(line)
        if line.opens_traceback and self._record[1] is not Level.ERROR:
            self._suspect = line

    def add_error(self, number: int, text: str) -> None:
        self.errors += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append({"line": number, "text": text.strip()[:_EXAMPLE_CHARS]})

    def _is_same_record(self, line: LogLine) -> bool:
        """Return whether a line continues the record: same process, time and source; the level may be repeated."""
        header, level = self._record
        return line.timed and line.header == header and level.value >= line.level.value

    def _open_record(self, line: LogLine) -> None:
        self._record = (line.header, line.level)
        if line.level is Level.ERROR:
            self.add_error(line.number, line.text)
        elif line.level is Level.WARNING:
            self.warnings += 1


@dataclass
class Materialized:
    """What a log says was materialized, for one request or for all that have no name; and when, in Unix seconds."""

    events: int = 0
    tokens: int = 0
    units: int = 0
    first_unix_s: float | None = None
    last_unix_s: float | None = None

    def add(self, event: EngineEvent, now_unix_s: float | None) -> None:
        self.events += 1
        self.tokens += event.tokens
        self.units += event.units
        if now_unix_s is not None:
            self.first_unix_s = now_unix_s if self.first_unix_s is None else min(self.first_unix_s, now_unix_s)
            self.last_unix_s = now_unix_s if self.last_unix_s is None else max(self.last_unix_s, now_unix_s)


@dataclass
class EventCounter:
    """Counts the events of one engine; an event with a known key does not count again."""

    engine: str
    where: str
    skip_bad: bool = False
    lines: int = 0
    bad_lines: int = 0
    repeated: int = 0
    counts: Counter[EngineEventKind] = field(default_factory=Counter)
    tokens: int = 0
    units: int = 0
    rope_corrections: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    errors: ErrorCounter = field(default_factory=ErrorCounter)
    requests: dict[str, Materialized] = field(default_factory=dict)
    unnamed: Materialized = field(default_factory=Materialized)
    runs: Counter[str] = field(default_factory=Counter)
    first_unix_s: float | None = None
    last_unix_s: float | None = None
    _seen: set[tuple[EngineEventKind, tuple[object, ...]]] = field(default_factory=set)
    _now_unix_s: float | None = None

    def read(self, lines: Iterable[str]) -> LogParser:
        parser = make_parser(self.engine, self.where)
        for event in self._read_events(parser, lines):
            self._count_event(event)
        for event in parser.finish():
            self._count_event(event)
        return parser

    def _read_events(self, parser: LogParser, lines: Iterable[str]) -> Iterator[EngineEvent]:
        for number, text in enumerate(lines, start=1):
            self.lines += 1
            line = read_line(number, text)
            self._note_time_and_run(line)
            try:
                found = tuple(parser.feed(line))
                self._watch(line)
            except InputError:
                if not self.skip_bad:
                    raise
                self.bad_lines += 1
                continue
            yield from found

    def _note_time_and_run(self, line: LogLine) -> None:
        """Note when a line was written and which run of sembench it is about, so that the log can be tied to a run."""
        record = parse_object(line, self.where, audit=False)
        at = read_time(line, record)
        if at is not None:
            self._now_unix_s = at
            self.first_unix_s = at if self.first_unix_s is None else min(self.first_unix_s, at)
            self.last_unix_s = at if self.last_unix_s is None else max(self.last_unix_s, at)
        self.runs.update(set(_RUN.findall(line.text)))

    def _watch(self, line: LogLine) -> None:
        record = parse_object(line, self.where, audit=False) if line.level is Level.PLAIN else None
        if record is not None and read_level(record) is Level.ERROR:
            self.errors.add_error(line.number, line.text)
        elif record is not None and read_level(record) is Level.WARNING:
            self.errors.warnings += 1
        else:
            self.errors.feed(line)

    def _count_event(self, event: EngineEvent) -> None:
        if event.request_id is not None:  # named, whatever was done for it: the log is about this request
            self.requests.setdefault(strip_id(event.request_id), Materialized())
        if event.key is not None:
            seen = (event.kind, event.key)
            if seen in self._seen:
                self.repeated += 1
                return
            self._seen.add(seen)
        if event.kind is EngineEventKind.ERROR:
            self.errors.add_error(event.line, event.reason or "error event")
        self.counts[event.kind] += 1
        if event.kind is EngineEventKind.REJECTED:
            self.reasons[event.reason] += 1
        if event.kind is EngineEventKind.MATERIALIZED:
            self.tokens += event.tokens
            self.units += event.units
            self._find_owner(event).add(event, self._now_unix_s)
            self.rope_corrections += event.rope_corrected

    def _find_owner(self, event: EngineEvent) -> Materialized:
        if event.request_id is None:
            return self.unnamed
        return self.requests.setdefault(strip_id(event.request_id), Materialized())


def make_parser(engine: str, where: str) -> LogParser:
    try:
        return PARSERS[engine](where)
    except KeyError:
        raise InputError(f"no log format {engine!r}", hint=f"one of {', '.join(ENGINES)}") from None


def summarize_log(engine: str, lines: Iterable[str], where: str = "log", *, skip_bad: bool = False) -> dict[str, Any]:
    """Return the summary of a log for JSON.

    >>> found = summarize_log("sglang", ["[FUZZY] Realized 64 fuzzy tokens request_id=r1", "a prompt with ERROR in it"])
    >>> found["materialized_tokens"], found["errors"], found["materialized_semantic_kv_reuse"]
    (64, 0, False)
    """
    counter = EventCounter(engine, where, skip_bad)
    parser = counter.read(lines)
    hits, done = counter.counts[EngineEventKind.SEMANTIC_HIT], counter.counts[EngineEventKind.MATERIALIZED]
    semantic = [kind for kind in EngineEventKind if kind is not EngineEventKind.ERROR]
    return {
        "summary_version": SUMMARY_VERSION,
        "engine": engine,
        "input": where,
        "lines": counter.lines,
        "bad_lines": counter.bad_lines,
        "donor_registrations": counter.counts[EngineEventKind.DONOR_REGISTERED],
        "semantic_hits": hits,
        "load_advertisements": counter.counts[EngineEventKind.LOAD_ADVERTISED],
        "materialization_events": done,
        "materialized_tokens": counter.tokens,
        "materialized_units": counter.units,
        "rope_corrections": counter.rope_corrections,
        "engine_boundaries": counter.counts[EngineEventKind.ENGINE_BOUNDARY],
        "rejection_reasons": dict(sorted(counter.reasons.items())),
        "errors": counter.errors.errors,
        "error_examples": counter.errors.examples,
        "runtime_warnings": counter.errors.warnings,
        "events": sum(counter.counts[kind] for kind in semantic),
        "repeated_events": counter.repeated,
        "counted_once": parser.counted_once,
        "caveat": parser.caveat,
        "first_time_unix_s": counter.first_unix_s,
        "last_time_unix_s": counter.last_unix_s,
        "runs": dict(sorted(counter.runs.items())),
        "requests": {name: asdict(own) for name, own in counter.requests.items()},
        "unnamed": asdict(counter.unnamed),
        "materialized_semantic_kv_reuse": done > 0 and (hits > 0 or parser.receipt_suffices),
    }


def summarize_file(engine: str, path: str, *, skip_bad: bool = False) -> dict[str, Any]:
    """Return the summary of a log file, packed or not. Bytes that are not UTF-8 are replaced."""
    make_parser(engine, path)  # a wrong engine is reported before the file is opened
    with open_text(path) as stream:
        stream.reconfigure(errors="replace")  # type: ignore[attr-defined]
        try:
            return summarize_log(engine, stream, path, skip_bad=skip_bad)
        except (EOFError, OSError) as error:
            raise InputError(f"cannot read {path}: {error}", hint="the file is cut off or damaged") from None
