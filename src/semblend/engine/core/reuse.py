"""The semantic half of the engine: what happens to a request besides computing it.

Before prefill: look for donors, claim the plan, let the blender put their KV in place. After the first token: the
receipt. Then, if everything the prompt holds was computed exactly: keep it as a donor. Nothing in here raises: what
fails is told as an event, and the request is computed as if there were no donors.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from semblend._version import __version__
from semblend.confirm import events
from semblend.confirm.build_receipt import RequestFacts, build_receipt
from semblend.confirm.receipt import Receipt
from semblend.engine.core.config import PATIENCE, EngineConfig
from semblend.engine.core.directory_donors import DirectoryDonors
from semblend.engine.core.sequence import EXACT_TO_THE_END, Sequence
from semblend.engine.model.paged_kv import KvPool
from semblend.facade import SemBlend
from semblend.materialize.blend.quality import Blended, Pace, Pieces, Rejected, Spliced
from semblend.materialize.contract import Layout
from semblend.materialize.gate.gate import OutcomeMemory
from semblend.plan.donor_cost import explain_lost_donor
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan
from semblend.prompt import Prompt
from semblend.quality import GATED_MODE, choose_quality, find_path
from semblend.wire.request import Request

ENGINE_NAME = "semblend"
log = logging.getLogger("semblend.engine")


class Donors(Protocol):
    """Where donor KV is kept; see `semblend.materialize.donors.tiers`."""

    def capture(self, donor_id: str, generation: int, layout: Layout, slots: Tensor, *, tenant: str) -> object: ...
    def holds(self, donor_id: str, generation: int) -> bool: ...
    def drop(self, donor_id: str) -> bool: ...
    def close(self) -> None: ...
    @property
    def used_bytes(self) -> Mapping[str, int]: ...


class PromptFiller(Protocol):
    """Fills a prompt's KV from donors; see `semblend.materialize.blend.blender`."""

    @property
    def donor_kv(self) -> Donors | None: ...
    def prepare_in_pieces(
        self, sequence: Any, plan: ReusePlan, *, mode: str | None = None
    ) -> Pieces[Blended | Rejected | Decline]: ...
    def place(self, sequence: Any, plan: ReusePlan) -> Spliced | Decline: ...


class NoBlender:
    """Stands in where there is no semantic reuse: every plan is declined, every request computed, no donor kept."""

    donor_kv: Donors | None = None

    def prepare_in_pieces(
        self, sequence: Any, plan: ReusePlan, *, mode: str | None = None
    ) -> Pieces[Blended | Rejected | Decline]:
        del sequence, plan
        yield from ()
        return Decline(DeclineReason.UNSUPPORTED_MODE, f"no blender is there for mode {mode}")

    def place(self, sequence: Any, plan: ReusePlan) -> Spliced | Decline:
        del sequence, plan
        return Decline(DeclineReason.UNSUPPORTED_MODE, "no blender is there")


