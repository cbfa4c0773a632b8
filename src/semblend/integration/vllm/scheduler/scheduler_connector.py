"""Our side in vLLM's scheduler: lookup, claims, where each request is, receipts.

It decides and keeps books, and touches no KV. vLLM calls it in this order for a request:

    note_arrival     it waits from now on
    count_matched    how many tokens behind the exact hit shall we provide? It waits for them, and holds up nobody
    note_allocated   it has the blocks for what we claimed, and its load begins; again when it is scheduled
    build_orders     once a step: what the worker's side has to load, capture and drop
    note_report      after the step: what it did. A load that ends well is scheduled next; one that was refused is
                     computed by vLLM, under its own hashes, and never claimed again. A captured prompt becomes a donor,
                     a served one gets its receipt, with the next report: the first token does not wait for it
    finish           the answer is complete, or the request was aborted

Nothing in here raises into vLLM: `connector_v1` catches, says so in an event, and the request is computed cold.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np

from semblend.confirm.receipt import Receipt
from semblend.facade import SemBlend
from semblend.integration.vllm.orders import Capture, Load, Orders, Report
from semblend.integration.vllm.scheduler.healing import PrefixHealing
from semblend.integration.vllm.scheduler.prefix_locks import PrefixLocks
from semblend.integration.vllm.scheduler.records import (
    ENGINE,
    EngineFacts,
    Record,
    RecordBook,
    add_computed,
    build_refused_receipt,
    iterate_scheduled,
    keep_block_tables,
    make_record,
    move_prompt,
    name_weights,
)
from semblend.integration.vllm.scheduler.shared_blocks import SharedBlocks
from semblend.integration.vllm.scheduler.worker_donors import WorkerDonors
from semblend.integration.vllm.settings import ConnectorSettings
from semblend.materialize.blend.quality import QualitySettings
from semblend.materialize.gate.gate import OutcomeMemory
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan
from semblend.session.session import NEVER, LoadResult, State
from semblend.session.sessions import EngineTraits, Sessions
from semblend.span import Span

log = logging.getLogger("vllm.semblend")


class SchedulerConnector:
    """See the module."""

    def __init__(
        self,
        facts: EngineFacts,
        settings: ConnectorSettings,
        semblend: SemBlend,
        *,
        clock: Callable[[], float] = time.time,
        outcomes: OutcomeMemory | None = None,
    ) -> None:
        self.facts, self.settings, self.semblend = facts, settings, semblend
        self.locks = PrefixLocks(facts, self.report_failure)
        self.donors = WorkerDonors(semblend, self.report_failure, facts)
        self.shares = SharedBlocks(self.locks, facts.block_tokens)
        seam_tokens = settings.config.seam_tokens
        self.sessions = Sessions(
            semblend,
            EngineTraits(ENGINE, facts.version, donor_min_new_tokens=settings.donor_min_new_tokens),
            self.donors,
            config=settings.config,
            quality=QualitySettings(seam_tokens=seam_tokens),
            outcomes=outcomes,
        )
        self.donors.lineage = self.sessions.lineage
        self.healing = PrefixHealing(settings.heal_prefixes, facts.hash_block_tokens, seam_tokens, self.report_failure)
        self._clock = clock
        self._answered: dict[str, tuple[float, float]] = {}  # whose receipts are due, and when they were answered
        self._arrived: dict[str, Record] = {}  # requests that nobody has asked about yet
        self._records = RecordBook()
        self._given_up: set[str] = set()  # requests that vLLM computes without us, until they end
        self._refused: dict[str, int] = {}  # exact tokens of each request in an engine that we do not serve
        self._loads = PendingLoads(facts.block_tokens)
        self._freed: list[str] = []
        self._ended: list[Capture] = []  # of requests that have given their blocks away
        self._admitted: set[str] = set()  # since the last step's orders

    # -- a request -------------------------------------------------------------------------------------------------

    def note_arrival(self, request: Any) -> None:
        """vLLM has a new request, and will ask about it: `healing` counts how many wait for one prefix."""
        if self.facts.refusal is not None or not self.healing.on or not request.prompt_token_ids:
            return
        record = self._arrived[request.request_id] = make_record(request, self.facts, self.settings)
        if self._may_reuse(record):
            self.healing.note_arrival(record, shares_equal=self._shares_blocks)

    def count_matched(self, request: Any, local_tokens: int) -> int | None:
        """Tokens behind the ``local_tokens`` of vLLM's own hit that we claim; 0 for none, None to be asked again."""
        if self.facts.refusal is not None:  # a number is all that an engine which we do not serve keeps of a request
            self._refused[request.request_id] = local_tokens
            return 0
        self._catch_up()
        self._confirm_answered()  # what they took and what the gate said counts for this one
        record = self._find_record(request)
        if record is None:
            return 0
        record.brought_from = None
        if record.state is State.COLD:
            record.block_ids = None  # they went back with the load; vLLM computes it
            return 0
        if record.block_ids is not None:  # preempted outside of a step: vLLM asks again for a request that had blocks
            self._start_over(request.request_id)
        if record.share is not None and self.shares.find_blocks(record, local_tokens):
            return 0
        may_reuse = self._may_reuse(record)
        may_share = may_reuse and self._shares_blocks and len(self.shares) > 0
        if may_share and self.shares.join(record, local_tokens, self._records):
            return None
        if may_reuse and self.healing.must_wait(record, local_tokens, self._records):
            return None
        before = record.decision
        earlier, in_common = self.shares.find_edited(record, local_tokens) if may_share else (None, 0)
        offered = self.sessions.offer(record, local_tokens, goes_on_from=in_common)
        if record.decision is not before:
            record.cost = None
        if earlier is not None and self.sessions.goes_on(record):
            self.shares.join_part(record, local_tokens, earlier, in_common)
            return None
        if offered and isinstance(record.decision, ReusePlan) and self.healing.must_compute(record, record.decision):
            self._leave_to_vllm(record)
        return record.offered_tokens

    def leave_to_another(self, request: Any, exact_tokens: int, local_tokens: int = 0) -> None:
        """We claim nothing, and count what another connector brings as exact, for that is what it says it is.

        It brings the tokens from ``local_tokens`` on.
        """
        if self.facts.refusal is not None:
            self._refused[request.request_id] = exact_tokens
            return
        record = self._find_record(request)
        if record is not None:
            self.shares.leave(record)
            self.locks.unlock(record)
            self.sessions.stand_back(record, exact_tokens, None)
            record.brought_from = local_tokens

    def note_allocated(self, request: Any, block_ids: list[int], claimed_tokens: int) -> None:
        """The request was admitted, to be loaded or to be computed; ``block_ids`` are all it has so far."""
        record = self._records.get(request.request_id)
        if record is None:
            return
        record.block_ids = list(block_ids)
        self._admitted.add(request.request_id)
        self.healing.note_admitted(request.request_id)
        if claimed_tokens:
            self._begin_load(record, claimed_tokens)
        elif record.share is not None:
            self.shares.take(record)
            self.semblend.ledger.note_plan(request.request_id, record.share.plan)
        elif record.is_loading:  # the word about its load was lost: whatever is in its blocks, nobody else finds it
            self.sessions.finish_load(record, LoadResult(record.approximate_from))
        elif record.state is State.OFFERED:
            record.withdraw()
        record.entered = record.holds_moved_kv
        self.locks.keep_private([record])

    def refuse_claim(self, request: Any, block_ids: list[int], claimed_tokens: int) -> None:
        """`note_allocated` failed. Where we had claimed, vLLM waits for a load: it gets one that is refused."""
        record = self._records.get(request.request_id)
        self.give_up(request.request_id)
        if claimed_tokens and record is not None:
            self._loads.refuse(record, block_ids, claimed_tokens)

    def holds_approximate(self, request_id: str) -> bool:
        """Whether any block of a request may hold approximate KV: nobody else may store it."""
        record = self._records.get(request_id)
        return record is not None and record.salted is not None

    def count_hit_sources(self, request_id: str, claimed_tokens: int) -> tuple[int, int]:
        """How many claimed tokens a donor holds, and how many we shall compute; they add up to the claim.

        This is the plan, because vLLM asks before the load runs. What really happened is in the receipt.
        """
        record = self._records.get(request_id)
        if record is None or not isinstance(record.decision, ReusePlan):
            return 0, claimed_tokens
        reused = min(claimed_tokens, record.decision.until(record.claim_end).reused_tokens)
        return reused, claimed_tokens - reused

    def finish(self, request_id: str, block_ids: Sequence[int] = ()) -> Receipt | None:
        """The request ended; its receipt, where its prompt was complete and the worker has spoken.

        What it computed lies in ``block_ids`` until the next step.
        """
        self._given_up.discard(request_id)
        self._arrived.pop(request_id, None)
        self.healing.forget(request_id)
        record = self._records.get(request_id)
        if record is None:
            return None
        self._confirm(request_id)
        self._keep_answered(record, block_ids)
        self._release_blocks(record)
        if record.is_loading:
            self._loads.cancel(request_id)
            self.shares.drop_of(record)
        is_receipt_due = record.has_answered and record.has_said and record.receipt is None
        record.end()
        if not is_receipt_due:
            self._forget(request_id)
        return record.receipt

    def finish_refused(self, request: Any) -> Receipt | None:
        """The receipt of a request that has ended in an engine that we do not serve; None where it has no answer."""
        exact_tokens = self._refused.pop(request.request_id, None)
        if exact_tokens is None or not request.num_output_tokens or not request.prompt_token_ids:
            return None
        receipt = build_refused_receipt(request, exact_tokens, self.facts, self.settings)
        self.sessions.record(receipt)
        return receipt

    # -- a step ----------------------------------------------------------------------------------------------------

    def build_orders(self, output: Any) -> Orders:
        """What the worker's side does in this step."""
        self._catch_up()
        # A reset preempts all that run, and some are admitted again before vLLM names them here.
        for request_id in set(output.preempted_req_ids or ()) - self._admitted:
            self._start_over(request_id)
        self._admitted.clear()
        captures: list[Capture] = []
        served: list[str] = []
        computed_now: set[int] | None = set()
        asks = self._loads.has_any  # else nobody wants to know what is computed now: a running request costs nothing
        keep_block_tables(output.scheduled_cached_reqs, self._records)
        for request_id, computed in iterate_scheduled(output) if asks or self._records.any_unanswered else ():
            record = self._records.get(request_id)
            if not asks and (record is None or record.has_answered):
                continue
            end = computed + output.num_scheduled_tokens[request_id]
            start = computed if record is None else record.begin_step(computed)
            if asks:
                computed_now = add_computed(computed_now, record, start, end, self.facts.block_tokens)
            if record is not None and not record.has_answered and end >= len(record.prompt):
                served.append(request_id)
                tokens = self.sessions.answer(record)
                order = self.donors.order(record, tokens) if tokens and record.block_ids else None
                if order is not None:
                    captures.append(order)
                    record.keep(tokens)
        self.locks.keep_private(self._records.open.values())
        self._records.settle()
        orders = self._order_loads(busy=bool(output.num_scheduled_tokens), computed_now=computed_now)
        orders.captures, orders.served = captures, served
        orders.ended, self._ended = self._ended, []
        orders.drops, orders.pins = self.donors.take_drops(), self.donors.take_pins()
        orders.heirs, orders.kept_first = self.donors.take_heirs(), self.donors.take_kept_first()
        orders.publications = self.donors.take_publications()
        self.donors.note_sent()
        return orders

    def build_least_orders(self, preempted: Iterable[str]) -> Orders:
        """Where `build_orders` failed, the least that a step must order: without loads requests would wait forever, and
        without ``freed`` a copy would read blocks that others write. Captures that no worker has heard of are none.

        ``preempted``: requests whose blocks vLLM has taken back.
        """
        self._ended = []
        self.donors.take_back_unsent()
        for request_id in preempted:
            if request_id in self._records:
                self._release_blocks(self._records[request_id])
        return self._order_loads()

    def _order_loads(self, *, busy: bool = True, computed_now: Set[int] | None = None) -> Orders:
        """``busy``: others are computed in the step. ``computed_now``: the blocks in which they are; None where that is
        not known."""
        orders = self._loads.take(self.settings.step_work_ms if busy else None, computed_now)
        orders.freed, self._freed = self._freed, []
        return orders

    def note_failed_loads(self, block_ids: Set[int]) -> None:
        """vLLM computes these blocks anew, because a connector could not load them. Nothing that was computed on them
        becomes a donor or is shared, and a load behind them has come to nothing.

        Told with the output of the step that loaded them, before what else is reported of it.
        """
        self.donors.drop_copies_of(block_ids)
        for record in self._records.values():
            first = record.find_block_in(block_ids, self.facts.block_tokens)
            if first is None:
                continue
            record.spoiled = "another connector could not load KV that it is computed on"
            record.rule_out(record.spoiled)
            record.exact_tokens = min(record.exact_tokens, first * self.facts.block_tokens)
            self.shares.drop_of(record)
            if record.state is State.FILLED and record.share is None and not record.entered:
                self.sessions.run_cold(record, Decline(DeclineReason.ERROR, record.spoiled))
                self.locks.unlock(record)

    def note_report(self, report: Report) -> None:
        """The worker's side has done a step."""
        self._catch_up()
        self._confirm_answered()
        if report.weights:
            self._adopt_weights(report.weights)
        for where, message, request_id in report.errors:
            self.report_failure(where, message, request_id)
        self.sessions.note_start(report.times)
        self.donors.note_report(report)
        for request_id, result in report.loaded.items():
            record = self._records.get(request_id)
            if record is not None and record.is_loading:
                self._note_loaded(record, result)
        for request_id in report.served:
            self._answered[request_id] = self._clock(), self.sessions.read_clock()
            if (ended := self._records.get(request_id)) is None or ended.state is State.ENDED:
                self._confirm(request_id)
        for tier, used in report.donor_bytes.items():
            self.semblend.metrics.donors(self.semblend.stats().donors, used, tier)

    def reset(self) -> bool:
        """Drop every donor, and what was made from them."""
        self.shares.clear()
        self.healing.accounts.clear()
        self.donors.forget_all()
        return True

    def report_failure(self, where: str, message: str, request_id: str = "") -> None:
        """Something of ours failed; the request is computed cold or was already."""
        self.sessions.report_failure(where, message, request_id)

    def give_up(self, request_id: str) -> None:
        """A hook failed for this request: its claim and its record go, and it is not claimed again."""
        self._given_up.add(request_id)
        self._arrived.pop(request_id, None)
        self.healing.forget(request_id)
        record = self._records.remove(request_id)
        if record is not None:
            self._release_blocks(record)
            self.shares.drop_of(record)
            if record.holds_moved_kv:  # filled blocks must stay salted, and nobody looks after those of its answer
                self.locks.end_caching(record)
            else:  # computed cold, under its own hashes
                self.locks.unlock(record)
        self.semblend.release(request_id)

    def let_go(self, request_id: str) -> None:
        """A request has ended, and what we had to do about that failed."""
        self.give_up(request_id)
        self._given_up.discard(request_id)
        self._refused.pop(request_id, None)

    def _confirm_answered(self) -> None:
        """Receipts of those whose first token came with an earlier step's output: by now it is on its way."""
        for request_id in list(self._answered):
            try:
                self._confirm(request_id)
            except Exception as error:
                log.warning("SemBlend: a receipt failed for %s", request_id, exc_info=True)
                self.report_failure("report", f"{type(error).__name__}: {error}", request_id)
                self.give_up(request_id)

    def _catch_up(self) -> None:
        """What an operator has asked for, and a reset of vLLM's prefix cache."""
        is_void = self.donors.catch_up()
        self.shares.drop_donors(self.donors.take_forgotten())
        if is_void:
            self.reset()

    def _adopt_weights(self, digest: str) -> None:
        """These are the model's weights. Donors of others go, and none is made of a request that began before."""
        knew, self.facts = self.facts.knows_weights, name_weights(self.facts, digest)
        self.donors.follow(self.facts.namespace)
        self.donors.name_anew(lambda prompt: move_prompt(prompt, self.facts))
        self._arrived.clear()  # their records name the weights of before
        for record in self._records.values():
            record.request = replace(record.request, prompt=move_prompt(record.prompt, self.facts))
            if knew:
                record.rule_out(record.request.unsupported or "the weights have changed since it began")
                record.epoch = NEVER
        if knew:
            self.reset()

    # -- what to do with a request ---------------------------------------------------------------------------------

    def _find_record(self, request: Any) -> Record | None:
        record = self._records.get(request.request_id)
        if record is None:
            record = self._arrived.pop(request.request_id, None)
            if not request.prompt_token_ids or request.request_id in self._given_up:
                return None
            if record is None or record.source is not request:
                record = make_record(request, self.facts, self.settings)
            self._records.add(request.request_id, record)
        return record

    def _may_reuse(self, record: Record) -> bool:
        """Whether a lookup for this request is worth anything: it neither opted out nor is of a kind that we refuse."""
        if not record.is_open or self.sessions.explain_no_reuse(record):
            return False
        off = self.semblend.decline_beforehand(record.prompt, record.request_id, self.sessions.opts_out(record))
        return off is None

    @property
    def _shares_blocks(self) -> bool:
        return self.settings.share_equal_prompts and self.locks.can_share

    def _leave_to_vllm(self, record: Record) -> None:
        """vLLM computes its prefix, once for all requests that share it."""
        epoch = record.epoch
        record.withdraw()
        record.epoch = epoch
        record.decision = Decline(DeclineReason.SHARED_PREFIX, "loads of this prefix would cost as much as it does")

    # -- loads ----------------------------------------------------------------------------------------------------

    def _begin_load(self, record: Record, claimed_tokens: int) -> None:
        """It has its blocks: lock the exact prefix cache before anything is written into them."""
        assert record.block_ids is not None, "vLLM has just told them"
        plan = self.sessions.begin_load(record)
        if isinstance(plan, Decline):  # vLLM waits for a load: it gets one that is refused
            self._loads.refuse(record, record.block_ids, claimed_tokens)
            return
        key = self.shares.begin(record, plan) if self._shares_blocks else None
        self.locks.lock(record, plan.spans[0].target_start, key)
        spans = (replace(one, generation=self.donors.find_generation(one.donor_id)) for one in plan.spans)
        self._loads.add(record, plan, spans)
        self.healing.note_load(record)
        self.donors.note_used(plan.donor_ids)

    def _note_loaded(self, record: Record, result: LoadResult) -> None:
        """Its load is over, and vLLM has not computed anything on it."""
        if record.spoiled is not None:
            result = replace(result, failed=True, reason=DeclineReason.ERROR, detail=record.spoiled)
        plan = record.plan
        self.sessions.finish_load(record, result)
        if record.approximate_from is not None:
            self.shares.note_loaded(record, result)
            return
        self.shares.drop_of(record)
        self.locks.unlock(record)  # what is in its blocks is exact, or will be: vLLM may find it
        if result.reason is DeclineReason.VALIDATION_FAILED and plan is not None:
            self.shares.drop_donors(result.faulty_donors or plan.donor_ids)

    def _keep_answered(self, record: Record, block_ids: Sequence[int]) -> None:
        """A request has ended: where its answer is exact, prompt and answer become one donor.

        The last token was said and never computed; what an engine that schedules ahead has computed behind it is not
        part of the answer.
        """
        source = record.source
        if record.salted is not None or record.spoiled is not None or not block_ids or self.donors.stands_beside_others:
            return
        held = min(source.num_tokens - 1, source.num_computed_tokens, len(block_ids) * self.facts.block_tokens)
        tokens = self.sessions.count_answered_tokens(record, held)
        is_last = all(one is record or one.state is State.ENDED for one in self._records.values())
        order = self.donors.order_answered(record, tokens, block_ids, is_last=is_last) if tokens else None
        if order is not None:
            self._ended.append(order)

    # -- its life --------------------------------------------------------------------------------------------------

    def _release_blocks(self, record: Record) -> None:
        """vLLM gives its blocks to others, while a worker may still copy from them."""
        if record.state is State.KEPT:
            self._freed.append(record.request_id)

    def _start_over(self, request_id: str) -> None:
        """Preempted: its blocks are gone, it will be computed from its exact prefix on, under its own hashes."""
        record = self._records.get(request_id)
        if record is None or record.state is State.ENDED:  # it may end before the step that names it
            return
        self._confirm(request_id)
        if record.is_loading:
            self._loads.cancel(request_id)
        self._release_blocks(record)
        self.locks.unlock(record)
        self._records.open[request_id] = record
        self.sessions.restart(record)
        record.lose_blocks()

    def _confirm(self, request_id: str) -> None:
        """The prompt's last step is done, so the first token is out: the receipt, once."""
        times, record = self._answered.pop(request_id, None), self._records.get(request_id)
        if times is None or record is None or record.receipt is not None or not record.has_said:
            return
        arrival = getattr(record.source, "arrival_time", None)
        ttft_ms = None if arrival is None else max(0.0, (times[0] - arrival) * 1e3)
        receipt = self.sessions.confirm(record, ttft_ms=ttft_ms, answered_at=times[1])
        if receipt is not None and receipt.reason is DeclineReason.SHARED_PREFIX:
            self.semblend.metrics.declined(receipt.reason)  # no lookup's decline, and the worker never saw it
        if record.state is State.ENDED:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        record = self._records.remove(request_id)
        if record is not None:
            self.sessions.end(record)


