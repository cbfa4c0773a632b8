"""Measures where the gate of a model may open: what each level of recomputation does to answers, and what follows.

A prompt is prepared cold, by donor KV alone, and by each step of the gate alone. Its cold greedy answer is then given
to all of them. Each step gives features (`RiskFeatures`) and the divergence from cold of what would have been served.
Two yardsticks go with it: the same prompt computed cold in chunks (*rerun noise*: rounding alone), and, where its
passages came in another order, cold with the passages changing places (*order noise*: what two retrievals of the same
passages do).

From all prompts: weights that turn features into an expected divergence, the largest expected divergence at which few
of the prompts that pass are damaged (*false-safe*), and the layer-1 deviations from which a small step is seldom
enough. `fit_dial` does the same for every number of nats.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import product
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from semblend.errors import InputError
from semblend.materialize.blend.blender import Blender
from semblend.materialize.blend.quality import Blended, Placed, QualitySettings
from semblend.materialize.contract import Model, Rows
from semblend.materialize.donors.tiers import DonorKv
from semblend.materialize.gate.thresholds import (
    FALSE_SAFE_TIMES,
    MIN_OF_AN_ORDER,
    NUMBERS,
    RECOMPUTE_LEVELS,
    STEPS,
    DialTable,
    PassageOrder,
    PlanShape,
    RiskFeatures,
    RiskModel,
    Thresholds,
    fit_weights,
    make_repair_features,
    next_token_kl,
)
from semblend.plan.reuse_plan import DeclineReason, ReusePlan
from semblend.span import Span


class Pool(Protocol):
    """Hands out blocks of the cache that the model computes in."""

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def blocks_for(self, tokens: int) -> int: ...
    def allocate(self, n_blocks: int) -> list[int]: ...
    def free(self, blocks: Sequence[int]) -> None: ...
    def slots_of(self, blocks: Sequence[int], start: int, end: int) -> Tensor: ...


# -- Answers over KV that lies in a pool: greedy, and along a given answer. For calibration and benchmarks.


ANSWER_TOKENS = 16
"""Of a cold answer, over which divergence is averaged."""


def answer_greedily(
    model: Model, prompt_tokens: int, logits: Tensor, slots: Tensor, most: int, stop: Collection[int] = ()
) -> list[int]:
    """The most likely tokens behind a prompt, until one of ``stop``, which is the last of them, or ``most``.

    ``logits`` are those of the prompt's last token; ``slots`` have room for ``most`` tokens behind the prompt.
    """
    said = [int(logits.argmax())]
    while len(said) < most and said[-1] not in stop:
        at = torch.tensor([prompt_tokens + len(said) - 1])
        logits = model.logits(model.forward(Rows.of(said[-1:], at, slots)))[-1]
        said.append(int(logits.argmax()))
    return said


def compute_log_probabilities(
    model: Model, prompt_tokens: int, logits: Tensor, slots: Tensor, answer: Sequence[int]
) -> Tensor:
    """Of every token of ``answer``, the distribution it was drawn from, given those before it: [tokens, vocabulary]."""
    rows = [logits.reshape(1, -1).float()]
    if len(answer) > 1:
        at = torch.arange(prompt_tokens, prompt_tokens + len(answer) - 1)
        rows.append(model.logits(model.forward(Rows.of(list(answer[:-1]), at, slots))).float())
    return torch.cat(rows).log_softmax(-1)


def compute_divergence(cold: Tensor, ours: Tensor) -> float:
    """Mean KL(cold || ours) in nats over the tokens of an answer, from log probabilities of the same shape.

    >>> compute_divergence(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.5, 0.5]]).log())
    0.0
    """
    each = torch.where(cold == -torch.inf, 0.0, cold.exp() * (cold - ours)).sum(-1)
    return max(0.0, float(each.double().mean()))


def keeps_answer(ours: Tensor, answer: Sequence[int]) -> bool:
    """Whether the greedy answer would be this one: then, and only then, each of its tokens is the likeliest in turn.

    ``ours`` are log probabilities along ``answer``.
    """
    return bool((ours.argmax(-1).cpu() == torch.tensor(answer)).all())


RERUN_CHUNKS = 3
_LOOK = Thresholds(1e9, 1e9, 1e9)  # accepts everything


@dataclass(frozen=True, slots=True)
class CalibrationPrompt:
    """A prompt, the prompts that were served before it, and what they share; spans name donors "0", "1", …"""

    tokens: tuple[int, ...]
    donors: tuple[tuple[int, ...], ...]
    spans: tuple[Span, ...]

    @property
    def plan(self) -> ReusePlan:
        return ReusePlan(self.spans, len(self.tokens))


@dataclass(frozen=True, slots=True)
class Moved:
    """How far an answer is from the cold one: mean divergence in nats a token, and whether its words change."""

    nats: float
    changed: bool


@dataclass(frozen=True, slots=True)
class WayMeasure:
    """One way: what could be seen, what it did, and its work as a share of a cold prefill.

    ``first_nats``: divergence of the first token alone. ``features``: None for a splice, which shows nothing of itself.
    """

    percent: int
    moved: Moved
    first_nats: float
    work: float
    features: RiskFeatures | None = None


@dataclass(frozen=True, slots=True)
class PromptMeasure:
    """All ways of one prompt that pay, by percent, and the yardsticks; ``reordered`` only where passages moved."""

    order: PassageOrder
    ways: tuple[WayMeasure, ...]
    rerun: Moved | None = None
    reordered: Moved | None = None

    def find_way(self, percent: int) -> WayMeasure | None:
        return next((way for way in self.ways if way.percent == percent), None)

    def to_record(self) -> dict[str, Any]:
        """As JSON holds it; `from_record` takes it back."""
        return {**asdict(self), "order": str(self.order), "ways": [asdict(way) for way in self.ways]}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> PromptMeasure:
        """Raises `KeyError`, `TypeError` or `ValueError` for a record that is none."""
        rerun, reordered = (None if record[name] is None else Moved(**record[name]) for name in ("rerun", "reordered"))
        return cls(PassageOrder(record["order"]), tuple(_read_way(way) for way in record["ways"]), rerun, reordered)


def _read_way(record: Mapping[str, Any]) -> WayMeasure:
    features = None if record["features"] is None else RiskFeatures(**record["features"])
    return WayMeasure(**{**record, "moved": Moved(**record["moved"]), "features": features})


def measure_prompt(
    model: Model,
    prompt: CalibrationPrompt,
    *,
    pool: Pool,
    settings: QualitySettings | None = None,
    answer_tokens: int = ANSWER_TOKENS,
    stop: Collection[int] = (),
    yardsticks: bool = True,
) -> PromptMeasure:
    """One prompt cold, and through every way alone. The pool must hold it with its answer, and its longest donor."""
    donor_kv = DonorKv(0, 1 << 62)
    for number, donor in enumerate(prompt.donors):
        capture_donor(model, donor_kv, str(number), donor, pool)
    base = replace(settings or QualitySettings(), thresholds=_LOOK, latency_budget_ms=0.0, most_work=math.inf)
    length = len(prompt.tokens)
    blocks = pool.allocate(pool.blocks_for(length + answer_tokens))
    try:
        slots = pool.slots_of(blocks, 0, length + answer_tokens)

        def prepare(asked: QualitySettings) -> Blended | None:
            done = Blender(model, donor_kv, asked).prepare(Placed(prompt.tokens, slots[:length]), prompt.plan)
            if isinstance(done, Blended):
                return done
            if done.reason is DeclineReason.BELOW_BREAK_EVEN:  # so would the gate: nothing to learn for it
                return None
            raise InputError(f"a calibration prompt was declined: {done.detail}", hint="check its spans")

        cold = prepare(replace(base, mode="exact"))
        if cold is None:
            return PromptMeasure(PlanShape.of(prompt.plan).order, ())
        answer = answer_greedily(model, length, cold.logits_last, slots, answer_tokens, stop)

        def follow(logits: Tensor) -> Tensor:
            return compute_log_probabilities(model, length, logits, slots, answer)

        true = follow(cold.logits_last)

        def compare(logits: Tensor) -> Moved:
            ours = follow(logits)
            return Moved(compute_divergence(true, ours), not keeps_answer(ours, answer))

        ways = _measure_ways(prepare, base, cold.logits_last, compare)
        rerun = compare(_prefill(model, prompt.tokens, slots, RERUN_CHUNKS)) if yardsticks else None
        other = reorder_passages(prompt) if yardsticks else None
        reordered = None if other is None else compare(_prefill(model, other, slots, 1))
        return PromptMeasure(PlanShape.of(prompt.plan).order, ways, rerun, reordered)
    finally:
        pool.free(blocks)


def _measure_ways(
    prepare: Callable[[QualitySettings], Blended | None],
    base: QualitySettings,
    cold: Tensor,
    compare: Callable[[Tensor], Moved],
) -> tuple[WayMeasure, ...]:
    """Every way alone; none where the blender would not begin one."""
    found = []
    by_percent = {step.percent: step for step in base.steps}
    for percent in RECOMPUTE_LEVELS:
        if percent == 0:
            asked = replace(base, mode="fast")
        elif percent in by_percent:
            asked = replace(base, mode="balanced", steps=(by_percent[percent],))
        else:
            continue
        done = prepare(asked)
        if done is None or done.decision not in ("fast", "accepted") or (percent and done.features is None):
            continue
        first = next_token_kl(cold, done.logits_last)
        found.append(WayMeasure(percent, compare(done.logits_last), first, done.work, done.features))
    return tuple(found)


def reorder_passages(prompt: CalibrationPrompt) -> tuple[int, ...] | None:
    """The prompt with its shared passages in another order; None where they have kept their order so far.

    Only prompts whose passages moved between prompts tell that they may.
    """
    if PlanShape.of(prompt.plan).order is PassageOrder.IN_ORDER or len(prompt.spans) < 2:
        return None
    rng = random.Random(len(prompt.tokens))
    order = list(range(len(prompt.spans)))
    while order == sorted(order):
        rng.shuffle(order)
    pieces: list[int] = []
    end = 0
    for span, instead in zip(prompt.spans, (prompt.spans[number] for number in order), strict=True):
        pieces += prompt.tokens[end : span.target_start]
        pieces += prompt.tokens[instead.target_start : instead.target_end]
        end = span.target_end
    return (*pieces, *prompt.tokens[end:])


def _prefill(model: Model, tokens: Sequence[int], slots: Tensor, chunks: int) -> Tensor:
    """Computes a prompt cold; returns the logits of its last token."""
    hidden = torch.empty(0)
    for part in torch.arange(len(tokens)).chunk(chunks):
        hidden = model.forward(Rows.of(torch.tensor(tokens)[part], part, slots))
    return model.logits(hidden[-1:])[0]


def capture_donor(model: Model, donor_kv: DonorKv, donor_id: str, tokens: tuple[int, ...], pool: Pool) -> None:
    """Computes a donor cold and captures it."""
    blocks = pool.allocate(pool.blocks_for(len(tokens)))
    try:
        slots = pool.slots_of(blocks, 0, len(tokens))
        positions = torch.arange(len(tokens), device=slots.device)
        model.forward(Rows.of(tokens, positions, slots))
        donor_kv.capture(donor_id, 0, model.layout, slots)
    finally:
        pool.free(blocks)


# -- From measured prompts to thresholds: after which repairs a prompt may be answered.


HARM = 0.02
"""Nats of first-token divergence from cold that count as damage: about what an 8-bit KV cache costs, ten times over."""
FALSE_SAFE = 0.02
MIN_TO_FIT = 24
"""Fewer prompts cannot weigh four numbers: the gate then goes by how far the distribution still moves."""
_FOLDS = 4


@dataclass(frozen=True, slots=True)
class Pair:
    """After ``step`` percent: what could be seen, and the true divergence from cold of what would be served."""

    step: int
    features: RiskFeatures
    true_kl: float


@dataclass(frozen=True, slots=True)
class Choice:
    """A threshold, the share of pairs that pass it, and the share of those that are damaged."""

    threshold: float
    passing: float
    false_safe: float
    pairs: int


def table_of(
    pairs: Sequence[Pair],
    *,
    pool: Pool,
    model_name: str,
    prompts: int,
    tokens: int,
    harm: float = HARM,
    false_safe: float = FALSE_SAFE,
    dial: DialTable | None = None,
    measured: Mapping[str, Any] = MappingProxyType({}),
) -> Thresholds:
    """The table that measured pairs allow; ``prompts`` and ``tokens`` say how much they were measured on.

    ``measured`` goes into the provenance.
    """
    if not pairs:
        raise InputError("no prompt could be measured", hint="give prompts that share at least 32 tokens with a donor")
    by_step = {step: [pair for pair in pairs if pair.step == step] for step in STEPS}
    enough = min(map(len, by_step.values())) >= MIN_TO_FIT
    risk = RiskModel(
        {step: fit_weights([(p.features, p.true_kl) for p in by_step[step]]) for step in STEPS} if enough else {}
    )
    expected = {step: _expect(by_step[step], fit=enough) for step in STEPS}
    chosen = {
        step: choose(list(zip(expected[step], (p.true_kl for p in by_step[step]), strict=True)), harm, false_safe)
        for step in STEPS
    }
    provenance = {
        "model": model_name,
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "device": str(pool.device),
        "dtype": str(pool.dtype).removeprefix("torch."),
        "prompts": prompts,
        "tokens": tokens,
        "harm": harm,
        "false_safe_target": false_safe,
        "steps": {
            str(step): {"pairs": c.pairs, "passing": c.passing, "false_safe": c.false_safe}
            for step, c in chosen.items()
        },
    }
    kl_10, kl_20, kl_40 = (chosen[step].threshold for step in STEPS)
    return Thresholds(
        kl_10,
        kl_20,
        kl_40,
        risk=risk,
        dial=DialTable() if dial is None else dial,
        provenance={**provenance, **measured},
    )


def _expect(pairs: Sequence[Pair], *, fit: bool) -> list[float]:
    """What the gate would expect of each prompt, weighed on the others: no prompt judges itself."""
    if not fit:
        return [pair.features.settled for pair in pairs]
    found = [0.0] * len(pairs)
    for fold in range(_FOLDS):
        others = [(p.features, p.true_kl) for i, p in enumerate(pairs) if i % _FOLDS != fold]
        model = RiskModel({0: fit_weights(others)})
        for i in range(fold, len(pairs), _FOLDS):
            found[i] = model.expect(0, pairs[i].features)
    return found


def list_pairs(measure: PromptMeasure) -> list[Pair]:
    """What a measured prompt says about thresholds."""
    return [
        Pair(way.percent, way.features, way.first_nats)
        for way in measure.ways
        if way.percent in STEPS and way.features is not None
    ]


def choose(pairs: Sequence[tuple[float, float]], harm: float, false_safe: float) -> Choice:
    """The largest expected divergence at which at most ``false_safe`` of what passes is damaged by more than ``harm``.

    >>> choose([(.001, 0.), (.5, .9)], harm=.02, false_safe=0.).threshold
    0.001
    """
    best = Choice(0.0, 0.0, 0.0, len(pairs))
    damaged = 0
    ordered = sorted(pairs)
    for passing, (expected, true) in enumerate(ordered, start=1):
        damaged += true > harm
        tied = passing < len(ordered) and ordered[passing][0] == expected
        if not tied and damaged <= false_safe * passing:
            best = Choice(expected, passing / len(pairs), damaged / passing, len(pairs))
    return best


# -- From measured prompts to a model's dial, and what the dial would have done with them.
#
# Weights come from least squares on the logarithm of the true divergence. What deviates more is never expected to be
# closer (`MIN_BY_DEVIATION`). An average of logarithms is below the logarithm of the average, so the mean error of
# the fit is added back, and a margin on top: the smallest one with which, on prompts that the fit has not seen, what
# is served at every number has a mean divergence below it and few false safes.


FloatArray = NDArray[np.float64]
MARGINS = (1.0, 1.25, 1.5, 2.0, 3.0, 5.0)
"""Fewer prompts cannot weigh six numbers."""
MAX_WORK = 0.7
"""No repair is begun that would bring all work above this share of a prefill, as in `QualitySettings.most_work`."""
MIN_BY_DEVIATION = 1.0
"""Where KV deviates twice as much, twice the divergence is expected, or more.

