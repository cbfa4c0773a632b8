"""Small models with random weights, as folders that vLLM loads. The tokenizer is that of the tests' own model."""

from __future__ import annotations

import json
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
            "parts of heads": _write_unlike_layers,
            "sizes of heads": _write_unlike_heads,
            "windowed": _write_windowed,
            "recurrent": _write_recurrent,
            "four bits": _write_four_bits,
            "latents": _write_latents,
            "latents and experts": _write_latents_and_experts,
        }
        if kind in EXPERTS:
            _write_experts(kind, folder, like)
        elif kind in PICTURES:
            _write_pictures(kind, folder, like)
        else:
            writers[kind](folder, like)
    return folder


FEW: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
HY = {"expert_hidden_dim": 64, "first_k_dense_replace": 1, "route_norm": True, "qk_norm": True}
BOTH = {"num_hidden_layers": 4, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
UNLIKE = {"head_dim": 32, "global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
"""As in Gemma 4: full layers have one head of 64 dimensions where others have two of 32."""

EXPERTS: dict[str, dict[str, Any]] = {
    "gemma4_text": FEW
    | BOTH
    | UNLIKE
    | {"enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 0},
    "qwen3_moe": FEW | {"head_dim": 32},
    "mixtral": LOCAL,
    "olmoe": FEW,
    "granitemoe": LOCAL,
    "glm": {"head_dim": 32, "partial_rotary_factor": 0.5},
    "phi3": {
        "original_max_position_embeddings": 512,
        "rope_parameters": {
            **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 512},
            **{"short_factor": [1.0] * 16, "long_factor": [1.0 + pair / 4 for pair in range(16)]},
        },
    },
    "hy_v3": FEW | {"head_dim": 32, "num_shared_experts": 1, **HY},
    "glm4_moe": {
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1},
        **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 32, "use_qk_norm": True},
    },
    # The checkpoints route by sigmoids, which vLLM's CPU package does not do without groups of experts.
    "minimax_m2": LOCAL | {"head_dim": 32, "rotary_dim": 16, "scoring_func": "softmax", "use_routing_bias": True},
}
"""Kinds of models with experts, and what their configs say beside the sizes. GLM has none: vLLM runs it by the
class of transformers."""

LATENTS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
LATENTS |= {"num_key_value_heads": 4, "num_hidden_layers": 3, "tie_word_embeddings": False}
"""The latents of all DeepSeek models: vLLM's kernel for CPUs knows no other."""

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
YARN |= {"beta_fast": 32, "beta_slow": 1}
"""Without it vLLM's package for CPUs rotates wrongly by itself: its kernel takes the keys for one piece of memory."""

EXPERTS_AND_LATENTS: dict[str, Any] = LATENTS | {
    **{"first_k_dense_replace": 1, "q_lora_rank": 64, "n_routed_experts": 4, "n_group": 2, "topk_group": 1},
    **{"num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 64, "scoring_func": "sigmoid"},
    "topk_method": "noaux_tc",  # what vLLM reads, and the files of DeepSeek-V3 say
    "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}

QWEN_TEXT: dict[str, Any] = {
    "head_dim": 32,
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 1e4},
        **{"mrope_section": [6, 5, 5], "mrope_interleaved": True},
    },
}
SIGHT: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "patch_size": 14}
SIGHT |= {"depth": 2, "out_hidden_size": 128}
QWEN_SIGHT = SIGHT | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
GLM_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}

PICTURES: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"text_config": QWEN_TEXT, "vision_config": QWEN_SIGHT},
    "qwen3_vl_moe": {"text_config": QWEN_TEXT | FEW | {"norm_topk_prob": True}, "vision_config": QWEN_SIGHT},
    "glm4v_moe": {
        "text_config": EXPERTS["glm4_moe"] | {"rope_parameters": GLM_ROPE, "use_qk_norm": False},
        "vision_config": SIGHT | {"image_size": 56},
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
        "vision_config": {
            **{"model_type": "pixtral", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1},
            **{"num_attention_heads": 2, "head_dim": 32, "image_size": 56, "patch_size": 14},
        },
    },
    "gemma3": {
        "mm_tokens_per_image": 4,
        "text_config": BOTH | {"head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
        "vision_config": {
            **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"image_size": 56, "patch_size": 14, "vision_use_head": False},
        },
    },
    "gemma4": {
        "audio_config": None,
        "text_config": BOTH | UNLIKE | {"hidden_size_per_layer_input": 16, "tie_word_embeddings": True},
        "vision_config": {
            **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"num_key_value_heads": 2, "head_dim": 32, "position_embedding_size": 64, "default_output_length": 70},
        },
    },
    "kimi_k25": {
        "projection_hidden_size": 64,
        "text_config": EXPERTS_AND_LATENTS | {"model_type": "deepseek_v3"},
        "vision_config": {
            **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"patch_size": 14, "pos_emb_height": 8, "pos_emb_width": 8},
        },
    },
}
"""Kinds of models that read images: with positions on three axes and images in several layers, without, with windows,
and with latents."""

