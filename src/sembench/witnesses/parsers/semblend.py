"""SemBlend's own audit stream: only a receipt confirms reuse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from sembench.values import read_text
from sembench.witnesses.parsers.event import EngineEvent, EngineEventKind, make_key
from sembench.witnesses.parsers.line import LogLine, parse_object, read_count
from semblend.confirm.events import EventKind
from semblend.confirm.receipt import Receipt
from semblend.errors import InputError, SemBlendError


class SemblendParser:
    """Parses receipts. A receipt whose parts do not add up is refused, not counted."""

    counted_once = (
        "a donor by id and generation; a hit, a plan and a confirmed receipt by request; a reason by request, however "
        "many events repeat it"
    )
    caveat = ""
    receipt_suffices = True

    def __init__(self, where: str = "audit") -> None:
        self._where = where

    def feed(self, line: LogLine) -> Iterable[EngineEvent]:
        record = parse_object(line, self._where)
        if record is None or "schema_version" not in record:
            return ()
        readers = {
            EventKind.DONOR_REGISTERED: self._read_donor,
            EventKind.LOOKUP: self._read_lookup,
            EventKind.REUSE_PLANNED: self._read_plan,
            EventKind.REUSE_DECLINED: self._read_refusal,
            EventKind.FALLBACK: self._read_refusal,
            EventKind.REUSE_CONFIRMED: self._read_receipt,
            EventKind.ERROR: self._read_error,
        }
        name = record.get("event")
        reader = readers.get(EventKind(name)) if name in set(EventKind) else None
        return reader(line, record) if reader else ()

    def finish(self) -> Iterable[EngineEvent]:
        return ()

    def _read_donor(self, line: LogLine, record: dict[str, Any]) -> Iterator[EngineEvent]:
        donor, tokens = str(record.get("donor_id")), self._read_count(line, record, "tokens")
        key = (donor, record.get("generation"))
        yield EngineEvent(
            EngineEventKind.DONOR_REGISTERED, line.number, key, read_text(record.get("request_id")), tokens, 1
        )

    def _read_lookup(self, line: LogLine, record: dict[str, Any]) -> Iterator[EngineEvent]:
        tokens, request_id = self._read_count(line, record, "reusable_tokens"), read_text(record.get("request_id"))
        if tokens:
            yield EngineEvent(EngineEventKind.SEMANTIC_HIT, line.number, make_key(request_id), request_id, tokens, 1)
        yield from self._read_refusal(line, record)

    def _read_plan(self, line: LogLine, record: dict[str, Any]) -> Iterator[EngineEvent]:
        spans = record.get("spans")
        units = len(spans) if isinstance(spans, list) else 1
        tokens = self._read_count(line, record, "reused_tokens")
        request_id = read_text(record.get("request_id"))
        yield EngineEvent(EngineEventKind.LOAD_ADVERTISED, line.number, make_key(request_id), request_id, tokens, units)

    def _read_refusal(self, line: LogLine, record: dict[str, Any]) -> Iterator[EngineEvent]:
        reason = read_text(record.get("reason"))
        if reason is not None:
            request_id = read_text(record.get("request_id"))
            key = make_key(request_id, reason)
            yield EngineEvent(EngineEventKind.REJECTED, line.number, key, request_id, reason=reason)

    def _read_receipt(self, line: LogLine, record: dict[str, Any]) -> Iterator[EngineEvent]:
        written = record.get("receipt")
        try:
            receipt = Receipt.from_dict(written if isinstance(written, dict) else {})
        except (SemBlendError, TypeError) as error:
            what = error.message if isinstance(error, SemBlendError) else str(error)
            raise InputError(
                f"{self._where}, line {line.number}, field receipt: {what}",
                hint="a receipt that does not hold proves nothing; --skip-bad goes on without it",
            ) from None
        if receipt.reused_tokens:
            yield EngineEvent(
                EngineEventKind.MATERIALIZED,
                line.number,
                (receipt.request_id,),
                receipt.request_id,
                receipt.reused_tokens,
                len(receipt.spans),
                rope_corrected=any(span.shift for span in receipt.spans),
            )

    def _read_error(self, line: LogLine, record: dict[str, Any]) -> Iterator[EngineEvent]:
        reason = f"{record.get('where')}: {record.get('message')}"
        yield EngineEvent(EngineEventKind.ERROR, line.number, None, read_text(record.get("request_id")), reason=reason)

    def _read_count(self, line: LogLine, record: dict[str, Any], name: str) -> int:
        return read_count(record, name, self._where, line.number)
