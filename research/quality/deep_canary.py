"""How far donor KV above layer 0 is off where nothing is wrong, and where it is damaged: the bound of the deep canary.

    semblend models pull smollm2-135m
    PYTHONPATH=src:bench python bench/deep_canary.py --data-dir DATA --prompts 12 --tokens 240 --damage-every 4
    PYTHONPATH=src:bench python bench/deep_canary.py --data-dir DATA --model MODEL.gguf --device cuda --dtype bfloat16

Every prompt is prepared in mode fast, with both tolerances off, and what the canary saw is its number. Natural: the
prompts of bench/quality.py (one document behind another instruction, edits, several donors, reordered, code, articles).
Damaged: the same prompts from donors whose layers above 0 were spoiled; layer 0 stays right, so that nothing else sees
it. `served`: how many of them would be. Layers and blocks are drawn anew for every prompt.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import _report  # first: it sets the number of threads
import numpy as np
import torch
from _quality_cases import SCENARIOS, Case, cases, choose_chat_form
from _quality_lab import Lab
from quality import default_model
from torch import Tensor

from semblend.engine.model.model import DecoderModel
from semblend.engine.model.pooled_model import PooledModel
from semblend.engine.model.tokenizer import ModelTokenizer
from semblend.materialize.blend.blender import Blender
from semblend.materialize.blend.quality import Blended, Placed, QualitySettings
from semblend.materialize.donors.donor_kv import DonorKv
from semblend.materialize.gate.canary import DEEP_TOLERANCE
from semblend.materialize.kv.rope import RopeSpec
from semblend.plan.reuse_plan import ReusePlan

MEASURE = QualitySettings(mode="fast", question_tokens=1, canary_tolerance=1e9, deep_tolerance=1e9)
BLOCK = 16
Damage = Callable[[Tensor, Tensor, np.random.Generator, RopeSpec], None]
"""Spoils keys and values of a donor, ``[layers, n, kv_heads, head_dim]``, in place; layer 0 is put back afterwards."""


def add_noise(x: Tensor, level: float, rng: np.random.Generator) -> None:
    """In place, ``level`` times the root mean square of each layer."""
    drawn = torch.from_numpy(rng.standard_normal(tuple(x.shape), dtype=np.float32)).to(x.device)
    x += (drawn * x.float().square().mean((1, 2, 3), keepdim=True).sqrt() * level).to(x.dtype)


def make_noise(level: float) -> Damage:
    def spoil(k: Tensor, v: Tensor, rng: np.random.Generator, rope: RopeSpec) -> None:
        del rope
        add_noise(k, level, rng)
        add_noise(v, level, rng)

    return spoil


def take_others(k: Tensor, v: Tensor, rng: np.random.Generator, rope: RopeSpec) -> None:
    """KV of other tokens of the text, in a random order: as another document's at the right positions."""
    del rope
    order = torch.from_numpy(rng.permutation(k.shape[1]))
    k[:], v[:] = k[:, order], v[:, order]


def roll(by: int) -> Damage:
    def spoil(k: Tensor, v: Tensor, rng: np.random.Generator, rope: RopeSpec) -> None:
        del rng, rope
        k[:], v[:] = k.roll(by, 1), v.roll(by, 1)

    return spoil


def swap_layers(k: Tensor, v: Tensor, rng: np.random.Generator, rope: RopeSpec) -> None:
    del rope
    layer = int(rng.integers(1, len(k) - 1))
    for x in (k, v):
        x[[layer, layer + 1]] = x[[layer + 1, layer]]


def turn_keys(k: Tensor, v: Tensor, rng: np.random.Generator, rope: RopeSpec) -> None:
    """Keys as if they stood a block further."""
    del v, rng
    cos, sin = rope.cos_sin(torch.full((k.shape[1],), BLOCK, device=k.device))
    for layer in range(len(k)):
        k[layer] = rope.rotate(k[layer], cos, sin)


def empty_rows(share: float) -> Damage:
    """The last ``share`` of the tokens are zeros: pages that were never written."""

    def spoil(k: Tensor, v: Tensor, rng: np.random.Generator, rope: RopeSpec) -> None:
        del rng, rope
        first = int(k.shape[1] * (1 - share))
        k[:, first:], v[:, first:] = 0, 0

    return spoil


def spoil_one_layer(k: Tensor, v: Tensor, rng: np.random.Generator, rope: RopeSpec) -> None:
    del rope
    layer = int(rng.integers(1, len(k)))
    for x in (k, v):
        add_noise(x[layer : layer + 1], 1.0, rng)


def spoil_one_block(k: Tensor, v: Tensor, rng: np.random.Generator, rope: RopeSpec) -> None:
    del rope
    first = int(rng.integers(0, max(1, k.shape[1] - BLOCK)))
    for x in (k, v):
        add_noise(x[:, first : first + BLOCK], 1.0, rng)


def empty_keys(k: Tensor, v: Tensor, rng: np.random.Generator, rope: RopeSpec) -> None:
    del v, rng, rope
    k.zero_()