QWEN_TOKENS = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
QWEN_TOKENS |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}

IMAGE_TOKENS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), QWEN_TOKENS),
    "glm4v_moe": {
        **{"image_token_id": "<|image|>", "image_start_token_id": "<|begin_of_image|>"},
        **{"image_end_token_id": "<|end_of_image|>", "video_token_id": "<|video|>"},
        **{"video_start_token_id": "<|begin_of_video|>", "video_end_token_id": "<|end_of_video|>"},
    },
    "mistral3": {"image_token_index": "[IMG]"},
    "gemma3": {
        **{"image_token_index": "<image_soft_token>", "boi_token_index": "<start_of_image>"},
        **{"eoi_token_index": "<end_of_image>"},
    },
    "gemma4": {
        **{"image_token_id": "<|image>", "boi_token_id": "<|begin_image>", "eoi_token_id": "<|end_image>"},
        **{"audio_token_id": "<|audio>", "boa_token_id": "<|begin_audio>", "eoa_token_id": "<|end_audio>"},
        "video_token_id": "<|video|>",
    },
    "kimi_k25": {
        **{"image_token_id": "<|media_pad|>", "vision_start_token_id": "<|media_begin|>"},
        **{"vision_end_token_id": "<|media_end|>"},
    },
}

CHECKPOINTS: dict[str, dict[str, str]] = {
    "gemma3": {"vision_tower.": "vision_tower.vision_model."},
    "kimi_k25": {
        **{"language_model.model.blocks.": "language_model.model.layers."},
        **{"vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.", "model.mm_projector.": "mm_projector."},
    },
}
"""What transformers calls some weights where it saves them, and what checkpoints and vLLM do."""

