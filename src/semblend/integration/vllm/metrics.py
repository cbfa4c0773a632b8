"""Our Prometheus metrics on vLLM's own endpoint.

The scheduler's side counts in the engine's process, the endpoint lives in the API server's. vLLM carries a connector's
statistics from one to the other as plain data: `MetricsTally` records it, `replay` counts it there.
"""

from __future__ import annotations

from typing import Any

from semblend.confirm.metrics import Metrics
from semblend.confirm.outcome import Outcome
from semblend.confirm.receipt import Receipt
from semblend.plan.reuse_plan import DeclineReason

Data = dict[str, list[Any]]


class MetricsTally(Metrics):
    """A `Metrics` that remembers, in values that JSON knows, what it was told since the last `take`."""

    def __init__(self, limit: int = 10_000) -> None:
        self._limit = limit
        self._data: Data = {}

    def take(self) -> Data:
        data, self._data = self._data, {}
        return data

    def lookup(self, seconds: float) -> None:
        self._add("lookup", seconds)

    def similarity(self, value: float) -> None:
        self._add("similarity", value)

    def declined(self, reason: DeclineReason) -> None:
        self._add("declined", str(reason))

    def outcome(self, outcome: Outcome, engine: str) -> None:
        self._add("outcome", [str(outcome), engine])

    def confirmed(self, receipt: Receipt) -> None:
        self._add("confirmed", receipt.to_dict())

    def compared(self, kind: str, mean: float, low: float, high: float) -> None:
        self._add("compared", [kind, mean, low, high])

    def donors(self, count: int, bytes_: int, tier: str) -> None:
        self._data["donors"] = [d for d in self._data.get("donors", []) if d[2] != tier] + [[count, bytes_, tier]]

    def close(self) -> None:
        self._data.clear()

    def _add(self, name: str, value: Any) -> None:
        kept = self._data.setdefault(name, [])
        if len(kept) < self._limit:  # where nobody collects, memory must not grow
            kept.append(value)


def merge(first: Data, second: Data) -> Data:
    """Both; of gauges the later ones.

    >>> merge({"lookup": [1.0]}, {"lookup": [2.0], "declined": ["disabled"]})
    {'lookup': [1.0, 2.0], 'declined': ['disabled']}
    """
    both = {
        name: first.get(name, []) + second.get(name, []) for name in (*first, *(n for n in second if n not in first))
    }
    if second.get("donors") and "donors" in both:
        both["donors"] = list({entry[2]: entry for entry in both["donors"]}.values())
    return both


def replay(data: Data, metrics: Metrics) -> None:
    """Count what a `MetricsTally` remembered."""
    for seconds in data.get("lookup", ()):
        metrics.lookup(seconds)
    for value in data.get("similarity", ()):
        metrics.similarity(value)
    for reason in data.get("declined", ()):
        metrics.declined(DeclineReason(reason))
    for outcome, engine in data.get("outcome", ()):
        metrics.outcome(Outcome(outcome), engine)
    for record in data.get("confirmed", ()):
        metrics.confirmed(Receipt.from_dict(record))
    for kind, mean, low, high in data.get("compared", ()):
        metrics.compared(kind, mean, low, high)
    for count, bytes_, tier in data.get("donors", ()):
        metrics.donors(count, bytes_, tier)


def summary(data: Data) -> dict[str, int | float]:
    """For vLLM's periodic log line."""
    receipts = data.get("confirmed", [])
    return {
        "semblend_requests": len(receipts),
        "semblend_reused_requests": sum(record["reused_tokens"] > 0 for record in receipts),
        "semblend_reused_tokens": sum(record["reused_tokens"] for record in receipts),
        "semblend_prompt_tokens": sum(record["prompt_tokens"] for record in receipts),
        "semblend_declines": len(data.get("declined", [])),
    }
