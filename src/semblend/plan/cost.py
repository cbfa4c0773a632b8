"""What reuse saves by rates that a user has given, and the donor that it costs.

What it saves by what the engine was seen to take: `semblend.plan.times`.
"""

from __future__ import annotations

from dataclasses import dataclass

from semblend.plan.reuse_plan import ReusePlan
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


# -- The donor that a reuse costs: KV behind a moved span is an approximation, and approximations are never donors.


SMALL_SHARE = 0.1


def explain_lost_donor(plan: ReusePlan) -> str | None:
    """Explain why a plan is not worth the donor it costs; None if it is worth it.

    A prompt that takes forty tokens of an instruction from an earlier one would keep its own document, thousands of new
    tokens, from ever being reused. The tokens in front of the first span stay exact and are not lost.
    """
    lost = plan.prompt_tokens - plan.spans[0].target_start if plan.spans else 0
    if plan.reused_tokens < SMALL_SHARE * lost:
        return f"reuses {plan.reused_tokens} tokens and would keep {lost} from becoming a donor"
    return None