KIMI_IMAGES = {"in_patch_limit": 16384, "patch_size": 14, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
KIMI_IMAGES |= {"merge_kernel_size": 2, "fixed_output_tokens": None, "patch_limit_on_one_side": 512}
KIMI_IMAGES |= {"in_patch_limit_each_frame": 4096, "in_patch_limit_video": None, "temporal_merge_kernel_size": 4}


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


def _write_experts(kind: str, folder: Path, like: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = _sizes(like) | {"intermediate_size": 128, "num_hidden_layers": 3}
    sizes["vocab_size_per_layer_input"] = sizes["vocab_size"]  # of Gemma 4
    config = AutoConfig.for_model(kind, **(sizes | EXPERTS[kind]))
    _write(AutoModelForCausalLM.from_config, config, folder, like, norms=True)


def _write_pictures(kind: str, folder: Path, like: str) -> None:
    import transformers
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

    named = IMAGE_TOKENS[kind]
    said = "_token_id" if kind == "gemma4" else "_token_index"
    ends = {name.rpartition("_")[0]: token for name, token in named.items() if name.endswith(said)}
    tokenizer = AutoTokenizer.from_pretrained(like, extra_special_tokens=ends)
    tokenizer.add_special_tokens({"additional_special_tokens": [*named.values(), "[IMG_BREAK]", "[IMG_END]"]})
    if kind == "gemma3":
        tokenizer.add_tokens(["\n" * count for count in (1, 2, 3, 4)])  # its processor asks for them by name
    parts = PICTURES[kind]
    sizes = _sizes(like) | {"vocab_size": len(tokenizer), "num_hidden_layers": 3, "tie_word_embeddings": False}
    tokens = {name: tokenizer.convert_tokens_to_ids(token) for name, token in named.items()}
    text = sizes | parts["text_config"]
    text["vocab_size_per_layer_input"] = sizes["vocab_size"]
    config = AutoConfig.for_model(kind, **(parts | {"text_config": text}), **tokens)
    _write(AutoModelForImageTextToText.from_config, config, folder, like, norms=True)
    _write_as_checkpoints(kind, folder / "model.safetensors")
    if kind == "kimi_k25":
        processor = tokenizer  # vLLM has one of its own for images
        config.architectures = ["KimiK25ForConditionalGeneration"]  # as checkpoints have it, and not transformers
        config.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": KIMI_IMAGES}))
    elif kind == "gemma3":
        images = transformers.Gemma3ImageProcessor(size={"height": 56, "width": 56})
        processor = transformers.Gemma3Processor(images, tokenizer, image_seq_length=4)
    elif kind == "gemma4":
        images, sounds = (
            transformers.Gemma4ImageProcessor(max_soft_tokens=70),
            transformers.Gemma4AudioFeatureExtractor(),
        )
        processor = transformers.Gemma4Processor(sounds, images, tokenizer, transformers.Gemma4VideoProcessor())
    elif kind == "glm4v_moe":
        images = transformers.Glm4vImageProcessor(patch_size=14, merge_size=2)
        videos = transformers.Glm4vVideoProcessor(patch_size=14, merge_size=2)
        processor = transformers.Glm4vProcessor(images, tokenizer, videos)
    elif kind == "mistral3":
        images = transformers.PixtralImageProcessor(patch_size=14, size={"longest_edge": 56})
        processor = transformers.PixtralProcessor(images, tokenizer, patch_size=14, spatial_merge_size=2)
    else:
        images = transformers.Qwen2VLImageProcessor(patch_size=14, merge_size=2)
        videos = transformers.Qwen3VLVideoProcessor(patch_size=14, merge_size=2)
        processor = transformers.Qwen3VLProcessor(images, tokenizer, videos)
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_as_checkpoints(kind: str, file: Path) -> None:
    """What transformers names and lays out in another way where it saves it than checkpoints do."""
    from safetensors.torch import load_file, save_file

    state = {}
    for name, weight in load_file(file).items():
        for old, new in CHECKPOINTS.get(kind, {}).items():
            name = name.replace(old, new)
        turned = kind == "qwen3_vl_moe" and ".experts." in name
        state[name] = weight.transpose(1, 2).contiguous() if turned else weight
    save_file(state, file, metadata={"format": "pt"})


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


def _write_unlike_layers(folder: Path, like: str) -> None:
    """As Laguna: layers with a window have more heads for queries than the others, and rotate all of a key. No experts:
    they are chosen by sigmoids, which vLLM's CPU package does not do."""
    from transformers import LagunaConfig, LagunaForCausalLM

    rope = {
        "full_attention": YARN | {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    }
    sizes = _sizes(like) | BOTH | {"mlp_layer_types": ["dense"] * 4, "tie_word_embeddings": False}
    heads = {"head_dim": 32, "num_attention_heads_per_layer": [8, 4] * 2}
    config = LagunaConfig(**sizes, **heads, rope_parameters=rope)
    _write(LagunaForCausalLM, config, folder, like, norms=True)


def _write_unlike_heads(folder: Path, like: str) -> None:
    """As Gemma 4: full layers have one head of 64 dimensions where others have two of 32, and rotate a quarter of it;
    scores are not divided by the root of a head's size."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    sizes = _sizes(like)
    config = Gemma4TextConfig(**sizes, **BOTH, **UNLIKE, hidden_size_per_layer_input=0)
    _write(Gemma4ForCausalLM, config, folder, like, norms=True)


def _write_windowed(folder: Path, like: str) -> None:
    """Two layers, both with a window of 64 tokens: one kind of KV cache, and not a full one, as in Mistral 7B v0.1."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(**_sizes(like), num_hidden_layers=2, sliding_window=64)
    _write(MistralForCausalLM, config, folder, like)


def _write_recurrent(folder: Path, like: str) -> None:
    """Four layers, every other one a short convolution with a state, the others full attention, as in LFM2."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    sizes = _sizes(like)
    width, inner = sizes["hidden_size"], sizes["intermediate_size"]
    named = {"conv_dim": width, "conv_dim_out": width, "block_dim": width, "block_ff_dim": inner}
    named |= {"block_multiple_of": 1, "block_auto_adjust_ff_dim": False, "block_ffn_dim_multiplier": 1.0}
    config = Lfm2Config(**sizes, **named, layer_types=["conv", "full_attention"] * 2, num_hidden_layers=4)
    _write(Lfm2ForCausalLM, config, folder, like)


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

    config = DeepseekV3Config(**(_sizes(like) | EXPERTS_AND_LATENTS))
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


def _write(
    kind: Any, config: Any, folder: Path, like: str, scale: float = 4, norms: bool = False, **drawn: tuple[float, float]
) -> None:
    """``drawn``: parameters by the end of their name, and the range that their values are drawn from.

    ``norms`` are drawn as well: those of ones would hide one that is left out or comes too late.
    """
    import torch
    from transformers import AutoTokenizer

    torch.manual_seed(3)
    model = kind(config).to(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if norms and "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif parameter.dim() > 1:  # large enough that the answer depends on what is attended to
                parameter.mul_(scale)
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
