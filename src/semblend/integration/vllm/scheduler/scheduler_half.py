"""The half that lives beside vLLM's scheduler: lookup, claims, where each request is, receipts.

It decides and keeps books, and touches no KV. vLLM calls it in this order for a request:

    matched      how many tokens behind the exact hit shall we provide?   (again each step while it waits for blocks)
    allocated    it has its blocks now, the ones we claimed among them
    orders       once a step: what the worker half has to load, capture and drop
    reported     after the step: what it did; a captured prompt becomes a donor now, a served one gets its receipt
    finished     the answer is complete, or the request was aborted

Nothing in here raises into vLLM: `connector_v1` catches, says so in an event, and the request is computed cold.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from semblend.confirm import events
from semblend.confirm.receipt import Receipt
from semblend.discover.donor import Eviction
from semblend.errors import SemBlendError
from semblend.facade import SemBlend
from semblend.integration.vllm.orders import Capture, Load, Orders, Report
from semblend.integration.vllm.scheduler.hash_chain import restore, salt, withdraw
from semblend.integration.vllm.scheduler.receipts import ENGINE, build_vllm_receipt
from semblend.integration.vllm.scheduler.records import EngineFacts, Record, iterate_scheduled, learn_from
from semblend.integration.vllm.scheduler.requests import build_namespace, explain_decline, read_options
from semblend.integration.vllm.settings import ConnectorSettings
from semblend.materialize.blend.first_pass import first_rows, two_passes_cost_more
from semblend.materialize.blend.quality import QualitySettings
from semblend.materialize.gate.outcome_memory import OutcomeMemory
from semblend.plan.donor_cost import explain_lost_donor
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan
from semblend.prompt import Prompt

SHORT_TAIL = 128
"""Tokens. Tails of 32 were measured; passes of ours are recorded up to 256 rows, with gaps and heads of spans."""


class SchedulerHalf:
    """See the module. ``block_pool`` and ``cached_counts`` are vLLM's, as far as the version hands them over."""

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
        self.outcomes = OutcomeMemory() if outcomes is None else outcomes
        self.block_pool: Any = None
        self.cached_counts: list[dict[str, int]] = []
        self._clock = clock
        self._records: dict[str, Record] = {}
        self._captures = 0
        self._on_the_way: dict[tuple[str, int], Prompt] = {}  # ordered, not reported yet
        self._held: dict[str, int] = {}  # donor -> the worker's generation of it
        self._drops: list[tuple[str, int]] = []
        self._freed: list[str] = []
        self._epoch = 0  # moves when donors come or go: a decline from before may be wrong by now
        semblend.on_evicted(self._evicted)

    # -- a request -------------------------------------------------------------------------------------------------

    def count_matched(self, request: Any, local_tokens: int) -> int:
        """Tokens behind the ``local_tokens`` of vLLM's own exact hit that we claim; 0 for none."""
        record = self._find_record(request)
        if record is None:
            return 0
        if record.admitted:  # preempted outside of a step: vLLM asks again for a request that had its blocks
            self._start_over(request.request_id)
        if record.claimed and record.local_tokens == local_tokens:
            return record.claim_end - local_tokens
        self._unclaim(record)
        if record.seen_epoch != self._epoch or record.local_tokens != local_tokens:
            record.local_tokens, record.seen_epoch = local_tokens, self._epoch
            self._decide(record)
        if isinstance(record.decision, ReusePlan):
            self._claim(record, record.decision)
        return record.claim_end - local_tokens if record.claimed else 0

    def left_to_another(self, request: Any, exact_tokens: int) -> None:
        """We claim nothing, and count what another connector brings as exact, for that is what it says it is."""
        record = self._find_record(request)
        if record is not None:
            self._unclaim(record)
            record.local_tokens, record.decision, record.seen_epoch = exact_tokens, None, self._epoch

    def allocated(self, request: Any, block_ids: list[int], claimed_tokens: int) -> None:
        """The request was admitted; ``block_ids`` are all it has so far."""
        record = self._records.get(request.request_id)
        if record is None:
            return
        record.admitted = True
        record.block_ids = list(block_ids)
        if not claimed_tokens:
            self._unclaim(record)
        elif isinstance(record.decision, ReusePlan):
            self._withdraw(record, self._find_first_block(record))

    def hit_sources(self, request_id: str, claimed_tokens: int) -> tuple[int, int]:
        """How many claimed tokens a donor holds, and how many we shall compute; they add up to the claim.

        This is the plan, because vLLM asks before the load runs. What really happened is in the receipt.
        """
        record = self._records.get(request_id)
        if record is None or not isinstance(record.decision, ReusePlan):
            return 0, claimed_tokens
        spans = record.decision.until(record.claim_end).spans
        reused = min(claimed_tokens, sum(span.length for span in spans))
        return reused, claimed_tokens - reused

    def finished(self, request_id: str) -> Receipt | None:
        """The request ended; its receipt, where its prompt was complete and the worker has spoken."""
        record = self._records.get(request_id)
        if record is None:
            return None
        record.finished = True
        self._release_blocks(record)
        if record.receipt is not None or not record.served:
            self._forget(request_id)
        return record.receipt

    # -- a step ----------------------------------------------------------------------------------------------------

    def build_orders(self, output: Any) -> Orders:
        """What the worker half does in this step. Requests that were not admitted get their hashes back."""
        orders = Orders()
        for request_id in output.preempted_req_ids or ():
            self._start_over(request_id)
        for request_id, computed, first_step in iterate_scheduled(output, self._records):
            record = self._records.get(request_id)
            if record is not None and record.claimed and not self.cached_counts:
                # Before 0.30 vLLM enters blocks as they fill, the answer's too: those since, and two that were filling.
                self._withdraw(record, max(record.withdrawn - 2, self._find_first_block(record)))
            if record is None or record.served:
                continue
            if first_step and record.claimed:
                orders.loads.append(self._make_load(record))
            if computed + output.num_scheduled_tokens[request_id] >= len(record.prompt):
                record.served = True
                orders.served.append(request_id)
                if self._is_worth_keeping(record):
                    orders.captures.append(self._make_capture(record))
        for record in self._records.values():
            if not record.admitted:
                self._unclaim(record)
        orders.drops, self._drops = self._drops, []
        orders.freed, self._freed = self._freed, []
        return orders

    def reported(self, report: Report) -> None:
        """The worker half has done a step."""
        for where, message, request_id in report.errors:
            self.report_failure(where, message, request_id)
        for key in report.not_captured:
            self._on_the_way.pop(key, None)
            self._drops.append(key)  # another rank may have it
        for key in report.captured:
            self._register(*key)
        for donor_id, generation in report.evicted:
            if self._held.get(donor_id) == generation:
                self.semblend.forget(donor_id, reason="engine")  # and `_evicted` tells the other ranks
        for request_id, loaded in report.loaded.items():
            if request_id in self._records:
                self._records[request_id].loaded = loaded
        for request_id in report.served:
            self._confirm(request_id)
        for tier, used in report.donor_bytes.items():
            self.semblend.metrics.donors(self.semblend.stats().donors, used, tier)

    def reset(self) -> bool:
        """Drop every donor."""
        self._on_the_way.clear()
        self.semblend.clear()
        return True

    def report_failure(self, where: str, message: str, request_id: str = "") -> None:
        """Something of ours failed; the request is computed cold or was already."""
        if self.semblend.events:
            self.semblend.events.emit(events.error(where, message, request_id or None, engine=ENGINE))

    def give_up(self, request_id: str) -> None:
        """A hook failed for this request: its claim and its record go, whatever it still has to do."""
        record = self._records.pop(request_id, None)
        if record is not None:
            self._release_blocks(record)
            if not record.admitted:
                self._unclaim(record)  # it will be computed cold, under its own hashes; later they must stay salted
        self.semblend.release(request_id)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _find_record(self, request: Any) -> Record | None:
        record = self._records.get(request.request_id)
        if record is None:
            if not request.prompt_token_ids:
                return None
            asked = read_options(request)
            prompt = Prompt(request.prompt_token_ids, namespace=build_namespace(request, self.facts.namespace))
            mode = asked.quality or self.settings.config.quality
            why = explain_decline(request, require_cache_salt=self.settings.require_cache_salt)
            record = self._records[request.request_id] = Record(request, prompt, mode, why)
        return record

    def _decide(self, record: Record) -> None:
        request = record.request
        why = self.facts.refusal or record.declined
        if record.restarted:
            why = "the request was preempted and goes on with the tokens it has said"
        if why:
            record.decision = Decline(DeclineReason.UNSUPPORTED_MODE, why)
            return
        started = time.perf_counter()
        decision = self.semblend.lookup(
            record.prompt,
            request_id=request.request_id,
            exact_tokens=record.local_tokens,
            opt_out=read_options(request).opt_out or record.mode == "exact",
        )
        declined = self._decline_not_worth_it(record, decision) if isinstance(decision, ReusePlan) else None
        record.decision = declined or decision
        record.lookup_ms = (time.perf_counter() - started) * 1e3

    def _decline_not_worth_it(self, record: Record, plan: ReusePlan) -> Decline | None:
        if why := self._explain_not_worth_it(record, plan):
            return Decline(DeclineReason.BELOW_BREAK_EVEN, why)
        if record.mode == "balanced" and not record.judged:
            record.judged = True
            record.in_vain = self.outcomes.decline_in_vain(plan, record.prompt.namespace)
        return record.in_vain

    def _explain_not_worth_it(self, record: Record, plan: ReusePlan) -> str | None:
        if not plan.until(self._find_claim_end(record, plan)).spans:
            return "the only token that donors hold is the last one, which the engine computes itself"
        if (why := explain_lost_donor(plan)) or record.mode != "balanced":
            return why
        quality = QualitySettings(seam_tokens=self.settings.config.seam_tokens)
        first = first_rows(plan.prompt_tokens, plan.exact_tokens, plan.spans, quality)
        return two_passes_cost_more(first, plan.spans, plan.prompt_tokens - plan.exact_tokens, quality)

    def _find_claim_end(self, record: Record, plan: ReusePlan) -> int:
        """Where the claim ends: vLLM always computes the last token itself.

        In mode balanced the gate has to see what the question does, so we compute what is behind the last span. In mode
        fast we do where it is short: a pass of ours runs in any case, and what is left to vLLM is as quick as decoding.
        """
        last, held = len(record.prompt) - 1, plan.spans[-1].target_end
        return last if record.mode == "balanced" or last - held <= SHORT_TAIL else held

    def _claim(self, record: Record, plan: ReusePlan) -> None:
        """Pin the donors, and lock the exact prefix cache before vLLM allocates."""
        request_id = record.request.request_id
        claimed = self.semblend.claim(plan, request_id)
        if isinstance(claimed, Decline):
            record.decision = claimed
            return
        missing = [span.donor_id for span in plan.spans if span.donor_id not in self._held]
        if missing:
            self.semblend.release(request_id)
            record.decision = Decline(DeclineReason.STALE, f"no worker holds the KV of {missing[0]}")
            return
        record.salted = salt(record.request, plan.spans[0].target_start // self.facts.hash_block_tokens)
        record.claim_end = self._find_claim_end(record, plan)

    def _find_first_block(self, record: Record) -> int:
        """Of the request's blocks, the first with approximate KV."""
        assert isinstance(record.decision, ReusePlan), "only a plan is claimed"
        return record.decision.spans[0].target_start // self.facts.block_tokens

    def _withdraw(self, record: Record, first_block: int) -> None:
        """The second lock; what it has seen of the request's blocks need not be looked at again."""
        if record.salted is None or self.block_pool is None or record.block_ids is None:
            return
        name = record.request.request_id
        try:
            withdraw(self.block_pool, self.cached_counts, name, first_block, record.block_ids)
        except Exception as error:  # the salted hashes still keep these blocks from being found
            self.report_failure("withdraw", f"{type(error).__name__}: {error}", name)
        record.withdrawn = len(record.block_ids)

    def _unclaim(self, record: Record) -> None:
        if record.salted is not None:
            restore(record.request, record.salted)
            record.salted = None
        if record.claimed:
            record.claim_end = 0
            self.semblend.release(record.request.request_id)

    def _release_blocks(self, record: Record) -> None:
        """vLLM gives its blocks to others, while a worker may still copy from them."""
        if record.captured:
            record.captured = False
            self._freed.append(record.request.request_id)

    def _start_over(self, request_id: str) -> None:
        """Preempted: its blocks are gone, it will be computed from its exact prefix on, under its own hashes."""
        record = self._records.get(request_id)
        if record is None:
            return
        self._unclaim(record)
        self._release_blocks(record)
        record.admitted, record.restarted, record.block_ids, record.seen_epoch = False, True, None, -1

    def _make_load(self, record: Record) -> Load:
        plan = record.decision
        assert isinstance(plan, ReusePlan), "only a plan is claimed"
        assert record.block_ids is not None, "vLLM admits before it schedules"
        plan_tokens = len(record.prompt) if record.mode == "balanced" else record.claim_end
        spans = tuple(
            replace(span, generation=self._held.get(span.donor_id, -1)) for span in plan.until(plan_tokens).spans
        )
        return Load(
            record.request.request_id,
            record.prompt.token_ids[:plan_tokens].astype(np.int32),
            tuple(record.block_ids),
            record.local_tokens,
            record.claim_end,
            spans,
            record.mode,
        )

    def _is_worth_keeping(self, record: Record) -> bool:
        """Only if enough of what is exact in it is new."""
        if record.restarted or self.facts.refusal or record.declined:
            return False
        if not self.settings.config.enabled or read_options(record.request).opt_out or record.block_ids is None:
            return False
        return self._find_exact_end(record) - record.local_tokens >= self.settings.donor_min_new_tokens

    def _find_exact_end(self, record: Record) -> int:
        """Exact KV ends where moved KV begins."""
        if record.claimed and isinstance(record.decision, ReusePlan):
            return record.decision.spans[0].target_start
        return len(record.prompt)

    def _make_capture(self, record: Record) -> Capture:
        self._captures += 1
        record.captured = True
        key, tokens, prompt = (record.request.request_id, self._captures), self._find_exact_end(record), record.prompt
        whole = tokens == len(prompt)
        self._on_the_way[key] = prompt if whole else Prompt(prompt.token_ids[:tokens], namespace=prompt.namespace)
        assert record.block_ids is not None, "checked by _worth_keeping"
        return Capture(*key, tokens, tuple(record.block_ids[: -(-tokens // self.facts.block_tokens)]))

    def _register(self, donor_id: str, generation: int) -> None:
        """Every rank holds its KV: only now can it be found."""
        prompt = self._on_the_way.pop((donor_id, generation), None)
        if prompt is None:  # reset meanwhile
            self._drops.append((donor_id, generation))
            return
        try:
            self.semblend.register(prompt, donor_id)
        except SemBlendError as error:
            self._drops.append((donor_id, generation))
            self.report_failure("capture", str(error), donor_id)
            return
        self._held[donor_id] = generation
        self._epoch += 1

    def _evicted(self, eviction: Eviction) -> None:
        generation = self._held.pop(eviction.donor.donor_id, None)
        self._epoch += 1
        if generation is not None:
            self._drops.append((eviction.donor.donor_id, generation))

    def _confirm(self, request_id: str) -> None:
        """The prompt's last step is done, so the first token is out: the receipt, once."""
        record = self._records.get(request_id)
        if record is None or record.receipt is not None:
            return
        arrival = getattr(record.request, "arrival_time", None)
        ttft_ms = None if arrival is None else max(0.0, (self._clock() - arrival) * 1e3)
        record.receipt = build_vllm_receipt(record, self._cut_to_orders(record), self.facts.version, ttft_ms)
        learn_from(record, self.outcomes)
        try:
            self.semblend.confirm(record.receipt)
        except SemBlendError as error:  # such as a request id that was used before: the answer goes on
            self.semblend.release(request_id)
            self.report_failure("confirm", str(error), request_id)
        if record.finished:
            self._forget(request_id)

    def _cut_to_orders(self, record: Record) -> ReusePlan | Decline | None:
        """What the worker was told to do, which in mode fast ends with the claim."""
        if not record.claimed or not isinstance(record.decision, ReusePlan):
            return record.decision
        return record.decision.until(len(record.prompt) if record.mode == "balanced" else record.claim_end)

    def _forget(self, request_id: str) -> None:
        record = self._records.pop(request_id, None)
        if record is not None and record.receipt is None:
            self.semblend.release(request_id)
