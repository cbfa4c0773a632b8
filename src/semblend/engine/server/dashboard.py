"""What the dashboard shows: the latest requests as token strips, and what their receipts add up to.

Kept in memory for one event loop. No text of a prompt or an answer is kept, only counts, places and times.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from semblend.confirm.receipt import TOKEN_KINDS, JsonObject, Receipt
from semblend.engine.server.tenants import Identity
from semblend.fairness import EvictionOrder
from semblend.wire.answer import Chunk, describe_receipt

MAX_REQUESTS = 100
"""Requests that are kept of a tenant, and told in one answer: 100 take 6 ms of the event loop."""
MAX_REQUESTS_IN_ALL = 5000
MIN_SAMPLES = 3
"""Requests before a cold estimate is made."""
MAX_RANGES = 1200
MAX_TENANTS = 1000
Ranges = tuple[tuple[int, int], ...]


class ColdEstimate:
    """What a prompt would have cost without any reuse, by what computing tokens cost in requests without moved KV.

    It is an estimate and labelled so. The first request of a server is slow for reasons of its own, and one sample
    cannot tell: None until there are `MIN_SAMPLES`. None, too, for more than twice the longest sample: nobody has
    seen how time grows up there. The line is Theil and Sen's, through the median of the slopes between samples, so
    that a few slow moments, the first request's among them, do not bend it.

    >>> cold = ColdEstimate()
    >>> cold.add(40, 1500.0); cold.add(1000, 100.0); cold.add(2000, 190.0); cold.add(1500, 145.0); cold.add(500, 55.0)
    >>> cold.estimate_ms(4000), cold.estimate_ms(4001)
    (370.0, None)
    """

    def __init__(self, keep: int = 32) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=keep)

    @property
    def samples(self) -> int:
        return len(self._seen)

    def learn(self, receipt: Receipt) -> None:
        """Learn from a request in which no KV was moved or repaired: what it computed, and how long that took."""
        computed = receipt.prompt_tokens - receipt.exact_tokens
        if receipt.reused_tokens or receipt.recomputed_tokens or receipt.ttft_ms is None or computed <= 0:
            return
        # Compute time where it is known: time in line says nothing about the prompt, and would flatter reuse.
        self.add(computed, receipt.compute_ms or receipt.ttft_ms)

    def add(self, tokens: int, ms: float) -> None:
        self._seen.append((tokens, ms))

    def estimate_ms(self, tokens: int) -> float | None:
        """Milliseconds to compute so many tokens; None where the samples do not say."""
        if len(self._seen) < MIN_SAMPLES or tokens > 2 * max(length for length, _ in self._seen):
            return None
        slopes = [(b - a) / (m - n) for (n, a), (m, b) in itertools.combinations(self._seen, 2) if m != n]
        slope = median(slopes) if slopes else 0.0
        start = median(ms - slope * length for length, ms in self._seen)
        if slope <= 0 or start < 0:  # too few lengths for a line: through the origin
            slope, start = median(ms / length for length, ms in self._seen), 0.0
        return round(start + slope * tokens, 3)


@dataclass(slots=True)
class LiveRequest:
    """One request. ``state``: waiting, running, done, failed, refused (no place) or cancelled (its client left)."""

    id: str
    tenant: str
    endpoint: str
    quality: str | None
    state: str = "waiting"
    opened: float = field(default_factory=time.perf_counter)
    opened_unix_s: float = field(default_factory=time.time)
    admitted: float | None = None
    first_token: float | None = None
    closed: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    receipt: Receipt | None = None
    recomputed: Ranges = ()
    cold_ms: float | None = None
    error: str = ""
    sequence: int = 0
    own_sequence: int = 0

    def number_for(self, identity: Identity) -> int:
        """The number of its latest change: among all for an admin, among its tenant's for a tenant."""
        return self.sequence if identity.admin else self.own_sequence

    @property
    def ttft_ms(self) -> float | None:
        """The receipt's word; until it is there, what the server saw."""
        if self.receipt is not None and self.receipt.ttft_ms is not None:
            return self.receipt.ttft_ms
        return _ms(self.admitted, self.first_token)

    def to_dict(self, *, operator: bool) -> JsonObject:
        """The request for the dashboard. Donors, places and the tenant's name are for an ``operator`` only."""
        receipt = self.receipt
        body: JsonObject = {
            "id": self.id,
            "endpoint": self.endpoint,
            "state": self.state,
            "opened_unix_s": self.opened_unix_s,
            "waited_ms": _ms(self.opened, self.admitted),
            "total_ms": _ms(self.opened, self.closed),
            "ttft_ms": self.ttft_ms,
            "cold_ttft_ms": self.cold_ms,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "quality": self.quality,
            "error": self.error,
            "semblend": None if receipt is None else describe_receipt(receipt, operator=operator),
            "places_known": receipt is None or (operator and are_places_known(receipt, self.recomputed)),
            "strip": [],
        }
        if receipt is not None:
            body["strip"] = draw_strip(receipt, self.recomputed) if operator else draw_counts(receipt)
        return body | {"tenant": self.tenant} if operator else body


