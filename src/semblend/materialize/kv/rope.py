"""Rotary position embedding, and the one thing we add to it: moving a cached key to another position.

A rotary model turns pair ``i`` of a key by ``position * inv_freq[i]`` before caching it. Turning it further by
``shift * inv_freq[i]`` therefore gives, exactly, the key of the same hidden state ``shift`` positions later. Angles
are computed in double precision and the turn in single precision or better: in half precision a shift of 200,000
would already be off by whole turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from semblend.errors import InputError

# -- What a model's config says about its rotary embedding: frequencies, or the reason why its keys cannot be moved.
#
# Pure arithmetic over a Hugging Face ``config.json`` as a dict, without torch. A model is movable only if its family is
# one whose keys we know to be rotated last (norms and projections first; Llama 4 norms after it, by the key's length,
# which a rotation keeps), in a known pair layout; each family in the table is held against the transformers
# implementation by the tests, layer by layer. Whatever is not known is refused: a wrong guess would give wrong keys
# that look right.


Style = Literal["half", "interleaved"]
Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RopeFamily:
    """How one architecture rotates: which dimensions form a pair, and what an absent field means."""

    style: Style = "half"
    partial: float = 1.0
    theta: float = 10_000.0
    layers: Literal["alike", "by type", "windowed only", "listed"] = "alike"
    """Which layers rotate, and how: all alike; each as ``rope_parameters`` says of its type, or lists of Step's for
    each layer; only those with a window (where there are none, EXAONE 4 rotates all and others none); or those that
    ``no_rope_layers`` lists with a 1."""
    local_theta: float | None = None
    """Of layers with a window, where the config names none."""


FAMILIES: dict[str, RopeFamily] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3"), RopeFamily()),
    **dict.fromkeys(("gemma", "granite", "olmo", "olmo2", "olmoe", "starcoder2", "falcon"), RopeFamily()),
    **dict.fromkeys(("arcee", "seed_oss", "dots1", "granitemoe", "granitemoeshared", "hyperclovax"), RopeFamily()),
    **dict.fromkeys(("jais2", "aria_text", "gpt_neox_japanese"), RopeFamily()),
    **dict.fromkeys(("phi", "persimmon", "nemotron", "glm4_moe", "glm4v_moe_text"), RopeFamily(partial=0.5)),
    **dict.fromkeys(("stablelm", "gpt_neox"), RopeFamily(partial=0.25)),
    **dict.fromkeys(("bitnet", "flex_olmo", "qwen3_vl_text", "qwen3_vl_moe_text"), RopeFamily(theta=500_000.0)),
    **dict.fromkeys(("mixtral", "phimoe", "solar_open", "ministral3"), RopeFamily(theta=1_000_000.0)),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), RopeFamily(theta=1_000_000.0)),
    "minimax_m2": RopeFamily(theta=5_000_000.0),
    "apertus": RopeFamily(theta=12_000_000.0),
    **dict.fromkeys(("cohere", "ernie4_5", "ernie4_5_moe"), RopeFamily("interleaved", theta=500_000.0)),
    "helium": RopeFamily("interleaved", theta=100_000.0),
    **dict.fromkeys(("glm", "glm4"), RopeFamily("interleaved", partial=0.5)),
    **dict.fromkeys(("gptj", "codegen", "glm4v_text"), RopeFamily("interleaved")),
    "gemma2": RopeFamily(),
    "gemma3_text": RopeFamily(theta=1_000_000.0, layers="by type", local_theta=10_000.0),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), RopeFamily(theta=0.0, layers="by type")),  # they say it all
    "mellum": RopeFamily(theta=500_000.0, layers="by type", local_theta=10_000.0),
    **dict.fromkeys(("olmo3", "laguna"), RopeFamily(theta=500_000.0, layers="by type")),
    "step3p5": RopeFamily(layers="by type"),
    "hy_v3": RopeFamily(theta=11_158_840.0),
    "gpt_oss": RopeFamily(theta=150_000.0),
    "cohere2": RopeFamily("interleaved", layers="windowed only"),
    **dict.fromkeys(("exaone4", "afmoe"), RopeFamily(layers="windowed only")),
    "llama4_text": RopeFamily("interleaved", theta=500_000.0, layers="listed"),
    "smollm3": RopeFamily(theta=2_000_000.0, layers="listed"),
}

# Latent attention (MLA): a token has one vector, a latent that knows no position and behind it a rotated part. It is
# cut in the middle: the halves are kept and moved as any key and value are, and the end of the second half, which takes
# the place of the key, is rotated. The table's models have no scaling or YaRN; engines cache the pairs interleaved,
# whatever transformers does within its attention.
LATENT_FAMILIES = dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"), RopeFamily("interleaved"))

# What each kind of scaling reads. A parameter outside this list changes angles in a way we do not know.
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_READ: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "proportional": set(),  # Gemma 4: angles as of a whole head, and none for its last pairs
    "longrope": {"short_factor", "long_factor", "original_max_position_embeddings", "short_mscale", "long_mscale"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}
_HARMLESS = {"finetuned", "llama_4_scaling_beta", "max_position_embeddings"}  # they touch queries or nothing at all
LONGEST = "max_model_len"  # added by adapters of engines where it decides
_AXES = {"mrope_section", "mrope_interleaved"}
_PLAIN_KV = {"auto", "none", "float32", "float16", "bfloat16", "float", "half", "fp32", "fp16", "bf16"}


def family_of(config: Config) -> RopeFamily:
    """The table's row for this model; an unlisted model is read as half-split (``refusal`` is the one that says no)."""
    return (FAMILIES | LATENT_FAMILIES).get(str(config.get("model_type", "")), RopeFamily())


