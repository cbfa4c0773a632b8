"""Time to first token of vLLM itself, cold and with an exact prefix hit, for `bench/ttft.py --vllm-json`.

    python bench/lib/ttft_vllm.py --lengths 4096 8192 12288 16384 24576 32768 --rounds 15 --out vllm.json

Needs a GPU and vLLM 0.26, and no network: a folder with a config.json is all of the model (load_format="dummy"), so
this is the real speed of the shape, eager as our engine is, and no real text. It needs nothing of this project, so that
the file can be run alone. A length that fails is written down with its error, and the others go on; the file is
written after each length.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

# Read by vLLM when it is imported: one process, so that the clock sees all; nothing is looked up in a network.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_USE_FLASHINFER_SAMPLER="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    HF_HUB_OFFLINE="1",
)
SCHEMA = "semblend.bench.vllm.v1"
QWEN2_5_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 3584,
    "initializer_range": 0.02, "intermediate_size": 18944, "max_window_layers": 28, "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 152064, "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
ROOM = 256  # positions beyond the longest prompt


class Vllm:
    """One engine for all lengths; prompts are random tokens, so that only what we repeat can hit its prefix cache."""

    def __init__(self, folder: Path, longest: int, memory: float) -> None:
        import torch
        from vllm import LLM, SamplingParams

        folder.mkdir(parents=True, exist_ok=True)
        config = QWEN2_5_7B | {"max_position_embeddings": longest + ROOM}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        self._torch = torch
        self._rng = random.Random(0)
        self._sampling = SamplingParams(max_tokens=1, detokenize=False, temperature=0)
        self._llm = LLM(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=longest + ROOM,
            max_num_batched_tokens=longest + ROOM,  # a prompt in one step, as our engine computes it
            enable_prefix_caching=True,
            gpu_memory_utilization=memory,
            enforce_eager=True,
            dtype="bfloat16",
        )

    def prompt(self, tokens: int) -> list[int]:
        return [self._rng.randrange(150000) for _ in range(tokens)]

    def ask(self, ids: list[int]) -> tuple[float, int]:
        """Milliseconds to the only token of the answer, and how many tokens came from the prefix cache."""
        self._torch.cuda.synchronize()
        started = time.perf_counter()
        (answer,) = self._llm.generate([{"prompt_token_ids": ids}], self._sampling, use_tqdm=False)
        self._torch.cuda.synchronize()
        return (time.perf_counter() - started) * 1e3, int(answer.num_cached_tokens or 0)

    def measure(self, tokens: int, rounds: int, warm_up: int) -> dict[str, Any]:
        """Each round: a prompt nobody has seen, then the same and one token more."""
        cold_ms, exact_ms, cached = [], [], []
        for number in range(warm_up + rounds):
            ids = self.prompt(tokens)
            cold, none = self.ask(ids)
            hit, some = self.ask([*ids, *self.prompt(1)])
            if none:
                raise RuntimeError(f"{none} tokens of a new prompt came from the prefix cache")
            if number >= warm_up:
                cold_ms.append(cold)
                exact_ms.append(hit)
                cached.append(some)
        return {"tokens": tokens, "cold_ms": cold_ms, "exact_ms": exact_ms, "cached_tokens": cached}


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": sys.version.split()[0]}
    for name in ("vllm", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 12288, 16384, 24576, 32768])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--memory", type=float, default=0.5, help="share of the GPU's memory that vLLM takes")
    parser.add_argument("--folder", default="qwen2.5-7b-shape", help="where the model's config.json is written")
    parser.add_argument("--out", default="vllm.json")
    args = parser.parse_args()
    result: dict[str, Any] = {"schema": SCHEMA, "model": "shape:qwen2.5-7b", "versions": versions(), "cells": []}

    def write() -> None:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    try:
        engine = Vllm(Path(args.folder), max(args.lengths), args.memory)
        result["device"] = engine._torch.cuda.get_device_name()
    except Exception as error:  # whatever it is, the file must say it: the machine may be gone when we look
        result["cells"] = [{"tokens": n, "error": f"start: {type(error).__name__}: {error}"} for n in args.lengths]
        write()
        raise
    for tokens in args.lengths:
        try:
            cell = engine.measure(tokens, args.rounds, args.warm_up)
        except Exception as error:  # the other lengths may go well
            cell = {"tokens": tokens, "error": f"{type(error).__name__}: {error}"}
        result["cells"].append(cell)
        write()
        print(json.dumps(cell), flush=True)
    return 1 if any("error" in cell for cell in result["cells"]) else 0


if __name__ == "__main__":
    sys.exit(main())
