"""From a plan to KV in the pool and the logits of the prompt's last token, with the quality of this request measured.

    exact      nothing is taken from donors
    fast       donor KV is moved into place; gaps, the head of each span and the end of the prompt are computed
    balanced   fast, watching what the question attends to; then 10 % of the reused tokens, those it attends to most,
               are computed again, and what that changed tells how far the answer would be from a cold one. While it is
               more than the model's threshold: 20 %, 40 % (attention x deviation at layer 1), then a full prefill.
               A glance at layer 1 says before the first repair with which of these to begin

What a pass computes, and why that is enough. KV of a row depends on the tokens up to it. A pass writes new rows
(gaps, or tokens chosen for repair); of the rows that earlier passes computed, those behind the first new row have
attended to KV that is now different and are computed again, the question among them; those before it have not, and
stay. So after every pass each computed row is what the model computes over the KV that lies before it, and a prompt
with all its tokens chosen is a cold prefill. A full prefill starts at the first donor token: everything before it is
exact.

Nothing raises: a refusal or a failure is a `Decline`, and the caller computes the prompt from its exact prefix on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from semblend.config import QUALITY_MODES
from semblend.materialize.blend.blend_state import Refused, Work, runs_of
from semblend.materialize.blend.first_pass import two_passes_cost_more
from semblend.materialize.blend.quality import Blended, OnPass, Pass, QualitySettings, Step, Target
from semblend.materialize.blend.ranks import Agree, Ranks
from semblend.materialize.donors.donor_kv import DonorKv, DonorTensors
from semblend.materialize.gate.probe import (
    CANARY_TOLERANCE,
    QUESTION_ROWS,
    AttentionMass,
    Enough,
    KvDeviation,
    LaterMass,
    Model,
    Observer,
    RowsOf,
    bounded,
    canary,
    canary_positions,
    next_token_kl,
)
from semblend.materialize.gate.risk import RepairedDeviation, Signs, entropy
from semblend.materialize.kv.layout import KvLayout
from semblend.materialize.kv.splice import Move, splice
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan
from semblend.plan.selection import SELECTIONS, Positions, Scores, largest

log = logging.getLogger("semblend.materialize")
GLANCE_TOKENS = 256
"""The most attended donor tokens, whose deviation at layer 1 tells easy prompts from hard ones."""


class Blender:
    """Prepares prompts one at a time; ``rows_of`` builds what the model's ``forward`` takes.

    ``layout`` says where KV lies, for a pool that is not the embedded engine's. ``agree`` is for a model that several
    ranks compute together: each sees its own heads, and whatever decides what is computed next must be one number for
    all of them.
    """

    def __init__(
        self,
        model: Model,
        pool: Any,
        donor_kv: DonorKv,
        settings: QualitySettings | None = None,
        *,
        rows_of: RowsOf,
        layout: KvLayout | None = None,
        agree: Agree | None = None,
    ) -> None:
        self.model, self.pool, self.donor_kv = model, pool, donor_kv
        self.settings = QualitySettings() if settings is None else settings
        self._rows_of = rows_of
        self._layout = KvLayout.ours(pool.k, pool.v) if layout is None else layout
        self._ranks = Ranks(agree, pool.k.device)
        self._rows_per_ms = 0.0
        self._served = 0

    def prepare(
        self, sequence: Target, plan: ReusePlan, *, mode: str | None = None, on_pass: OnPass | None = None
    ) -> Blended | Decline:
        """Fills the slots of the whole prompt behind its exact prefix, or declines and leaves them undefined."""
        try:
            return self._prepare(sequence, plan, mode or self.settings.mode, on_pass)
        except Refused as refused:
            return refused.decline
        except Exception as error:  # the border of reuse: whatever fails in here costs time, never the request
            log.warning("reuse failed, the prompt is computed cold: %s", error, exc_info=True)
            return Decline(DeclineReason.ERROR, f"{type(error).__name__}: {error}".splitlines()[0])

    def _prepare(self, sequence: Target, plan: ReusePlan, mode: str, on_pass: OnPass | None) -> Blended:
        if mode not in QUALITY_MODES:
            raise Refused(DeclineReason.UNSUPPORTED_MODE, f"quality mode {mode!r} is unknown")
        prompt = Work.of(sequence, plan, self.pool.k.device, spans=() if mode == "exact" else plan.spans)
        prompt.on_pass = on_pass
        if not prompt.spans:
            self._prefill(prompt)
            return self._result(prompt, "exact")
        first = prompt.first_rows(self.settings)
        cold = len(prompt.tokens) - prompt.exact
        if mode == "balanced" and (why := two_passes_cost_more(first, prompt.spans, cold, self.settings)):
            raise Refused(DeclineReason.BELOW_BREAK_EVEN, why)
        watch = AttentionMass() if mode == "balanced" else None
        with self._loaded(prompt):
            self._compute(prompt, "fast", first, watch, checked=True)
        if watch is None:
            return self._result(prompt, "fast")
        prompt.mass = self._ranks.seen(watch.mass)
        return self._result(prompt, self._gate(prompt))

    @contextmanager
    def _loaded(self, prompt: Work) -> Iterator[None]:
        """Donor KV in the prompt's slots, as far as the device is concerned; donors are held until somebody waited."""
        with ExitStack() as held:
            problem: Exception | None = None
            try:
                moves = self._moves(prompt, held)
                splice(moves, self._layout, self.model.spec.rope, check_slots=False)
            except Exception as error:
                if not self._ranks.several:
                    raise
                problem = error  # raised when every rank has heard of it
            if self._ranks.several and self._ranks.number(float(problem is not None)):
                raise problem or Refused(DeclineReason.STALE, "another rank could not load its part of a donor")
            prompt.load_ms = prompt.elapsed_ms
            yield

    def _moves(self, prompt: Work, held: ExitStack) -> list[Move]:
        """The spans with their donors, which are held until ``held`` ends."""
        donors: dict[tuple[str, int], DonorTensors] = {}
        for span in prompt.spans:
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
                prompt.context[span.target_start : span.target_end],
                span.shift,
            )
            for span in prompt.spans
        ]

    def _canary(self, prompt: Work) -> Tensor:
        """On a sample: is this the KV that its tokens ask for? What a pass has overwritten is right in any case."""
        starts, ends = (
            torch.tensor([getattr(s, name) for s in prompt.spans]) for name in ("target_start", "target_end")
        )
        self._served += 1  # other tokens of each block with every request
        at = canary_positions(starts, ends, seed=self._served)
        return self._ranks.worst(canary(self.model, self.pool, self._rows(prompt, at)))

    def _checked_canary(self, found: Tensor) -> float:
        error = bounded(float(found))
        tolerance = self.settings.canary_tolerance
        tolerance = CANARY_TOLERANCE[self.pool.k.dtype] if tolerance is None else tolerance
        if error > tolerance:
            raise Refused(
                DeclineReason.VALIDATION_FAILED,
                f"layer-0 KV from donors is off by {error:.3g} of its size, at most {tolerance:g} is rounding",
            )
        return error

    def _gate(self, prompt: Work) -> str:
        """Repairs until the next-token distribution stands still, time is up, or all is computed."""
        settings = self.settings
        for number, step in enumerate(self._steps(prompt)):
            chosen = self._chosen(prompt, step)
            if not len(chosen):  # this step adds nothing to what is computed already
                continue
            rows = self._with_affected(prompt, chosen)
            if prompt.spent_rows(len(self.pool.k)) + len(rows) > settings.most_work * self._full_rows(prompt):
                break  # a prefill costs little more and leaves nothing to doubt
            if not self._affordable(prompt, len(rows)):
                if settings.over_budget == "accept":
                    return "over_budget"
                break
            prompt.escalations += number > 0
            watch = None if step is settings.steps[-1] else LaterMass()
            prompt.risk = self._repair(prompt, step, chosen, rows, watch)
            if prompt.risk <= settings.thresholds.after(step.percent):
                return "accepted"
            if watch is not None:
                prompt.mass = self._ranks.seen(watch.mass)
        if not len(prompt.stale):
            return "prefill"
        if settings.over_budget == "accept" and not self._affordable(prompt, self._full_rows(prompt)):
            return "over_budget"
        prompt.escalations += 1
        self._prefill(prompt)
        return "prefill"

    def _steps(self, prompt: Work) -> tuple[Step, ...]:
        """The steps that are worth their work, by how far off the donor KV is that the question attends to most."""
        if not self.settings.thresholds.glances or prompt.mass is None:
            return self.settings.steps
        stale = prompt.stale
        most = largest(stale, prompt.mass[stale], GLANCE_TOKENS)
        if not len(most):
            return ()
        look = KvDeviation(layer=1)
        self._forward(prompt, "glance", most, look, layers=1)
        deviation = float(np.average(self._ranks.seen(look.relative), weights=prompt.mass[most] + 1e-12))
        prompt.glance = deviation
        first = self.settings.thresholds.first_step(deviation)
        return () if first is None else tuple(step for step in self.settings.steps if step.percent >= first)

    def _repair(
        self, prompt: Work, step: Step, chosen: Positions, rows: Positions, watch: AttentionMass | None
    ) -> float:
        """Computes the rows; returns the divergence from cold that an answer is expected to have now."""
        mass, stale = prompt.mass, np.isin(rows, prompt.stale)
        look = RepairedDeviation(watch)
        prompt.repaired += len(chosen)
        settled = self._compute(prompt, f"repair {step.percent} %", rows, look)
        if prompt.tail is None or prompt.first_tail is None or mass is None:
            raise Refused(DeclineReason.ERROR, "a repair without a look before it")
        prompt.signs = Signs(
            next_token_kl(prompt.tail[-1], prompt.first_tail[-1]),
            settled,
            self._ranks.number(look.of(stale, mass[rows[stale]])),
            entropy(prompt.tail[-1]),
        )
        return self._ranks.number(self.settings.thresholds.expected(step.percent, prompt.signs))

    def _chosen(self, prompt: Work, step: Step) -> Positions:
        """The next tokens to repair, so that steps have chosen ``percent`` of the reused in all."""
        stale = prompt.stale
        count = min(len(stale), round(step.percent / 100 * len(prompt.reused)) - prompt.repaired)
        if count <= 0 or prompt.mass is None:
            return stale[:0]
        if step.rule in ("attended_and_deviating", "cacheblend") and prompt.deviation is None:
            prompt.deviation = self._deviation(prompt, squared=step.rule == "cacheblend")
        nothing = np.zeros(len(stale))
        deviation = nothing if prompt.deviation is None else prompt.deviation[stale]
        scores = Scores(stale, prompt.mass[stale], deviation, prompt.spans, self._served, count / len(stale))
        return SELECTIONS[step.rule](scores)

    def _deviation(self, prompt: Work, *, squared: bool) -> npt.NDArray[np.floating[Any]]:
        """Deviation above the first layers of all tokens that still are a donor's; zero elsewhere."""
        depth = min(self.settings.first_layers, len(self.pool.k) - 1)
        look = KvDeviation(layer=depth)
        self._forward(prompt, "deviation", prompt.stale, look, layers=depth)
        found = np.zeros(len(prompt.tokens))
        found[prompt.stale] = self._ranks.seen(look.squared if squared else look.relative)
        return found

    def _with_affected(self, prompt: Work, chosen: Positions) -> Positions:
        """``chosen``, and the computed rows behind its first: they attended to what now changes."""
        behind = prompt.computed.copy()
        if self.settings.refresh:
            behind[: chosen[0]] = False
        else:
            behind[: int(np.flatnonzero(~behind)[-1]) + 1] = False  # the last run only: the question
        return np.union1d(chosen, np.flatnonzero(behind))

    def _prefill(self, prompt: Work) -> None:
        """Computes everything from the first donor token on."""
        rows = np.arange(len(prompt.tokens) - self._full_rows(prompt), len(prompt.tokens))
        self._compute(prompt, "prefill", rows, None)

    def _full_rows(self, prompt: Work) -> int:
        # What lies before the first donor token attended to nothing of a donor, once the first pass has computed it.
        first = int(prompt.reused[0]) if len(prompt.reused) and prompt.passes else prompt.exact
        return len(prompt.tokens) - first

    def _compute(
        self, prompt: Work, name: str, rows: Positions, watch: Observer | None, *, checked: bool = False
    ) -> float:
        """Runs the rows through the model; returns how far the next-token distribution moved, in nats.

        ``checked``: the canary looks at the donor KV. It is queued behind the pass, so that a GPU is not kept idle.
        """
        begun = time.perf_counter()
        hidden = self._forward(prompt, name, rows, watch, layers=int(self.pool.k.shape[0]))
        if hidden is None:
            raise Refused(DeclineReason.ERROR, f"the pass {name!r} ended early")
        before, prompt.tail = prompt.tail, self.model.logits(hidden)
        found = self._canary(prompt) if checked else None
        finite = bool(prompt.tail.isfinite().all())  # waits for the device: the clock must not stop before
        ms = (time.perf_counter() - begun) * 1e3
        # Small passes are slower a row than large ones: the best rate seen foretells a large one.
        self._rows_per_ms = max(self._rows_per_ms * 0.98, len(rows) / max(ms, 1e-6))
        if found is not None:
            prompt.canary = self._checked_canary(found)
        if not finite:
            # NaN reaches rows before it too (0 x NaN behind a mask), so no further pass of ours can mend it.
            raise Refused(DeclineReason.VALIDATION_FAILED, f"logits after the pass {name!r} are not numbers")
        moved = 0.0 if before is None else next_token_kl(prompt.tail[-1], before[-1])
        prompt.computed[rows] = True
        prompt.first_tail = prompt.tail if before is None else prompt.first_tail
        prompt.passes[-1] = replace(prompt.passes[-1], ms=ms, kl=None if before is None else moved)
        if prompt.on_pass is not None:
            prompt.on_pass(prompt.passes[-1], prompt.tail)
        return moved

    def _forward(self, prompt: Work, name: str, rows: Positions, watch: Observer | None, layers: int) -> Tensor | None:
        """In chunks, ascending, so that each sees what the one before wrote; the question stays in one chunk.

        Gives the hidden states of the prompt's last tokens, None where ``watch`` has seen enough. Nobody waits.
        """
        begun, hidden = time.perf_counter(), None
        for start in range(0, max(1, len(rows) - QUESTION_ROWS), self.settings.chunk_tokens):
            end = start + self.settings.chunk_tokens
            end = len(rows) if end + QUESTION_ROWS >= len(rows) else end
            part = self._rows(prompt, torch.from_numpy(rows[start:end]))
            try:
                hidden = self.model.forward(part, self.pool, watch)
            except Enough:
                hidden = None
        if hidden is not None:
            hidden = hidden[-self._tail_rows(prompt) :].clone()
        ms = (time.perf_counter() - begun) * 1e3
        prompt.passes.append(Pass(name, len(rows), int((rows + 1).sum()), layers, ms))
        return hidden

    def _rows(self, prompt: Work, at: Tensor) -> Any:
        """Rows at these positions. They come from the host, so that asking where they are is no wait for a GPU.

        Taken by numpy: torch would wake all its threads for a few thousand tokens, which takes milliseconds.
        """
        return self._rows_of(torch.from_numpy(prompt.tokens.numpy()[at.numpy()]), at, prompt.context)

    def _tail_rows(self, prompt: Work) -> int:
        """Rows at the end that every pass computes: their next-token distributions can be compared."""
        return max(1, min(self.settings.question_tokens, len(prompt.tokens) - prompt.exact))

    def _affordable(self, prompt: Work, rows: int) -> bool:
        budget = self.settings.latency_budget_ms
        if not budget:
            return True
        return self._ranks.number(prompt.elapsed_ms + rows / max(self._rows_per_ms, 1e-9)) <= budget

    def _exact_until(self, prompt: Work) -> int:
        if not len(prompt.reused) or prompt.passes[-1].name == "prefill":
            return len(prompt.tokens)
        doubtful = prompt.stale if self.settings.refresh else prompt.reused
        return int(doubtful[0]) if len(doubtful) else len(prompt.tokens)

    def _result(self, prompt: Work, decision: str) -> Blended:
        if prompt.tail is None:
            raise Refused(DeclineReason.ERROR, "nothing was computed")
        stale = prompt.stale
        return Blended(
            logits_last=prompt.tail[-1],
            exact_tokens=prompt.exact,
            reused_tokens=len(stale),
            recomputed_tokens=len(prompt.reused) - len(stale),
            prefill_tokens=len(prompt.tokens) - prompt.exact - len(prompt.reused),
            exact_until=self._exact_until(prompt),
            decision=decision,
            risk=prompt.risk,
            signs=prompt.signs,
            glance=prompt.glance,
            escalations=prompt.escalations,
            canary=prompt.canary,
            load_ms=prompt.load_ms,
            compute_ms=sum(one.ms for one in prompt.passes),
            passes=tuple(prompt.passes),
            recomputed_runs=runs_of(prompt.reused[prompt.computed[prompt.reused]]),
        )
