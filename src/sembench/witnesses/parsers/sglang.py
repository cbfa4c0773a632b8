"""SGLang: the FUZZY lines. Two families of lines tell of one hit and of one materialization; each counts once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from urllib.parse import unquote

from sembench.witnesses.parsers.event import EngineEvent, EngineEventKind, make_key
from sembench.witnesses.parsers.line import LogLine, parse_fields, read_number

_DONOR = re.compile(r"^\[FUZZY\] register_donor(?:_async)?: ok\s+(?P<rest>.*)$")
_HIT = re.compile(
    r"^(?:\[[A-Z][A-Z ]*\]\s+)?(?:SemBlend\s+)?(?:semantic|fuzzy)\b[^'\"=]*?\b(?:hit|matched)\b:?\s*(?P<rest>.*)$",
    re.IGNORECASE,
)
_SUCCESS = re.compile(r"^\[FUZZY RADIX\] Fuzzy match success:\s*(?P<rest>.*)$")
_REALIZED = re.compile(r"^\[FUZZY\] Realized (?P<tokens>\d+) fuzzy tokens\b\s*(?P<rest>.*)$")
_PHASE = re.compile(r"^\[FUZZY RADIX\] segmented prefill realized donor phase:\s*(?P<rest>.*)$")
_REQUEST_NAMES = ("request_id", "rid", "req")


class SglangParser:
    """Joins the provider's line and the radix tree's line.

    With a request id in both, the id joins them. Without one, a radix line joins the provider's line that waits
    directly before it, and the phases of a segmented prefill join the `Realized` line whose tokens they add up to.
    """

    counted_once = (
        "a hit by request: the provider's hit line and the radix tree's success line are one; a materialization by "
        "request: donor phases and the Realized line they add up to are one; ranks above 0 are passed over"
    )
    caveat = ""
    receipt_suffices = False

    def __init__(self) -> None:
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
