"""How many bytes of KV a token takes, for models that people know by name."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from semblend.errors import InputError

# layers, KV heads, head dimension: from the configuration files that the models' authors publish
KV_SHAPES: Final = MappingProxyType(
    {
        "qwen2.5-0.5b": (24, 2, 64),
        "qwen2.5-1.5b": (28, 2, 128),
        "qwen2.5-3b": (36, 2, 128),
        "qwen2.5-7b": (28, 4, 128),
        "qwen2.5-14b": (48, 8, 128),
        "qwen2.5-32b": (64, 8, 128),
        "qwen2.5-72b": (80, 8, 128),
        "llama-3.1-8b": (32, 8, 128),
        "llama-3.1-70b": (80, 8, 128),
        "llama-3.2-1b": (16, 8, 64),
        "llama-3.2-3b": (28, 8, 128),
        "mistral-7b-v0.3": (32, 8, 128),
        "smollm2-135m": (30, 3, 64),
        "smollm2-1.7b": (24, 32, 64),
    }
)
DTYPE_BYTES: Final = MappingProxyType({"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1})


def count_kv_bytes_per_token(model: str, dtype: str = "bf16") -> int:
    """Count the bytes of keys and values that one token takes in all layers.

    >>> count_kv_bytes_per_token("qwen2.5-7b")
    57344
    """
    if model not in KV_SHAPES:
        raise InputError(f"unknown model {model!r}", hint="one of " + ", ".join(KV_SHAPES))
    if dtype not in DTYPE_BYTES:
        raise InputError(f"unknown KV dtype {dtype!r}", hint="one of " + ", ".join(DTYPE_BYTES))
    layers, heads, dimension = KV_SHAPES[model]
    return 2 * layers * heads * dimension * DTYPE_BYTES[dtype]
