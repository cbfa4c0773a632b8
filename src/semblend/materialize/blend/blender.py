"""From a plan to KV in the engine's cache and the logits of the prompt's last token, with the quality measured.

    exact      nothing is taken from donors
    fast       donor KV is moved into place; gaps, the head of each span and the end of the prompt are computed
    balanced   fast, and reused tokens are computed again, those that the question attends to, until the answer is
               expected to be close to a cold one (`Repair`), or the prompt is prefilled in full
    a number   the same, where close means at most so many nats (`semblend.quality`)

`prepare` does it all at once. `prepare_in_pieces` stops every so often (`Pace`), so that an engine can go on with what
is running. `place` only moves donor KV and checks it: the engine computes the rest with its
own scheduler.

Nothing raises: a refusal or a failure is a `Decline`, and the caller computes the prompt from its exact prefix on. The
one exception: where several ranks compute one model, a failure of one of them is a `RankError`, because the others wait
for it and none can go on alone.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from semblend.errors import InputError
from semblend.materialize.blend.passes import BlendState, PassRunner, Ranks, Refused
from semblend.materialize.blend.quality import (
    Blended,
    OnPass,
    Pace,
    Pieces,
    QualitySettings,
    Rejected,
    Spliced,
    Step,
    Target,
    finish,
)
from semblend.materialize.contract import Model
from semblend.materialize.donors.tiers import DonorKv
from semblend.materialize.gate.gate import Gate, prefill_at_once
from semblend.materialize.gate.observers import AttentionMass, KvDeviation, RepairedDeviation
from semblend.materialize.gate.thresholds import RiskFeatures, compute_entropy, next_token_kl
from semblend.materialize.kv.moves import DonorTensors, Move
from semblend.materialize.kv.splice import splice
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan
from semblend.plan.selection import SELECTIONS, Positions, Scores, count_leading_layers, select_largest
from semblend.quality import GATED_MODE, find_path, parse_quality, read_nats
from semblend.span import Span

log = logging.getLogger("semblend.materialize")

STAGED_BYTES = 256 << 20
"""So much of a donor in host memory is brought to the device in one piece: about 10 ms of a bus."""

READ_PIECE_S = 0.005
"""A piece of waiting for a donor that is read from a file."""


class Blender:
    """Prepares prompts in the cache of a model, from the KV that ``donor_kv`` keeps."""

    def __init__(
        self, model: Model, donor_kv: DonorKv, settings: QualitySettings | None = None, pace: Pace | None = None
    ) -> None:
        """``pace``: of the pieces, by default ``settings.piece_ms``; its owner changes it as the engine has work."""
        self.model, self.donor_kv = model, donor_kv
        self.settings = QualitySettings() if settings is None else settings
        self._ranks = Ranks(model)
        pace = Pace(self.settings.piece_ms) if pace is None else pace
        self._passes = PassRunner(model, self.settings, self._ranks, pace)
        self._repair = Repair(self._passes)

    def prepare(
        self, target: Target, plan: ReusePlan, *, mode: str | None = None, on_pass: OnPass | None = None
    ) -> Blended | Decline:
        """Fills the slots of the whole prompt behind its exact prefix, or declines and leaves them undefined."""
        found = finish(self.prepare_in_pieces(target, plan, mode=mode, on_pass=on_pass))
        assert not isinstance(found, Rejected), "an engine that prefills itself asks for pieces"
        return found

    def prepare_in_pieces(
        self, target: Target, plan: ReusePlan, *, mode: str | None = None, on_pass: OnPass | None = None
    ) -> Pieces[Blended | Rejected | Decline]:
        """The same, piece by piece. Slots are filled when it ends; donors are held until then, or until it is closed.

        It is for the engine to see that nobody else writes or reads these slots meanwhile.
        """
        try:
            return (yield from self._prepare(target, plan, mode or self.settings.mode, on_pass))
        except Refused as refused:
            return refused.decline
        except Exception as error:
            self._ranks.raise_if_several(error)
            return _decline_failure(error)

    def note_heir(self, donor: tuple[str, int], heir: tuple[str, int]) -> None:
        """A donor is gone, and another begins with all of its tokens: what was learned of them goes on counting."""
        self._repair.attended.inherit(donor, heir)

    def place(self, target: Target, plan: ReusePlan) -> Spliced | Decline:
        """Moves donor KV into place and checks it, computing nothing: for an engine that computes the gaps itself."""
        try:
            return self._place(target, plan)
        except Refused as refused:
            return refused.decline
        except Exception as error:
            self._ranks.raise_if_several(error)
            return _decline_failure(error)

    def _place(self, target: Target, plan: ReusePlan) -> Spliced:
        if not self.model.capabilities.native_spans:
            raise Refused(DeclineReason.UNSUPPORTED_MODE, "this engine takes one prefix-shaped range, not spans")
        self._require_observers("fast")
        state = BlendState.of(target, plan, self.model.device, spans=plan.spans)
        with ExitStack() as donors:
            finish(self._load(state, donors))
            canary = self._passes.check_donor_kv(state)
        state.computed[state.first_rows(self.settings)] = True
        held = state.stale
        if not len(held):
            raise Refused(
                DeclineReason.BELOW_BREAK_EVEN, "heads of spans and the prompt's end are all that donors hold"
            )
        return Spliced(held, **state.count_tokens(), canary=canary, load_ms=state.load_ms)

    def _prepare(
        self, target: Target, plan: ReusePlan, quality: str, on_pass: OnPass | None
    ) -> Pieces[Blended | Rejected]:
        try:
            nats = read_nats(parse_quality(quality))
            mode = find_path(parse_quality(quality))
        except InputError as error:
            raise Refused(DeclineReason.UNSUPPORTED_MODE, error.message) from error
        state = BlendState.of(target, plan, self.model.device, spans=() if mode == "exact" else plan.spans)
        state.on_pass = on_pass
        if not state.spans:
            yield from self._passes.prefill(state)
            return self._make_result(state, "exact")
        self._require_observers(mode)
        is_gated = mode == GATED_MODE
        if is_gated:
            self._open_gate(state, plan, nats)
        with ExitStack() as donors:
            yield from self._load(state, donors)
            if is_gated:
                yield from self._repair.begin(state)
            else:
                yield from self._passes.compute(
                    state, "fast", state.first_rows(self.settings), None, check=True, deep=True
                )
        if not is_gated:
            return self._make_result(state, "fast")
        decision = yield from self._repair.go_on(state)
        return self._reject(state) if decision == "rejected" else self._make_result(state, decision)

    def _open_gate(self, state: BlendState, plan: ReusePlan, nats: float) -> None:
        """The gate for this prompt and number; refused where no way is expected to be close enough to cold."""
        if choice := prefill_at_once(self.settings.thresholds, plan, nats):
            raise Refused(DeclineReason.QUALITY_RISK, choice.reason)
        state.gate = Gate.of(self.settings.thresholds, plan, nats)

    def _require_observers(self, mode: str) -> None:
        if not self.model.capabilities.observers:
            raise Refused(
                DeclineReason.UNSUPPORTED_MODE, f"mode {mode} checks donor KV, and this engine lets nobody look on"
            )

    def _load(self, state: BlendState, held: ExitStack) -> Pieces[None]:
        """Queues donor KV into the prompt's slots; donors are held until ``held`` ends, behind a wait for the device.

        Ranks compute nothing together here, so one that fails declines, and so do the others: they agree twice, once
        before the first piece, because all of them take as many.
        """
        problem: Exception | None = None
        groups: list[list[Move]] = []
        yield from self._await_donors(state)
        try:
            groups = self._group_moves(self._find_moves(state, held))
        except Exception as error:
            problem = error
        pieces = self._agree_to_load(problem, len(groups))
        for number in range(pieces):
            try:
                if problem is None and number < len(groups):
                    splice(groups[number], self.model.layout, self.model.rope, check_slots=False)
            except Exception as error:
                problem = error
                if not self._ranks.several:
                    break
            yield from self._passes.put_aside(state)
        self._agree_to_load(problem, pieces)
        state.load_ms = state.elapsed_ms

    def _await_donors(self, state: BlendState) -> Pieces[None]:
        """Give donors that lie in files time to be read, in pieces, where that is sooner than to compute the prompt.

        On a CPU it is. A GPU computes a token of a 7B in 0.05 ms and reads its KV in 0.1 (decisions/donors.md): there
        the prompt is computed, and the next one finds the donor in memory. So it is where an engine prefills itself:
        the loads behind this one would wait too.
        """
        waits = self.model.device.type == "cpu" and self.settings.prefills and not self._ranks.several
        if not waits or not self._passes.pace.piece_ms:
            return
        for key in dict.fromkeys((span.donor_id, span.generation) for span in state.spans):
            tensors = self.donor_kv.acquire(*key)
            if tensors is not None:
                self.donor_kv.release(tensors)
            while self.donor_kv.await_rise(*key, timeout_s=READ_PIECE_S):
                yield from self._passes.put_aside(state)

    def _agree_to_load(self, problem: Exception | None, pieces: int) -> int:
        """The most pieces that a rank has; raises `Refused` on every rank where one of them has a problem."""
        failed, most = problem is not None, pieces
        if self._ranks.several:  # else nothing crosses to the device and back
            ours = torch.tensor([float(failed), float(pieces)], device=self.model.device)
            failed, most = self._ranks.largest(ours).tolist()
        if isinstance(problem, Refused):
            raise problem
        if problem is not None:
            decline = _decline_failure(problem)
            raise Refused(decline.reason, decline.detail) from problem
        if failed:
            raise Refused(DeclineReason.STALE, "another rank could not load its part of a donor")
        return int(most)

    def _group_moves(self, moves: list[Move]) -> list[list[Move]]:
        """What is moved at once: everything, or, in pieces and from host memory, so much that it is a short while."""
        device = self.model.device
        if not self.settings.piece_ms or all(move.donor.k.device == device for move in moves):
            return [moves]
        groups: list[list[Move]] = [[]]
        room = most = max(1, STAGED_BYTES // max(1, _count_token_bytes(moves[0])))
        for move in moves:
            for start in range(0, move.length, most):
                part = _cut(move, start, min(most, move.length - start))
                if part.length > room:
                    groups.append([])
                    room = most
                groups[-1].append(part)
                room -= part.length
        return groups

    def _find_moves(self, state: BlendState, held: ExitStack) -> list[Move]:
        """The spans with their donors, which are held until ``held`` ends."""
        donors: dict[tuple[str, int], DonorTensors] = {}
        for span in state.spans:
            key = (span.donor_id, span.generation)
            if key not in donors:
                tensors = self.donor_kv.acquire(*key)
                if tensors is None and self.donor_kv.is_rising(*key):
                    detail = f"donor {span.donor_id!r} is read from a file; the next request finds it in memory"
                    raise Refused(DeclineReason.CAPACITY, detail)
                if tensors is None:
                    raise Refused(DeclineReason.STALE, f"donor {span.donor_id!r} generation {span.generation} is gone")
                held.callback(self.donor_kv.release, tensors)
                donors[key] = tensors
            if span.donor_end > donors[key].tokens:
                held_tokens = (
                    f"donor {span.donor_id!r} holds {donors[key].tokens} tokens of the {span.donor_end} asked for"
                )
                raise Refused(DeclineReason.VALIDATION_FAILED, held_tokens, (span.donor_id,))
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

    def _find_exact_until(self, state: BlendState) -> int:
        if not len(state.reused) or state.passes[-1].name == "prefill":
            return len(state.tokens)
        doubtful = state.stale if self.settings.refresh else state.reused
        return int(doubtful[0]) if len(doubtful) else len(state.tokens)

    def _reject(self, state: BlendState) -> Rejected:
        return Rejected(exact_until=int(state.reused[0]), **self._sum_up(state))

    def _sum_up(self, state: BlendState) -> dict[str, Any]:
        """What passes showed and cost, whatever came of them."""
        return {
            "risk": state.risk,
            "escalations": state.escalations,
            "canary": state.canary,
            "load_ms": state.load_ms,
            "compute_ms": sum(one.ms for one in state.passes),
            "work": state.count_work(self.model.layout.layers),
        }

    def _make_result(self, state: BlendState, decision: str) -> Blended:
        if state.tail is None:
            raise Refused(DeclineReason.ERROR, "nothing was computed")
        return Blended(
            logits_last=state.tail[-1],
            **state.count_tokens(),
            **self._sum_up(state),
            exact_until=self._find_exact_until(state),
            decision=decision,
            features=state.features,
            deep=state.deep,
            passes=tuple(state.passes),
        )


def _count_token_bytes(move: Move) -> int:
    """Bytes of one token's keys and values in all layers."""
    k = move.donor.k
    return 2 * k.shape[0] * k.shape[2] * k.shape[3] * k.element_size()


