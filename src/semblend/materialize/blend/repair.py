"""Repairs of mode balanced: compute more of the reused tokens again until the answer is expected to be close to cold.

A glance at layer 1 says with which step to begin. Each step computes the tokens that the question attends to most (and,
from 20 % on, that deviate most), and what this changed tells how far the answer would be from a cold one. While that is
more than the gate allows (`semblend.materialize.gate.gate`) the next step follows, then a full prefill. Where the dial
expects little enough after the glance, no step is needed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from semblend.materialize.blend.blend_state import BlendState, Refused
from semblend.materialize.blend.passes import PassRunner
from semblend.materialize.blend.pieces import Pieces
from semblend.materialize.blend.quality import Step
from semblend.materialize.gate.observers import AttentionMass, KvDeviation, LateAttentionMass, RepairedDeviation
from semblend.materialize.gate.risk import RiskFeatures, compute_entropy, next_token_kl
from semblend.plan.layers import LayerSchedule
from semblend.plan.reuse_plan import DeclineReason
from semblend.plan.selection import SELECTIONS, Positions, Scores, select_largest

PROBE_TOKENS = 256
"""The most attended donor tokens, whose deviation at layer 1 tells easy prompts from hard ones."""


class Repair:
    """Repairs prompts by the passes of a `PassRunner`."""

    def __init__(self, passes: PassRunner) -> None:
        self._passes, self._settings, self._ranks = passes, passes.settings, passes.ranks

    def repair(self, state: BlendState) -> Pieces[str]:
        """Repairs until the next-token distribution stands still, time is up, or all is computed; returns which.

        "rejected" where only a full prefill is left to do, and the engine does that itself.
        """
        settings, passes = self._settings, self._passes
        steps = yield from self._choose_steps(state)
        if steps is None:
            return "accepted"
        for number, step in enumerate(steps):
            chosen = yield from self._choose_tokens(state, step)
            if not len(chosen):  # this step adds nothing to what is computed already
                continue
            rows = self._add_affected(state, chosen)
            spent = state.spent_rows(passes.model.layout.layers)
            if spent + len(rows) > settings.most_work * passes.prefill_rows(state):
                break  # a prefill costs little more and leaves nothing to doubt
            if not passes.is_affordable(state, len(rows)):
                if settings.over_budget == "accept":
                    return "over_budget"
                break
            state.escalations += number > 0
            watch = None if step is settings.steps[-1] else LateAttentionMass()
            yield from passes.put_aside(state)
            state.risk = yield from self._run_step(state, step, chosen, rows, watch)
            if state.gate.accepts(step.percent, state.risk):
                return "accepted"
            if watch is not None:
                state.mass = self._ranks.read(watch.mass)
        if not len(state.stale):
            return "prefill"
        if settings.over_budget == "accept" and not passes.is_affordable(state, passes.prefill_rows(state)):
            return "over_budget"
        state.escalations += 1
        if not settings.prefills:
            return "rejected"
        yield from passes.put_aside(state)
        yield from passes.prefill(state)
        return "prefill"

    def _choose_steps(self, state: BlendState) -> Pieces[tuple[Step, ...] | None]:
        """The steps that are worth their work, by how far off the donor KV is that the question attends to most.

        None where no repair is needed; empty where only a prefill will do.
        """
        if not state.gate.glances or state.mass is None:
            return self._settings.steps
        stale = state.stale
        most = select_largest(stale, state.mass[stale], PROBE_TOKENS)
        if not len(most):
            return ()
        observer = KvDeviation(layer=1)
        yield from self._passes.put_aside(state)
        yield from self._passes.run_layers(state, "glance", most, observer, layers=1)
        deviation = float(np.average(self._ranks.read(observer.relative), weights=state.mass[most] + 1e-12))
        state.glance = deviation
        choice = state.gate.begin(deviation)
        if math.isfinite(choice.expected):
            state.risk = choice.expected
        if choice.percent is None:
            return ()
        return (
            tuple(step for step in self._settings.steps if step.percent >= choice.percent) if choice.percent else None
        )

    def _run_step(
        self, state: BlendState, step: Step, chosen: Positions, rows: Positions, watch: AttentionMass | None
    ) -> Pieces[float]:
        """Computes the rows; returns the divergence from cold that an answer is expected to have now, in nats."""
        mass, stale = state.mass, np.isin(rows, state.stale)
        observer = RepairedDeviation(watch)
        state.repaired += len(chosen)
        settled = yield from self._passes.compute(state, f"repair {step.percent} %", rows, observer)
        if state.tail is None or state.first_tail is None or mass is None:
            raise Refused(DeclineReason.ERROR, "a repair without a look before it")
        state.features = RiskFeatures(
            next_token_kl(state.tail[-1], state.first_tail[-1]),
            settled,
            self._ranks.mean(observer.mean_over(stale, mass[rows[stale]])),
            compute_entropy(state.tail[-1]),
        )
        return self._ranks.mean(state.gate.expect(step.percent, state.features))

    def _choose_tokens(self, state: BlendState, step: Step) -> Pieces[Positions]:
        """The next tokens to repair, so that steps have chosen ``percent`` of the reused in all."""
        stale = state.stale
        count = min(len(stale), round(step.percent / 100 * len(state.reused)) - state.repaired)
        if count <= 0 or state.mass is None:
            return stale[:0]
        if step.rule in ("attended_and_deviating", "cacheblend") and state.deviation is None:
            state.deviation = yield from self._measure_deviation(state, squared=step.rule == "cacheblend")
        deviation = np.zeros(len(stale)) if state.deviation is None else state.deviation[stale]
        seed = self._passes.prompts_checked
        scores = Scores(stale, state.mass[stale], deviation, state.spans, seed, count / len(stale))
        return SELECTIONS[step.rule](scores)

    def _measure_deviation(self, state: BlendState, *, squared: bool) -> Pieces[npt.NDArray[np.floating[Any]]]:
        """Deviation above the first layers of all tokens that still are a donor's; zero elsewhere."""
        layers = self._passes.model.layout.layers
        depth = min(max(1, LayerSchedule.bathtub(layers, self._settings.layer_share).leading), layers - 1)
        observer = KvDeviation(layer=depth)
        yield from self._passes.put_aside(state)
        yield from self._passes.run_layers(state, "deviation", state.stale, observer, layers=depth)
        found = np.zeros(len(state.tokens))
        found[state.stale] = self._ranks.read(observer.squared if squared else observer.relative)
        return found

    def _add_affected(self, state: BlendState, chosen: Positions) -> Positions:
        """``chosen``, and the computed rows behind its first: they attended to what now changes."""
        behind = state.computed.copy()
        if self._settings.refresh:
            behind[: chosen[0]] = False
        else:
            behind[: int(np.flatnonzero(~behind)[-1]) + 1] = False  # the last run only: the question
        return np.union1d(chosen, np.flatnonzero(behind))
