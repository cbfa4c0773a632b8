"""Measures where the gate of a model may open: what a repair shows, the true damage, and what follows from them.

Every prompt is prepared cold, and once with each step alone. Each step gives features (`materialize.gate.risk`) and
the divergence from cold of what would have been served. From all prompts: weights that turn features into an expected
divergence, the largest expected divergence at which few of the prompts that pass are damaged (*false-safe*), and the
layer-1 deviations from which a small step is seldom enough.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import torch

from semblend.errors import InputError
from semblend.materialize.blend.quality import QualitySettings
from semblend.materialize.contract import Model
from semblend.materialize.gate.dial import DialTable
from semblend.materialize.gate.risk import RiskFeatures, RiskModel, fit_weights
from semblend.materialize.gate.thresholds import STEPS, Thresholds
from semblend.materialize.measure_ways import CalibrationPrompt, PromptMeasure, measure_prompt
from semblend.materialize.pool import Pool

HARM = 0.02
"""Nats of first-token divergence from cold that count as damage: about what an 8-bit KV cache costs, ten times over."""
FALSE_SAFE = 0.02
LEAST_TO_FIT = 24
"""Fewer prompts cannot weigh four numbers: the gate then goes by how far the distribution still moves."""
_FOLDS = 4


@dataclass(frozen=True, slots=True)
class Pair:
    """After ``step`` percent: what could be seen, and the true divergence from cold of what would be served.

    ``glance`` is what layer 1 showed before the repair.
    """

    step: int
    features: RiskFeatures
    glance: float
    true_kl: float


@dataclass(frozen=True, slots=True)
class Choice:
    """A threshold, the share of pairs that pass it, and the share of those that are damaged."""

    threshold: float
    passing: float
    false_safe: float
    pairs: int


def calibrate(
    model: Model,
    prompts: Sequence[CalibrationPrompt],
    *,
    pool: Pool,
    model_name: str,
    harm: float = HARM,
    false_safe: float = FALSE_SAFE,
) -> Thresholds:
    """The table of a model from real prompts; ``pool`` must hold the longest prompt and its longest donor."""
    pairs = [pair for prompt in prompts for pair in measure(model, prompt, pool=pool)]
    tokens = sum(len(prompt.tokens) for prompt in prompts)
    return table_of(
        pairs, pool=pool, model_name=model_name, prompts=len(prompts), tokens=tokens, harm=harm, false_safe=false_safe
    )


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
    enough = min(map(len, by_step.values())) >= LEAST_TO_FIT
    risk = RiskModel(
        {step: fit_weights([(p.features, p.true_kl) for p in by_step[step]]) for step in STEPS} if enough else {}
    )
    expected = {step: _expect(by_step[step], fit=enough) for step in STEPS}
    chosen = {
        step: choose(list(zip(expected[step], (p.true_kl for p in by_step[step]), strict=True)), harm, false_safe)
        for step in STEPS
    }
    begins = {
        name: begin(
            [(p.glance, e <= chosen[step].threshold) for p, e in zip(by_step[step], expected[step], strict=True)]
        )
        for name, step in (("begin_20", 10), ("begin_40", 20), ("begin_prefill", 40))
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
        begin_20=begins["begin_20"],
        begin_40=begins["begin_40"],
        begin_prefill=begins["begin_prefill"],
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


def measure(
    model: Model,
    prompt: CalibrationPrompt,
    *,
    pool: Pool,
    settings: QualitySettings | None = None,
) -> list[Pair]:
    """One prompt cold, and through every step of the gate alone; the first token only."""
    done = measure_prompt(model, prompt, pool=pool, settings=settings, answer_tokens=1, yardsticks=False)
    return list_pairs(done)


def list_pairs(measure: PromptMeasure) -> list[Pair]:
    """What a measured prompt says about thresholds."""
    return [
        Pair(way.percent, way.features, way.glance, way.first_nats)
        for way in measure.ways
        if way.percent in STEPS and way.features is not None and way.glance is not None
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


def begin(seen: Sequence[tuple[float, bool]]) -> float:
    """The layer-1 deviation from which on fewer than half of the prompts passed a step: it need not be tried there.

    >>> begin([(.01, True), (.02, True), (.05, False), (.06, False), (.07, False), (.08, False)])
    0.05
    >>> begin([(.01, True), (.02, True)])
    inf
    """
    found, passed = math.inf, 0
    for count, (deviation, passes) in enumerate(sorted(seen, reverse=True), start=1):
        passed += passes
        if count >= 4 and passed * 2 < count and not passes:
            found = deviation
        elif passed * 2 >= count:
            break
    return found