def _cut(move: Move, start: int, length: int) -> Move:
    """A part of a move."""
    slots = move.target_slots[start : start + length]
    return replace(move, donor_start=move.donor_start + start, length=length, target_slots=slots)


def _decline_failure(error: Exception) -> Decline:
    """The border of reuse: a failure costs time and never the request."""
    log.warning("reuse failed, the prompt is computed cold: %s", error, exc_info=True)
    return Decline(DeclineReason.ERROR, f"{type(error).__name__}: {error}".splitlines()[0])


# -- Repairs of mode balanced: compute more of the reused tokens again until the answer is expected to be close to
# cold.
#
# The gate says with which step to begin (`semblend.materialize.gate.gate`); at some numbers no step is needed. Each
# step computes the tokens that the question attends to most (where passages moved, and that deviate most), and what
# this shows tells how far the answer would be from a cold one. While that is more than the gate allows the next step
# follows, then a full prefill.
#
# What a question attends to is seen in a pass of its own over the new tokens (a look). Where earlier questions have
# shown what matters in these donors, the first step goes by that, in the first pass: one instead of two. Of an edited
# history so much is new that two passes save little: its first step takes the tokens that deviate most in layer 1,
# those behind the edit (docs/research/quality.md).


MAX_NOTED_TOKENS = 1 << 22
"""Tokens of donors of which it is remembered how much questions attended to them: 16 MB."""


