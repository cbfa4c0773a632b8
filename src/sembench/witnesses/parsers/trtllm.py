"""TensorRT-LLM: the connector's audit, one JSON object a line; other lines only tell errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from sembench.values import read_text
from sembench.witnesses.parsers.event import EngineEvent, EngineEventKind, make_key
from sembench.witnesses.parsers.line import LogLine, parse_object, read_count


class TrtllmParser:
    """The unit of this format is the segment: ``materialized`` counts those that were written."""

    counted_once = (
        "a donor by id and length; a hit and a rejection by request; a materialization by request, kind and tokens; "
        "an engine boundary by its requests and layer"
    )
    caveat = ""
    receipt_suffices = False

    def __init__(self, where: str = "audit") -> None:
        self._where = where

    def feed(self, line: LogLine) -> Iterable[EngineEvent]:
        record = parse_object(line, self._where)
        if record is None:
            return ()
        readers = {
            "donor_registered": self._read_donor,
            "lookup": self._read_lookup,
            "plan_dispatched": self._read_plan,
            "materialized": self._read_materialized,
            "engine_blend_boundary": self._read_boundary,
        }
        name = record.get("event")
        reader = readers.get(name) if isinstance(name, str) else None
        return reader(line, record) if reader else ()

    def finish(self) -> Iterable[EngineEvent]:
        return ()

    def _read_donor(self, line: LogLine, record: dict[str, Any]) -> Iterator[EngineEvent]:
        tokens, donor = (
            self._read_count(line, record, "token_count"),
            read_text(record.get("donor_id")) or read_text(record.get("request_id")),
        )
        yield EngineEvent(EngineEventKind.DONOR_REGISTERED, line.number, make_key(donor, tokens), donor, tokens, 1)

    def _read_lookup(self, line: LogLine, record: dict[str, Any]) -> Iterator[EngineEvent]:
        request_id, reason = read_text(record.get("request_id")), read_text(record.get("rejection_reason"))
        if record.get("found") is True:
            tokens = self._read_count(line, record, "num_new_matched_tokens")
            yield EngineEvent(EngineEventKind.SEMANTIC_HIT, line.number, make_key(request_id), request_id, tokens, 1)
        if reason:
            key = make_key(request_id, reason)
            yield EngineEvent(EngineEventKind.REJECTED, line.number, key, request_id, reason=reason)

    def _read_plan(self, line: LogLine, record: dict[str, Any]) -> Iterator[EngineEvent]:
        request_id, tokens = read_text(record.get("request_id")), self._read_count(line, record, "covered_token_count")
        key = make_key(request_id, tokens)
        units = self._read_count(line, record, "segment_count", 1)
        yield EngineEvent(EngineEventKind.LOAD_ADVERTISED, line.number, key, request_id, tokens, units)

    def _read_materialized(self, line: LogLine, record: dict[str, Any]) -> Iterator[EngineEvent]:
        units = self._read_count(line, record, "materialized")  # true, or how many segments were written
        if not units:
            return
        request_id, tokens = read_text(record.get("request_id")), self._read_count(line, record, "covered_token_count")
        yield EngineEvent(
            EngineEventKind.MATERIALIZED,
            line.number,
            make_key(request_id, record.get("kind"), tokens),
            request_id,
            tokens,
            max(units, self._read_count(line, record, "segment_count")) if record["materialized"] is True else units,
            rope_corrected=record.get("requires_rope_correction") is True,
        )

    def _read_boundary(self, line: LogLine, record: dict[str, Any]) -> Iterator[EngineEvent]:
        requests = record.get("request_ids")
        key = (*map(str, requests), record.get("boundary_layer")) if isinstance(requests, list) and requests else None
        yield EngineEvent(EngineEventKind.ENGINE_BOUNDARY, line.number, key)

    def _read_count(self, line: LogLine, record: dict[str, Any], name: str, default: int = 0) -> int:
        return read_count(record, name, self._where, line.number, default)
