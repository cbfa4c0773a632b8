"""LMCache: lines about KV that was stored, looked up and retrieved.

LMCache finds KV by the hash of a chunk, and its lines do not tell an exact prefix from a chunk in another place.
What is counted here is KV that LMCache says it loaded; whether that was *semantic* reuse the log cannot prove.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from urllib.parse import unquote

from sembench.witnesses.parsers.event import EngineEvent, EngineEventKind, make_key
from sembench.witnesses.parsers.line import LogLine

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


class LmcacheParser:
    """`Storing` announces a store: it counts only in a log that has no `Stored` line at all."""

    counted_once = (
        "a hit and a load by request and length; a retrieval by its request where the line names one; Storing "
        "announces what Stored reports and is not added to it; ranks above 0 are passed over"
    )
    caveat = "its lines do not tell an exact prefix from a chunk found elsewhere: this is loaded KV, semantic or not"
    receipt_suffices = False

    def __init__(self) -> None:
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