class AttendedTokens:
    """How much earlier questions attended to each token of a donor; those of the least recently used are forgotten.

    A donor belongs to a namespace, and so does what is remembered of it. Of several questions the last ones count most.
    """

    def __init__(self, most_tokens: int = MAX_NOTED_TOKENS) -> None:
        self._most_tokens, self._tokens = most_tokens, 0
        self._donors: OrderedDict[tuple[str, int], npt.NDArray[np.float32]] = OrderedDict()

    def recall(self, spans: Sequence[Span], tokens: int) -> npt.NDArray[np.float32] | None:
        """By position of a prompt of so many tokens, zero outside of spans; None where something is not known."""
        found = np.zeros(tokens, dtype=np.float32)
        for span in spans:
            donor = self._donors.get((span.donor_id, span.generation))
            if donor is None or span.donor_end > len(donor):
                return None
            found[span.target_start : span.target_end] = donor[span.donor_start : span.donor_end]
            self._donors.move_to_end((span.donor_id, span.generation))
        return None if np.isnan(found).any() else found

    def note(self, spans: Sequence[Span], mass: npt.NDArray[np.floating[Any]]) -> None:
        """A question has attended so much to each position of its prompt."""
        for span in spans:
            key = (span.donor_id, span.generation)
            donor = self._donors.pop(key, np.zeros(0, dtype=np.float32))
            if span.donor_end > len(donor):
                self._tokens += span.donor_end - len(donor)
                donor = np.append(donor, np.full(span.donor_end - len(donor), np.nan, dtype=np.float32))
            before, now = donor[span.donor_start : span.donor_end], mass[span.target_start : span.target_end]
            donor[span.donor_start : span.donor_end] = np.where(np.isnan(before), now, (before + now) / 2)
            self._donors[key] = donor
        while self._tokens > self._most_tokens:
            self._tokens -= len(self._donors.popitem(last=False)[1])

    def inherit(self, donor: tuple[str, int], heir: tuple[str, int]) -> None:
        """A donor is gone, and another begins with all of its tokens."""
        known = self._donors.pop(donor, None)
        if known is None:
            return
        if heir in self._donors:
            self._tokens -= len(known)
        else:
            self._donors[heir] = known


