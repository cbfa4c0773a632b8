"""Where each request is: lookup, load, donors, receipts. It knows slots and tokens, and no engine.

Where scheduler and model run in one process and one thread, one object does what two halves do in vLLM:

    offer        how many tokens behind the exact hit shall we provide? Asked again as long as the request waits
    load         it is next and gets slots; donor KV will be moved in, gaps computed, and the gate looks at it
    work         a step's share of the load. The request waits until it is over, and others go on
    note_prompt  its prompt is complete: what is exact in it becomes a donor, and its receipt is written
    forget       it was released, or aborted while it waited

A load that waits for its next step holds slots, but no more firmly than a cache does: `count_waiting_slots` says how
many the engine may count as free, and `stop_loads` gives them back when it needs them. The load then begins again.

Nothing approximate may enter the exact tree: `find_exact_end` says how much of a request is as a cold prefill has it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semblend.confirm import events
from semblend.confirm.build_receipt import RequestFacts, build_receipt
from semblend.confirm.receipt import Receipt
from semblend.errors import SemBlendError
from semblend.facade import SemBlend
from semblend.integration.desk.kept_donors import KeptDonors
from semblend.integration.desk.records import (
    MOST_BEGINNINGS,
    NEVER,
    SHORT_TAIL,
    WAITS,
    LoadRecord,
    SlotPool,
    Waiting,
    choose_mode,
)
from semblend.integration.desk.settings import DeskSettings
from semblend.materialize.blend.blender import Blender
from semblend.materialize.blend.passes import first_rows, two_passes_cost_more
from semblend.materialize.blend.quality import Blended, Placed, QualitySettings, Rejected
from semblend.materialize.contract import Model
from semblend.materialize.gate.gate import OutcomeMemory
from semblend.materialize.weights_watch import WeightsWatch
from semblend.plan.donor_cost import explain_lost_donor
from semblend.plan.gap_cost import keep_paying_spans
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan
from semblend.prompt import Prompt

log = logging.getLogger("semblend.desk")


class ReuseDesk:
    """See the module. ``semblend`` finds, ``model`` computes, ``pool`` gives slots; receipts name the ``engine``."""

    def __init__(
        self,
        model: Model,
        semblend: SemBlend,
        pool: SlotPool,
        settings: DeskSettings,
        quality: QualitySettings,
        *,
        engine: str,
        engine_version: str,
        watch: WeightsWatch | None = None,
    ) -> None:
        self.semblend, self.settings = semblend, settings
        self._model, self._pool, self._quality = model, pool, quality
        self._engine, self._version = engine, engine_version
        self.donors, self._watch = KeptDonors(semblend, model, settings, engine), watch
        self._outcomes = OutcomeMemory(quality.thresholds.expected_costs, quality.thresholds)
        self._blenders: dict[str, Blender] = {}
        self._records: dict[str, LoadRecord] = {}
        self._loading: LoadRecord | None = None  # one load waits at most

    # -- a request that waits ----------------------------------------------------------------------------------------

    def find_request(self, request_id: str, source: Any) -> Waiting | None:
        """What was read of a request before; None for one that is new, also under an id that was used before."""
        record = self._records.get(request_id)
        if record is None or record.request.source is source:
            return None if record is None else record.request
        self.forget(request_id)
        return None

    def find_source(self, request_id: str) -> Any:
        """The engine's request that stands under an id now, or None. Two requests may have one id at once."""
        record = self._records.get(request_id)
        return None if record is None else record.request.source

    def offer(self, request: Waiting, exact_tokens: int) -> int:
        """Tokens behind the ``exact_tokens`` of the exact tree that we shall provide; 0 for none."""
        record = self._records.get(request.request_id)
        if record is None:
            mode = choose_mode(request, self.settings.config)
            record = self._records[request.request_id] = LoadRecord(request, mode)
        elif record.is_loading and exact_tokens == record.exact_tokens:
            return record.claim_end - exact_tokens
        elif record.outcome is not None:  # refused once; or loaded, and then not admitted; or released untold
            self._take_back(record)
            return 0
        if exact_tokens >= len(request.prompt) - 1:
            self._stop_load(record)
            record.exact_tokens, record.epoch, record.decision = exact_tokens, NEVER, None
            return 0
        if record.epoch != self.donors.epoch or record.exact_tokens != exact_tokens:
            self._stop_load(record)
            record.exact_tokens, record.epoch = exact_tokens, self.donors.epoch
            record.decision = self._decide(record)
        if not isinstance(record.decision, ReusePlan):
            return 0
        record.claim_end = self._find_claim_end(record, record.decision)
        return max(0, record.claim_end - exact_tokens)

    def stand_back(self, request: Waiting, exact_tokens: int, why: str) -> None:
        """The engine computes this request behind its ``exact_tokens``. Nothing is offered; it may become a donor."""
        record = self._records.get(request.request_id)
        if record is None:
            record = self._records[request.request_id] = LoadRecord(request, choose_mode(request, self.settings.config))
        self._stop_load(record)
        self._take_back(record)
        record.exact_tokens, record.epoch = exact_tokens, NEVER
        record.decision = Decline(DeclineReason.UNSUPPORTED_MODE, why)

    def load(self, request_id: str, exact_slots: Callable[[], Tensor]) -> None:
        """Begin the load of a request: take slots for it. One that has begun goes on, if its exact prefix is in place.

        The prefix may leave while a load waits, as any other: nobody holds it. Then the load begins again.
        """
        record = self._records.get(request_id)
        if record is None or not isinstance(record.decision, ReusePlan):
            return
        prefix = exact_slots()[: record.exact_tokens]
        if record.is_loading and record.prefix is not None and torch.equal(prefix, record.prefix):
            return
        self.stop_loads()
        record.begun += 1
        if record.begun > MOST_BEGINNINGS:
            record.outcome = Decline(DeclineReason.CAPACITY, f"its load was stopped {MOST_BEGINNINGS} times")
            return
        if self._drop_old_weights():
            record.outcome = Decline(DeclineReason.STALE, "the weights of the model have changed")
            return
        claimed = self.semblend.claim(record.decision, request_id)
        if isinstance(claimed, Decline):
            record.outcome = record.decision = claimed
            return
        plan_tokens = len(record.request.prompt) if record.is_gated else record.claim_end
        record.slots = self._pool.take(self._pool.round_up(plan_tokens - record.exact_tokens))
        if record.slots is None:
            record.outcome = Decline(DeclineReason.CAPACITY, "there are no slots left for it")
            self.semblend.release(request_id)
            return
        record.ordered, record.prefix = record.decision.until(plan_tokens), prefix
        context = torch.cat([prefix, record.slots])[:plan_tokens]
        tokens = torch.from_numpy(record.request.prompt.token_ids[:plan_tokens].astype(np.int64))
        record.pieces = self._get_blender(record.path).prepare_in_pieces(
            Placed(tokens, context), self.donors.name_generations(record.ordered), mode=record.mode
        )
        self._loading = record

    def work(self, request_id: str, *, busy: bool) -> int | None:
        """Go on with a load for a step's share of time, to its end where nobody else runs.

        Gives the tokens that are provided now, 0 where the engine has to compute them, None where the load goes on.
        """
        record = self._records[request_id]
        started = time.perf_counter()
        while record.pieces is not None:
            try:
                next(record.pieces)
            except StopIteration as done:
                record.outcome, record.pieces, self._loading = done.value, None, None
                break
            spent_ms = (time.perf_counter() - started) * 1e3
            if busy and spent_ms + self._quality.piece_ms / 2 > self.settings.step_work_ms:
                return None
        if not isinstance(record.outcome, Blended):
            self._give_slots_back(record)
            self._note_refusal(record)
            return 0
        assert record.slots is not None, "a load has slots"
        provided = record.claim_end - record.exact_tokens
        if len(record.slots) > provided:
            self._pool.give_back(record.slots[provided:])
            record.slots = record.slots[:provided]
        return provided

    def keep_private(self, request_id: str) -> None:
        """Nothing of this request is to be published, though some of it is exact."""
        record = self._records.get(request_id)
        if record is not None:
            record.private = True

    # -- a request that runs -----------------------------------------------------------------------------------------

    def find_tail(self, request_id: str) -> Tensor | None:
        """The slots behind the exact prefix that are loaded; None where there are none."""
        record = self._records.get(request_id)
        if record is None or not record.is_loaded:
            return None
        record.is_written = True
        return record.slots

    def find_exact_end(self, request_id: str) -> int | None:
        """Up to where the KV of a request is exact; None where all of it is."""
        record = self._records.get(request_id)
        if record is not None and record.private:
            return record.exact_tokens
        if record is None or not isinstance(record.outcome, Blended) or not record.outcome.approximate:
            return None
        return record.outcome.exact_until

    def note_prompt(self, request_id: str, slots: Tensor | None, answered: Sequence[int] = ()) -> Receipt | None:
        """The prompt is complete and lies in ``slots``: its exact part becomes a donor. Its receipt, the first time.

        ``answered``: tokens behind the prompt whose KV lies in ``slots`` too. Without ``slots`` there is no donor.
        """
        record = self._records.get(request_id)
        if record is None or record.receipt is not None or record.request.restarted:
            return None
        exact_end, whole = self.find_exact_end(request_id), len(record.request.prompt) + len(answered)
        length = whole if exact_end is None else min(exact_end, len(record.request.prompt))
        request = record.request
        wanted = slots is not None and self.settings.config.enabled and not request.declined and not request.opt_out
        if slots is not None and wanted and length - record.exact_tokens >= self.settings.donor_min_new_tokens:
            self._capture(record, slots[:length], answered)
        return self._confirm(record)

    def forget(self, request_id: str) -> None:
        """The request is gone. Slots that a load still has go back; those in its row are the engine's to free."""
        record = self._records.pop(request_id, None)
        if record is not None:
            self._stop_load(record)
            self._give_slots_back(record)
            self.semblend.release(request_id)

    def give_up(self, request_id: str, where: str, error: BaseException) -> None:
        """A hook failed for this request: it is computed cold, and an event says why."""
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        log.warning("SemBlend: %s failed for %s: %s", where, request_id, message, exc_info=error)
        record = self._records.get(request_id)
        if record is not None and where in WAITS:  # it has no row yet, so whatever slots it has are ours
            try:
                self._stop_load(record)
            finally:
                self._give_slots_back(record)
                record.outcome = Decline(DeclineReason.ERROR, message)
        self._tell_error(where, message, request_id)

    def count_waiting_slots(self) -> int:
        """Slots of a load that waits for its next step: `stop_loads` gives them back."""
        record = self._loading
        return 0 if record is None or record.slots is None else len(record.slots)

    def stop_loads(self) -> bool:
        """Give up the load that waits, because the engine needs its slots; whether there was one."""
        return self._loading is not None and self._stop_load(self._loading)

    def reset(self) -> None:
        """Drop every donor and every load: the engine has emptied its cache, or the model has other weights."""
        self.stop_loads()
        self.donors.drop_all()

    # -- parts -------------------------------------------------------------------------------------------------------

    def _decide(self, record: LoadRecord) -> ReusePlan | Decline:
        request = record.request
        if request.declined:
            return Decline(DeclineReason.UNSUPPORTED_MODE, request.declined)
        started = time.perf_counter()
        found = self.semblend.lookup(
            request.prompt,
            request_id=request.request_id,
            exact_tokens=record.exact_tokens,
            opt_out=request.opt_out or record.mode == "exact",
        )
        record.lookup_ms = (time.perf_counter() - started) * 1e3
        if isinstance(found, ReusePlan) and not record.is_gated:
            found = keep_paying_spans(found)
        return found if isinstance(found, Decline) else self._decline_not_worth_it(record, found) or found

    def _decline_not_worth_it(self, record: LoadRecord, plan: ReusePlan) -> Decline | None:
        """Decline a plan that would cost more than it saves, before anything is claimed or computed."""
        if why := self._explain_not_worth_it(record, plan):
            return Decline(DeclineReason.BELOW_BREAK_EVEN, why)
        if record.is_gated and not record.judged:  # once: the memory counts what it declines
            record.judged = True
            record.in_vain = self._outcomes.decline_in_vain(plan, record.request.prompt.namespace, record.mode)
        return record.in_vain

    def _explain_not_worth_it(self, record: LoadRecord, plan: ReusePlan) -> str | None:
        if not plan.until(self._find_claim_end(record, plan)).spans:
            return "what donors hold is the end of the prompt, which the engine computes itself"
        if (why := explain_lost_donor(plan)) or not record.is_gated:
            return why
        first = first_rows(plan.prompt_tokens, plan.exact_tokens, plan.spans, self._quality)
        return two_passes_cost_more(first, plan.spans, plan.prompt_tokens - plan.exact_tokens, self._quality)

    def _find_claim_end(self, record: LoadRecord, plan: ReusePlan) -> int:
        """Where the claim ends, in whole pages: the engine always computes the last token itself."""
        last, held = len(record.request.prompt) - 1, plan.spans[-1].target_end
        end = last if record.is_gated or last - held <= SHORT_TAIL else held
        end = min(end, record.request.longest_prefix)
        return record.exact_tokens + self._pool.round_down(max(0, end - record.exact_tokens))

    def _get_blender(self, mode: str) -> Blender:
        """In mode fast only the engine needs the end of the prompt; the gate of mode balanced looks at it."""
        if mode not in self._blenders:
            quality = replace(self._quality, question_tokens=1) if mode == "fast" else self._quality
            self._blenders[mode] = Blender(self._model, self.donors.kv, quality)
        return self._blenders[mode]

    def _stop_load(self, record: LoadRecord) -> bool:
        """Give up a load under way; it may begin again. A load that is over is left alone."""
        if record.pieces is None:
            return False
        pieces, record.pieces, record.ordered, self._loading = record.pieces, None, None, None
        try:
            pieces.close()
        finally:
            self._give_slots_back(record)
        self.semblend.release(record.request.request_id)
        return True

    def _give_slots_back(self, record: LoadRecord) -> None:
        slots, record.slots = record.slots, None
        if slots is not None and not record.is_written:  # those in its row are the engine's to free
            self._pool.give_back(slots)

    def _take_back(self, record: LoadRecord) -> None:
        """A load that the engine has not used: its slots go back, and no receipt may count it."""
        if record.is_loaded and not record.is_written:
            record.outcome = Decline(DeclineReason.CAPACITY, "the engine did not admit it with what was loaded")
        self._give_slots_back(record)

    def _note_refusal(self, record: LoadRecord) -> None:
        """The load ended without KV to use. A donor whose KV is not what its tokens ask for goes."""
        self.semblend.release(record.request.request_id)
        if not isinstance(record.outcome, Decline):
            return
        if record.outcome.reason is DeclineReason.VALIDATION_FAILED and record.ordered is not None:
            for donor_id in record.ordered.donor_ids:
                self.semblend.forget(donor_id, reason="engine")
        elif record.outcome.reason is DeclineReason.ERROR:
            self._tell_error("materialize", record.outcome.detail, record.request.request_id)

    def _drop_old_weights(self) -> bool:
        if self._watch is None or not self._watch.have_changed():
            return False
        log.warning("SemBlend: the model has new weights; the donors of the old ones are dropped")
        self.reset()
        return True

    def _capture(self, record: LoadRecord, slots: Tensor, answered: Sequence[int]) -> None:
        prompt = record.request.prompt
        if len(slots) != len(prompt):
            tokens = np.concatenate((prompt.token_ids, np.asarray(answered, dtype=np.int32)))
            prompt = Prompt(tokens[: len(slots)], namespace=prompt.namespace)
        self.donors.keep(prompt, slots)

    def _confirm(self, record: LoadRecord) -> Receipt:
        declined = record.outcome if isinstance(record.outcome, Decline) else None
        if isinstance(record.outcome, Rejected):
            declined = Decline(DeclineReason.QUALITY_RISK, "the gate wants the prompt computed in full")
        work = record.outcome if isinstance(record.outcome, Blended) else None
        facts = RequestFacts(
            request_id=record.request.request_id,
            engine=self._engine,
            engine_version=self._version,
            namespace=record.request.prompt.namespace,
            mode=record.mode,
            prompt_tokens=len(record.request.prompt),
            exact_tokens=record.exact_tokens,
            decision=record.ordered or record.decision,
            lookup_ms=record.lookup_ms,
        )
        record.receipt = build_receipt(facts, work, declined)
        self._learn(record)
        try:
            self.semblend.confirm(record.receipt)
        except SemBlendError as error:  # such as a request id that was used before: the answer goes on
            self.semblend.release(record.request.request_id)
            self._tell_error("confirm", str(error), record.request.request_id)
        return record.receipt

    def _learn(self, record: LoadRecord) -> None:
        """Tell the memory what a load that the gate looked at has cost."""
        if record.is_gated and record.ordered is not None and isinstance(record.outcome, Blended | Rejected):
            refused = isinstance(record.outcome, Rejected)  # the engine's prefill comes on top
            self._outcomes.learn(
                record.ordered,
                record.request.prompt.namespace,
                record.mode,
                work=record.outcome.work + refused,
                declined=DeclineReason.QUALITY_RISK if refused else None,
            )

    def _tell_error(self, where: str, message: str, request_id: str) -> None:
        if self.semblend.events:
            self.semblend.events.emit(events.error(where, message, request_id or None, engine=self._engine))
