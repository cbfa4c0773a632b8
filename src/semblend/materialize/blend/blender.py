"""From a plan to KV in the engine's cache and the logits of the prompt's last token, with the quality measured.

    exact      nothing is taken from donors
    fast       donor KV is moved into place; gaps, the head of each span and the end of the prompt are computed
    balanced   fast, watching what the question attends to; then reused tokens are computed again until the answer is
               expected to be close to a cold one (`repair`), or the prompt is prefilled in full

`begin` queues mode fast on the device and `PendingBlend.finish` reads the verdict: an engine may queue its own work in
between, if it can throw that away when the donor KV turns out to be wrong. `prepare` does both, for every mode.
`place` only moves donor KV and checks it: the engine computes the rest with its own scheduler.

Nothing raises: a refusal or a failure is a `Decline`, and the caller computes the prompt from its exact prefix on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from semblend.config import QUALITY_MODES
from semblend.materialize.blend.blend_state import BlendState, Refused
from semblend.materialize.blend.first_pass import two_passes_cost_more
from semblend.materialize.blend.passes import PassRunner, PendingPass
from semblend.materialize.blend.quality import Blended, OnPass, QualitySettings, Spliced, Target
from semblend.materialize.blend.ranks import Ranks
from semblend.materialize.blend.repair import Repair
from semblend.materialize.contract import Model, find_runs
from semblend.materialize.donors.donor_kv import DonorKv
from semblend.materialize.gate.observers import AttentionMass
from semblend.materialize.kv.moves import DonorTensors, Move
from semblend.materialize.kv.splice import splice
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan

log = logging.getLogger("semblend.materialize")
Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class PendingBlend:
    """A prompt whose KV is being prepared; its donors are held until `finish`, which must be called once."""

    blender: Blender
    state: BlendState
    pending: PendingPass
    donors: ExitStack

    def finish(self) -> Blended | Decline:
        """Waits for our part of the work, not for what was queued behind it."""
        return self.blender.finish(self)


class Blender:
    """Prepares prompts one at a time in the cache of a model, from the KV that ``donor_kv`` keeps."""

    def __init__(self, model: Model, donor_kv: DonorKv, settings: QualitySettings | None = None) -> None:
        self.model, self.donor_kv = model, donor_kv
        self.settings = QualitySettings() if settings is None else settings
        self._ranks = Ranks(model)
        self._passes = PassRunner(model, self.settings, self._ranks)
        self._repair = Repair(self._passes)

    def prepare(
        self, target: Target, plan: ReusePlan, *, mode: str | None = None, on_pass: OnPass | None = None
    ) -> Blended | Decline:
        """Fills the slots of the whole prompt behind its exact prefix, or declines and leaves them undefined."""
        asked = mode or self.settings.mode
        if asked == "fast" and plan.spans:
            begun = self.begin(target, plan, on_pass=on_pass)
            return begun.finish() if isinstance(begun, PendingBlend) else begun
        return _decline_failures(lambda: self._prepare(target, plan, asked, on_pass))

    def begin(self, target: Target, plan: ReusePlan, *, on_pass: OnPass | None = None) -> PendingBlend | Decline:
        """Queues mode fast; a refusal that is known before anything is queued is a `Decline`, as from `prepare`."""
        return _decline_failures(lambda: self._begin(target, plan, on_pass))

    def finish(self, begun: PendingBlend) -> Blended | Decline:
        """The verdict over a prompt that was begun; releases its donors."""
        with begun.donors:
            return _decline_failures(lambda: self._read_verdict(begun))

    def place(self, target: Target, plan: ReusePlan) -> Spliced | Decline:
        """Moves donor KV into place and checks it, computing nothing: for an engine that computes the gaps itself."""
        return _decline_failures(lambda: self._place(target, plan))

    def _place(self, target: Target, plan: ReusePlan) -> Spliced:
        if not self.model.capabilities.native_spans:
            raise Refused(DeclineReason.UNSUPPORTED_MODE, "this engine takes one prefix-shaped range, not spans")
        self._require_observers("fast")
        state = BlendState.of(target, plan, self.model.device, spans=plan.spans)
        with self._load(state):
            canary = self._passes.check_donor_kv(state)
        state.computed[state.first_rows(self.settings)] = True
        held = state.stale
        if not len(held):
            raise Refused(
                DeclineReason.BELOW_BREAK_EVEN, "heads of spans and the prompt's end are all that donors hold"
            )
        return Spliced(
            held,
            exact_tokens=state.exact,
            reused_tokens=len(held),
            recomputed_tokens=len(state.reused) - len(held),
            prefill_tokens=len(state.tokens) - state.exact - len(state.reused),
            recomputed_runs=find_runs(state.reused[state.computed[state.reused]]),
            canary=canary,
            load_ms=state.load_ms,
        )

    def _begin(self, target: Target, plan: ReusePlan, on_pass: OnPass | None) -> PendingBlend:
        self._require_observers("fast")
        state = BlendState.of(target, plan, self.model.device, spans=plan.spans)
        state.on_pass = on_pass
        rows = state.first_rows(self.settings)
        with ExitStack() as donors:
            donors.enter_context(self._load(state))
            pending = self._passes.queue(state, "fast", rows, None, check=True)
            return PendingBlend(self, state, pending, donors.pop_all())

    def _read_verdict(self, begun: PendingBlend) -> Blended:
        self._passes.finish(begun.state, begun.pending)
        return self._make_result(begun.state, "fast")

    def _prepare(self, target: Target, plan: ReusePlan, mode: str, on_pass: OnPass | None) -> Blended:
        """Modes exact and balanced, and plans without spans."""
        if mode not in QUALITY_MODES:
            raise Refused(DeclineReason.UNSUPPORTED_MODE, f"quality mode {mode!r} is unknown")
        state = BlendState.of(target, plan, self.model.device, spans=() if mode == "exact" else plan.spans)
        state.on_pass = on_pass
        if not state.spans:
            self._passes.prefill(state)
            return self._make_result(state, "exact")
        self._require_observers(mode)
        first = state.first_rows(self.settings)
        if why := two_passes_cost_more(first, state.spans, len(state.tokens) - state.exact, self.settings):
            raise Refused(DeclineReason.BELOW_BREAK_EVEN, why)
        watch = AttentionMass()
        with self._load(state):
            self._passes.compute(state, "fast", first, watch, check=True)
        state.mass = self._ranks.read(watch.mass)
        return self._make_result(state, self._repair.repair(state))

    def _require_observers(self, mode: str) -> None:
        if not self.model.capabilities.observers:
            raise Refused(
                DeclineReason.UNSUPPORTED_MODE, f"mode {mode} checks donor KV, and this engine lets nobody look on"
            )

    @contextmanager
    def _load(self, state: BlendState) -> Iterator[None]:
        """Queues donor KV into the prompt's slots; donors are held until the body has waited for the device."""
        with ExitStack() as held:
            problem: Exception | None = None
            try:
                splice(self._find_moves(state, held), self.model.layout, self.model.rope, check_slots=False)
            except Exception as error:
                if not self._ranks.several:
                    raise
                problem = error  # raised when every rank has heard of it
            if self._ranks.several and self._ranks.mean(float(problem is not None)):
                raise problem or Refused(DeclineReason.STALE, "another rank could not load its part of a donor")
            state.load_ms = state.elapsed_ms
            yield

    def _find_moves(self, state: BlendState, held: ExitStack) -> list[Move]:
        """The spans with their donors, which are held until ``held`` ends."""
        donors: dict[tuple[str, int], DonorTensors] = {}
        for span in state.spans:
            key = (span.donor_id, span.generation)
            if key in donors:
                continue
            tensors = self.donor_kv.acquire(*key)
            if tensors is None:
                raise Refused(DeclineReason.STALE, f"donor {span.donor_id!r} generation {span.generation} is gone")
            held.callback(self.donor_kv.release, tensors)
            donors[key] = tensors
        return [
            Move(
                donors[span.donor_id, span.generation],
                span.donor_start,
                span.length,
                state.context[span.target_start : span.target_end],
                span.shift,
            )
            for span in state.spans
        ]

    def _find_exact_end(self, state: BlendState) -> int:
        if not len(state.reused) or state.passes[-1].name == "prefill":
            return len(state.tokens)
        doubtful = state.stale if self.settings.refresh else state.reused
        return int(doubtful[0]) if len(doubtful) else len(state.tokens)

    def _make_result(self, state: BlendState, decision: str) -> Blended:
        if state.tail is None:
            raise Refused(DeclineReason.ERROR, "nothing was computed")
        stale = state.stale
        return Blended(
            logits_last=state.tail[-1],
            exact_tokens=state.exact,
            reused_tokens=len(stale),
            recomputed_tokens=len(state.reused) - len(stale),
            prefill_tokens=len(state.tokens) - state.exact - len(state.reused),
            exact_until=self._find_exact_end(state),
            decision=decision,
            risk=state.risk,
            features=state.features,
            glance=state.glance,
            escalations=state.escalations,
            canary=state.canary,
            load_ms=state.load_ms,
            compute_ms=sum(one.ms for one in state.passes),
            passes=tuple(state.passes),
            recomputed_runs=find_runs(state.reused[state.computed[state.reused]]),
            work=state.count_work(self.model.layout.layers, self.settings.pass_rows),
        )


def _decline_failures(work: Callable[[], Result]) -> Result | Decline:
    """What ``work`` returns, or a decline: the border of reuse, where a failure costs time and never the request."""
    try:
        return work()
    except Refused as refused:
        return refused.decline
    except Exception as error:
        log.warning("reuse failed, the prompt is computed cold: %s", error, exc_info=True)
        return Decline(DeclineReason.ERROR, f"{type(error).__name__}: {error}".splitlines()[0])
