"""Small models with random weights, as folders that vLLM loads. The tokenizer is that of the tests' own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write(kind: str, folder: Path, like: str) -> Path:
    """Write the folder of a kind of model, where it is not there yet."""
    if not (folder / "config.json").exists():
        writers = {
            "hybrid": _write_hybrid,
            "windowed": _write_windowed,
            "four bits": _write_four_bits,
            "latents": _write_latents,
            "latents and experts": _write_latents_and_experts,
        }
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


LATENTS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
LATENTS |= {"num_key_value_heads": 4, "num_hidden_layers": 3, "tie_word_embeddings": False}
"""The latents of all DeepSeek models: vLLM's kernel for CPUs knows no other."""

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
YARN |= {"beta_fast": 32, "beta_slow": 1}
"""Without it vLLM's package for CPUs rotates wrongly by itself: its kernel takes the keys for one piece of memory."""


def _write_latents(folder: Path, like: str) -> None:
    """Three dense layers with latent attention and YaRN, as in DeepSeek-V2-Lite."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        **(_sizes(like) | LATENTS),
        first_k_dense_replace=3,
        q_lora_rank=None,
        rope_parameters=YARN | {"mscale": 0.707, "mscale_all_dim": 0.5},
    )
    _write(DeepseekV2ForCausalLM, config, folder, like)


def _write_latents_and_experts(folder: Path, like: str) -> None:
    """Three layers with latent attention and compressed queries, two of them with experts, as in DeepSeek-V3."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **(_sizes(like) | LATENTS),
        first_k_dense_replace=1,
        q_lora_rank=64,
        topk_method="noaux_tc",  # what vLLM reads, and the files of DeepSeek-V3 say
        scoring_func="sigmoid",
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=64,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    )
    _write(DeepseekV3ForCausalLM, config, folder, like)


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


def _write_four_bits(folder: Path, like: str) -> None:
    """The first four layers of the tests' own model in 4 bits, one scale a channel; rounded, not optimised.

    In the format of compressed-tensors for 4-bit weights and 8-bit activations: of the 4-bit kernels of vLLM's CPU
    package the only one that an ARM CPU has. GPTQ and AWQ end there with "no attribute 'cpu_gemm_wna16'". On x86
    it is a plain loop: all thirty layers took more than six minutes for five prompts.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(like)
    config.num_hidden_layers = 4
    model = AutoModelForCausalLM.from_pretrained(like, config=config, dtype=torch.float32)
    state = {}
    for name, weight in model.state_dict().items():
        if name.endswith("_proj.weight") and ".layers." in name:
            scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-8) / 7
            state[name] = (weight / scale).round().clamp(-8, 7).to(torch.int8)
            state[f"{name}_scale"] = scale
        elif name != "lm_head.weight":  # tied to the embedding
            state[name] = weight.contiguous()
    common = {"type": "int", "symmetric": True}
    config.quantization_config = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "strategy": "channel", "dynamic": False, **common},
                "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True, **common},
            }
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(like).save_pretrained(folder)
    config.save_pretrained(folder)
