"""Drafts with random weights for the small model (`small_model`), as vLLM's ways of speculation want them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

MTP_LAYER = ("token_layernorm", "hidden_layernorm", "final_layernorm")


def limit_words(folder: Path, count: int) -> None:
    """Let a model say the first ``count`` tokens only: even a draft that guesses is right now and then."""
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][count:] = 0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def write_draft(method: str, folder: Path, target: Path) -> tuple[str, dict[str, Any]]:
    """The target's folder, another one where its weights hold the draft, and what to say as ``speculative_config``.

    A draft model is the target itself, so that nearly all that it says is accepted where it has seen the prompt.
    """
    if method == "ngram":
        return str(target), {
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    if method == "draft_model":
        return str(target), {"method": method, "model": str(target), "num_speculative_tokens": 3}
    config = json.loads((target / "config.json").read_text())
    weights = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    width = config["hidden_size"]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.05

    layer = {
        name.removeprefix("model.layers.0."): weight.clone()
        for name, weight in weights.items()
        if name.startswith("model.layers.0.")
    }
    shutil.copytree(target, folder)
    if method == "mtp":
        config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
        made = {name: torch.ones(width) for name in (f"{norm}.weight" for norm in MTP_LAYER)}
        made |= layer | {"input_proj.weight": draw(width, 2 * width)}
        _write(folder, config, weights | {f"model.mtp_layers.0.{name}": weight for name, weight in made.items()})
        return str(folder), {"method": method, "num_speculative_tokens": 1}
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    config.pop("layer_types", None)
    plain = {name: weight for name, weight in layer.items() if not name.endswith("_proj.bias")}
    if method == "eagle":
        del plain["input_layernorm.weight"]
        made = {f"layers.0.{name}": weight for name, weight in plain.items()} | {"fc.weight": draw(width, 2 * width)}
    else:
        for name in ("q", "k", "v"):
            at = f"self_attn.{name}_proj.weight"
            plain[at] = draw(len(plain[at]), 2 * width)
        plain["hidden_norm.weight"] = torch.ones(width)
        made = {f"midlayer.{name}": weight for name, weight in plain.items()}
        made |= {"fc.weight": draw(width, 3 * width), "norm.weight": torch.ones(width)}
        made["lm_head.weight"] = draw(config["vocab_size"], width)
        config["draft_vocab_size"] = config["vocab_size"]
    _write(folder, config, made)
    return str(target), {"method": method, "model": str(folder), "num_speculative_tokens": 3}


def _write(folder: Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )
