"""How much memory: what the engine takes by itself, and what host memory beside it would add.

Memory that the GPU has costs nothing: the engine takes it without a flag, and advising less would only lose hits. So a
size is chosen only beyond it, and only where the hits that it adds are worth its price.
"""

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
NOISE = 0.005
"""Hit rates that differ by less than this are called equal: half a point."""
LEAST_HOURS = 1.0
"""A shorter trace gives no money a day: a burst of seconds, times a day, is a number about nothing."""


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
    def free_gib(self) -> float:
        """GiB that the weights leave on the model's GPUs, when a tenth of their memory is kept for activations."""
        return max(0.0, 0.9 * self.gpu.memory_gib * self.rate.gpus - self.rate.weights_gib)

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
class Room:
    """KV memory that the engine takes without a flag, and what running requests need of it, in tokens."""

    pool: int
    running: int  # the most that running requests hold at a time
    longest: int  # prompt and answer of the longest request

    @property
    def cache(self) -> int:
        """What is left for ended requests at the busiest moment; never less than one request, whose blocks stay."""
        return max(1, self.pool - self.running, min(self.pool, self.longest))

    @property
    def is_short(self) -> bool:
        """Whether running requests alone fill the pool, so that some have to wait."""
        return self.running + self.longest > self.pool

    def add_requests(self, cache: int) -> int:
        """Return the memory to ask for: the cache, the running requests' peak and one request of full length."""
        return cache + self.running + self.longest


@dataclass(frozen=True, slots=True)
class SizeRule:
    """Chooses how much memory to add to what the engine has: what leaves most money, or without prices the knee.

    ``hours`` is the length of the traffic whose hits are given. ``by_price`` is false for a trace under `LEAST_HOURS`.
    """

    costs: Costs
    room: Room
    hours: float
    by_price: bool

    def choose(self, sizes: Sequence[int], hit_tokens: Sequence[float], asked_tokens: float) -> int | None:
        """Return the index of the size to go to, above the engine's own; None where none is worth it.

        Hits that come to less than `NOISE` of the tokens that were asked for are no reason to add memory.
        """
        own = list(sizes).index(self.room.cache)
        gains = [hits - hit_tokens[own] for hits in hit_tokens[own + 1 :]]
        if not gains or max(gains) <= NOISE * asked_tokens or self.costs.saved_gpu_ms_per_token <= 0:
            return None
        if not self.costs.tier.gib_hour:  # memory that stands unused: all that helps
            found: int | None = next(at for at, gain in enumerate(gains) if gain >= max(gains) - NOISE * asked_tokens)
        elif self.by_price:
            found = find_paying_size(
                [
                    self.costs.compute_net(self.room.add_requests(size), gain, self.hours)
                    for size, gain in zip(sizes[own + 1 :], gains, strict=True)
                ]
            )
        else:
            found = find_knee([size - sizes[own] for size in sizes[own + 1 :]], gains)
        return None if found is None else own + 1 + found


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
