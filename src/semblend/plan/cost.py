"""What reuse saves and costs: milliseconds of prefill, gaps between spans, the donor that is lost."""

from __future__ import annotations

from dataclasses import dataclass, replace

from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan
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


# -- What gaps cost: where donors hold passages far apart, everything between them is computed by passes of ours.


GAP_PRICE = 0.3
"""A row of ours takes so much longer than one of the engine's own prefill: scattered rows attend in more kernels
(H200, vLLM 0.26: 2,499 rows among 24,576 in 87 ms, where a prefill takes 72 ms for as much work; 8,192 tokens with
gaps of 6,000 among them: 94 ms, where a prefill of all takes 71)."""


def keep_paying_spans(plan: ReusePlan, pass_rows: int = 0) -> ReusePlan | Decline:
    """The first spans of a plan, as many as save most; behind the last one the engine goes on by itself.

    ``pass_rows``: what a pass costs beside its rows, in rows. Declines where not even the best choice saves anything.

    >>> from semblend.span import Span
    >>> near, far = Span("d", 0, 10, 500), Span("d", 900, 5000, 600)
    >>> [span.target_start for span in keep_paying_spans(ReusePlan((near, far), 9000)).spans]
    [10]
    >>> keep_paying_spans(ReusePlan((far,), 9000)).detail
    'donors hold 600 tokens behind gaps of 5000, which take 30 % longer than a prefill'
    """
    best, kept, saved, gaps, end = 0.0, 0, 0, 0, plan.exact_tokens
    for count, span in enumerate(plan.spans, start=1):
        gaps += max(0, span.target_start - end)
        saved += span.length
        end = span.target_end
        gain = saved - GAP_PRICE * gaps - pass_rows
        if gain >= best:
            best, kept = gain, count
    if kept and best > 0:
        return plan if kept == len(plan.spans) else replace(plan, spans=plan.spans[:kept], saving_ms=None)
    beside = f"; a pass costs {pass_rows} rows more" if pass_rows else ""
    longer = f"which take {GAP_PRICE:.0%} longer than a prefill".replace("%", " %")
    return Decline(
        DeclineReason.BELOW_BREAK_EVEN, f"donors hold {saved} tokens behind gaps of {gaps}, {longer}{beside}"
    )


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
