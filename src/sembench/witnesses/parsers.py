"""One log parser for each engine; all of them return the same events. A parser never guesses from user text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

from sembench.files import read_text
from sembench.witnesses.log_lines import (
    EngineEvent,
    EngineEventKind,
    LogLine,
    LogParser,
    make_key,
    parse_fields,
    parse_object,
    read_number,
)
from semblend.confirm.events import EventKind
from semblend.confirm.receipt import Receipt
from semblend.errors import InputError, SemBlendError

# -- vLLM ------------------------------------------------------------------------------------------------------------
# vLLM: the connector's log lines, and the JSONL audit that a connector may write beside them.

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


class VllmParser(LogParser):
    """`SemBlend materializing` announces; only `SemBlend materialized` is counted."""

    counted_once = (
        "a donor by request, namespace and length; a hit by request; a load and a materialization by request, donors "
        "and tokens; lines of tensor-parallel ranks above 0 are passed over"
    )

    def feed(self, line: LogLine) -> Iterable[EngineEvent]:
        if line.repeats_rank_zero:
            return
        record = parse_object(line, self.where, audit='"event"' in line.message)
        if record is not None:
            yield from self._read_audit(line, record)
            return
        for head, kind in _HEADS:
            if line.message.startswith(head):
                yield from _read_vllm_log(line, kind, parse_fields(line.message[len(head) :]))
                return

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
        tokens = self.read_count(line, record, "tokens") or self.read_count(line, record, "token_count")
        donor = str(record.get("donor_id") or "")
        key = make_key(request_id) if kind is EngineEventKind.SEMANTIC_HIT else make_key(request_id, donor, tokens)
        yield EngineEvent(kind, line.number, key, request_id, tokens=tokens, units=1)


def _read_vllm_log(line: LogLine, kind: EngineEventKind, pairs: dict[str, str]) -> Iterator[EngineEvent]:
    request_id = _read_vllm_id(pairs.get("request_id", ""))
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


def _read_vllm_id(text: str) -> str | None:
    return unquote(text) if text and text != "-" else None


# -- SGLang ----------------------------------------------------------------------------------------------------------
# SGLang: the FUZZY lines. Two families of lines tell of one hit and of one materialization; each counts once.

_DONOR = re.compile(r"^\[FUZZY\] register_donor(?:_async)?: ok\s+(?P<rest>.*)$")
_HIT = re.compile(
    r"^(?:\[[A-Z][A-Z ]*\]\s+)?(?:SemBlend\s+)?(?:semantic|fuzzy)\b[^'\"=]*?\b(?:hit|matched)\b:?\s*(?P<rest>.*)$",
    re.IGNORECASE,
)
_SUCCESS = re.compile(r"^\[FUZZY RADIX\] Fuzzy match success:\s*(?P<rest>.*)$")
_REALIZED = re.compile(r"^\[FUZZY\] Realized (?P<tokens>\d+) fuzzy tokens\b\s*(?P<rest>.*)$")
_PHASE = re.compile(r"^\[FUZZY RADIX\] segmented prefill realized donor phase:\s*(?P<rest>.*)$")
_REQUEST_NAMES = ("request_id", "rid", "req")


class SglangParser(LogParser):
    """Joins the provider's line and the radix tree's line.

    With a request id in both, the id joins them. Without one, a radix line joins the provider's line that waits
    directly before it, and the phases of a segmented prefill join the `Realized` line whose tokens they add up to.
    """

    counted_once = (
        "a hit by request: the provider's hit line and the radix tree's success line are one; a materialization by "
        "request: donor phases and the Realized line they add up to are one; ranks above 0 are passed over"
    )

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self._waiting_hit = False  # a provider's hit without an id: the next success line may be the same one
        self._phases: list[EngineEvent] = []

    def feed(self, line: LogLine) -> Iterable[EngineEvent]:
        if line.repeats_rank_zero:
            return
        text = line.message
        if (donor := _DONOR.match(text)) is not None:
            yield from self._read_donor(line, parse_fields(donor["rest"]))
        elif (success := _SUCCESS.match(text)) is not None:
            yield from self._read_hit(line, parse_fields(success["rest"]), from_tree=True)
        elif (realized := _REALIZED.match(text)) is not None:
            yield from self._read_realized(line, int(realized["tokens"]), parse_fields(realized["rest"]))
        elif (phase := _PHASE.match(text)) is not None:
            yield from self._read_phase(line, parse_fields(phase["rest"]))
        elif (hit := _HIT.match(text)) is not None:
            yield from self._read_hit(line, parse_fields(hit["rest"]), from_tree=False)

    def finish(self) -> Iterable[EngineEvent]:
        waiting, self._phases = self._phases, []
        return waiting

    def _read_donor(self, line: LogLine, pairs: dict[str, str]) -> Iterator[EngineEvent]:
        tokens, request_id = read_number(pairs, "tokens"), _read_request_id(pairs)
        if tokens is not None:
            key = make_key(request_id, tokens)
            yield EngineEvent(EngineEventKind.DONOR_REGISTERED, line.number, key, request_id, tokens, 1)

    def _read_hit(self, line: LogLine, pairs: dict[str, str], *, from_tree: bool) -> Iterator[EngineEvent]:
        request_id = _read_request_id(pairs)
        tokens = read_number(pairs, "cached", "matched_tokens", "reused_tokens", "tokens")
        similarity = _read_float(pairs, "similarity", "score", "quality_cosine")
        if not tokens or (similarity is None and not from_tree):
            return
        joins = from_tree and self._waiting_hit and request_id is None
        self._waiting_hit = not from_tree and request_id is None
        if not joins:
            key = make_key(request_id)
            yield EngineEvent(EngineEventKind.SEMANTIC_HIT, line.number, key, request_id, tokens, 1)

    def _read_phase(self, line: LogLine, pairs: dict[str, str]) -> Iterator[EngineEvent]:
        tokens, request_id = read_number(pairs, "donor_tokens"), _read_request_id(pairs)
        if not tokens:
            return
        if self._phases and self._phases[-1].request_id != request_id:
            yield from self.finish()
        # The same phase said twice (a log collected twice) has the same place in the prompt.
        key = make_key(request_id, pairs.get("target", line.number))
        self._phases.append(EngineEvent(EngineEventKind.MATERIALIZED, line.number, key, request_id, tokens, 1))

    def _read_realized(self, line: LogLine, tokens: int, pairs: dict[str, str]) -> Iterator[EngineEvent]:
        request_id = _read_request_id(pairs)
        phases, self._phases = self._phases, []
        same_request = bool(phases) and phases[-1].request_id in (None, request_id)
        units = read_number(pairs, "spans") or 1
        if same_request and sum(phase.tokens for phase in phases) == tokens:
            units = len(phases)
            request_id = request_id or phases[-1].request_id
        else:
            yield from phases
        if tokens:
            key = make_key(request_id, tokens)
            yield EngineEvent(EngineEventKind.MATERIALIZED, line.number, key, request_id, tokens, units)


def _read_request_id(pairs: dict[str, str]) -> str | None:
    found = next((pairs[name] for name in _REQUEST_NAMES if pairs.get(name)), "-")
    return None if found == "-" else unquote(found)


def _read_float(pairs: dict[str, str], *names: str) -> float | None:
    for name in names:
        match = re.match(r"\d+(?:\.\d+)?", pairs.get(name, ""))
        if match:
            return float(match[0])
    return None


# -- TensorRT-LLM ----------------------------------------------------------------------------------------------------
# TensorRT-LLM: the connector's audit, one JSON object a line; other lines only tell errors.


class TrtllmParser(LogParser):
    """The unit of this format is the segment: ``materialized`` counts those that were written."""

    counted_once = (
        "a donor by id and length; a hit and a rejection by request; a materialization by request, kind and tokens; "
        "an engine boundary by its requests and layer"
    )

    def feed(self, line: LogLine) -> Iterable[EngineEvent]:
        record = parse_object(line, self.where)
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

    def _read_donor(self, line: LogLine, record: dict[str, Any]) -> Iterator[EngineEvent]:
        tokens, donor = (
            self.read_count(line, record, "token_count"),
            read_text(record.get("donor_id")) or read_text(record.get("request_id")),
        )
        yield EngineEvent(EngineEventKind.DONOR_REGISTERED, line.number, make_key(donor, tokens), donor, tokens, 1)

    def _read_lookup(self, line: LogLine, record: dict[str, Any]) -> Iterator[EngineEvent]:
        request_id, reason = read_text(record.get("request_id")), read_text(record.get("rejection_reason"))
        if record.get("found") is True:
            tokens = self.read_count(line, record, "num_new_matched_tokens")
            yield EngineEvent(EngineEventKind.SEMANTIC_HIT, line.number, make_key(request_id), request_id, tokens, 1)
        if reason:
            key = make_key(request_id, reason)
            yield EngineEvent(EngineEventKind.REJECTED, line.number, key, request_id, reason=reason)

    def _read_plan(self, line: LogLine, record: dict[str, Any]) -> Iterator[EngineEvent]:
        request_id, tokens = read_text(record.get("request_id")), self.read_count(line, record, "covered_token_count")
        key = make_key(request_id, tokens)
        units = self.read_count(line, record, "segment_count", 1)
        yield EngineEvent(EngineEventKind.LOAD_ADVERTISED, line.number, key, request_id, tokens, units)

    def _read_materialized(self, line: LogLine, record: dict[str, Any]) -> Iterator[EngineEvent]:
        units = self.read_count(line, record, "materialized")  # true, or how many segments were written
        if not units:
            return
        request_id, tokens = read_text(record.get("request_id")), self.read_count(line, record, "covered_token_count")
        yield EngineEvent(
            EngineEventKind.MATERIALIZED,
            line.number,
            make_key(request_id, record.get("kind"), tokens),
            request_id,
            tokens,
            max(units, self.read_count(line, record, "segment_count")) if record["materialized"] is True else units,
            rope_corrected=record.get("requires_rope_correction") is True,
        )

    def _read_boundary(self, line: LogLine, record: dict[str, Any]) -> Iterator[EngineEvent]:
        requests = record.get("request_ids")
        key = (*map(str, requests), record.get("boundary_layer")) if isinstance(requests, list) and requests else None
        yield EngineEvent(EngineEventKind.ENGINE_BOUNDARY, line.number, key)


# -- LMCache ---------------------------------------------------------------------------------------------------------
# LMCache: lines about KV that was stored, looked up and retrieved.
#
# LMCache finds KV by the hash of a chunk, and its lines do not tell an exact prefix from a chunk in another place.
# What is counted here is KV that LMCache says it loaded; whether that was *semantic* reuse the log cannot prove.

_ID = r"(?:\[req_id=(?P<request>[^\]\s]+)\]\s*)?"
_RETRIEVED = re.compile(
    rf"^{_ID}(?:Retrieved|Reusing) (?P<tokens>\d+)\s*(?:/|out of(?: total)?)\s*(?P<total>\d+)\b.*?\btokens\b"
)
_STORED = re.compile(rf"^{_ID}Stored (?P<tokens>\d+) out of(?: total)? \d+ tokens\b")
_STORING = re.compile(
    r"^Storing (?:KV cache for )?(?P<tokens>\d+) out of \d+ tokens\b(?:.* for request (?P<request>\S+))?"
)
_LOOKUP = re.compile(
    r"^Reqid:? ?(?P<request>[^,\s]+), Total tokens (?P<total>\d+),"
    r"(?: Inference Engine computed tokens: (?P<computed>\d+),)?"
    r" LMCache hit tokens: (?P<hit>\d+), need to load: (?P<load>-?\d+)"
)


class LmcacheParser(LogParser):
    """`Storing` announces a store: it counts only in a log that has no `Stored` line at all."""

    counted_once = (
        "a hit and a load by request and length; a retrieval by its request where the line names one; Storing "
        "announces what Stored reports and is not added to it; ranks above 0 are passed over"
    )
    caveat = "its lines do not tell an exact prefix from a chunk found elsewhere: this is loaded KV, semantic or not"

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self._announced: list[EngineEvent] = []
        self._stored = False

    def feed(self, line: LogLine) -> Iterable[EngineEvent]:
        if line.repeats_rank_zero:
            return
        text = line.message
        if (lookup := _LOOKUP.match(text)) is not None:
            yield from _read_lookup(line, lookup)
        elif (retrieved := _RETRIEVED.match(text)) is not None:
            yield from _make_event(line, EngineEventKind.MATERIALIZED, retrieved)
        elif (stored := _STORED.match(text)) is not None:
            self._stored = True
            yield from _make_event(line, EngineEventKind.DONOR_REGISTERED, stored)
        elif (storing := _STORING.match(text)) is not None:
            self._announced.extend(_make_event(line, EngineEventKind.DONOR_REGISTERED, storing))

    def finish(self) -> Iterable[EngineEvent]:
        return () if self._stored else self._announced


def _read_lookup(line: LogLine, lookup: re.Match[str]) -> Iterator[EngineEvent]:
    request_id, hit, load = unquote(lookup["request"]), int(lookup["hit"]), int(lookup["load"])
    key = (request_id, int(lookup["total"]))
    if hit:
        yield EngineEvent(EngineEventKind.SEMANTIC_HIT, line.number, key, request_id, hit, 1)
    if load > 0:  # negative where the engine already holds more than LMCache does
        yield EngineEvent(EngineEventKind.LOAD_ADVERTISED, line.number, key, request_id, load, 1)


def _make_event(line: LogLine, kind: EngineEventKind, match: re.Match[str]) -> Iterator[EngineEvent]:
    tokens, request_id = int(match["tokens"]), match["request"]
    if tokens:
        yield EngineEvent(kind, line.number, make_key(request_id, tokens), request_id, tokens, 1)


# -- SemBlend --------------------------------------------------------------------------------------------------------
# SemBlend's own audit stream: only a receipt confirms reuse.


class SemblendParser(LogParser):
    """Parses receipts. A receipt whose parts do not add up is refused, not counted."""

    counted_once = (
        "a donor by id and generation; a hit, a plan and a confirmed receipt by request; a reason by request, however "
        "many events repeat it"
    )
    receipt_suffices = True

    def feed(self, line: LogLine) -> Iterable[EngineEvent]:
        record = parse_object(line, self.where)
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

    def _read_donor(self, line: LogLine, record: dict[str, Any]) -> Iterator[EngineEvent]:
        donor, tokens = str(record.get("donor_id")), self.read_count(line, record, "tokens")
        key = (donor, record.get("generation"))
        yield EngineEvent(
            EngineEventKind.DONOR_REGISTERED, line.number, key, read_text(record.get("request_id")), tokens, 1
        )

    def _read_lookup(self, line: LogLine, record: dict[str, Any]) -> Iterator[EngineEvent]:
        tokens, request_id = self.read_count(line, record, "reusable_tokens"), read_text(record.get("request_id"))
        if tokens:
            yield EngineEvent(EngineEventKind.SEMANTIC_HIT, line.number, make_key(request_id), request_id, tokens, 1)
        yield from self._read_refusal(line, record)

    def _read_plan(self, line: LogLine, record: dict[str, Any]) -> Iterator[EngineEvent]:
        spans = record.get("spans")
        units = len(spans) if isinstance(spans, list) else 1
        tokens = self.read_count(line, record, "reused_tokens")
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
                f"{self.where}, line {line.number}, field receipt: {what}",
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


# -- all of them -----------------------------------------------------------------------------------------------------

PARSERS: Mapping[str, type[LogParser]] = MappingProxyType(
    {
        "vllm": VllmParser,
        "sglang": SglangParser,
        "trtllm": TrtllmParser,
        "lmcache": LmcacheParser,
        "semblend": SemblendParser,
    }
)