DAMAGES: dict[str, Damage] = {
    "noise, 0.1 of their size": make_noise(0.1),
    "noise, 0.2": make_noise(0.2),
    "noise, 0.3": make_noise(0.3),
    "noise, 0.5": make_noise(0.5),
    "noise, 1": make_noise(1.0),
    "of other tokens": take_others,
    "of the token before": roll(1),
    "of the block before": roll(BLOCK),
    "two layers swapped": swap_layers,
    "keys turned by a block": turn_keys,
    "keys zeroed": empty_keys,
    "all zeroed": empty_rows(1.0),
    "second half zeroed": empty_rows(0.5),
    "one layer noise": spoil_one_layer,
    "one block noise": spoil_one_block,
}


def measure(lab: Lab, case: Case, kv: DonorKv, number: int) -> float | None:
    """What the canary sees above layer 0; None where it does not look."""
    blocks: list[int] = []
    slots = lab._slots(len(case.tokens), blocks)
    try:
        blender = Blender(PooledModel(lab.model, lab.pool), kv, MEASURE)
        blender._passes.prompts_checked = number  # other rows for every prompt, the same for all damages
        done = blender.prepare(Placed(case.tokens, slots), ReusePlan(case.spans, len(case.tokens)))
    finally:
        lab.pool.free(blocks)
    if not isinstance(done, Blended):
        return float("inf")  # logits that are no numbers: refused by another check
    return done.deep


def damage_donors(kv: DonorKv, case: Case, spoil: Damage, seed: int, rope: RopeSpec) -> Callable[[], None]:
    """Spoils the donors of a case; returns what mends them."""
    kept: list[tuple[Tensor, Tensor]] = []
    rng = np.random.default_rng(seed)
    for name in dict.fromkeys(span.donor_id for span in case.spans):
        held = kv.acquire(name, 0)
        assert held is not None
        kept += [(x, x.clone()) for x in (held.k, held.v)]
        spoil(held.k, held.v, rng, rope)
        for x, was in kept[-2:]:
            x[0] = was[0]
        kv.release(held)

    def mend() -> None:
        for x, was in kept:
            x.copy_(was)

    return mend


def describe(values: list[float]) -> list[float]:
    low, middle, high = np.quantile(values, (0.01, 0.5, 0.999), method="nearest")
    return [min(values), float(low), float(middle), float(high), max(values)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    _report.add_common_arguments(parser, "deep_canary")
    parser.add_argument("--model", default=default_model(), help="GGUF file or folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None, help="float32, bfloat16 or float16; default: float32 on a CPU")
    parser.add_argument("--prompts", type=int, default=20, help="cases of each scenario")
    parser.add_argument("--tokens", type=int, default=600, help="tokens of a document, at most")
    parser.add_argument("--damage-every", type=int, default=1, help="every so many prompts are damaged too")
    parser.add_argument("--budget-s", type=float, default=0.0, help="begin no prompt after this long; 0: no limit")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.tokens = 1, 240
    report, begun = _report.Report("deep_canary", args), time.perf_counter()
    model = DecoderModel.load(args.model, args.device, getattr(torch, args.dtype) if args.dtype else None)
    tokenizer = ModelTokenizer.load(args.model)
    lab = Lab(model, tokenizer, [], longest=args.tokens * 2 + 400)
    encode: Callable[[str], list[int]] = lambda text: tokenizer.encode(text, add_special=False)  # noqa: E731
    natural: dict[str, list[float]] = {}
    damaged: dict[str, list[float]] = {name: [] for name in DAMAGES}
    made = cases(_report.data_dir(args), encode, scenarios=list(SCENARIOS), prompts=args.prompts,
                 tokens=args.tokens, seed=args.seed, form=choose_chat_form(encode))  # fmt: skip
    seen: set[tuple[object, ...]] = set()
    number = 0
    with torch.inference_mode():
        for case in made:
            if args.budget_s and time.perf_counter() - begun > args.budget_s:
                report.note("stopped by --budget-s")
                break
            shape = (case.donors, case.spans)
            if shape in seen:  # another question behind the same text: the canary sees the same
                continue
            seen.add(shape)
            number += 1
            kv = lab._captured(case.donors)
            found = measure(lab, case, kv, number)
            if found is None:
                continue
            natural.setdefault(case.scenario, []).append(found)
            for name, spoil in DAMAGES.items() if number % args.damage_every == 0 else ():
                mend = damage_donors(kv, case, spoil, number, model.spec.rope)
                damaged[name].append(measure(lab, case, kv, number) or 0.0)
                mend()
            _report.progress(f"{time.perf_counter() - begun:6.0f} s  {case.case_id}  {found:.3f}")
    everything = [value for values in natural.values() for value in values]
    rows = {**natural, "all of these": everything, **{name: values for name, values in damaged.items() if values}}
    report.table(
        f"How far donor KV above layer 0 is off, {Path(args.model).name}",
        ["donor KV", "n", "least", "1 %", "median", "99.9 %", "most", "served"],
        [[name, len(values), *describe(values), sum(value <= DEEP_TOLERANCE for value in values)]
         for name, values in rows.items()],
    )  # fmt: skip
    report.note(f"the bound is {DEEP_TOLERANCE}; 1 is what rows of a layer differ by")
    report.write(args.out)


if __name__ == "__main__":
    main()
