"""How much memory: the size whose last GiB still earns what it costs; the knee of the curve where time is unknown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from semantickv.analysis.latency import LatencyModel
from semblend.errors import InputError
from semblend.prices import Gpu, MemoryTier, PrefillRate, PriceBook

GIB = 2**30
DEFAULT_GPU = "h200"


@dataclass(frozen=True, slots=True)
class Costs:
    """What a hit saves and what memory costs, for one model, one GPU and one tier of memory. Money is in one currency.

    ``token_bytes``: KV of a token. ``rate.source`` and those of the tier say where the numbers come from.
    """

    gpu: Gpu
    tier: MemoryTier
    rate: PrefillRate
    token_bytes: int
    currency: str = "USD"

    @classmethod
    def find(
        cls,
        book: PriceBook,
        *,
        model: str,
        gpu: str,
        tier: str,
        token_bytes: int,
        hour: float | None = None,
        gib_hour: float | None = None,
        latency: LatencyModel | None = None,
    ) -> Costs:
        """Look everything up; what is given (two prices, a latency line that is not the default) replaces it."""
        for name, value in (("an hour", hour), ("a GiB for an hour", gib_hour)):
            if value is not None and not 0 <= value < float("inf"):
                raise InputError(f"a price of {value} for {name}", hint="0 or more")
        found, memory, rate = book.find_gpu(gpu), book.find_tier(tier, gpu), book.find_prefill(model, gpu)
        if hour is not None:
            found = replace(found, hour=hour, hour_source="given")
        if gib_hour is not None:
            memory = replace(memory, gib_hour=gib_hour, gib_hour_source="given")
        elif hour is not None and tier == "hbm" and "gib_hour" not in book.tables["memory"]["hbm"]:
            memory = replace(memory, gib_hour=hour / found.memory_gib)
        if latency is not None and latency.token_latency_ms > 0:
            each = 1000 / (latency.token_latency_ms * rate.gpus)
            rate = replace(rate, tokens_per_s=each, base_ms=latency.base_ttft_ms, source=latency.source)
        return cls(found, memory, rate, token_bytes, book.currency)

    @property
    def latency(self) -> LatencyModel:
        """The line of the time to first token that these rates give."""
        return LatencyModel(self.rate.base_ms, self.rate.ms_per_token, self.rate.source)

    @property
    def load_ms_per_token(self) -> float:
        """Time to bring the KV of a token from the tier to the GPU, in ms."""
        return self.tier.compute_load_ms(self.token_bytes)

    @property
    def saved_gpu_ms_per_token(self) -> float:
        """GPU time that a hit token saves: its prefill less its load, during which the GPUs are taken to wait."""
        return self.rate.gpu_ms_per_token - self.load_ms_per_token * self.rate.gpus

    def compute_gpu_hours(self, tokens: float) -> float:
        """GPU hours that so many hit tokens save."""
        return tokens * self.saved_gpu_ms_per_token / 3.6e6

    def compute_gib(self, tokens: float) -> float:
        return tokens * self.token_bytes / GIB

    def compute_net(self, size_tokens: float, hit_tokens: float, hours: float) -> float:
        """Money left in an hour of this traffic: GPU time saved, less the memory that did it."""
        earned = self.compute_gpu_hours(hit_tokens) * self.gpu.hour / hours
        return earned - self.compute_gib(size_tokens) * self.tier.gib_hour

    @property
    def free_gib_per_gpu(self) -> float:
        """GiB of a GPU that the weights leave, when a tenth of its memory is kept for activations."""
        return max(0.0, 0.9 * self.gpu.memory_gib - self.rate.weights_gib / self.rate.gpus)

    def as_json(self) -> dict[str, Any]:
        """Return the numbers with their sources."""
        return {
            "currency": self.currency,
            "gpu": self.gpu.name,
            "gpus_a_replica": self.rate.gpus,
            "gpu_hour": self.gpu.hour,
            "gpu_hour_source": self.gpu.hour_source,
            "prefill_tokens_per_s_and_gpu": self.rate.tokens_per_s,
            "prefill_source": self.rate.source,
            "memory": self.tier.name,
            "gib_hour": self.tier.gib_hour,
            "gib_hour_source": self.tier.gib_hour_source,
            "load_ms_per_token": self.load_ms_per_token,
            "load_source": self.tier.load_source,
        }


@dataclass(frozen=True, slots=True)
class SizeRule:
    """Chooses a size: the one that leaves most money; without a duration of the trace, the knee."""

    costs: Costs
    hours: float

    @property
    def is_by_price(self) -> bool:
        return self.hours > 0

    def choose(self, sizes: Sequence[int], hit_tokens: Sequence[float]) -> int | None:
        """Return the index of the size; None where no size earns what it costs."""
        if not self.is_by_price:
            return find_knee(sizes, hit_tokens)
        left = [self.costs.compute_net(size, hits, self.hours) for size, hits in zip(sizes, hit_tokens, strict=True)]
        return find_paying_size(left)


def find_knee(sizes: Sequence[int], rates: Sequence[float]) -> int:
    """Return the index at which the curve is highest above the straight line from no memory to all of it.

    >>> find_knee([1, 2, 4, 8, 16], [0.1, 0.3, 0.5, 0.52, 0.53])
    2
    """
    if not rates or rates[-1] <= 0:
        return 0
    top = max(rates)
    above = [rate / top - size / sizes[-1] for size, rate in zip(sizes, rates, strict=True)]
    return int(np.argmax(above))


def find_paying_size(left: Sequence[float]) -> int | None:
    """Return the index of the size that leaves most; None where none leaves anything. Of equal ones the smallest.

    >>> find_paying_size([2.5, 3.0, 2.5]), find_paying_size([-1.0, -2.0])
    (1, None)
    """
    best = int(np.argmax(left))
    return best if left[best] > 0 else None
