"""Whether a plan is worth claiming, and how far the claim goes."""

from __future__ import annotations

from semblend.integration.vllm.scheduler.records import Record
from semblend.integration.vllm.settings import ConnectorSettings
from semblend.materialize.blend.first_pass import first_rows, two_passes_cost_more
from semblend.materialize.blend.quality import QualitySettings
from semblend.materialize.gate.outcome_memory import OutcomeMemory
from semblend.plan.donor_cost import explain_lost_donor
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan

SHORT_TAIL = 128
"""Tokens. Tails of 32 were measured; passes of ours are recorded up to 256 rows, with gaps and heads of spans."""


def find_claim_end(record: Record, plan: ReusePlan) -> int:
    """Where the claim ends: vLLM always computes the last token itself.

    In mode balanced the gate has to see what the question does, so we compute what is behind the last span. In mode
    fast we do where it is short: a pass of ours runs in any case, and what is left to vLLM is as quick as decoding.
    """
    last, held = len(record.prompt) - 1, plan.spans[-1].target_end
    return last if record.mode == "balanced" or last - held <= SHORT_TAIL else held


def split_claim(record: Record | None, claimed_tokens: int) -> tuple[int, int]:
    """Of the claimed tokens, how many a donor holds and how many we shall compute.

    This is the plan, because vLLM asks before the load runs. What really happened is in the receipt.
    """
    if record is None or not isinstance(record.decision, ReusePlan):
        return 0, claimed_tokens
    reused = min(claimed_tokens, sum(span.length for span in record.decision.until(record.claim_end).spans))
    return reused, claimed_tokens - reused


def decline_not_worth_it(
    record: Record, plan: ReusePlan, settings: ConnectorSettings, outcomes: OutcomeMemory
) -> Decline | None:
    """Decline a plan that would cost more than it saves; None for one to claim."""
    if why := _explain_not_worth_it(record, plan, settings):
        return Decline(DeclineReason.BELOW_BREAK_EVEN, why)
    if record.mode == "balanced" and not record.judged:
        record.judged = True
        record.in_vain = outcomes.decline_in_vain(plan, record.prompt.namespace)
    return record.in_vain


def _explain_not_worth_it(record: Record, plan: ReusePlan, settings: ConnectorSettings) -> str | None:
    if not plan.until(find_claim_end(record, plan)).spans:
        return "the only token that donors hold is the last one, which the engine computes itself"
    if (why := explain_lost_donor(plan)) or record.mode != "balanced":
        return why
    quality = QualitySettings(seam_tokens=settings.config.seam_tokens)
    first = first_rows(plan.prompt_tokens, plan.exact_tokens, plan.spans, quality)
    return two_passes_cost_more(first, plan.spans, plan.prompt_tokens - plan.exact_tokens, quality)
