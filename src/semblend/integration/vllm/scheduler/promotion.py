"""Whether a prefix that requests load again and again is better computed once; the accounts are in `healing`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from semblend.integration.vllm.scheduler.healing import LEAST_SHARE, Healing, LoadCost, Mark, Verdict, list_marks
from semblend.integration.vllm.scheduler.records import Record
from semblend.materialize.blend.passes import first_rows
from semblend.materialize.blend.quality import QualitySettings
from semblend.plan.reuse_plan import ReusePlan
from semblend.plan.selection import keep_in_order, list_reused_positions
from semblend.session.session import State

ReportFailure = Callable[[str, str, str], None]


class PrefixPromotion:
    """Asks the accounts about a request. After a failure it is off, and all are loaded as without it."""

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
        number, theirs = record.exact_tokens // self._block_tokens, other.source.block_hashes
        return bool(theirs[number : number + 1] == record.source.block_hashes[number : number + 1] != [])

    def _fail(self, record: Record, error: Exception) -> None:
        self.on, record.cost = False, None
        message = f"{type(error).__name__}: {error}; prefixes are no longer healed"
        self._report_failure("healing", message, record.request_id)


def is_prefilling(record: Record) -> bool:
    """Whether vLLM computes the prompt of a request now, under its own hashes."""
    return record.block_ids is not None and not record.restarted and record.state in (State.WAITING, State.COLD)


def estimate_cost(record: Record, plan: ReusePlan, block_tokens: int, seam_tokens: int) -> LoadCost:
    """What a load of this plan computes up to each mark inside of what donors hold, in rows.

    ``block_tokens``: of the blocks that have hashes.
    """
    hashes, exact = record.source.block_hashes, plan.exact_tokens
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
    return LoadCost(record.request_id, namespace.tenant, tuple(Mark(*values) for values in found))