class Reuse:
    """Fill, confirm, capture: one verb each, called by the engine in this order for every request."""

    def __init__(
        self,
        semblend: SemBlend | None,
        blender: PromptFiller,
        pool: KvPool,
        config: EngineConfig,
        outcomes: OutcomeMemory | None = None,
        pace: Pace | None = None,
    ) -> None:
        """``pace`` is that of the blender's pieces."""
        self.semblend = semblend
        self.outcomes = OutcomeMemory() if outcomes is None else outcomes
        self.directory: DirectoryDonors | None = None  # where donors are shared with other engines
        self._blender = blender
        self._pool = pool
        self._config = config
        self._pace = Pace() if pace is None else pace

    @property
    def donor_kv(self) -> Donors | None:
        return self._blender.donor_kv

    def close(self) -> None:
        """Remove donor KV from disk, and close the store of donors."""
        for part in (self.directory, self.donor_kv, self.semblend):
            if part is not None:
                part.close()

    def find_mode(self, request: Request) -> str:
        """The quality of a request: its own, its tenant's, or the engine's."""
        tenant = request.prompt.namespace.tenant
        tenants = None if self.semblend is None else self.semblend.config.find_tenant_quality(tenant)
        return choose_quality(request.quality, tenants, self._config.quality)

    def is_gated(self, request: Request) -> bool:
        """Whether the gate decides about a request's donor KV."""
        return find_path(self.find_mode(request)) == GATED_MODE

    def may_fill(self, request: Request) -> bool:
        """Whether donors are looked for at all; looks at the settings only."""
        return self.semblend is not None and self.find_mode(request) != "exact"

    def fill(self, sequence: Sequence, work_ms: float | None = None, is_awaited: Callable[[], bool] = bool) -> bool:
        """Put donor KV in place for a sequence that has its blocks; False where the engine has to compute, all or some.

        It works for about ``work_ms``, or until ``is_awaited``; where it is not done then, the sequence stays
        ``to_fill`` and the next call goes on. What is done is tried once: a sequence that is preempted later is
        computed, and goes on with the tokens it has said.
        """
        sequence.to_fill = False
        if self.semblend is None:
            return False
        try:
            if sequence.filling is not None:
                return self._go_on(sequence, work_ms, is_awaited)
            if sequence.decision is None:  # else it was preempted while it was filled
                sequence.decision = self._plan(self.semblend, sequence)
            if isinstance(sequence.decision, ReusePlan):
                takes_spans = not self.semblend.config.strict_prefix_boundary
                if takes_spans and not self.is_gated(sequence.request):  # the gate needs passes of its own
                    return self._splice(sequence, sequence.decision)
                return self._blend(sequence, sequence.decision, work_ms, is_awaited)
        except Exception as error:  # a failure of ours costs the request time, never its answer
            self._report_failure("materialize", sequence, error)
            self._start_over(sequence)
            sequence.declined = Decline(DeclineReason.ERROR, f"{type(error).__name__}: {error}")
        return False

    def compute_instead(self, sequence: Sequence) -> bool:
        """Compute a sequence cold whose first logits over donor KV are not numbers; False where donors have no part."""
        if sequence.held is None or sequence.receipt is not None:
            return False
        sequence.declined = Decline(DeclineReason.VALIDATION_FAILED, "logits over donor KV are not numbers")
        self._start_over(sequence)
        return True

    def read_first_logits(self, sequence: Sequence) -> Tensor:
        """What the blender computed after the prompt's last token, [1, vocab]."""
        assert sequence.blended is not None, "only a filled sequence has logits before it ran"
        return sequence.blended.logits_last.reshape(1, -1)

    def confirm(self, sequence: Sequence) -> Receipt:
        """The receipt, at the moment of the first token; only it counts as reuse."""
        sequence.times.ttft_ms = (time.perf_counter() - sequence.times.submitted) * 1e3
        receipt = sequence.receipt = self._build_receipt(sequence)
        if isinstance(sequence.decision, ReusePlan) and find_path(receipt.mode) == GATED_MODE:
            work = sequence.blended.work if sequence.blended is not None else 0.0
            self.outcomes.learn(sequence.decision, sequence.namespace, receipt.mode, work=work, declined=receipt.reason)
        if self.semblend is not None:
            try:
                self.semblend.confirm(receipt)
            except Exception as error:  # as with a request id that was used before: the answer goes on
                self._report_failure("confirm", sequence, error)
        return receipt

    def list_recomputed(self, sequence: Sequence) -> tuple[tuple[int, int], ...]:
        """Runs of the prompt that a donor held and that were computed again; empty where the blender does not tell."""
        work = sequence.blended or sequence.spliced
        return work.recomputed_runs if work else ()

    def capture(self, sequence: Sequence) -> None:
        """Keep the prompt's KV as a donor, as far as it is exact, if enough of that is new.

        A prompt that was preempted and computed again may be exact further than before; it takes its donor's place.
        """
        donors = self.donor_kv
        if self.semblend is None or donors is None or not self._config.keep_donors:
            return
        tokens = self._count_donor_tokens(sequence)
        new = tokens - max(sequence.exact_tokens, sequence.kept_tokens)
        if sequence.request.opt_out or new < self._config.donor_min_new_tokens:
            return
        donor_id, prompt = sequence.request_id, sequence.prompt
        if self.directory is not None and not self.directory.may_keep(donor_id):
            return
        if tokens < sequence.prompt_tokens:
            prompt = Prompt(prompt.token_ids[:tokens], namespace=prompt.namespace)
        try:
            donor = self.semblend.register(prompt, donor_id)
            try:
                slots = sequence.slots_in(self._pool)[:tokens]
                donors.capture(donor_id, donor.generation, self._pool.layout, slots, tenant=prompt.namespace.tenant)
            except Exception:
                self.semblend.forget(donor_id, reason="engine")  # a donor without KV must not be found
                raise
            sequence.kept_tokens = tokens
            if self.directory is not None:
                self.directory.publish(donor_id, donor.generation, prompt)
            for tier, used in donors.used_bytes.items():
                self.semblend.metrics.donors(self.semblend.stats().donors, used, tier)
        except Exception as error:  # a donor less; the answer goes on
            self._report_failure("capture", sequence, error)

    def _count_donor_tokens(self, sequence: Sequence) -> int:
        """How much of a prompt is exact and in no donor yet: the computed head of the first span is in its donor."""
        if sequence.exact_until >= sequence.prompt_tokens or not isinstance(sequence.decision, ReusePlan):
            return min(sequence.exact_until, sequence.prompt_tokens)
        return min(sequence.exact_until, sequence.decision.spans[0].target_start)

    def forget_donors(self) -> int:
        """Drop every donor and its KV; returns how many went."""
        if self.semblend is None:
            return 0
        if self.donor_kv is not None:
            for donor in self.semblend.donors():
                self.donor_kv.drop(donor.donor_id)
        if self.directory is not None:
            return self.directory.forget_all(self.semblend.clear)
        return self.semblend.clear()

    def release(self, sequence: Sequence) -> None:
        """A sequence ended; let go of its claim if no receipt did."""
        sequence.blended = None
        if self.semblend is not None and sequence.receipt is None and isinstance(sequence.decision, ReusePlan):
            self.semblend.release(sequence.request_id)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _plan(self, semblend: SemBlend, sequence: Sequence) -> ReusePlan | Decline:
        started = time.perf_counter()
        if self.directory is not None:
            self.directory.look_around()
        decision = semblend.lookup(
            sequence.prompt,
            request_id=sequence.request_id,
            exact_tokens=sequence.exact_tokens,
            opt_out=sequence.request.opt_out,
        )
        if isinstance(decision, ReusePlan):
            declined = self._decline_not_worth_it(sequence, decision)
            decision = declined or semblend.claim(decision, sequence.request_id)
        if self.directory is not None and isinstance(decision, ReusePlan):
            decision = self.directory.name_generations(decision)
        sequence.times.lookup_ms = (time.perf_counter() - started) * 1e3
        return decision

    def _decline_not_worth_it(self, sequence: Sequence, plan: ReusePlan) -> Decline | None:
        """Decline a plan that costs more than it saves, before anything is claimed or computed."""
        why = explain_lost_donor(plan) if self._config.keep_donors else None
        if why is not None:
            return Decline(DeclineReason.BELOW_BREAK_EVEN, why)
        if not self.is_gated(sequence.request):
            return None
        return self.outcomes.decline_in_vain(plan, sequence.namespace, self.find_mode(sequence.request))

    def _splice(self, sequence: Sequence, plan: ReusePlan) -> bool:
        """Put donor KV in place and leave the rest to the scheduler: strict_prefix_boundary is off."""
        sequence.exact_until = plan.spans[0].target_start
        sequence.slots_in(self._pool)
        spliced = self._blender.place(sequence, plan)
        if isinstance(spliced, Decline):
            return self._compute_declined(sequence, plan, spliced)
        sequence.spliced, sequence.held = spliced, spliced.held
        sequence.exact_until = int(spliced.held[0])
        return False

    def _compute_declined(self, sequence: Sequence, plan: ReusePlan, declined: Decline) -> bool:
        sequence.declined = declined
        self._start_over(sequence)
        if declined.reason is DeclineReason.STALE:
            self._forget_lost(plan)
        return False

    def _blend(
        self, sequence: Sequence, plan: ReusePlan, work_ms: float | None, is_awaited: Callable[[], bool]
    ) -> bool:
        # Before the blender writes anything: whatever happens from here on, these positions are no longer exact.
        sequence.exact_until = plan.spans[0].target_start
        sequence.slots_in(self._pool)
        sequence.filling = self._blender.prepare_in_pieces(sequence, plan, mode=self.find_mode(sequence.request))
        return self._go_on(sequence, work_ms, is_awaited)

    def _go_on(self, sequence: Sequence, work_ms: float | None, is_awaited: Callable[[], bool]) -> bool:
        """Let the blender work for about ``work_ms``, or until it is done or somebody else waits."""
        assert sequence.filling is not None
        assert isinstance(sequence.decision, ReusePlan)
        allowed, started = work_ms or PATIENCE * self._config.step_work_ms, time.perf_counter()
        self._pace.piece_ms = allowed
        while True:
            try:
                next(sequence.filling)
            except StopIteration as done:
                blended: Blended | Rejected | Decline = done.value
                break
            spent = (time.perf_counter() - started) * 1e3
            if spent > allowed / 2 if work_ms is not None else is_awaited():
                sequence.to_fill = True
                return False
            self._pace.piece_ms = allowed - spent if work_ms is not None else allowed
        sequence.filling = None
        assert not isinstance(blended, Rejected), "this engine's blender prefills"
        if isinstance(blended, Decline):
            return self._compute_declined(sequence, sequence.decision, blended)
        sequence.blended = blended
        sequence.computed = sequence.prompt_tokens
        # Where everything was computed in the end, this is a cold prefill, and the answer behind it is exact too.
        whole = blended.exact_until >= sequence.prompt_tokens
        sequence.exact_until = EXACT_TO_THE_END if whole else blended.exact_until
        return True

    def _forget_lost(self, plan: ReusePlan) -> None:
        """Donors that the library knows, but whose KV is not here: as after a restart with a store file."""
        donors = self.donor_kv
        if self.semblend is None or donors is None:
            return
        for donor_id, generation in dict.fromkeys((span.donor_id, span.generation) for span in plan.spans):
            if not donors.holds(donor_id, generation):
                self.semblend.forget(donor_id, reason="engine")

    def _start_over(self, sequence: Sequence) -> None:
        """Compute everything behind the exact prefix, over whatever a blender left there: that is exact again."""
        sequence.blended = sequence.spliced = sequence.held = None
        sequence.stop_filling()
        sequence.computed = sequence.exact_tokens
        sequence.exact_until = EXACT_TO_THE_END

    def _build_receipt(self, sequence: Sequence) -> Receipt:
        times = sequence.times
        facts = RequestFacts(
            request_id=sequence.request_id,
            engine=ENGINE_NAME,
            engine_version=__version__,
            namespace=sequence.namespace,
            mode=self.find_mode(sequence.request),
            prompt_tokens=sequence.prompt_tokens,
            exact_tokens=sequence.exact_tokens,
            decision=sequence.decision,
            lookup_ms=times.lookup_ms,
            compute_ms=times.compute_ms,
            ttft_ms=times.ttft_ms,
        )
        blended, declined = sequence.blended, sequence.declined
        if blended is not None and not blended.reused_tokens:
            detail = f"all {blended.recomputed_tokens} donor tokens were computed after all"
            declined = Decline(DeclineReason.QUALITY_RISK, detail)
        spliced = sequence.spliced and replace(sequence.spliced, compute_ms=times.compute_ms)
        return build_receipt(facts, blended or spliced, declined)

    def _report_failure(self, where: str, sequence: Sequence, error: BaseException) -> None:
        log.warning("%s failed for request %s: %s: %s", where, sequence.request_id, type(error).__name__, error)
        if self.semblend is not None and self.semblend.events:
            message = f"{type(error).__name__}: {error}"
            self.semblend.events.emit(events.error(where, message, sequence.request_id, engine=ENGINE_NAME))
