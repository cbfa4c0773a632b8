"""vLLM: the connector's log lines, and the JSONL audit that a connector may write beside them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

from sembench.values import read_text
from sembench.witnesses.parsers.event import EngineEvent, EngineEventKind, make_key
from sembench.witnesses.parsers.line import LogLine, parse_fields, parse_object, read_count, read_number

_HEADS: tuple[tuple[str, EngineEventKind], ...] = (
    ("SemBlend donor registered ", EngineEventKind.DONOR_REGISTERED),
    ("SemBlend semantic lookup hit ", EngineEventKind.SEMANTIC_HIT),
    ("SemBlend request-local experimental load advertised ", EngineEventKind.LOAD_ADVERTISED),
    ("SemBlend materialized ", EngineEventKind.MATERIALIZED),
)
# An exact-prefix load is no semantic reuse, so its events are not in this table.
_AUDIT: dict[str, EngineEventKind] = {
    "donor_registered": EngineEventKind.DONOR_REGISTERED,
    "semantic_lookup_hit": EngineEventKind.SEMANTIC_HIT,
    "request_only_load_advertised": EngineEventKind.LOAD_ADVERTISED,
    "semantic_span_load_advertised": EngineEventKind.LOAD_ADVERTISED,
    "runtime_materialized": EngineEventKind.MATERIALIZED,
    "lookup_error": EngineEventKind.ERROR,
    "runtime_materialization_failed_loud": EngineEventKind.ERROR,
    "load_error_blocks_reported": EngineEventKind.ERROR,
    "donor_capture_write_failed": EngineEventKind.ERROR,
}
_REFUSAL = re.compile(
    r"^(lookup_skipped_|semantic_span_.*declined|request_only_load_rejected|load_declined_|runtime_materialization_declined)"
)


class VllmParser:
    """`SemBlend materializing` announces; only `SemBlend materialized` is counted."""

    counted_once = (
        "a donor by request, namespace and length; a hit by request; a load and a materialization by request, donors "
        "and tokens; lines of tensor-parallel ranks above 0 are passed over"
    )
    caveat = ""
    receipt_suffices = False

    def __init__(self, where: str = "log") -> None:
        self._where = where

    def feed(self, line: LogLine) -> Iterable[EngineEvent]:
        if line.repeats_rank_zero:
            return
        record = parse_object(line, self._where, audit='"event"' in line.message)
        if record is not None:
            yield from self._read_audit(line, record)
            return
        for head, kind in _HEADS:
            if line.message.startswith(head):
                yield from _read_log(line, kind, parse_fields(line.message[len(head) :]))
                return

    def finish(self) -> Iterable[EngineEvent]:
        return ()

    def _read_audit(self, line: LogLine, record: dict[str, Any]) -> Iterator[EngineEvent]:
        name = record.get("event")
        if not isinstance(name, str) or record.get("mode") == "exact_prefix":
            return
        request_id = read_text(record.get("request_id"))
        if _REFUSAL.match(name):
            reason = str(record.get("declined_reason") or record.get("reason") or name)
            yield EngineEvent(
                EngineEventKind.REJECTED, line.number, make_key(request_id, reason), request_id, reason=reason
            )
            return
        kind = _AUDIT.get(name)
        if kind is None:
            return
        tokens = read_count(record, "tokens", self._where, line.number) or read_count(
            record, "token_count", self._where, line.number
        )
        donor = str(record.get("donor_id") or "")
        key = make_key(request_id) if kind is EngineEventKind.SEMANTIC_HIT else make_key(request_id, donor, tokens)
        yield EngineEvent(kind, line.number, key, request_id, tokens=tokens, units=1)


def _read_log(line: LogLine, kind: EngineEventKind, pairs: dict[str, str]) -> Iterator[EngineEvent]:
    request_id = _read_id(pairs.get("request_id", ""))
    tokens = read_number(pairs, "tokens", "reusable_tokens")
    if tokens is None:
        return
    if kind is EngineEventKind.DONOR_REGISTERED:
        key = make_key(request_id, pairs.get("namespace", ""), tokens)
    elif kind is EngineEventKind.SEMANTIC_HIT:
        key = make_key(request_id)
        reason = pairs.get("reason", "")
        if pairs.get("kind") == "discovery_only" and reason not in ("", "ok"):
            refused = make_key(request_id, reason)
            yield EngineEvent(EngineEventKind.REJECTED, line.number, refused, request_id, reason=reason)
    else:
        key = make_key(request_id, pairs.get("donor_id", ""), tokens)
    yield EngineEvent(kind, line.number, key, request_id, tokens, 1)


def _read_id(text: str) -> str | None:
    return unquote(text) if text and text != "-" else None