@dataclass(slots=True)
class ReceiptTotals:
    """What receipts of one tenant add up to; errors and give-ups are counted beside."""

    outcomes: Counter[str] = field(default_factory=Counter)
    declines: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    saved_ms: float = 0.0
    cold_ms: float = 0.0
    risks: deque[float] = field(default_factory=lambda: deque(maxlen=200))

    def book(self, entry: LiveRequest) -> None:
        receipt = entry.receipt
        self.states[entry.state] += 1
        if receipt is None:
            return
        self.outcomes[str(receipt.outcome)] += 1
        self.tokens.update({kind: count for kind, count in receipt.tokens.items() if count})
        if receipt.reason is not None:
            self.declines[str(receipt.reason)] += 1
        if receipt.risk is not None:
            self.risks.append(receipt.risk)
        if entry.cold_ms is not None and receipt.ttft_ms is not None and receipt.reused_tokens:
            self.cold_ms += entry.cold_ms
            self.saved_ms += entry.cold_ms - receipt.ttft_ms

    def __iadd__(self, other: ReceiptTotals) -> ReceiptTotals:
        for name in ("outcomes", "declines", "tokens", "states"):
            getattr(self, name).update(getattr(other, name))
        self.saved_ms += other.saved_ms
        self.cold_ms += other.cold_ms
        self.risks.extend(other.risks)
        return self

    def to_dict(self) -> JsonObject:
        return {
            "requests": sum(self.states.values()),
            "states": dict(self.states),
            "outcomes": dict(self.outcomes),
            "declines": dict(self.declines),
            "tokens": {kind: self.tokens[kind] for kind in TOKEN_KINDS},
            "saved_ms": round(self.saved_ms, 1),
            "cold_ms": round(self.cold_ms, 1),
            "risks": list(self.risks),
        }


@dataclass(slots=True)
class TenantRecord:
    """What the board keeps of one tenant, all of it from that tenant's own requests."""

    totals: ReceiptTotals = field(default_factory=ReceiptTotals)
    cold: ColdEstimate = field(default_factory=ColdEstimate)
    responses: Counter[tuple[str, int]] = field(default_factory=Counter)
    sequence: int = 0


class LiveBoard:
    """The latest requests and the tallies. Each change gets the next number, so that a page asks only for news.

    A tenant has numbers, estimates and room of its own: nothing that it is told depends on what others do. An admin
    is told of everybody, under numbers that count every change. When too many requests are kept in all, the tenant
    with most of them loses its oldest.
    """

    def __init__(self, keep: int = MAX_REQUESTS, keep_in_all: int = MAX_REQUESTS_IN_ALL) -> None:
        self._keep = keep
        self._keep_in_all = keep_in_all
        self._entries: dict[str, LiveRequest] = {}
        self._kept: EvictionOrder[str] = EvictionOrder()
        self._tenants: OrderedDict[str, TenantRecord] = OrderedDict()
        self._sequence = 0

    def open(self, entry: LiveRequest) -> LiveRequest:
        if self._kept.usage[entry.tenant] >= self._keep:
            self._drop(self._kept.find_oldest(entry.tenant))
        elif len(self._kept) >= self._keep_in_all:
            with closing(self._kept.order_leavers(entry.tenant, 1, self._keep_in_all)) as leavers:
                self._drop(next(leavers, None))
        self._entries[entry.id] = entry
        self._kept.add(entry.id, entry.tenant, 1)
        return self._changed(entry)

    def admit(self, entry: LiveRequest, prompt_tokens: int) -> None:
        entry.state, entry.prompt_tokens, entry.admitted = "running", prompt_tokens, time.perf_counter()
        self._changed(entry)

    def record_chunk(self, entry: LiveRequest, chunk: Chunk) -> None:
        if chunk.token_ids and entry.first_token is None:
            entry.first_token = time.perf_counter()
        entry.output_tokens += len(chunk.token_ids)
        if chunk.receipt is not None:
            cold = self._record_of(entry.tenant).cold
            entry.receipt, entry.recomputed = chunk.receipt, chunk.recomputed
            cold.learn(chunk.receipt)
            entry.cold_ms = cold.estimate_ms(chunk.receipt.prompt_tokens)
        self._changed(entry)

    def close(self, entry: LiveRequest, state: str, error: str = "") -> None:
        entry.state, entry.error, entry.closed = state, error, time.perf_counter()
        self._changed(entry)
        self._record_of(entry.tenant).totals.book(entry)

    def count_response(self, tenant: str, path: str, status: int) -> None:
        self._record_of(tenant).responses[path, status] += 1

    def find(self, request_id: str, identity: Identity) -> JsonObject | None:
        entry = self._entries.get(request_id)
        if entry is None or not identity.may_see(entry.tenant):
            return None
        return entry.to_dict(operator=identity.admin)

    def tally(self, identity: Identity) -> ReceiptTotals:
        total = ReceiptTotals()
        for _, record in self._list_records(identity):
            total += record.totals
        return total

    def count_responses(self, tenant: str) -> Mapping[tuple[str, int], int]:
        """One tenant's own responses by path and status."""
        record = self._tenants.get(tenant)
        return {} if record is None else dict(record.responses)

    def news(self, identity: Identity, after: int = 0) -> JsonObject:
        """What changed since the number ``after``, as far as this identity may see it; the latest if that is much."""
        fresh = [entry for entry in self._visible(identity) if entry.number_for(identity) > after]
        records = self._list_records(identity)
        return {
            "sequence": self._sequence if identity.admin else sum(record.sequence for _, record in records),
            "requests": [entry.to_dict(operator=identity.admin) for entry in fresh[-self._keep :]],
            "totals": self.tally(identity).to_dict(),
            "cold_samples": sum(record.cold.samples for _, record in records),
        }

    def _visible(self, identity: Identity) -> Iterator[LiveRequest]:
        return (entry for entry in self._entries.values() if identity.may_see(entry.tenant))

    def _list_records(self, identity: Identity) -> list[tuple[str, TenantRecord]]:
        return [(tenant, record) for tenant, record in self._tenants.items() if identity.may_see(tenant)]

    def _record_of(self, tenant: str) -> TenantRecord:
        """A tenant's record, now the most recently used; of too many the least recently used one is forgotten."""
        record = self._tenants.setdefault(tenant, TenantRecord())
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        return record

    def _changed(self, entry: LiveRequest) -> LiveRequest:
        record = self._record_of(entry.tenant)
        self._sequence += 1
        record.sequence += 1
        entry.sequence, entry.own_sequence = self._sequence, record.sequence
        return entry

    def _drop(self, request_id: str | None) -> None:
        if request_id is not None:
            self._kept.remove(request_id)
            del self._entries[request_id]


