"""What a token costs: prefill rates and prices by model, from `semblend.prices`. A user's own numbers replace them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from semblend.kv_shapes import count_kv_bytes_per_token
from semblend.prices import PriceBook, load_price_book

DEFAULT_MODEL: Final = "qwen2.5-7b"
DEFAULT_GPU: Final = "h200"
DEFAULT_KV_BYTES: Final = 40 * 10**9
"""Memory for cached KV where nobody says otherwise: what a GPU of 80 GB leaves beside the weights of 7B to 14B."""
CURRENCY: Final = "USD"


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens to seconds and money. ``*_source`` says where a number comes from."""

    model: str
    kv_bytes_per_token: int
    prefill_tokens_per_s: float
    prefill_source: str
    price_per_million: float
    price_source: str
    currency: str = CURRENCY

    def compute_seconds(self, tokens: int) -> float:
        return tokens / self.prefill_tokens_per_s

    def compute_price(self, tokens: int) -> float:
        return tokens * self.price_per_million / 1e6

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def find_rates(
    model: str = DEFAULT_MODEL,
    *,
    prefill_tokens_per_s: float | None = None,
    gpu_hour: float | None = None,
    price_per_million: float | None = None,
    gpu: str = DEFAULT_GPU,
    book: PriceBook | None = None,
) -> Rates:
    """The rates of a model on one GPU, with a user's own numbers in their places.

    >>> find_rates(prefill_tokens_per_s=10_000, gpu_hour=3.6).compute_price(1_000_000)
    0.1
    """
    kv_bytes = count_kv_bytes_per_token(model)
    prices = book or load_price_book()
    if prefill_tokens_per_s is not None:
        rate, source = prefill_tokens_per_s, "given"
    else:
        found = prices.find_prefill(model, gpu)
        rate, source = round(found.tokens_per_s, -2) or found.tokens_per_s, found.source
    if price_per_million is not None:
        return Rates(model, kv_bytes, rate, source, price_per_million, "given", prices.currency)
    hour = prices.find_gpu(gpu).hour if gpu_hour is None else gpu_hour
    told = "given" if gpu_hour is not None else prices.find_gpu(gpu).hour_source
    return Rates(
        model, kv_bytes, rate, source, round(hour / 3600 / rate * 1e6, 9),
        f"{hour:.2f} {prices.currency} a GPU hour, {told}", prices.currency,
    )  # fmt: skip
