"""Claim: a document under another instruction starts answering many times sooner than cold, in the embedded engine.

    python bench/ttft.py --model smollm2-135m --lengths 1024 4096          # real weights on the CPU
    python bench/ttft.py --device cuda --model shape:qwen2.5-7b --lengths 4096 8192 16384 24576 32768

Each cell has its own documents: a donor prompt is answered first (instruction A, the document), then the recipient
(instruction B, the same document, a question). Arms, in random order within a round: cold (another document nobody has
seen, the same lengths), exact (the identical prompt again: the floor), fast, balanced. TTFT is the engine's own, from
submission to the first token, taken from the receipt, lookup included. Random weights show speed, not quality: their
gate says nothing, so `balanced` is shown with real weights, and as a fixed 10 % repair with a shape.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import replace
from typing import Any

import _report
import numpy as np
import torch

from semblend import Prompt, SemBlend, SemBlendConfig
from semblend.engine.assemble import assemble
from semblend.engine.engine import Engine
from semblend.engine.model import Model
from semblend.engine.request import Request
from semblend.engine.sampling import Sampling
from semblend.engine.settings_of_engine import EngineConfig
from semblend.engine.spec import ModelSpec
from semblend.materialize.quality import QualitySettings, Step
from semblend.materialize.thresholds import Thresholds

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
    "qwen2.5-1.5b": {
        "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 131072, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    },
    "tiny": {
        "model_type": "qwen2", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 5000, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 131072, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    },
}  # fmt: skip
INSTRUCTION_A, INSTRUCTION_B, QUESTION = 64, 24, 32


def load(name: str, device: str) -> Model:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if name.startswith("shape:"):
        spec = ModelSpec.from_hf_config(SHAPES[name.removeprefix("shape:")])
        return random_model(spec, device, dtype)
    from semblend.models import resolve

    return Model.load(resolve(name), device, dtype)


def random_model(spec: ModelSpec, device: str, dtype: torch.dtype) -> Model:
    """Random weights made on the device itself: a 7B shape takes seconds instead of minutes."""
    small = replace(spec, layers=1)
    first = Model.random(small, 0, device, dtype)
    layers = tuple(first.weights.layers[0] for _ in range(spec.layers))  # one layer's weights, used again
    return Model(spec, replace(first.weights, layers=layers))


class Cell:
    """One length: its documents, its engine, and the arms' times."""

    def __init__(self, model: Model, length: int, tier: str, seed: int, *, gated: bool) -> None:
        self.rng = np.random.default_rng(seed)
        self.model, self.length = model, length
        bytes_ = model.spec.kv_bytes_per_token * 2 * (length + 256) * 8
        self.engine: Engine = assemble(
            model,
            pool_tokens=3 * (length + 512),
            config=EngineConfig(quality="fast", step_tokens=1 << 20, max_running=4),
            semblend=SemBlend(SemBlendConfig(embedder="none", metrics=False)),
            quality=QualitySettings() if gated else FIXED,
            donor_device_bytes=bytes_ if tier == "device" else 0,
            donor_host_bytes=bytes_,
        )
        self.count = 0

    def tokens(self, count: int) -> np.ndarray:
        return self.rng.integers(10, self.model.spec.vocab - 10, count)

    def ask(self, ids: np.ndarray, quality: str) -> Any:
        self.count += 1
        request = Request(f"r{self.count}", Prompt(ids), Sampling(temperature=0.0, max_tokens=1), quality=quality)
        stream = self.engine.submit(request)
        while self.engine.has_work:
            self.engine.step()
        return stream.completion().receipt

    def round(self, arms: list[str]) -> dict[str, Any]:
        """Prime a donor, then every arm once; the exact cache is emptied before each but `exact`."""
        document = self.tokens(self.length - INSTRUCTION_B - QUESTION)
        self.engine.reset_prefix_cache()
        self.ask(np.concatenate([self.tokens(INSTRUCTION_A), document]), "exact")
        receipts: dict[str, Any] = {}
        for arm in random.Random(self.count).sample(arms, len(arms)):
            ids = np.concatenate([self.tokens(INSTRUCTION_B), document, self.tokens(QUESTION)])
            if arm == "cold":
                ids = self.tokens(self.length)
            if arm == "exact":
                self.ask(ids, "exact")
                ids = np.concatenate([ids, self.tokens(1)])
            else:
                self.engine.reset_prefix_cache()
            receipts[arm] = self.ask(ids, "exact" if arm in ("cold", "exact") else arm)
        return receipts


# A random model's distributions never stand still: accept after the first repair, so that 10 % is what is timed.
FIXED = QualitySettings(steps=(Step(10, "attended"),), thresholds=Thresholds(1e9, 1e9, 1e9))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", default="smollm2-135m", help=f"a model name or path, or shape:{'|'.join(SHAPES)}")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tier", default="", choices=["", "device", "host"], help="where donor KV lies")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="bench/results/ttft.json")
    args = parser.parse_args()
    tier = args.tier or ("device" if args.device == "cuda" else "host")
    report = _report.Report("ttft", args)
    model = load(args.model, args.device)
    arms = ["cold", "exact", "fast", "balanced"]
    rows = []
    for length in args.lengths:
        cell = Cell(model, length, tier, args.seed, gated=not args.model.startswith("shape:"))
        for _ in range(2):
            cell.round(arms)  # warm-up: allocations, kernels
        taken = [cell.round(arms) for _ in range(args.rounds)]
        report.add(f"ttft_ms_{length}", {arm: [r[arm].ttft_ms for r in taken] for arm in arms})
        cold = float(np.median([r["cold"].ttft_ms for r in taken]))
        for arm in arms:
            receipts = [r[arm] for r in taken]
            ttft = np.array([r.ttft_ms for r in receipts])
            median = float(np.median(ttft))
            one = receipts[0]
            rows.append(
                [length, arm, len(taken), median, float(ttft.min()), float(ttft.max()), cold / median,
                 float(np.median([r.lookup_ms or 0 for r in receipts])), one.exact_tokens, one.reused_tokens,
                 one.recomputed_tokens, one.prefill_tokens]
            )  # fmt: skip
        _report.progress(f"{length}: done")
    report.table(
        f"TTFT, {args.model} on {args.device}, donor KV in {tier} memory",
        ["tokens", "arm", "n", "p50 ms", "min", "max", "times faster", "lookup ms", "exact", "reused", "recomputed",
         "prefilled"],
        rows,
    )  # fmt: skip
    report.write(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
