"""What a token costs: prefill rates and prices by model. Data, with where each number comes from.

One rate was measured: vLLM 0.26 on one H200 prefills 8,192 tokens of a model of the Qwen2.5-7B shape (bfloat16) in
198 ms. For other models the rate is that one, divided by how many times more parameters they have: prefill of such
lengths is bound by computing. The price of a GPU hour is an assumption. A user's own numbers replace each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from semblend.kv_shapes import count_kv_bytes_per_token

DEFAULT_MODEL: Final = "qwen2.5-7b"
DEFAULT_KV_BYTES: Final = 40 * 10**9
"""Memory for cached KV where nobody says otherwise: what a GPU of 80 GB leaves beside the weights of 7B to 14B."""
DEFAULT_GPU_HOUR: Final = 3.00
CURRENCY: Final = "USD"
MEASURED_RATE: Final = 41_000.0
MEASURED: Final = "measured: vLLM 0.26, one H200, bfloat16, prompts of 8,192 tokens"
# billions of parameters, from the authors' model cards
PARAMETERS: Final[Mapping[str, float]] = {
    "qwen2.5-0.5b": 0.49,
    "qwen2.5-1.5b": 1.54,
    "qwen2.5-3b": 3.09,
    "qwen2.5-7b": 7.61,
    "qwen2.5-14b": 14.7,
    "qwen2.5-32b": 32.5,
    "qwen2.5-72b": 72.7,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.6,
    "llama-3.2-1b": 1.24,
    "llama-3.2-3b": 3.21,
    "mistral-7b-v0.3": 7.25,
    "smollm2-135m": 0.135,
    "smollm2-1.7b": 1.71,
}


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens to seconds and money. ``*_source`` says where a number comes from."""

    model: str
    kv_bytes_per_token: int
    prefill_tokens_per_s: float
    prefill_source: str
    price_per_million: float
    price_source: str

    def compute_seconds(self, tokens: int) -> float:
        return tokens / self.prefill_tokens_per_s

    def compute_price(self, tokens: int) -> float:
        return tokens * self.price_per_million / 1e6

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {"currency": CURRENCY}


def find_rates(
    model: str = DEFAULT_MODEL,
    *,
    prefill_tokens_per_s: float | None = None,
    gpu_hour: float | None = None,
    price_per_million: float | None = None,
) -> Rates:
    """The rates of a model, with a user's own numbers in their places.

    >>> find_rates(prefill_tokens_per_s=10_000, gpu_hour=3.6).compute_price(1_000_000)
    0.1
    """
    kv_bytes = count_kv_bytes_per_token(model)
    if prefill_tokens_per_s is not None:
        rate, source = prefill_tokens_per_s, "given"
    else:
        scale = PARAMETERS[DEFAULT_MODEL] / PARAMETERS[model]
        rate = round(MEASURED_RATE * scale, -2)
        source = MEASURED if model == DEFAULT_MODEL else f"scaled by parameters from {DEFAULT_MODEL} ({MEASURED})"
    if price_per_million is not None:
        return Rates(model, kv_bytes, rate, source, price_per_million, "given")
    hour = DEFAULT_GPU_HOUR if gpu_hour is None else gpu_hour
    told = "given" if gpu_hour is not None else "an assumption, not a quote"
    return Rates(
        model, kv_bytes, rate, source, round(hour / 3600 / rate * 1e6, 9), f"{hour:.2f} {CURRENCY} a GPU hour, {told}"
    )
