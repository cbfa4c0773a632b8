"""Small models with random weights, as folders that vLLM loads. The tokenizer is that of the tests' own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write(kind: str, folder: Path, like: str) -> Path:
    """Write the folder of a kind of model, where it is not there yet."""
    if not (folder / "config.json").exists():
        writers = {"hybrid": _write_hybrid, "windowed": _write_windowed, "gptq": _write_gptq}
        writers[kind](folder, like)
    return folder


def _write_hybrid(folder: Path, like: str) -> None:
    """Four layers, every other one with a window of 64 tokens: two kinds of KV cache, as in Gemma."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **_sizes(like),
        head_dim=32,
        num_hidden_layers=4,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=32,
    )
    _write(Gemma3ForCausalLM, config, folder, like)


def _write_windowed(folder: Path, like: str) -> None:
    """Two layers, both with a window of 64 tokens: one kind of KV cache, and not a full one, as in Mistral 7B v0.1."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(**_sizes(like), num_hidden_layers=2, sliding_window=64)
    _write(MistralForCausalLM, config, folder, like)


def _sizes(like: str) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(like)
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": True,
    }


def _write(kind: Any, config: Any, folder: Path, like: str) -> None:
    import torch
    from transformers import AutoTokenizer

    torch.manual_seed(3)
    model = kind(config).to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # large enough that the answer depends on what is attended to
            if parameter.dim() > 1:
                parameter.mul_(4)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(like).save_pretrained(folder)


def _write_gptq(folder: Path, like: str) -> None:
    """A Llama of two layers, all of them in 4 bits, in groups of 32, as GPTQ stores them; rounded, not optimised."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    group = 32
    torch.manual_seed(3)
    config = LlamaConfig(**_sizes(like), num_hidden_layers=2, dtype="float16", architectures=["LlamaForCausalLM"])
    model = LlamaForCausalLM(config)
    state = {}
    for name, weight in model.state_dict().items():
        if not (name.endswith("_proj.weight") and ".layers." in name):
            if name != "lm_head.weight":  # tied to the embedding
                state[name] = weight.to(torch.float16).contiguous()
            continue
        rows, columns = weight.shape
        grouped = weight.view(rows, columns // group, group)
        scale = grouped.abs().amax(dim=2).clamp_min(1e-8) / 7
        number = (grouped / scale[..., None]).round().add(8).clamp(0, 15).view(rows, columns).t().to(torch.int64)
        nibbles = number.reshape(columns // 8, 8, rows)
        packed = sum(nibbles[:, place] << (4 * place) for place in range(8))
        stem = name.removesuffix("weight")
        state[f"{stem}qweight"] = ((packed + 2**31) % 2**32 - 2**31).to(torch.int32).contiguous()
        state[f"{stem}qzeros"] = torch.full((columns // group, rows // 8), 0x77777777, dtype=torch.int32)
        state[f"{stem}scales"] = scale.t().to(torch.float16).contiguous()
        state[f"{stem}g_idx"] = torch.arange(columns, dtype=torch.int32) // group
    config.quantization_config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(like).save_pretrained(folder)
    config.save_pretrained(folder)
