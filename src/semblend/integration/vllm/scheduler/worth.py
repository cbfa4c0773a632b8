"""Whether a plan is worth claiming, whether its prefix is better computed once for all, how far the claim goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from semblend.integration.vllm.scheduler.healing import LEAST_SHARE, Healing, LoadCost, Mark, Verdict, list_marks
from semblend.integration.vllm.scheduler.records import Record
from semblend.integration.vllm.settings import ConnectorSettings
from semblend.materialize.blend.passes import first_rows, two_passes_cost_more
from semblend.materialize.blend.quality import QualitySettings
from semblend.materialize.gate.gate import OutcomeMemory
from semblend.plan.donor_cost import explain_lost_donor
from semblend.plan.gap_cost import keep_paying_spans
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan
from semblend.plan.selection import keep_in_order, list_reused_positions

ReportFailure = Callable[[str, str, str], None]

SHORT_TAIL = 128
"""Tokens. Tails of 32 were measured; passes of ours of so few rows are recorded, with gaps and heads of spans."""


def find_claim_end(record: Record, plan: ReusePlan) -> int:
    """Where the claim ends: vLLM always computes the last token itself.

    In mode balanced the gate has to see what the question does, so we compute what is behind the last span. In mode
    fast we do where it is short: a pass of ours runs in any case, and what is left to vLLM is as quick as decoding.
    """
    last, held = len(record.prompt) - 1, plan.spans[-1].target_end
    return last if record.is_gated or last - held <= SHORT_TAIL else held


def split_claim(record: Record | None, claimed_tokens: int) -> tuple[int, int]:
    """Of the claimed tokens, how many a donor holds and how many we shall compute.

    This is the plan, because vLLM asks before the load runs. What really happened is in the receipt.
    """
    if record is None or not isinstance(record.decision, ReusePlan):
        return 0, claimed_tokens
    reused = min(claimed_tokens, sum(span.length for span in record.decision.until(record.claim_end).spans))
    return reused, claimed_tokens - reused


def judge_worth(
    record: Record, plan: ReusePlan, pass_rows: int, settings: ConnectorSettings, outcomes: OutcomeMemory
) -> ReusePlan | Decline:
    """The plan, or as much of it as saves most; a decline where it would cost more than it saves."""
    if not plan.until(find_claim_end(record, plan)).spans:
        last = "the only token that donors hold is the last one, which the engine computes itself"
        return Decline(DeclineReason.BELOW_BREAK_EVEN, last)
    if not record.is_gated:
        kept = keep_paying_spans(plan, pass_rows)
        lost = explain_lost_donor(kept) if isinstance(kept, ReusePlan) else None
        return Decline(DeclineReason.BELOW_BREAK_EVEN, lost) if lost else kept
    if why := explain_lost_donor(plan) or _explain_two_passes(plan, pass_rows, settings):
        return Decline(DeclineReason.BELOW_BREAK_EVEN, why)
    if not record.judged:
        record.judged = True
        record.in_vain = outcomes.decline_in_vain(plan, record.prompt.namespace, record.mode)
    return record.in_vain or plan


def _explain_two_passes(plan: ReusePlan, pass_rows: int, settings: ConnectorSettings) -> str | None:
    quality = QualitySettings(seam_tokens=settings.config.seam_tokens, pass_rows=pass_rows)
    first = first_rows(plan.prompt_tokens, plan.exact_tokens, plan.spans, quality)
    return two_passes_cost_more(first, plan.spans, plan.prompt_tokens - plan.exact_tokens, quality)


class Healer:
    """Asks the books of `healing` about a request. After a failure it is off, and all are loaded as without it."""

    def __init__(self, on: bool, block_tokens: int, seam_tokens: int, report_failure: ReportFailure) -> None:
        self.on, self._block_tokens, self._seam_tokens = on, block_tokens, seam_tokens
        self._report_failure = report_failure
        self.books = Healing()

    def judge(self, record: Record, plan: ReusePlan, records: Mapping[str, Record]) -> Verdict:
        """Load the plan, leave the prompt to vLLM, or ask again in the next step. The request has its own hashes."""
        if not self.on:
            return Verdict.LOAD
        try:
            if record.cost is None:
                record.cost = estimate_cost(record, plan, self._block_tokens, self._seam_tokens)
            return self.books.judge(record.cost, lambda name: self._computes_next(records.get(name), record))
        except Exception as error:
            self._fail(record, error)
            return Verdict.LOAD

    def note_load(self, record: Record) -> None:
        """Its load begins."""
        if self.on and record.cost is not None:
            try:
                self.books.note_load(record.cost)
            except Exception as error:
                self._fail(record, error)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self.books.forget(request_id)

    def _computes_next(self, other: Record | None, record: Record) -> bool:
        """Whether vLLM computes another request under its own hashes, and this one's next block with it."""
        if other is None or not is_prefilling(other):
            return False
        number, theirs = record.local_tokens // self._block_tokens, other.request.block_hashes
        return bool(theirs[number : number + 1] == record.request.block_hashes[number : number + 1] != [])

    def _fail(self, record: Record, error: Exception) -> None:
        self.on, record.cost = False, None
        message = f"{type(error).__name__}: {error}; prefixes are no longer healed"
        self._report_failure("healing", message, record.request.request_id)


def is_prefilling(record: Record) -> bool:
    """Whether vLLM computes the prompt of a request now, under its own hashes."""
    begun = record.admitted and not record.restarted
    return begun and not (record.served or record.finished or record.loading or record.filled)


def estimate_cost(record: Record, plan: ReusePlan, block_tokens: int, seam_tokens: int) -> LoadCost:
    """What a load of this plan computes up to each mark inside of what donors hold, in rows; see `healing`.

    ``block_tokens``: of the blocks that have hashes.
    """
    hashes, exact = record.request.block_hashes, plan.exact_tokens
    full_blocks = min(len(hashes), plan.spans[-1].target_end // block_tokens)
    marks = [number for number in list_marks(full_blocks, block_tokens) if number * block_tokens > exact]
    ends = np.array(marks, dtype=np.int64) * block_tokens
    quality = QualitySettings(seam_tokens=seam_tokens)
    first = first_rows(plan.prompt_tokens, exact, plan.spans, quality)
    reused = np.searchsorted(list_reused_positions(plan.spans), ends)
    rows = np.searchsorted(first, ends).astype(np.float64)
    if record.is_gated:  # a second pass, over gaps again and over what the gate has chosen
        repaired = sum(step.percent / 100 for step in quality.steps[:1])
        second = keep_in_order(plan.spans, quality.moved_ahead_share)[0].target_start
        rows += np.searchsorted(first[first > second], ends) + repaired * reused
    rows = np.maximum(rows, LEAST_SHARE * (ends - exact))
    prices = ends - exact + plan.reused_tokens - reused  # what donors hold behind a mark is computed with it
    namespace = record.prompt.namespace
    keys = [namespace.digest.encode() + bytes(hashes[number - 1]) for number in marks]
    found = zip(ends.tolist(), keys, rows.tolist(), prices.tolist(), strict=True)
    return LoadCost(record.request.request_id, namespace.tenant, tuple(Mark(*values) for values in found))
