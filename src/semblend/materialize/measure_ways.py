"""What each way to fill a prompt does to its answer, and what a cold answer does by itself: the dial's measurements.

A prompt is prepared cold, by donor KV alone, and by each step of the gate alone. Its cold greedy answer is then given
to all of them. Two yardsticks go with it: the same prompt computed cold in chunks (*rerun noise*: rounding alone), and,
where its passages came in another order, cold with the passages changing places (*order noise*: what two retrievals of
the same passages do).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from semblend.errors import InputError
from semblend.materialize.blend.blender import Blender
from semblend.materialize.blend.quality import Blended, Placed, QualitySettings
from semblend.materialize.contract import Model, Rows
from semblend.materialize.donors.tiers import DonorKv
from semblend.materialize.gate.thresholds import WAYS, PassageOrder, PlanShape, RiskFeatures, Thresholds, next_token_kl
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
_LOOK = Thresholds(1e9, 1e9, 1e9, begin_prefill=1e9)  # accepts everything, and glances at layer 1


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

    ``first_nats``: divergence of the first token alone. ``features`` and ``glance``: None for a splice, which shows
    nothing of itself.
    """

    percent: int
    moved: Moved
    first_nats: float
    work: float
    glance: float | None = None
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

    @property
    def glance(self) -> float | None:
        """The layer-1 deviation; the same for all ways, because it comes before them."""
        return next((way.glance for way in self.ways if way.glance is not None), None)

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
    for percent in WAYS:
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
        found.append(WayMeasure(percent, compare(done.logits_last), first, done.work, done.glance, done.features))
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
