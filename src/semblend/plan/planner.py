"""Alignment → ReusePlan or Decline."""

from __future__ import annotations

from dataclasses import dataclass

from semblend.align.aligner import Alignment
from semblend.plan.cost import CostModel
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan
from semblend.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Planner:
    """Keeps the spans that are long enough and save time; without measured rates every long-enough span does."""

    min_span_tokens: int
    min_reuse_ratio: float = 0.0
    cost: CostModel | None = None

    def plan(self, prompt: Prompt, alignment: Alignment, *, exact_tokens: int = 0) -> ReusePlan | Decline:
        """Decide which spans to reuse, or decline with a reason."""
        spans = tuple(span for span in alignment.spans if span.length >= self.min_span_tokens)
        if not spans:
            return self._explain_nothing(alignment)
        saving_ms = None
        if self.cost is not None:
            lengths = [span.length for span in spans]
            spans = self.cost.keep_worthwhile(spans)
            saving_ms = self.cost.estimate_saving_ms([span.length for span in spans])
            if not spans or saving_ms <= 0:
                detail = f"reuse of {sum(lengths)} tokens (spans: {len(lengths)}) saves {saving_ms:.3f} ms net"
                return Decline(DeclineReason.BELOW_BREAK_EVEN, detail)
        plan = ReusePlan(spans, len(prompt), exact_tokens, saving_ms)
        if plan.reuse_ratio < self.min_reuse_ratio:
            return Decline(
                DeclineReason.LOW_REUSE_RATIO,
                f"donors hold {plan.reuse_ratio:.3f} of the prompt, {self.min_reuse_ratio:.3f} is asked for",
            )
        return plan

    def _explain_nothing(self, alignment: Alignment) -> Decline:
        """Decline with the reason why no span is long enough."""
        if not alignment.complete:
            return Decline(
                DeclineReason.OVER_BUDGET, f"nothing found in the first {alignment.scanned_tokens} tokens in time"
            )
        if alignment.spans:
            longest = max(span.length for span in alignment.spans)
            return Decline(
                DeclineReason.NOTHING_SHARED,
                f"longest shared run {longest} tokens, shorter than {self.min_span_tokens}",
            )
        held = f"{alignment.seeds_held} of {alignment.seeds} seeds known to donors"
        return Decline(DeclineReason.NOTHING_SHARED, f"no shared run of {self.min_span_tokens} tokens ({held})")
