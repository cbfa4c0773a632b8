"""The cost model: how many milliseconds a reuse saves."""

from __future__ import annotations

from dataclasses import dataclass

from semblend.span import Span


@dataclass(frozen=True, slots=True)
class CostModel:
    """What the engine was measured to do. Rates are tokens per second; `prefill_tokens_per_s` must be known.

    A load rate of 0 means that moving donor KV costs nothing that was measured.

    >>> CostModel(prefill_tokens_per_s=10_000, load_tokens_per_s=1_000_000, seam_tokens=16).estimate_saving_ms([1000])
    97.4
    """

    prefill_tokens_per_s: float
    load_tokens_per_s: float = 0.0
    overhead_ms: float = 0.0
    seam_tokens: int = 0

    def estimate_span_saving_ms(self, length: int) -> float:
        """Estimate the prefill time that one span saves, less its load and its recomputed start, in ms."""
        avoided = (length - min(self.seam_tokens, length)) * 1e3 / self.prefill_tokens_per_s
        loading = length * 1e3 / self.load_tokens_per_s if self.load_tokens_per_s else 0.0
        return round(avoided - loading, 6)

    def estimate_saving_ms(self, lengths: list[int]) -> float:
        """Estimate what spans of these lengths save together, less the fixed cost of a reuse, in ms."""
        return round(sum(map(self.estimate_span_saving_ms, lengths)) - self.overhead_ms, 6)

    def keep_worthwhile(self, spans: tuple[Span, ...]) -> tuple[Span, ...]:
        """Return the spans that save more than they cost."""
        return tuple(span for span in spans if self.estimate_span_saving_ms(span.length) > 0)