def draw_strip(receipt: Receipt, recomputed: Ranges = ()) -> list[list[Any]]:
    """The prompt from left to right as ``[start, end, kind, donor]``; donor is an index into the receipt's donors.

    Where the engine did not say which tokens were recomputed, they stand at the heads of the spans, by share.

    >>> from semblend.confirm.outcome import Outcome
    >>> draw_strip(Receipt(request_id="r", engine="e", namespace="0" * 32, outcome=Outcome.COLD_FALLBACK,
    ...               prompt_tokens=9, exact_tokens=4, prefill_tokens=5))
    [[0, 4, 'exact', None], [4, 9, 'prefill', None]]
    """
    ranges = recomputed if are_places_known(receipt, recomputed) else _spread_by_share(receipt)
    donors = {donor: number for number, donor in enumerate(receipt.donor_ids)}
    parts: list[list[Any]] = []

    def paint(end: int, kind: str, donor: int | None = None) -> None:
        start = parts[-1][1] if parts else 0
        if end > start:
            parts.append([start, end, kind, donor])

    paint(receipt.exact_tokens, "exact")
    for span in receipt.spans[: MAX_RANGES // 2]:
        paint(span.target_start, "prefill")
        for start, end in ranges:
            if start < span.target_end and end > span.target_start:
                paint(max(start, span.target_start), "reused", donors[span.donor_id])
                paint(min(end, span.target_end), "recomputed", donors[span.donor_id])
        paint(span.target_end, "reused", donors[span.donor_id])
    paint(receipt.prompt_tokens, "prefill")
    return parts


def draw_counts(receipt: Receipt) -> list[list[Any]]:
    """A strip in the form of `strip` that shows how many tokens of each kind there are, and not where they lie.

    >>> from semblend.confirm.outcome import Outcome
    >>> draw_counts(Receipt(request_id="r", engine="e", namespace="0" * 32, outcome=Outcome.COLD_FALLBACK,
    ...                         prompt_tokens=9, exact_tokens=4, prefill_tokens=5))
    [[0, 4, 'exact', None], [4, 9, 'prefill', None]]
    """
    parts: list[list[Any]] = []
    start = 0
    for kind, count in receipt.tokens.items():
        if count:
            parts.append([start, start + count, kind, None])
            start += count
    return parts


def are_places_known(receipt: Receipt, recomputed: Ranges) -> bool:
    """Whether a strip can show where tokens were recomputed, and not only how many: told, and not too many to draw."""
    told = sum(end - start for start, end in recomputed) == receipt.recomputed_tokens
    return told and len(recomputed) + 2 * len(receipt.spans) <= MAX_RANGES


def _spread_by_share(receipt: Receipt) -> Ranges:
    if not receipt.recomputed_tokens or not receipt.spans:
        return ()
    share = min(1.0, receipt.recomputed_tokens / receipt.span_tokens)
    return tuple((span.target_start, span.target_start + round(share * span.length)) for span in receipt.spans)


def _ms(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(1000 * (end - start), 3)
