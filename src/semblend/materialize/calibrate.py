"""Measures where the gate of a model may open: pairs of (signal, true damage), and the threshold that they allow.

Every prompt is prepared once with a gate that never opens. Each repair gives a signal (how far it moved the next-token
distribution), and the full prefill at the end gives the truth about it: the divergence of what would have been served
from cold. A threshold is the largest signal below which at most a given share of prompts is damaged (*false-safe*).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from semblend.errors import InputError
from semblend.materialize.blend import Blender
from semblend.materialize.donor_kv import DonorKv
from semblend.materialize.probe import Model, RowsOf, next_token_kl
from semblend.materialize.quality import Pass, Placed, QualitySettings
from semblend.materialize.thresholds import STEPS, Thresholds
from semblend.plan.reuse_plan import Decline, ReusePlan
from semblend.span import Span

HARM = 0.02
"""Nats of first-token divergence from cold that count as damage: about what an 8-bit KV cache costs, ten times over."""
FALSE_SAFE = 0.02
_NEVER = Thresholds(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class CalibrationPrompt:
    """A prompt, the prompts that were served before it, and what they share; spans name donors "0", "1", …"""

    tokens: tuple[int, ...]
    donors: tuple[tuple[int, ...], ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """After ``step`` percent: what the gate saw, and the true divergence from cold of what would be served."""

    step: int
    signal: float
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
    rows_of: RowsOf,
    pool: Any,
    model_name: str,
    harm: float = HARM,
    false_safe: float = FALSE_SAFE,
) -> Thresholds:
    """The table of a model from real prompts; ``pool`` must hold the longest prompt and its longest donor."""
    pairs = [pair for prompt in prompts for pair in measure(model, prompt, rows_of=rows_of, pool=pool)]
    tokens = sum(len(prompt.tokens) for prompt in prompts)
    return table_of(
        pairs, pool=pool, model_name=model_name, prompts=len(prompts), tokens=tokens, harm=harm, false_safe=false_safe
    )


def table_of(
    pairs: Sequence[Pair],
    *,
    pool: Any,
    model_name: str,
    prompts: int,
    tokens: int,
    harm: float = HARM,
    false_safe: float = FALSE_SAFE,
) -> Thresholds:
    """The table that measured pairs allow; ``prompts`` and ``tokens`` say how much they were measured on."""
    if not pairs:
        raise InputError("no prompt could be measured", hint="give prompts that share at least 32 tokens with a donor")
    chosen = {step: choose([p for p in pairs if p.step == step], harm=harm, false_safe=false_safe) for step in STEPS}
    provenance = {
        "model": model_name,
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "device": str(pool.k.device),
        "dtype": str(pool.k.dtype).removeprefix("torch."),
        "prompts": prompts,
        "tokens": tokens,
        "harm": harm,
        "false_safe_target": false_safe,
        "steps": {
            str(step): {"pairs": c.pairs, "passing": c.passing, "false_safe": c.false_safe}
            for step, c in chosen.items()
        },
    }
    values = {f"kl_{step}": choice.threshold for step, choice in chosen.items()}
    return Thresholds(**values, provenance=provenance)


def measure(
    model: Model,
    prompt: CalibrationPrompt,
    *,
    rows_of: RowsOf,
    pool: Any,
    settings: QualitySettings | None = None,
) -> list[Pair]:
    """One prompt through every step of the gate and a full prefill."""
    donor_kv = DonorKv(0, 1 << 62)
    for number, donor in enumerate(prompt.donors):
        _donate(model, donor_kv, str(number), donor, rows_of, pool)
    asked = replace(settings or QualitySettings(), mode="balanced", thresholds=_NEVER, latency_budget_ms=0.0)
    seen: list[tuple[Pass, Tensor]] = []
    blocks = pool.allocate(pool.blocks_for(len(prompt.tokens)))
    try:
        target = Placed(prompt.tokens, pool.slots_of(blocks, 0, len(prompt.tokens)))
        blender = Blender(model, pool, donor_kv, asked, rows_of=rows_of)
        plan = ReusePlan(prompt.spans, len(prompt.tokens))
        done = blender.prepare(target, plan, on_pass=lambda one, logits: seen.append((one, logits.clone())))
    finally:
        pool.free(blocks)
    if isinstance(done, Decline):
        raise InputError(f"a calibration prompt was declined: {done.detail}", hint="check its spans")
    cold = done.logits_last
    return [
        Pair(step, one.kl, next_token_kl(cold, logits))
        for one, logits in seen
        for step in STEPS
        if one.name == f"repair {step} %" and one.kl is not None
    ]


def choose(pairs: Sequence[Pair], *, harm: float, false_safe: float) -> Choice:
    """The largest signal at which at most ``false_safe`` of the prompts that pass are damaged by more than ``harm``.

    >>> choose([Pair(10, .001, 0.), Pair(10, .5, .9)], harm=.02, false_safe=0.).threshold
    0.001
    """
    best = Choice(0.0, 0.0, 0.0, len(pairs))
    damaged = 0
    ordered = sorted(pairs, key=lambda pair: pair.signal)
    for passing, pair in enumerate(ordered, start=1):
        damaged += pair.true_kl > harm
        tied = passing < len(ordered) and ordered[passing].signal == pair.signal
        if not tied and damaged <= false_safe * passing:
            best = Choice(pair.signal, passing / len(pairs), damaged / passing, len(pairs))
    return best


def _donate(
    model: Model, donor_kv: DonorKv, donor_id: str, tokens: tuple[int, ...], rows_of: RowsOf, pool: Any
) -> None:
    """Computes a donor cold and captures it."""
    blocks = pool.allocate(pool.blocks_for(len(tokens)))
    try:
        slots = pool.slots_of(blocks, 0, len(tokens))
        positions = torch.arange(len(tokens), device=slots.device)
        model.forward(rows_of(torch.tensor(tokens, device=slots.device), positions, slots), pool)
        donor_kv.capture(donor_id, 0, pool, slots)
    finally:
        pool.free(blocks)
