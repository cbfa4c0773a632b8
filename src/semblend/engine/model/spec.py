"""A model's shape: what its config.json or its GGUF metadata say, checked and in one form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from semblend.errors import InputError
from semblend.materialize.kv.rope import RopeSpec

ARCHITECTURES = ("llama", "qwen2", "qwen3")
# Control tokens that end a turn in the chat formats of these families; GGUF metadata names only one of them.
END_OF_TURN = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "</s>")
GGUF_CONTROL_TOKEN = 3


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The numbers that the forward pass and the KV pool need."""

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    norm_eps: float
    rope: RopeSpec
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    max_positions: int
    eos_ids: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab", "max_positions"):
            if getattr(self, name) < 1:
                raise InputError(f"the model's {name} is {getattr(self, name)}", hint="the config is damaged")
        if self.heads % self.kv_heads:
            raise InputError(
                f"{self.heads} heads do not divide by {self.kv_heads} KV heads", hint="the config is damaged"
            )

    @property
    def attention_tokens(self) -> float:
        """The context at which a row's attention takes as many operations as its products with the weights."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return (attention + 3 * self.hidden * self.intermediate) / (2 * self.heads * self.head_dim)

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """From the dictionary of a ``config.json``."""
        config = dict(config)
        architecture = str(config.get("model_type", "unknown"))
        if architecture not in ARCHITECTURES:
            raise InputError(
                f"this engine has no architecture {architecture!r}", hint="it has " + ", ".join(ARCHITECTURES)
            )
        _refuse_unsupported(config)
        hidden, heads = _whole(config, "hidden_size"), _whole(config, "num_attention_heads")
        return cls(
            architecture=architecture,
            layers=_whole(config, "num_hidden_layers"),
            hidden=hidden,
            intermediate=_whole(config, "intermediate_size"),
            heads=heads,
            kv_heads=_whole(config, "num_key_value_heads", heads),
            head_dim=_whole(config, "head_dim", 128 if architecture == "qwen3" else hidden // max(heads, 1)),
            vocab=_whole(config, "vocab_size"),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=RopeSpec.from_hf_config(config),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            max_positions=_whole(config, "max_position_embeddings", 2048),
            eos_ids=_ids(config.get("eos_token_id")),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch."),
        )

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, Any]) -> ModelSpec:
        """From the key-value part of a GGUF file; whether the embeddings are tied is told by its tensors."""
        return cls.from_hf_config(hf_config_of_gguf(metadata))


def hf_config_of_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The same facts as a ``config.json`` would state them."""
    architecture = str(metadata.get("general.architecture", "unknown"))

    def get(name: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{name}", default)

    heads, hidden = get("attention.head_count"), get("embedding_length")
    config = {
        "model_type": architecture,
        "num_hidden_layers": get("block_count"),
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("attention.key_length"),
        "vocab_size": len(metadata.get("tokenizer.ggml.tokens", ())) or get("vocab_size"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon", 1e-6),
        "max_position_embeddings": get("context_length"),
        "rope_theta": float(get("rope.freq_base", 10000.0)),
        "tie_word_embeddings": bool(metadata.get("semblend.tied_embeddings", False)),
        "eos_token_id": list(_gguf_eos_ids(metadata)),
        "dtype": "bfloat16",
    }
    scaling = _gguf_rope_scaling(get)
    if scaling:
        config["rope_scaling"] = scaling
    return {name: value for name, value in config.items() if value is not None}


def _gguf_rope_scaling(get: Any) -> dict[str, Any]:
    kind = get("rope.scaling.type", "none")
    factor = get("rope.scaling.factor", get("rope.scale_linear"))
    if kind == "none" or not factor:
        return {}
    scaling = {"rope_type": kind, "factor": float(factor)}
    original = get("rope.scaling.original_context_length")
    if original:
        scaling["original_max_position_embeddings"] = int(original)
    return scaling


def _gguf_eos_ids(metadata: Mapping[str, Any]) -> Sequence[int]:
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    found = {int(token) for token in named if token is not None}
    tokens, kinds = metadata.get("tokenizer.ggml.tokens", ()), metadata.get("tokenizer.ggml.token_type", ())
    control = {tokens[at]: at for at, kind in enumerate(kinds) if kind == GGUF_CONTROL_TOKEN and at < len(tokens)}
    return sorted(found | {control[name] for name in END_OF_TURN if name in control})


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Say no to what would compute something else than the model's authors meant."""
    activation = config.get("hidden_act", "silu")
    full_attention = all(kind == "full_attention" for kind in config.get("layer_types") or ())
    reasons = {
        f"its activation is {activation}, not silu": activation != "silu",
        "it uses sliding-window attention": bool(config.get("use_sliding_window")) or not full_attention,
        "its attention output has a bias": config["model_type"] != "qwen2" and bool(config.get("attention_bias")),
        "its MLP has a bias": bool(config.get("mlp_bias")),
        "its weights are quantised": bool(config.get("quantization_config")),
    }
    for reason, holds in reasons.items():
        if holds:
            raise InputError(f"this engine cannot run the model: {reason}", hint="serve it with vLLM or SGLang")


def _whole(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"the model's {name} is {value!r}, not a whole number", hint="the config is incomplete")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, (list, tuple)) else (int(value),)