class Repair:
    """Repairs prompts by the passes of a `PassRunner`."""

    def __init__(self, passes: PassRunner) -> None:
        self._passes, self._settings, self._ranks = passes, passes.settings, passes.ranks
        self.attended = AttendedTokens()

    def begin(self, state: BlendState) -> Pieces[None]:
        """The first pass, over donor KV that was just moved into place: the first step, or a look.

        A step measures deep layers in any case, where the question reads them.
        """
        first, steps = state.first_rows(self._settings), self._list_steps(state)
        if not steps:  # nobody will look at what a repair shows: deep layers are sampled, as in mode fast
            yield from self._passes.compute(state, "fast", first, None, check=True, deep=True)
            return
        chosen = (yield from self._choose_at_once(state, steps[0], first)) if state.gate.sees_at_once else first[:0]
        if len(chosen):
            rows = np.union1d(first, chosen)
            yield from self._run_step(state, steps[0], chosen, rows, self._watch_question(), is_first=True)
            return
        watch = self._watch_question()
        yield from self._passes.compute(state, "fast", first, watch, check=True)
        self._note_attention(state, watch)

    def _watch_question(self) -> AttentionMass:
        return AttentionMass(beside=self._passes.model.capabilities.windowed)

    def _choose_at_once(self, state: BlendState, step: Step, first: Positions) -> Pieces[Positions]:
        """Tokens that the first pass repairs without a look before it; none where that is not known, or too dear."""
        left = np.setdiff1d(state.reused, first, assume_unique=True)
        count = min(len(left), round(step.percent / 100 * len(state.reused)))
        rows = len(first) + count
        if not count or not self._allows(state, rows) or not self._passes.is_affordable(state, rows):
            return left[:0]
        if rule := step.rule_at_once if state.gate.is_edited else "":
            state.canary = self._passes.check_donor_kv(state)  # before layer 0 is written
            deviation = yield from self._measure_deviation(state, squared=rule == "cacheblend", is_first=True)
            return SELECTIONS[rule](Scores(left, np.ones(len(left)), deviation[left], 0, count / len(left)))
        known = self.attended.recall(state.spans, len(state.tokens))
        return left[:0] if known is None else select_largest(left, known[left], count)

    def go_on(self, state: BlendState) -> Pieces[str]:
        """Repairs until the answer is expected to be close enough, time is up, or all is computed; returns which.

        "rejected" where only a full prefill is left to do, and the engine does that itself.
        """
        settings, passes = self._settings, self._passes
        if state.gate.begin().percent == 0:
            state.risk = state.gate.begin().expected
            return "accepted"
        for step in self._list_steps(state):
            watch: AttentionMass | None = None
            if step is not state.step:
                chosen = yield from self._choose_tokens(state, step)
                if not len(chosen):  # this step adds nothing to what is computed already
                    continue
                rows = self._add_affected(state, chosen)
                if not self._allows(state, len(rows)):
                    break  # a prefill costs little more and leaves nothing to doubt
                if not passes.is_affordable(state, len(rows)):
                    if settings.over_budget == "accept":
                        return "over_budget"
                    break
                state.escalations += state.step is not None
                watch = self._watch_question()
                yield from passes.put_aside(state)
                yield from self._run_step(state, step, chosen, rows, watch)
            if state.risk is not None and state.gate.accepts(step.percent, state.risk):
                return "accepted"
            if watch is not None and step is not settings.steps[-1]:
                self._note_attention(state, watch)
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

    def _list_steps(self, state: BlendState) -> list[Step]:
        """Those that the gate would take, the first to begin with; none where nothing is to be repaired."""
        begin = state.gate.begin().percent
        return [step for step in self._settings.steps if begin and step.percent >= begin]

    def _allows(self, state: BlendState, rows: int) -> bool:
        """Whether all passes with this one stay clearly below a prefill."""
        spent = state.spent_rows(self._passes.model.layout.layers)
        return spent + rows <= self._settings.most_work * self._passes.prefill_rows(state)

    def _run_step(
        self,
        state: BlendState,
        step: Step,
        chosen: Positions,
        rows: Positions,
        watch: AttentionMass,
        *,
        is_first: bool = False,
    ) -> Pieces[None]:
        """Computes the rows, and notes the divergence from cold that an answer is expected to have now, in nats."""
        observer, before = RepairedDeviation(watch), state.computed.copy()
        state.step, state.repaired = step, state.repaired + len(chosen)
        unchecked = is_first and state.canary is None
        # What deviates most in layer 1 need not be what the question reads: deep layers are sampled, as in mode fast.
        deep = is_first and not unchecked
        settled = yield from self._passes.compute(
            state, f"repair {step.percent} %", rows, observer, check=unchecked, deep=deep
        )
        rows = np.union1d(rows, np.flatnonzero(state.computed & ~before))
        repaired = np.isin(rows, chosen)
        if is_first:
            self._note_attention(state, watch)
        if state.tail is None or state.first_tail is None or state.mass is None:
            raise Refused(DeclineReason.ERROR, "a repair without a look")
        state.features = RiskFeatures(
            math.nan if is_first else next_token_kl(state.tail[-1], state.first_tail[-1]),
            math.nan if is_first else settled,
            self._ranks.mean(observer.mean_over(repaired, state.mass[chosen])),
            compute_entropy(state.tail[-1]),
        )
        state.risk = self._ranks.mean(state.gate.expect(step.percent, state.features))

    def _note_attention(self, state: BlendState, watch: AttentionMass) -> None:
        """What the question attends to by the last pass, for this prompt and for later ones with the same donors."""
        state.mass = self._ranks.read(watch.mass)
        self.attended.note(state.spans, state.mass)

    def _choose_tokens(self, state: BlendState, step: Step) -> Pieces[Positions]:
        """The next tokens to repair, so that steps have chosen ``percent`` of the reused in all."""
        stale = state.stale
        count = min(len(stale), round(step.percent / 100 * len(state.reused)) - state.repaired)
        if count <= 0 or state.mass is None:
            return stale[:0]
        rule = step.find_rule(state.gate.order)
        if rule in ("attended_and_deviating", "cacheblend") and state.deviation is None:
            state.deviation = yield from self._measure_deviation(state, squared=rule == "cacheblend")
        deviation = np.zeros(len(stale)) if state.deviation is None else state.deviation[stale]
        seed = self._passes.prompts_checked
        scores = Scores(stale, state.mass[stale], deviation, seed, count / len(stale))
        return SELECTIONS[rule](scores)

    def _measure_deviation(
        self, state: BlendState, *, squared: bool, is_first: bool = False
    ) -> Pieces[npt.NDArray[np.floating[Any]]]:
        """Deviation above the first layers of all tokens that still are a donor's; zero elsewhere.

        ``is_first``: new tokens are not computed yet, so they go through these layers too, and their number means
        nothing.
        """
        layers, windowed = self._passes.model.layout.layers, self._passes.model.capabilities.windowed
        # Below the first full layer, what a window lets through of another text in front ends a window's length on.
        first_full = next(layer for layer in range(layers) if layer not in windowed)
        depth = min(max(first_full + 1, count_leading_layers(layers, self._settings.layer_share)), layers - 1)
        observer = KvDeviation(layer=depth)
        yield from self._passes.put_aside(state)
        rows = np.arange(state.exact, len(state.tokens)) if is_first else state.stale
        yield from self._passes.run_layers(state, "deviation", rows, observer, layers=depth)
        found = np.zeros(len(state.tokens))
        found[rows] = self._ranks.read(observer.squared if squared else observer.relative)
        return found

    def _add_affected(self, state: BlendState, chosen: Positions) -> Positions:
        """``chosen``, and the computed rows behind its first: they attended to what now changes."""
        behind = state.computed.copy()
        if self._settings.refresh:
            behind[: chosen[0]] = False
        else:
            behind[: int(np.flatnonzero(~behind)[-1]) + 1] = False  # the last run only: the question
        return np.union1d(chosen, np.flatnonzero(behind))
