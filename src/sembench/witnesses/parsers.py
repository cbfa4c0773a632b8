"""One log parser for each engine; all of them return the same events. A parser never guesses from user text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

from sembench.files import read_text
from sembench.witnesses.log_lines import (
    EngineEvent,
    LogLine,
    LogParser,
    make_event,
    parse_fields,
    parse_object,
    read_number,
)
from sembench.witnesses.log_lines import EngineEventKind as Kind
from semblend.confirm.events import EventKind
from semblend.confirm.receipt import Receipt
from semblend.errors import InputError, SemBlendError

# -- vLLM ------------------------------------------------------------------------------------------------------------
# vLLM: the connector's log lines, and the JSONL audit that a connector may write beside them.

_HEADS: tuple[tuple[str, Kind], ...] = (
    ("SemBlend donor registered ", Kind.DONOR_REGISTERED),
    ("SemBlend semantic lookup hit ", Kind.SEMANTIC_HIT),
    ("SemBlend request-local experimental load advertised ", Kind.LOAD_ADVERTISED),
    ("SemBlend materialized ", Kind.MATERIALIZED),
)
# An exact-prefix load is no semantic reuse, so its events are not in this table.
_AUDIT: dict[str, Kind] = {
    "donor_registered": Kind.DONOR_REGISTERED,
    "semantic_lookup_hit": Kind.SEMANTIC_HIT,
    "request_only_load_advertised": Kind.LOAD_ADVERTISED,
    "semantic_span_load_advertised": Kind.LOAD_ADVERTISED,
    "runtime_materialized": Kind.MATERIALIZED,
    "lookup_error": Kind.ERROR,
    "runtime_materialization_failed_loud": Kind.ERROR,
    "load_error_blocks_reported": Kind.ERROR,
    "donor_capture_write_failed": Kind.ERROR,
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

    def feed(self, line: LogLine) -> Iterator[EngineEvent]:
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
        name, request_id = record.get("event"), read_text(record.get("request_id"))
        if not isinstance(name, str) or record.get("mode") == "exact_prefix":
            return
        if _REFUSAL.match(name):
            reason = str(record.get("declined_reason") or record.get("reason") or name)
            yield make_event(line, Kind.REJECTED, request_id, reason, reason=reason)
        elif (kind := _AUDIT.get(name)) is not None:
            tokens = self.read_count(line, record, "tokens") or self.read_count(line, record, "token_count")
            same = () if kind is Kind.SEMANTIC_HIT else (str(record.get("donor_id") or ""), tokens)
            yield make_event(line, kind, request_id, *same, tokens=tokens, units=1)


def _read_vllm_log(line: LogLine, kind: Kind, pairs: dict[str, str]) -> Iterator[EngineEvent]:
    request_id, tokens = _read_request_id(pairs, "request_id"), read_number(pairs, "tokens", "reusable_tokens")
    if tokens is None:
        return
    same: tuple[object, ...] = (pairs.get("donor_id", ""), tokens)
    if kind is Kind.DONOR_REGISTERED:
        same = (pairs.get("namespace", ""), tokens)
    elif kind is Kind.SEMANTIC_HIT:
        same, reason = (), pairs.get("reason", "")
        if pairs.get("kind") == "discovery_only" and reason not in ("", "ok"):
            yield make_event(line, Kind.REJECTED, request_id, reason, reason=reason)
    yield make_event(line, kind, request_id, *same, tokens=tokens, units=1)


def _read_request_id(pairs: dict[str, str], *names: str) -> str | None:
    found = next((pairs[name] for name in names if pairs.get(name)), "-")
    return None if found == "-" else unquote(found)


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
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


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
        tokens = read_number(pairs, "tokens")
        if tokens is not None:
            request_id = _read_request_id(pairs, *_REQUEST_NAMES)
            yield make_event(line, Kind.DONOR_REGISTERED, request_id, tokens, tokens=tokens, units=1)

    def _read_hit(self, line: LogLine, pairs: dict[str, str], *, from_tree: bool) -> Iterator[EngineEvent]:
        request_id = _read_request_id(pairs, *_REQUEST_NAMES)
        tokens = read_number(pairs, "cached", "matched_tokens", "reused_tokens", "tokens")
        similar = any(_NUMBER.match(pairs.get(name, "")) for name in ("similarity", "score", "quality_cosine"))
        if not tokens or not (similar or from_tree):
            return
        joins = from_tree and self._waiting_hit and request_id is None
        self._waiting_hit = not from_tree and request_id is None
        if not joins:
            yield make_event(line, Kind.SEMANTIC_HIT, request_id, tokens=tokens, units=1)

    def _read_phase(self, line: LogLine, pairs: dict[str, str]) -> Iterator[EngineEvent]:
        tokens, request_id = read_number(pairs, "donor_tokens"), _read_request_id(pairs, *_REQUEST_NAMES)
        if not tokens:
            return
        if self._phases and self._phases[-1].request_id != request_id:
            yield from self.finish()
        # The same phase said twice (a log collected twice) has the same place in the prompt.
        place = pairs.get("target", line.number)
        self._phases.append(make_event(line, Kind.MATERIALIZED, request_id, place, tokens=tokens, units=1))

    def _read_realized(self, line: LogLine, tokens: int, pairs: dict[str, str]) -> Iterator[EngineEvent]:
        request_id = _read_request_id(pairs, *_REQUEST_NAMES)
        phases, self._phases = self._phases, []
        same_request = bool(phases) and phases[-1].request_id in (None, request_id)
        units = read_number(pairs, "spans") or 1
        if same_request and sum(phase.tokens for phase in phases) == tokens:
            units = len(phases)
            request_id = request_id or phases[-1].request_id
        else:
            yield from phases
        if tokens:
            yield make_event(line, Kind.MATERIALIZED, request_id, tokens, tokens=tokens, units=units)


# -- TensorRT-LLM ----------------------------------------------------------------------------------------------------
# TensorRT-LLM: the connector's audit, one JSON object a line; other lines only tell errors.


class TrtllmParser(LogParser):
    """The unit of this format is the segment: ``materialized`` counts those that were written."""

    counted_once = (
        "a donor by id and length; a hit and a rejection by request; a materialization by request, kind and tokens; "
        "an engine boundary by its requests and layer"
    )

    def feed(self, line: LogLine) -> Iterator[EngineEvent]:
        record = parse_object(line, self.where) or {}
        request_id = read_text(record.get("request_id"))
        count = partial(self.read_count, line, record)
        match record.get("event"):
            case "donor_registered":
                tokens, donor = count("token_count"), read_text(record.get("donor_id")) or request_id
                yield make_event(line, Kind.DONOR_REGISTERED, donor, tokens, tokens=tokens, units=1)
            case "lookup":
                if record.get("found") is True:
                    tokens = count("num_new_matched_tokens")
                    yield make_event(line, Kind.SEMANTIC_HIT, request_id, tokens=tokens, units=1)
                if reason := read_text(record.get("rejection_reason")):
                    yield make_event(line, Kind.REJECTED, request_id, reason, reason=reason)
            case "plan_dispatched":
                tokens, units = count("covered_token_count"), count("segment_count", 1)
                yield make_event(line, Kind.LOAD_ADVERTISED, request_id, tokens, tokens=tokens, units=units)
            case "materialized" if units := count("materialized"):  # true, or how many segments were written
                tokens, rope = count("covered_token_count"), record.get("requires_rope_correction") is True
                units = max(units, count("segment_count")) if record["materialized"] is True else units
                same = (record.get("kind"), tokens)
                yield make_event(
                    line, Kind.MATERIALIZED, request_id, *same, tokens=tokens, units=units, rope_corrected=rope
                )
            case "engine_blend_boundary":
                names = record.get("request_ids")
                named = names if isinstance(names, list) else []
                key = (*map(str, named), record.get("boundary_layer")) if named else None
                yield EngineEvent(Kind.ENGINE_BOUNDARY, line.number, key)


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
            yield from _read_tokens(line, Kind.MATERIALIZED, retrieved)
        elif (stored := _STORED.match(text)) is not None:
            self._stored = True
            yield from _read_tokens(line, Kind.DONOR_REGISTERED, stored)
        elif (storing := _STORING.match(text)) is not None:
            self._announced.extend(_read_tokens(line, Kind.DONOR_REGISTERED, storing))

    def finish(self) -> Iterable[EngineEvent]:
        return () if self._stored else self._announced


def _read_lookup(line: LogLine, lookup: re.Match[str]) -> Iterator[EngineEvent]:
    request_id, total = unquote(lookup["request"]), int(lookup["total"])
    # What is to be loaded is negative where the engine already holds more than LMCache does.
    for kind, tokens in ((Kind.SEMANTIC_HIT, int(lookup["hit"])), (Kind.LOAD_ADVERTISED, int(lookup["load"]))):
        if tokens > 0:
            yield make_event(line, kind, request_id, total, tokens=tokens, units=1)


def _read_tokens(line: LogLine, kind: Kind, match: re.Match[str]) -> Iterator[EngineEvent]:
    if tokens := int(match["tokens"]):
        yield make_event(line, kind, match["request"], tokens, tokens=tokens, units=1)


# -- SemBlend --------------------------------------------------------------------------------------------------------
# SemBlend's own audit stream: only a receipt confirms reuse.


class SemblendParser(LogParser):
    """Parses receipts. A receipt whose parts do not add up is refused, not counted."""

    counted_once = (
        "a donor by id and generation; a hit, a plan and a confirmed receipt by request; a reason by request, however "
        "many events repeat it"
    )
    receipt_suffices = True

    def feed(self, line: LogLine) -> Iterator[EngineEvent]:
        record = parse_object(line, self.where) or {}
        if "schema_version" not in record:
            return
        request_id, reason = read_text(record.get("request_id")), read_text(record.get("reason"))
        count = partial(self.read_count, line, record)
        match record.get("event"):
            case EventKind.DONOR_REGISTERED:
                key, tokens = (str(record.get("donor_id")), record.get("generation")), count("tokens")
                yield EngineEvent(Kind.DONOR_REGISTERED, line.number, key, request_id, tokens, 1)
            case EventKind.LOOKUP | EventKind.REUSE_DECLINED | EventKind.FALLBACK as name:
                if name == EventKind.LOOKUP and (tokens := count("reusable_tokens")):
                    yield make_event(line, Kind.SEMANTIC_HIT, request_id, tokens=tokens, units=1)
                if reason is not None:
                    yield make_event(line, Kind.REJECTED, request_id, reason, reason=reason)
            case EventKind.REUSE_PLANNED:
                spans, tokens = record.get("spans"), count("reused_tokens")
                units = len(spans) if isinstance(spans, list) else 1
                yield make_event(line, Kind.LOAD_ADVERTISED, request_id, tokens=tokens, units=units)
            case EventKind.REUSE_CONFIRMED:
                receipt = self._read_receipt(line, record.get("receipt"))
                if receipt.reused_tokens:
                    yield make_event(
                        line,
                        Kind.MATERIALIZED,
                        receipt.request_id,
                        tokens=receipt.reused_tokens,
                        units=len(receipt.spans),
                        rope_corrected=any(span.shift for span in receipt.spans),
                    )
            case EventKind.ERROR:
                why = f"{record.get('where')}: {record.get('message')}"
                yield EngineEvent(Kind.ERROR, line.number, None, request_id, reason=why)

    def _read_receipt(self, line: LogLine, written: Any) -> Receipt:
        try:
            return Receipt.from_dict(written if isinstance(written, dict) else {})
        except (SemBlendError, TypeError) as error:
            what = error.message if isinstance(error, SemBlendError) else str(error)
            raise InputError(
                f"{self.where}, line {line.number}, field receipt: {what}",
                hint="a receipt that does not hold proves nothing; --skip-bad goes on without it",
            ) from None


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