class PendingLoads:
    """Loads on their way to the workers, and those that are held back for a step.

    The workers work on loads before a step's forward pass, and a load reads the exact blocks in front of it. vLLM
    enters blocks into its prefix cache when it schedules them, so a request may be given blocks that are computed in
    this very step. Its load is ordered with the next one.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._waiting: list[Load] = []
        self._held: set[str] = set()
        self._cancels: list[str] = []

    @property
    def has_any(self) -> bool:
        """Whether a load waits to be ordered."""
        return bool(self._waiting)

    def add(self, record: Record, plan: ReusePlan, spans: Iterable[Span]) -> None:
        """A request was given its blocks; ``spans`` carry the workers' generations."""
        assert record.block_ids is not None, "vLLM has just told them"
        self._waiting.append(
            Load(
                record.request.request_id,
                record.prompt.token_ids[: plan.prompt_tokens].astype(np.int32),
                tuple(record.block_ids),
                record.exact_tokens,
                record.claim_end,
                tuple(spans),
                record.mode,
                record.prompt.namespace.tenant,
                plan.repair,
                plan.moved_back,
            )
        )

    def refuse(self, record: Record, block_ids: Iterable[int], claimed_tokens: int) -> None:
        """Order a load that the workers refuse, in place of the one that was to be ordered."""
        name, exact = record.request.request_id, record.exact_tokens
        self._waiting = [load for load in self._waiting if load.request_id != name]
        nothing, tenant = np.zeros(0, dtype=np.int32), record.prompt.namespace.tenant
        end = exact + claimed_tokens
        self._waiting.append(Load(name, nothing, tuple(block_ids), exact, end, (), record.mode, tenant))

    def cancel(self, request_id: str) -> None:
        """The request has ended while it was being loaded."""
        self._cancels.append(request_id)

    def take(self, work_ms: float | None, computed_now: Set[int] | None) -> Orders:
        """The orders of a step that computes these blocks, None for unknown ones; they may take ``work_ms``.

        A load waits for one step at most. Workers look at cancels first: one follows its load by a step.
        """
        if not self._waiting and not self._cancels:
            return Orders(work_ms=work_ms)
        ready = [load for load in self._waiting if load.request_id in self._held or self._may_read(load, computed_now)]
        names = {load.request_id for load in self._waiting}
        self._waiting = [load for load in self._waiting if load not in ready]
        self._held = {load.request_id for load in self._waiting}
        orders = Orders(loads=ready, cancels=[name for name in self._cancels if name not in names], work_ms=work_ms)
        self._cancels = [name for name in self._cancels if name in names]
        return orders

    def _may_read(self, load: Load, computed_now: Set[int] | None) -> bool:
        """Whether the exact blocks in front of a load are computed by now; one that is refused reads none."""
        if not load.exact_tokens or not load.spans:
            return True
        exact_blocks = load.block_ids[: -(-load.exact_tokens // self._block_tokens)]
        return computed_now is not None and computed_now.isdisjoint(exact_blocks)