Prompts of a fit may deviate all alike; a free fit then gives deviation any weight, -.92 once: prompts that deviated
less than all that were measured were prefilled (20 of 60). With no weight at all, a bad prompt would be
served. Divergence grows with the square of a small deviation, and fits that see both kinds find 1 to 2.
"""
RIDGE = 1e-2
_MIN_NATS = 1e-5


@dataclass(frozen=True, slots=True)
class Served:
    """What the dial does with a prompt at a number: its way (None: a prefill), work, and distance from cold."""

    percent: int | None
    work: float
    nats: float
    changed: bool
    expected: float | None = None


@dataclass(frozen=True, slots=True)
class DialRow:
    """The prompts of one kind at one number: means, and the share of the served ones that are false safes."""

    number: float
    kind: str
    prompts: int
    served: int
    work: float
    nats: float
    changed: float
    false_safe: float


def fit_dial(measures: Sequence[PromptMeasure], *, false_safe: float = 0.02) -> DialTable:
    """The dial of a model from measured prompts; an empty one where there are too few."""
    usable = _list_usable(measures)
    if len(usable) < MIN_TO_FIT:
        return DialTable()
    unseen = _fit_folds(usable)
    margin = next((m for m in MARGINS if _is_honest(unseen, m, false_safe)), MARGINS[-1])
    return _fit(usable, margin)


def replay(table: DialTable, measure: PromptMeasure, nats: float) -> Served:
    """What the gate would do with a measured prompt.

    Each way was measured alone. Where one follows another, its work counts on top; what it leaves is taken as alone.
    """
    prefill = Served(None, 1.0, 0.0, changed=False)
    if not table.knows(measure.order):
        return prefill
    first = table.begin(measure.order, nats)
    if first.percent is None:
        return prefill
    splice = measure.find_way(0)
    work = splice.work if splice else 0.0
    if first.percent == 0:
        return _serve(splice, work, first.expected) if splice else prefill
    before = work
    for way in measure.ways:
        if way.percent < first.percent or way.features is None:
            continue
        more = way.work - before
        if work + more > MAX_WORK:
            break
        work += more
        expected = table.expect_by_repair(measure.order, way.percent, way.features)
        if expected <= nats:
            return _serve(way, work, expected)
    return Served(None, 1.0 + work, 0.0, changed=False)


def replay_unseen(measures: Sequence[PromptMeasure], *, false_safe: float = 0.02) -> list[DialRow]:
    """The dial at every number, each prompt judged by a fit of the others; by order of passages, then all."""
    usable = _list_usable(measures)
    if len(usable) < MIN_TO_FIT:
        return []
    unseen = _fit_folds(usable)
    margin = next((m for m in MARGINS if _is_honest(unseen, m, false_safe)), MARGINS[-1])
    rows = []
    for number in NUMBERS:
        served = [(measure, replay(table.scale(margin), measure, number)) for table, measure in unseen]
        for order in PassageOrder:
            mine = [done for measure, done in served if measure.order is order]
            if mine:
                rows.append(summarize(number, str(order), mine))
        rows.append(summarize(number, "all", [done for _, done in served]))
    return rows


def summarize(number: float, kind: str, served: Sequence[Served]) -> DialRow:
    """Means over prompts of one kind."""
    passed = [one for one in served if one.percent is not None]
    return DialRow(
        number,
        kind,
        len(served),
        len(passed),
        float(np.mean([one.work for one in served])),
        float(np.mean([one.nats for one in served])),
        float(np.mean([one.changed for one in served])),
        float(np.mean([one.nats > FALSE_SAFE_TIMES * number for one in passed])) if passed else 0.0,
    )


def _serve(way: WayMeasure, work: float, expected: float) -> Served:
    return Served(way.percent, work, way.moved.nats, way.moved.changed, expected)


def _list_usable(measures: Iterable[PromptMeasure]) -> list[PromptMeasure]:
    """Prompts that were measured by every way."""
    return [one for one in measures if len(one.ways) == len(RECOMPUTE_LEVELS)]


def _fit_folds(measures: Sequence[PromptMeasure]) -> list[tuple[DialTable, PromptMeasure]]:
    """Every prompt with a table that was fitted on others."""
    found = []
    for fold in range(_FOLDS):
        table = _fit([one for number, one in enumerate(measures) if number % _FOLDS != fold], 1.0)
        found += [(table, one) for one in measures[fold::_FOLDS]]
    return found


def _is_honest(unseen: Sequence[tuple[DialTable, PromptMeasure]], margin: float, false_safe: float) -> bool:
    """Whether, with this margin, no number serves more divergence or false safes than it says."""
    for number in NUMBERS:
        served = [replay(table.scale(margin), measure, number) for table, measure in unseen]
        passed = [one for one in served if one.percent is not None]
        if not passed:
            continue
        row = summarize(number, "served", passed)
        if row.nats > number or row.false_safe > false_safe:
            return False
    return True


def _fit(measures: Sequence[PromptMeasure], margin: float) -> DialTable:
    by_order = {order: [one for one in measures if one.order is order] for order in PassageOrder}
    means = {
        order: {
            percent: float(np.mean([way.moved.nats for one in mine if (way := one.find_way(percent))]))
            for percent in RECOMPUTE_LEVELS
        }
        for order, mine in by_order.items()
        if len(mine) >= MIN_OF_AN_ORDER
    }
    repair = {}
    for percent in RECOMPUTE_LEVELS:
        pairs = [(one, way) for one in measures if (way := one.find_way(percent))]
        if percent:
            seen = [make_repair_features(one.order, way.features) for one, way in pairs if way.features is not None]
            repair[percent] = fit_log_weights(seen, [way.moved.nats for _, way in pairs], deviation_at=0)
    return DialTable(means, repair).scale(margin)


def fit_log_weights(features: Sequence[Sequence[float]], nats: Sequence[float], deviation_at: int) -> tuple[float, ...]:
    """Least squares on logarithms; the constant makes up for what an average of logarithms misses.

    No weight but the constant is negative, and that of the deviation, which stands at ``deviation_at``, is at least
    `MIN_BY_DEVIATION`.
    """
    seen, target = np.array(features), np.log(np.array(nats) + _MIN_NATS)
    weights = solve_not_negative(seen, target - MIN_BY_DEVIATION * seen[:, deviation_at])
    weights[deviation_at] += MIN_BY_DEVIATION
    weights[-1] += math.log(float(np.mean(np.exp(target - seen @ weights))))
    return tuple(float(weight) for weight in weights)


def solve_not_negative(seen: FloatArray, target: FloatArray) -> FloatArray:
    """The best weights, the last of any sign, the others not negative: signs are few, so every choice is tried."""
    signs, best, least = seen.shape[1] - 1, np.zeros(seen.shape[1]), math.inf
    for chosen in product((False, True), repeat=signs):
        kept = np.flatnonzero([*chosen, True])
        some = seen[:, kept]
        found = np.linalg.solve(some.T @ some + RIDGE * np.eye(len(kept)), some.T @ target)
        loss = float(np.sum((target - some @ found) ** 2) + RIDGE * np.sum(found**2))
        if loss < least and bool((found[:-1] >= 0).all()):
            least, best = loss, np.zeros(seen.shape[1])
            best[kept] = found
    return best
