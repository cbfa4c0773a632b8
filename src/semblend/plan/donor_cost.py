"""The donor that a reuse costs: KV behind a moved span is an approximation, and approximations are never donors."""

from __future__ import annotations

from semblend.plan.reuse_plan import ReusePlan

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