def rope_parameters(config: Config) -> dict[str, Any]:
    """The rotary parameters of old and new configs in one dict: ``rope_parameters``, ``rope_scaling``, top level.

    >>> rope_parameters({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})["rope_type"]
    'linear'
    """
    family = family_of(config)
    nested: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        nested |= {key: value for key, value in (config.get(name) or {}).items() if value is not None}
    theta = config.get("rope_theta") or config.get("rotary_emb_base") or family.theta
    partial = config.get("partial_rotary_factor") or config.get("rotary_pct") or family.partial
    found = {"rope_theta": theta, "partial_rotary_factor": partial} | nested
    found["rope_type"] = str(nested.get("rope_type") or nested.get("type") or "default")
    if found["rope_type"] in ("llama3", "yarn", "longrope") and config.get("original_max_position_embeddings"):
        found["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return found


def read_for_text(config: Config) -> Config:
    """The config of a model that rotates by several axes (M-RoPE), as text rotates: on all axes by the token's index.

    >>> read_for_text({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}})["rope_scaling"]
    {'type': 'default'}
    """
    given = {
        name: config[name] for name in ("rope_scaling", "rope_parameters") if isinstance(config.get(name), Mapping)
    }
    read = {
        name: {key: "default" if value == "mrope" else value for key, value in parameters.items() if key not in _AXES}
        for name, parameters in given.items()
    }
    return {**config, **read}


def list_layer_configs(config: Config) -> list[Config | None]:
    """Of each layer, the config by which it rotates, as if all did so; None where it does not rotate.

    Empty where all layers rotate alike.
    """
    family = family_of(config)
    kinds = [str(kind) for kind in config.get("layer_types") or ()]
    if family.layers == "listed":
        listed = list(config.get("no_rope_layers") or ())
        return [config if rotates else None for rotates in listed] if 0 in listed else []
    if family.layers == "windowed only" and ("sliding_attention" in kinds or config.get("model_type") != "exaone4"):
        return [config if kind == "sliding_attention" else None for kind in kinds]
    if family.layers != "by type":
        return []
    if isinstance(config.get("rope_theta"), list):
        return [_read_listed_layer(config, number, kind) for number, kind in enumerate(kinds)]
    if not kinds:
        raise InputError("the config does not say of which type each layer is", hint="it needs layer_types")
    flat = {name: value for name, value in config.items() if name not in ("rope_parameters", "rope_scaling")}
    said = config.get("rope_parameters") or {}
    if not any(isinstance(value, Mapping) for value in said.values()):  # as they were written once: scaling is global
        local = config.get("rope_local_base_freq") or family.local_theta or config.get("rope_theta") or family.theta
        windowed: dict[str, Any] = {"rope_type": "default", "rope_theta": local}
        return [flat | {"rope_parameters": windowed} if "sliding" in kind else config for kind in kinds]
    if missing := set(kinds) - {kind for kind, value in said.items() if isinstance(value, Mapping)}:
        raise InputError(f"the config does not say how {min(missing)} layers rotate", hint="see rope_parameters")
    own = {int(layer): fields for layer, fields in (config.get("per_layer_config") or {}).items()}
    if size := config.get("global_head_dim"):  # as Gemma 4's own files say it
        own = {layer: {"head_dim": size} for layer, kind in enumerate(kinds) if kind == "full_attention"} | own
    return [
        flat | {"head_dim": own.get(layer, config).get("head_dim"), "rope_parameters": said[kind]}
        for layer, kind in enumerate(kinds)
    ]


def _read_listed_layer(config: Config, number: int, kind: str) -> Config | None:
    """As Step's own files say it: lists with an entry for each layer, and the types of layers that are scaled."""
    rotates, parts = config.get("use_rope_layers") or (), config.get("partial_rotary_factors") or ()
    scaled = kind in (config.get("yarn_only_types") or (kind,))
    said: dict[str, Any] = dict((config.get("rope_scaling") or {}) if scaled else {})
    for name, values in (("rope_theta", config["rope_theta"]), ("partial_rotary_factor", parts)):
        if values:
            said[name] = values[number]
    flat = {name: value for name, value in config.items() if name not in ("rope_theta", "rope_scaling")}
    return flat | {"rope_parameters": said} if not rotates or rotates[number] else None


def head_dim(config: Config) -> int:
    """Dimensions of one key head; of half a token's vector where there are latents."""
    if config.get("kv_lora_rank"):
        return (int(config["kv_lora_rank"]) + rotary_dim(config)) // 2
    given = config.get("head_dim")
    if not given:
        hidden = config.get("hidden_size") or config.get("n_embd")
        heads = config.get("num_attention_heads") or config.get("n_head")
        if not hidden or not heads:
            raise InputError("the config gives no head size", hint="it needs head_dim, or hidden_size and its heads")
        given = int(hidden) // int(heads)
    return int(given)


def rotary_dim(config: Config) -> int:
    """How many dimensions of a head are rotated: the leading ones, the last ones behind a latent."""
    if config.get("kv_lora_rank"):
        return int(_number(config, "qk_rope_head_dim"))
    size = head_dim(config)
    in_dimensions = config.get("model_type") in ("gptj", "codegen", "minimax_m2")
    if "partial_rotary_factor" in (config.get("rope_parameters") or {}):
        in_dimensions = False
    if rope_parameters(config)["rope_type"] == "proportional":
        return size
    given = config.get("rotary_dim") if in_dimensions else None
    rotated = int(given) if given else int(size * float(rope_parameters(config)["partial_rotary_factor"]))
    if not 2 <= rotated <= size or rotated % 2:
        raise InputError(f"{rotated} rotary dimensions of {size} cannot be paired", hint="check partial_rotary_factor")
    return rotated


def frequencies(config: Config, seq_len: int | None = None) -> tuple[tuple[float, ...], float]:
    """Radians per position of each pair after scaling, and the factor that multiplies rotated queries and keys.

    ``seq_len`` matters to dynamic scaling alone: above the trained length, the angles depend on it.
    """
    parameters = rope_parameters(config)
    kind = parameters["rope_type"]
    if kind not in _READ:
        raise InputError(f"rotary scaling {kind!r} is not known", hint=f"known: {', '.join(_READ)}")
    dim = rotary_dim(config)
    theta = _number(parameters, "rope_theta")
    if kind == "dynamic":
        theta = _stretch_base(theta, dim, _number(parameters, "factor"), _find_trained_length(config), seq_len)
    plain = [theta ** (-i / dim) for i in range(0, dim, 2)]
    if kind == "linear":
        return tuple(f / _number(parameters, "factor") for f in plain), 1.0
    if kind == "llama3":
        return tuple(_llama3(f, parameters, config) for f in plain), 1.0
    if kind == "yarn":
        return _yarn(plain, dim, theta, parameters, config)
    if kind == "longrope":
        return _longrope(plain, parameters, config)
    if kind == "proportional":
        turning = int(_number(parameters, "partial_rotary_factor") * dim // 2)
        return (*plain[:turning], *[0.0] * (len(plain) - turning)), 1.0
    return tuple(plain), 1.0


def _longrope(plain: list[float], parameters: Config, config: Config) -> tuple[tuple[float, ...], float]:
    """Factors of Phi-3: of two lists, by whether the engine takes longer prompts than the model was trained for."""
    trained = _original_length(parameters, config)
    way = "long" if _number(config, LONGEST) > trained else "short"
    factors = parameters.get(f"{way}_factor")
    if not isinstance(factors, Sequence) or len(factors) != len(plain):
        raise InputError(
            f"{way}_factor does not have a number for each of {len(plain)} pairs", hint="check config.json"
        )
    longer = _find_trained_length(config) / trained
    magnitude = math.sqrt(1 + math.log(longer) / math.log(trained)) if longer > 1 else 1.0
    scaled = (frequency / factor for frequency, factor in zip(plain, factors, strict=True))
    return tuple(scaled), _number(parameters, f"{way}_mscale", magnitude)


def _stretch_base(theta: float, dim: int, factor: float, trained: int, seq_len: int | None) -> float:
    """Dynamic NTK: the base grows with the sequence once it is longer than the model was trained for."""
    length = max(seq_len or trained, trained)
    return float(theta * (factor * length / trained - (factor - 1)) ** (dim / (dim - 2)))


def _llama3(frequency: float, parameters: Config, config: Config) -> float:
    """Llama 3.1: short wavelengths stay, long ones are slowed by ``factor``, those between are blended."""
    factor, low, high = (_number(parameters, name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = _original_length(parameters, config) * frequency / (2 * math.pi)  # full turns over the trained length
    if turns > high:
        return frequency
    if turns < low:
        return frequency / factor
    kept = (turns - low) / (high - low)
    return frequency * (kept + (1 - kept) / factor)


def _yarn(
    plain: list[float], dim: int, theta: float, parameters: Config, config: Config
) -> tuple[tuple[float, ...], float]:
    """YaRN: pairs that turn often keep their angle, slow ones are interpolated, with a linear ramp between."""
    trained = _original_length(parameters, config)
    factor = _number(parameters, "factor") if "factor" in parameters else _find_trained_length(config) / trained

    def pair_with(turns: float) -> float:
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_with(_number(parameters, "beta_fast", 32.0))
    high = pair_with(_number(parameters, "beta_slow", 1.0))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    scaled = []
    for pair, frequency in enumerate(plain):
        slowed = min(max((pair - low) / width, 0.0), 1.0)
        scaled.append(frequency * (1 - slowed) + frequency / factor * slowed)
    return tuple(scaled), _yarn_attention_factor(factor, parameters)


def _yarn_attention_factor(factor: float, parameters: Config) -> float:
    if "attention_factor" in parameters:
        return _number(parameters, "attention_factor")

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return magnitude(_number(parameters, "mscale")) / magnitude(_number(parameters, "mscale_all_dim"))
    return magnitude(1.0)


def _find_trained_length(config: Config) -> int:
    return int(_number(config, "max_position_embeddings"))


def _original_length(parameters: Config, config: Config) -> float:
    given = parameters.get("original_max_position_embeddings")
    return _number(parameters, "original_max_position_embeddings") if given else _find_trained_length(config)


def _number(source: Config, name: str, default: float | None = None) -> float:
    value = source.get(name) or default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise InputError(f"the rotary parameter {name} is missing or not a positive number", hint="check config.json")
    return float(value)


def refusal(config: Config, *, by_layer: bool = False, latents: bool = False) -> str | None:
    """Why keys of this model cannot be moved to other positions, in one sentence; None when they can.

    ``by_layer``: the engine keeps every position of every layer, and attends by a window where a layer has one; and
    keys are moved by `RopeSpec.of_layer`. Without it all layers have to be alike. ``latents``: the engine caches the
    latents of a model with latent attention, and its adapter moves them.

    >>> refusal({"model_type": "deepseek_v3", "kv_lora_rank": 512})
    'The model attends to latents (MLA, kv_lora_rank), which this engine or adapter does not keep as such.'
    """
    if config.get("kv_lora_rank") and not latents:
        return "The model attends to latents (MLA, kv_lora_rank), which this engine or adapter does not keep as such."
    if latents and not config.get("kv_lora_rank"):
        return "The engine caches latents, and the model's configuration does not say of what size (kv_lora_rank)."
    configs, checks = [config], _CHECKS
    if by_layer:
        checks = (_refuse_other_attention, *(check for check in _CHECKS if check is not _refuse_windowed))
        if family_of(config).layers != "alike":
            checks = tuple(check for check in checks if check is not _layers_differ)
            try:
                found = {repr(one): one for one in list_layer_configs(config) if one is not None}
            except InputError as error:
                return f"The rotary parameters cannot be read: {error.message}."
            configs = list(found.values()) or configs
    return next((reason for one in configs for check in checks if (reason := check(one))), None)


def _refuse_latents(config: Config) -> str | None:
    """What is not known of a model with latent attention."""
    rank = config.get("kv_lora_rank")
    if not rank:
        return None
    if config.get("index_topk"):
        return "The model chooses which tokens it attends to (index_topk) by keys that no donor holds."
    rotated, parameters = config.get("qk_rope_head_dim"), rope_parameters(config)
    if not rotated or rank < rotated or (rank + rotated) % 4 or rotated % 2:
        return f"A latent of {rank} and {rotated} rotated dimensions cannot be cut in two."
    if parameters["rope_type"] not in ("default", "yarn") and parameters["rope_type"] in _READ:
        return f"The rotary scaling {parameters['rope_type']!r} is not known for latent attention."
    if parameters["partial_rotary_factor"] != 1:
        return "Only a part of the rotated dimensions behind the latent is rotated (partial_rotary_factor)."
    return None


def _other_positions(config: Config) -> str | None:
    kind = str(config.get("model_type", ""))
    named = str(config.get("position_embedding_type") or "").lower()
    attention = config.get("attn_config") or {}
    if config.get("alibi") or config.get("use_alibi") or attention.get("alibi") or kind == "bloom" or named == "alibi":
        return "The model places tokens by attention biases (ALiBi), not by rotation."
    if kind in ("gpt2", "gpt_bigcode", "gpt_neo", "opt", "bert", "roberta") or "absolute" in named or "learn" in named:
        return "The model adds learned absolute positions to its input, so every layer depends on them."
    if config.get("is_encoder_decoder"):
        return "The model is an encoder-decoder; its keys are not those of one rotated sequence."
    if config.get("use_rope") is False or named in ("nope", "none") or kind in ("mamba", "mamba2", "rwkv"):
        return "The model uses no rotary embedding."
    return None


def _several_axes(config: Config) -> str | None:
    parameters = rope_parameters(config.get("text_config") or config)
    if "mrope_section" in parameters or parameters["rope_type"] == "mrope":
        return "The model rotates by several axes (M-RoPE), which one shift does not describe."
    if any(config.get(name) for name in ("vision_config", "audio_config")):
        return "The model reads images or audio, and equal placeholder tokens do not mean equal content."
    return None


def _layers_differ(config: Config) -> str | None:
    if any(isinstance(value, Mapping) for value in rope_parameters(config).values()) or config.get(
        "rope_local_base_freq"
    ):
        return "The layers rotate by different frequencies, and one rotation would be wrong for some of them."
    if config.get("no_rope_layer_interval") or 0 in (config.get("no_rope_layers") or ()):
        return "Some layers apply no rotary embedding (no_rope_layers)."
    return None


def attends_by_window(config: Config) -> bool:
    """Whether some layers attend through a sliding window.

    >>> attends_by_window({"sliding_window": 4096, "max_position_embeddings": 32768})
    True
    """
    return _refuse_windowed(config) == _WINDOWED


_WINDOWED = "Some layers attend through a sliding window, so their cache does not hold every position."


def _refuse_windowed(config: Config) -> str | None:
    """Whether some layer really attends through a window: a config may name one and not use it."""
    said = _WINDOWED
    if kinds := config.get("layer_types"):
        return said if any("sliding" in str(kind) for kind in kinds) else _refuse_other_attention(config)
    if reason := _refuse_other_attention(config):
        return reason
    window = config.get("sliding_window")
    if not window:
        return said if config.get("use_sliding_window") else None
    if "use_sliding_window" in config:  # Qwen2 names a window, and the layer from which on it applies
        first = config.get("max_window_layers")
        layers = config.get("num_hidden_layers")
        everywhere_full = first is not None and layers is not None and first >= layers
        return said if config["use_sliding_window"] and not everywhere_full else None
    return said if window < (config.get("max_position_embeddings") or math.inf) else None


def _refuse_other_attention(config: Config) -> str | None:
    """Neither full nor through a window: in chunks, linear, or a state in place of KV."""
    other = sorted({str(kind) for kind in config.get("layer_types") or ()} - {"full_attention", "sliding_attention"})
    if other:
        return f"Some layers are not full attention ({', '.join(other)})."
    if config.get("attention_chunk_size") and not config.get("layer_types"):
        return "Some layers attend within chunks (attention_chunk_size)."
    if config.get("use_bidirectional_attention") in (True, "all"):
        return "Tokens see what stands behind them (use_bidirectional_attention)."
    return None


def _refuse_quantised_cache(config: Config) -> str | None:
    places = [config, *(config.get(name) or {} for name in ("quantization_config", "compression_config"))]
    places.append(config.get("quantization") or {})
    for place in places:
        for name, value in place.items() if isinstance(place, Mapping) else ():
            if str(name).startswith("kv_cache") and value and str(value).lower() not in _PLAIN_KV:
                return f"The KV cache is quantised ({name}), and rotating quantised keys would change them twice."
    if config.get("cache_implementation") == "quantized":
        return "The KV cache is quantised (cache_implementation), and rotating quantised keys would change them twice."
    return None


def _scaling(config: Config) -> str | None:
    parameters = rope_parameters(config)
    kind = parameters["rope_type"]
    if kind in ("longrope", "su") and not (kind == "longrope" and config.get(LONGEST)):
        return "The rotation (longrope) switches its frequencies with the prompt's length."
    if kind not in _READ:
        return f"The rotary scaling {kind!r} is not known."
    strange = sorted(set(parameters) - _COMMON - _READ[kind] - _HARMLESS)
    # Checkpoints carry numbers that their kind does not read (a theta rule of another loader): unknown, so refused.
    return f"The rotary parameter {strange[0]!r} is not known for {kind!r} scaling." if strange else None


def _refuse_unknown_family(config: Config) -> str | None:
    kind = str(config.get("model_type", ""))
    if kind not in (LATENT_FAMILIES if config.get("kv_lora_rank") else FAMILIES):
        return f"How model type {kind!r} rotates its keys is not known."
    return None


def _unreadable(config: Config) -> str | None:
    try:
        frequencies(config)
    except InputError as error:
        return f"The rotary parameters cannot be read: {error.message}."
    return None


_CHECKS: tuple[Callable[[Config], str | None], ...] = (
    _refuse_latents,
    _other_positions,
    _several_axes,
    _layers_differ,
    _refuse_windowed,
    _refuse_quantised_cache,
    _scaling,
    _refuse_unknown_family,
    _unreadable,
)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The rotation of one model: frequencies after scaling, which dimensions form a pair, and how many rotate.

    ``attention_factor`` multiplies rotated queries and keys when they are computed (YaRN). A cached key has it
    already, so ``relocate`` leaves it alone. ``dynamic`` says that the frequencies depend on the prompt's length: then
    keys may move only between prompts of equal ``inv_freq``. ``rotary_start``: the first dimension that rotates. Where
    layers rotate differently, ``others`` has the other frequencies, zeros for layers that do not rotate and fewer where
    less of a head does, and ``layer_kinds`` says of each layer which of ``(inv_freq, *others)`` it has: then only
    `of_layer` rotates. Where heads are of unlike size, ``sizes`` has that of each layer, and ``head_dim`` the largest.

    >>> RopeSpec.plain(head_dim=4, theta=10_000.0).inv_freq
    (1.0, 0.01)
    """

    head_dim: int
    rotary_dim: int
    style: Style
    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0
    dynamic: bool = False
    rotary_start: int = 0
    others: tuple[tuple[float, ...], ...] = ()
    layer_kinds: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.style not in ("half", "interleaved"):
            raise InputError(f"rotary style {self.style!r} is not known", hint="use 'half' or 'interleaved'")
        if not 2 <= self.rotary_dim <= self.head_dim - self.rotary_start or self.rotary_dim != 2 * len(self.inv_freq):
            raise InputError(
                f"{len(self.inv_freq)} frequencies, {self.rotary_dim} rotary dimensions and head size {self.head_dim} "
                "do not fit together",
                hint="rotary_dim is twice the number of frequencies and at most head_dim",
            )
        if any(not 2 <= 2 * len(other) <= self.head_dim for other in self.others) or (
            self.others and (self.dynamic or self.rotary_start)
        ):
            raise InputError("layers rotate in ways that do not fit together", hint="such keys are not moved")

    @property
    def rotated(self) -> slice:
        """The dimensions of a head that rotate."""
        return slice(self.rotary_start, self.rotary_start + self.rotary_dim)

    @classmethod
    def plain(cls, head_dim: int, theta: float = 10_000.0, style: Style = "half") -> RopeSpec:
        """The original rotation over the whole head, without scaling."""
        return cls(head_dim, head_dim, style, tuple(theta ** (-i / head_dim) for i in range(0, head_dim, 2)))

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], seq_len: int | None = None) -> RopeSpec:
        """Reads a ``config.json``; ``seq_len`` is the prompt's length, which only dynamic scaling needs.

        This says how keys are rotated, not whether they may be moved: that is ``refusal``.
        """
        layers = list_layer_configs(config)
        if rotating := next((one for one in layers if one is not None), None):
            config = rotating
        inv_freq, attention_factor = frequencies(config, seq_len)
        size, rotated = head_dim(config), rotary_dim(config)
        still = (0.0,) * len(inv_freq)
        by_layer = [still if one is None else frequencies(one, seq_len)[0] for one in layers]
        kinds = list(dict.fromkeys((inv_freq, *by_layer)))
        sizes = tuple(size if one is None else head_dim(one) for one in layers)
        return cls(
            head_dim=max(size, *sizes) if sizes else size,
            rotary_dim=rotated,
            style=family_of(config).style,
            inv_freq=inv_freq,
            attention_factor=attention_factor,
            dynamic=rope_parameters(config)["rope_type"] == "dynamic",
            rotary_start=size - rotated if config.get("kv_lora_rank") else 0,
            others=tuple(kinds[1:]),
            layer_kinds=tuple(map(kinds.index, by_layer)) if max(len(kinds), len(set(sizes))) > 1 else (),
            sizes=sizes if len(set(sizes)) > 1 else (),
        )

    @property
    def kinds(self) -> tuple[tuple[float, ...], ...]:
        """The frequencies that there are in this model."""
        return (self.inv_freq, *self.others)

    def of_layer(self, layer: int) -> RopeSpec:
        """The rotation of one layer."""
        if not self.layer_kinds:
            return self
        inv_freq = self.kinds[self.layer_kinds[layer]]
        size, dims = self.sizes[layer] if self.sizes else self.head_dim, 2 * len(inv_freq)
        return replace(self, head_dim=size, rotary_dim=dims, inv_freq=inv_freq, others=(), layer_kinds=(), sizes=())

    def split(self, layers: int) -> list[tuple[list[int], RopeSpec]]:
        """Of so many layers those that rotate equally many dimensions, with the rotation of these.

        >>> two = RopeSpec(8, 8, "half", (1.0, 0.1, 0.01, 0.001), others=((1.0, 0.1),), layer_kinds=(1, 0, 1))
        >>> [(layers, rope.rotary_dim, rope.layer_kinds) for layers, rope in two.split(3)]
        [([1], 8, (0,)), ([0, 2], 4, (0, 0))]
        """
        if len({len(kind) for kind in self.kinds}) == 1:
            return [(list(range(layers)), self)]
        found = []
        for pairs in dict.fromkeys(len(kind) for kind in self.kinds):
            alike = [kind for kind in self.kinds if len(kind) == pairs]
            members = [layer for layer, kind in enumerate(self.layer_kinds) if len(self.kinds[kind]) == pairs]
            kinds = tuple(alike.index(self.kinds[self.layer_kinds[layer]]) for layer in members)
            first, *others = alike
            rope = replace(self, rotary_dim=2 * pairs, inv_freq=first, others=tuple(others), layer_kinds=kinds)
            found.append((members, rope))
        return found

    def cos_sin(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Cosines and sines of ``positions[...]``, each ``[..., rotary_dim / 2]``, attention factor included."""
        cos, sin = self._turn(positions)
        return (cos * self.attention_factor).to(dtype), (sin * self.attention_factor).to(dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates queries or keys ``x[..., heads, head_dim]`` when they are computed; ``cos_sin`` gives the rest."""
        self._check(x)
        return self._apply(x, cos.unsqueeze(-2), sin.unsqueeze(-2))

    def relocate(self, k: Tensor, shift: Tensor | int) -> Tensor:
        """Keys ``k[..., head_dim]`` computed at p become those at p + shift; always a new tensor.

        ``shift`` is one number, or a tensor that broadcasts over ``k.shape[:-1]`` (``shift[:, None]`` for
        ``k[n, heads, head_dim]``). A shift of 0 returns the key bit for bit.
        """
        self._check(k)
        if isinstance(shift, int):
            if shift == 0:
                return k.clone()
            shift = torch.tensor(shift, device=k.device)
        if shift.is_floating_point() or shift.dtype == torch.bool:
            raise InputError("a shift counts positions and must be an integer", hint="cast it to torch.int64")
        cos, sin = self._turn(shift.to(k.device))
        wide = torch.promote_types(k.dtype, torch.float32)
        moved = self._apply(k, cos.to(wide), sin.to(wide))
        return torch.where((shift == 0).to(k.device).unsqueeze(-1), k, moved)

    def relocation_table(self, shifts: Sequence[int]) -> np.ndarray:
        """Cosines, then sines, of whole moves: ``[2, kinds, len(shifts), rotary_dim / 2]`` in single precision."""
        shifted = np.asarray(shifts, dtype=np.float64)
        angles = np.stack([np.multiply.outer(shifted, np.asarray(inv_freq)) for inv_freq in self.kinds])
        return np.stack((np.cos(angles), np.sin(angles))).astype(np.float32)

    def cannot_follow(self, donor: RopeSpec | None) -> str | None:
        """Why keys computed with ``donor``'s rotation cannot be relocated under this one; None when they can.

        ``None`` as donor means that its rotation was not recorded, which is fine while frequencies never change.
        """
        if donor is None:
            return "dynamic frequencies need the donor's own rotation to compare with" if self.dynamic else None
        if (donor.kinds, donor.layer_kinds, donor.sizes) != (self.kinds, self.layer_kinds, self.sizes):
            return "donor and target were computed with different rotary frequencies"
        ways = [(one.style, one.head_dim, one.rotary_start, one.attention_factor) for one in (donor, self)]
        if ways[0] != ways[1]:
            return "donor and target rotate in different ways"
        return None

    def _check(self, x: Tensor) -> None:
        if self.layer_kinds:
            raise InputError("the layers of this model rotate differently", hint="take of_layer(number)")
        if x.shape[-1] != self.head_dim:
            raise InputError(f"heads of {x.shape[-1]} dimensions, not {self.head_dim}", hint="is it the same model?")
        if not x.is_floating_point() or x.dtype.itemsize < 2:
            raise InputError(f"keys of type {x.dtype} cannot be rotated", hint="use float32, float16 or bfloat16")

    def _turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.to(torch.float64).unsqueeze(-1) * _frequency_tensor(self.inv_freq, positions.device)
        return angles.cos(), angles.sin()

    def _apply(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = self.rotary_dim // 2
        wide = x[..., self.rotated].to(torch.promote_types(x.dtype, torch.float32))
        if self.style == "half":
            first, second = wide[..., :half], wide[..., half:]
        else:
            first, second = wide[..., 0::2], wide[..., 1::2]
        turned = first * cos - second * sin, second * cos + first * sin
        joined = torch.cat(turned, dim=-1) if self.style == "half" else torch.stack(turned, dim=-1).flatten(-2)
        before, after = (
            x[..., part].expand(*joined.shape[:-1], -1)
            for part in (slice(self.rotated.start), slice(self.rotated.stop, None))
        )
        return torch.cat((before, joined.to(x.dtype), after), dim=-1)


@lru_cache(maxsize=64)
def _frequency_tensor(inv_freq: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(inv_freq, dtype=torch.float64, device=device)
