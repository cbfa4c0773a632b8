"""Small models with random weights, as folders that vLLM loads. The tokenizer is that of the tests' own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write(kind: str, folder: Path, like: str) -> Path:
    """Write the folder of a kind of model, where it is not there yet."""
    if not (folder / "config.json").exists():
        writers = {
            "hybrid": _write_hybrid,
            "soft cap": _write_soft_cap,
            "sinks": _write_sinks,
            "no rope": _write_without_rope_in_full_layers,
            "windowed": _write_windowed,
            "four bits": _write_four_bits,
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


BOTH = {"num_hidden_layers": 4, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}


def _write_soft_cap(folder: Path, like: str) -> None:
    """As Gemma 2: scores of attention are capped, and all layers rotate alike."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(**_sizes(like), **BOTH, head_dim=32, query_pre_attn_scalar=32, attn_logit_softcapping=5.0)
    _write(Gemma2ForCausalLM, config, folder, like)


def _write_sinks(folder: Path, like: str) -> None:
    """As gpt-oss: sinks in every layer, YaRN that is not truncated, experts."""
    from transformers import GptOssConfig, GptOssForCausalLM

    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "rope_theta": 150_000.0}
    yarn |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    sizes = _sizes(like) | BOTH | {"tie_word_embeddings": False}  # vLLM's class has a head of its own
    config = GptOssConfig(**sizes, head_dim=32, rope_parameters=yarn, num_local_experts=4, num_experts_per_tok=2)
    _write(GptOssForCausalLM, config, folder, like, scale=3, sinks=(-1.0, 3.0))


def _write_without_rope_in_full_layers(folder: Path, like: str) -> None:
    """As EXAONE 4: what has no window does not rotate."""
    from transformers import Exaone4Config, Exaone4ForCausalLM

    config = Exaone4Config(**_sizes(like), **BOTH, head_dim=32, sliding_window_pattern=2)
    _write(Exaone4ForCausalLM, config, folder, like)


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


def _write(kind: Any, config: Any, folder: Path, like: str, scale: float = 4, **drawn: tuple[float, float]) -> None:
    """``drawn``: parameters by the end of their name, and the range that their values are drawn from."""
    import torch
    from transformers import AutoTokenizer

    torch.manual_seed(3)
    model = kind(config).to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # large enough that the answer depends on what is attended to
            if parameter.dim() > 1:
                parameter.mul_(scale)
        for name, parameter in model.named_parameters():
            if (end := name.rpartition(".")[2]) in drawn:
                parameter.uniform_(*drawn[end])
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
