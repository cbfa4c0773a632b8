"""The advice for one trace as a value: curves, the chosen policy and size, what it saves, and how sure that is.

Memory that the GPU has costs nothing: the engine takes it without a flag, and advising less would only lose hits. So a
size is chosen only beyond it, and only where the hits that it adds are worth its price (`SizeRule`). How sure that is
comes from a bootstrap: the sessions of the trace are drawn again and again (`resample`). `ENGINES` holds what engines
can be told, as of vLLM 0.32, SGLang 0.5.23, LMCache 0.5.6 and this project's own engine. Policies that an engine has
and the simulator does not know (SGLang: priority; LMCache: MRU) are not there, nor are those that nobody has compared
with the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from semantickv.analysis.latency import LatencyModel
from semantickv.simulator.simulate import SimulationResult
from semantickv.traces.trace import Trace
from semblend.errors import InputError
from semblend.prices import Gpu, MemoryTier, PrefillRate, PriceBook

# -- intervals ------------------------------------------------------------------------------------------------------

DRAWS = 400
MIN_UNITS = 10
"""With fewer sessions or runs no interval is given."""
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Interval:
    """From ``low`` to ``high`` lie 95 % of the draws."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, eq=False)
class Resampling:
    """How often each unit is drawn, in every draw. ``unit`` is what is drawn: "sessions" or "runs of requests"."""

    unit: str
    members: Counts  # for every request, the number of its unit
    weights: Counts  # draws x units

    @property
    def units(self) -> int:
        return int(self.weights.shape[1])

    def sum_units(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Sum a value of every request over the units of each draw."""
        summed = np.bincount(self.members, weights=values, minlength=self.units)
        return np.asarray(self.weights @ summed, np.float64)


def resample(trace: Trace, seed: int = 0, draws: int = DRAWS) -> Resampling | None:
    """Draw the sessions of a trace again and again; None where there are fewer than `MIN_UNITS`."""
    unit, members = _find_units(trace)
    units = int(members.max(initial=-1)) + 1
    if units < MIN_UNITS:
        return None
    chance = np.random.default_rng(seed)
    return Resampling(unit, members, chance.multinomial(units, np.full(units, 1 / units), size=draws))


def _find_units(trace: Trace) -> tuple[str, Counts]:
    """Say what is drawn, and for every request the number of its unit."""
    named = trace.sessions
    if named and sum(map(bool, named)) > len(trace) // 2:
        numbers: dict[tuple[int, str], int] = {}
        pairs = zip(trace.tenant.tolist(), named, strict=True)
        keys = [(tenant, name or f"\0{at}") for at, (tenant, name) in enumerate(pairs)]  # nameless: a session of one
        return "sessions", np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
    run = max(1, int(len(trace) ** 0.5))
    return "runs of requests", np.arange(len(trace), dtype=np.int64) // run


def find_interval(values: npt.NDArray[np.float64]) -> Interval:
    """Find the 2.5 % and 97.5 % points of the draws.

    >>> find_interval(np.arange(1001.0))
    Interval(low=25.0, high=975.0)
    """
    low, high = np.percentile(values, [2.5, 97.5])
    return Interval(float(low), float(high))


# -- what engines can be told ---------------------------------------------------------------------------------------

GIB = 2**30


@dataclass(frozen=True, slots=True)
class KvMemory:
    """A size of KV in the units that engines ask for, and the GPUs that share it."""

    tokens: int
    bytes: int
    gpus: int = 1

    @property
    def gib(self) -> int:
        """Whole GiB, rounded up."""
        return -(-self.bytes // GIB)

    def divide(self, unit_bytes: int) -> int:
        """Return each GPU's share in whole units, rounded up."""
        return -(-self.bytes // (unit_bytes * self.gpus))


Write = Callable[[str, KvMemory], str]


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """``policies``: those that can be set, by our names. The rest is what an operator types, made of policy and memory.

    ``write_host`` asks for host memory beside the GPU's; ``write_own`` is for the GPU's memory alone: empty where the
    engine takes all of it by itself and has one policy. ``default_tokens``: the pool without a flag, where that is not
    all that the GPU has; ``least_host_bytes``: what it takes of the host without a flag. ``memories`` are the kinds
    that can be set.
    """

    policies: tuple[str, ...]
    write_own: Write
    write_host: Write | None = None
    memories: tuple[str, ...] = ("hbm", "dram")
    default_tokens: int | None = None
    least_host_bytes: int = 0


def _write_sglang(policy: str) -> str:
    return f"python -m sglang.launch_server --model-path MODEL --radix-eviction-policy {policy}"


ENGINES: Final[Mapping[str, EngineChoice]] = MappingProxyType(
    {
        "vllm": EngineChoice(
            ("lru",), lambda *_: "", lambda _, memory: f"vllm serve MODEL --kv-offloading-size {memory.gib}"
        ),
        "sglang": EngineChoice(
            ("lru", "lfu"),
            lambda policy, _: "" if policy == "lru" else _write_sglang(policy),
            lambda policy, memory: (
                f"{_write_sglang(policy)} --enable-hierarchical-cache --hicache-size {memory.divide(10**9)}"
            ),
        ),
        "lmcache": EngineChoice(
            ("lru", "lfu", "fifo"),
            lambda *_: "",
            lambda policy, memory: (
                f"LMCACHE_CACHE_POLICY={policy.upper()} LMCACHE_LOCAL_CPU=true "
                f"LMCACHE_MAX_LOCAL_CPU_SIZE={memory.divide(GIB)}"
            ),
            ("dram",),
            least_host_bytes=5 * GIB,
        ),
        "semblend": EngineChoice(
            ("lru",),
            lambda _, memory: f"semblend serve --model MODEL --pool-tokens {memory.tokens}",
            memories=("hbm",),
            default_tokens=32_768,
        ),
    }
)


def list_engines_with(policy: str) -> tuple[str, ...]:
    """Name the engines that have a policy.

    >>> list_engines_with("lfu"), list_engines_with("gdsf")
    (('sglang', 'lmcache'), ())
    """
    return tuple(name for name, engine in ENGINES.items() if policy in engine.policies)


# -- how much memory ------------------------------------------------------------------------------------------------

DEFAULT_GPU = "h200"
NOISE = 0.005
"""Hit rates that differ by less than this are called equal: half a point."""
MIN_HOURS = 1.0
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

    ``hours`` is the length of the traffic whose hits are given. ``by_price`` is false for a trace under `MIN_HOURS`.
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


# -- the advice -----------------------------------------------------------------------------------------------------

MUCH = 0.05
"""Of the prompt tokens: so much more is worth a headline before its size is known."""
STABLE_TIMES = 1.5
"""Two sizes that differ by no more than this are called the same: about a step between two sizes that are tried."""


@dataclass(frozen=True, slots=True)
class Point:
    """One policy at one size."""

    tokens: int
    token_hit_rate: float
    block_hit_rate: float
    tokens_saved: int
    error: float = 0.0  # standard error of the rates where they come from samples


@dataclass(frozen=True, slots=True)
class TierChoice:
    """How much memory of this kind to add to what the engine has. ``at`` is the index of the size; None: add nothing.

    ``own`` is what the engine gives as it is (LRU, its own memory), ``point`` what it would give with the advice.
    """

    costs: Costs
    policy: str
    at: int | None
    point: Point
    own: Point
    room: Room
    hours: float

    @property
    def adds(self) -> bool:
        return self.at is not None

    @property
    def added_tokens(self) -> int:
        """Tokens of KV that the added memory holds: the cache, the running requests and one of full length."""
        return self.room.add_requests(self.point.tokens) if self.adds else 0

    @property
    def gpu_hours_a_day(self) -> float:
        """GPU hours that a day of this traffic saves: by the added memory, or without one by the engine's own."""
        hits = self.point.tokens_saved - (self.own.tokens_saved if self.adds else 0)
        return hits * self.saved_gpu_ms_per_token / 3.6e6 * 24 / self.hours

    @property
    def saved_gpu_ms_per_token(self) -> float:
        """GPU time that a hit saves: of the added memory its prefill less its load; on the GPU nothing is loaded."""
        return self.costs.saved_gpu_ms_per_token if self.adds else self.costs.rate.gpu_ms_per_token

    @property
    def saved_a_day(self) -> float:
        """What those GPU hours cost."""
        return self.gpu_hours_a_day * self.costs.gpu.hour

    @property
    def memory_a_day(self) -> float:
        """What the added memory costs in a day."""
        return self.costs.compute_gib(self.added_tokens) * self.costs.tier.gib_hour * 24

    @property
    def net_a_day(self) -> float:
        return self.saved_a_day - self.memory_a_day

    def as_json(self, by_price: bool) -> dict[str, Any]:
        """Return the choice in the names of advice.json; money only where the trace is long enough."""
        return {
            "adds_memory": self.adds,
            "policy": self.policy,
            "tokens": self.point.tokens,
            "gib": round(self.costs.compute_gib(self.point.tokens), 4),
            "gib_to_add": round(self.costs.compute_gib(self.added_tokens), 4),
            "token_hit_rate": self.point.token_hit_rate,
            "token_hit_rate_of_the_engines_own_memory": self.own.token_hit_rate,
            "gpu_hours_saved_a_day": self.gpu_hours_a_day if by_price else None,
            "saved_a_day": self.saved_a_day if by_price else None,
            "memory_cost_a_day": self.memory_a_day if by_price else None,
            "net_a_day": self.net_a_day if by_price else None,
        } | self.costs.as_json()


@dataclass(frozen=True, slots=True)
class Sureness:
    """95 % intervals by bootstrap over so many ``units``. ``sizes`` (tokens) is None where the curves are samples."""

    unit: str
    units: int
    hit_rate: Interval
    net_a_day: Interval | None  # None where the trace is too short for money
    sizes: Interval | None
    share_without: float  # of the draws in which nothing is added


@dataclass(frozen=True, eq=False)
class Advice:
    """Curves of hit rate against memory, and what to do. Sizes are in tokens of KV."""

    trace: Trace
    facts: Mapping[str, Any]
    model: str
    dtype: str
    curves: Mapping[str, tuple[Point, ...]]
    anywhere: tuple[Point, ...]  # the advised policy in block mode; empty where the trace cannot tell
    arranged: Point | None  # the advised policy and size with passages in the order of earlier prompts; None: none move
    choice: TierChoice
    tiers: Mapping[str, TierChoice]  # the same question for every kind of memory
    spare: TierChoice | None  # memory to add if the machine has it unused, where at its price none is worth adding
    hours: float
    by_price: bool  # whether money chose the size: not on a trace under an hour
    at_chosen: SimulationResult
    ceiling: Point  # LRU with room for everything: what a prefix cache could ever give on this trace
    rate: float = 1.0  # share of the blocks that were simulated
    half: int | None = None  # the size that the first half of the trace asks for; None where it asks for no more memory
    sureness: Sureness | None = None  # None: too few sessions
    engine: str = ""  # only its policies are advised; "": those of any

    @property
    def policy(self) -> str:
        return self.choice.policy

    @property
    def chosen(self) -> int:
        """Index of the advised size; that of the engine's own memory where nothing is added."""
        return self.sizes.index(self.choice.point.tokens)

    @property
    def room(self) -> Room:
        return self.choice.room

    @property
    def surely_helps_to_add(self) -> bool:
        """Whether the whole trace, its half and the draws all ask for more memory, and it could give much (`MUCH`)."""
        found = self.sureness
        gain = self.ceiling.token_hit_rate - self.choice.own.token_hit_rate
        asked = self.choice.adds and self.half is not None and found is not None
        return asked and gain > MUCH and found is not None and found.share_without <= 0.05

    @property
    def costs(self) -> Costs:
        return self.choice.costs

    @property
    def latency(self) -> LatencyModel:
        return self.costs.latency

    @property
    def command(self) -> str:
        """What sets the advice in the chosen engine; empty where its defaults do, or the trace is too short."""
        return "" if self.is_too_short or self.ceiling.token_hit_rate < NOISE else self.write_command(self.choice)

    def write_command(self, choice: TierChoice) -> str:
        """Write what sets a choice in the chosen engine; empty where there is nothing to set.

        Never less than the engine takes by default, nor than the running requests and one of full length need.
        """
        engine = ENGINES.get(self.engine)
        if engine is None:
            return ""
        if choice.adds and engine.write_host:
            size = max(choice.added_tokens * self.token_bytes, engine.least_host_bytes)
            return engine.write_host(choice.policy, KvMemory(choice.added_tokens, size, self.costs.rate.gpus))
        tokens = self.pool_tokens
        return engine.write_own(choice.policy, KvMemory(tokens, tokens * self.token_bytes, self.costs.rate.gpus))

    @property
    def pool_tokens(self) -> int:
        """The pool of an engine that does not take all of the GPU by itself: what gives as many hits as all of it."""
        engine, least = ENGINES.get(self.engine), self.choice.own.token_hit_rate - NOISE
        useful = next(point.tokens for point in self.curves["lru"] if point.token_hit_rate >= least)
        default = engine.default_tokens or 0 if engine else 0
        return max(default, min(self.room.pool, self.room.add_requests(useful)))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(point.tokens for point in self.curves["lru"])

    @property
    def token_bytes(self) -> int:
        return self.costs.token_bytes

    @property
    def is_stable(self) -> bool:
        """Whether half of the trace, on its own, asks for about as much memory: within `STABLE_TIMES`."""
        if self.half is None:
            return not self.choice.adds
        return self.choice.adds and _are_alike(self.half, self.choice.point.tokens)

    @property
    def is_sure(self) -> bool:
        """Whether the draws of the bootstrap agree: on a size, within `STABLE_TIMES`, and on whether to add memory."""
        found = self.sureness
        if found is None:
            return False
        if not self.choice.adds:
            return found.share_without >= 0.95
        if found.share_without > 0.05:
            return False
        size = self.choice.point.tokens
        return found.sizes is None or (_are_alike(found.sizes.low, size) and _are_alike(found.sizes.high, size))

    @property
    def is_too_short(self) -> bool:
        """Whether the trace is too short for the advice: too few sessions, or its half or the draws say another size.

        Leaving the engine as it is needs no size, nor does memory that costs nothing: those need enough sessions only.
        """
        if self.sureness is None:
            return True
        free = not self.costs.tier.gib_hour
        return self.choice.adds and not free and not (self.is_stable and self.is_sure)

    @property
    def can_tell(self) -> bool:
        """Whether the trace says what prompts hold. One that has their lengths alone says nothing about a cache."""
        return self.trace.holds_content

    def get_advised_point(self, policy: str) -> Point:
        """Return the result of ``policy`` at the advised size."""
        return self.curves[policy][self.chosen]

    def to_gib(self, tokens: float) -> float:
        """Convert tokens of KV to GiB for the advice's model and dtype."""
        return self.costs.compute_gib(tokens)

    @property
    def ttft_cold_ms(self) -> float:
        """Estimated average time to first token without a cache, in ms."""
        return self.latency.base_ttft_ms + self.latency.token_latency_ms * self._mean_tokens

    @property
    def ttft_ms(self) -> float:
        """Estimated average time to first token with the advice, in ms; what the added memory gives is loaded."""
        hit = self._mean_tokens * self.choice.point.token_hit_rate
        loaded = hit - self._mean_tokens * self.choice.own.token_hit_rate if self.choice.adds else 0.0
        computed = self.latency.token_latency_ms * (self._mean_tokens - hit)
        return self.latency.base_ttft_ms + computed + self.costs.load_ms_per_token * loaded

    @property
    def _mean_tokens(self) -> float:
        """Prompt tokens of an average request."""
        return float(self.facts["prompt_tokens"]) / max(1, int(self.facts["requests"]))

    def as_json(self) -> dict[str, Any]:
        """Return the advice with all its curves, in the names of advice.json."""
        return {
            "simulated": True,
            "trace": dict(self.facts) | {"format": self.trace.format, "skipped_lines": self.trace.skipped},
            "sampled": self.rate,
            "kv": {"model": self.model, "dtype": self.dtype, "bytes_per_token": self.token_bytes},
            "latency": self.latency.as_json(),
            "ceiling": self._list_points([self.ceiling])[0] if self.can_tell else None,
            "advice": self._describe_advice() if self.can_tell else None,
            "by_memory": {name: one.as_json(self.by_price) for name, one in self.tiers.items()}
            if self.can_tell
            else None,
            "curves": {policy: self._list_points(points) for policy, points in self.curves.items()},
            "position_independent": self._list_points(self.anywhere) or None,
            "arranged": None if self.arranged is None else self._list_points([self.arranged])[0],
        }

    def _describe_advice(self) -> dict[str, Any]:
        sure = self.sureness
        return self.choice.as_json(self.by_price) | {
            "engine": self.engine or None,
            "command": self.command or None,
            "engines_that_have_it": list_engines_with(self.policy),
            "command_for_unused_memory": (self.spare and self.write_command(self.spare)) or None,
            "gib_to_add_if_unused": self.spare and round(self.to_gib(self.spare.added_tokens), 4),
            "token_hit_rate_with_unused_memory": self.spare and self.spare.point.token_hit_rate,
            "size_chosen_by": "price" if self.by_price else "knee",
            "gib_by_the_first_half": None if self.half is None else round(self.to_gib(self.half), 4),
            "stable": self.is_stable,
            "trace_too_short": self.is_too_short,
            "intervals": None if sure is None else {
                "drawn": sure.unit,
                "units": sure.units,
                "token_hit_rate": [sure.hit_rate.low, sure.hit_rate.high],
                "net_a_day": sure.net_a_day and [sure.net_a_day.low, sure.net_a_day.high],
                "gib": None if sure.sizes is None else [self.to_gib(sure.sizes.low), self.to_gib(sure.sizes.high)],
                "share_of_draws_in_which_nothing_is_added": sure.share_without,
            },
            "avg_ttft_ms_without_a_cache": self.ttft_cold_ms,
            "avg_ttft_ms": self.ttft_ms,
            "gib_of_the_engines_own_memory": self.to_gib(self.room.pool),
            "gib_of_running_requests": self.to_gib(self.room.running),
            "gib_of_the_longest_request": self.to_gib(self.room.longest),
        }  # fmt: skip

    def _list_points(self, points: Sequence[Point]) -> list[dict[str, float]]:
        return [
            {
                "tokens": point.tokens,
                "gib": round(self.to_gib(point.tokens), 4),
                "token_hit_rate": point.token_hit_rate,
                "block_hit_rate": point.block_hit_rate,
                "tokens_saved": point.tokens_saved,
                "standard_error": point.error,
            }
            for point in points
        ]


def _are_alike(one: float, other: float) -> bool:
    less, more = sorted((one, other))
    return more <= STABLE_TIMES * less


def count_hits_by_type(advice: Advice) -> dict[str, tuple[int, int]]:
    """Count the prompt tokens of each block type, and those that hit at the advised size."""
    trace = advice.trace
    left = np.asarray(advice.at_chosen.hit_tokens_by_request, dtype=np.int64)
    ends = np.cumsum(trace.tokens, dtype=np.int64)
    before = ends - trace.tokens
    offset = before - np.repeat(before[trace.starts[:-1]] if len(trace) else before, np.diff(trace.starts))
    hit = np.where(offset + trace.tokens <= left[trace.request], trace.tokens, 0)
    return {
        name: (int(trace.tokens[trace.types == n].sum(dtype=np.int64)), int(hit[trace.types == n].sum()))
        for n, name in enumerate(trace.type_names)
        if (trace.types == n).any()
    }
