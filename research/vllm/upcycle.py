"""A model with experts made of a dense one: each expert is a copy of the dense layer, with as much noise as wished.

    python research/vllm/upcycle.py DENSE_FOLDER OUT_FOLDER [--noise 0.1] [--experts 4]

Equal experts answer as the dense model does, through vLLM's code for experts (Mixtral's class, the router is random). With
noise, a share of each matrix's deviation, they differ, and which of them a token meets depends on what stands before it.
Real answers of experts: no trained model with experts that is small enough was to be had. DENSE is a Llama.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

PARTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dense", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--experts", type=int, default=4)
    args = parser.parse_args()
    config = json.loads((args.dense / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": args.experts,
               "num_experts_per_tok": 2, "sliding_window": None, "router_jitter_noise": 0.0}  # fmt: skip
    drawn, made = torch.Generator().manual_seed(0), {}
    for name, weight in load_file(args.dense / "model.safetensors").items():
        layer, found, part = name.partition(".mlp.")
        if not found:
            made[name] = weight
            continue
        place = f"{layer}.block_sparse_moe"
        for number in range(args.experts):
            noise = args.noise * weight.std() * torch.randn(weight.shape, generator=drawn, dtype=weight.dtype)
            made[f"{place}.experts.{number}.{PARTS[part.partition('.')[0]]}.weight"] = weight + noise
        if f"{place}.gate.weight" not in made:
            made[f"{place}.gate.weight"] = torch.randn(args.experts, config["hidden_size"], generator=drawn) * 0.05
    args.out.mkdir(parents=True, exist_ok=True)
    for file in args.dense.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, args.out)
    (args.out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(made, args.out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
