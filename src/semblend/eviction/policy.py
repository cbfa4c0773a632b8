"""The interface between a cache and what decides what it lets go first, and the policies by name.

A policy is a priority function. The cache owns its blocks, its tree and its order; it tells the policy what requests
use and asks what blocks are worth. The cheapest block that may leave goes first, among equals the least recently used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from semblend.config import EVICTION_POLICIES
from semblend.errors import ConfigError
from semblend.eviction.plan import AdaptivePlan, limit_history

T = TypeVar("T")


class EvictionPolicy(Protocol):
    """What a cache tells a policy, and asks it.

    A key is any whole number of 64 bits that stands for one block's content and all before it, the same before and
    after an eviction.
    """

    @property
    def epoch(self) -> int:
        """Grows when what was asked before may be out of date: the cache then asks again."""
        ...

    def use(self, keys: Sequence[int], *, told: int = 0, session: int = 0, sizes: Sequence[int] | None = None) -> None:
        """Hear that a request used these blocks, from the beginning of its prompt on, cached or not.

        ``told``: of the first so many it spoke before (its prompt, when now its answer follows). ``session``: the
        conversation it belongs to, 0 where that is not known. ``sizes``: what each takes of the capacity, where that is
        not one.
        """

    def price(self, keys: Sequence[int]) -> list[float]:
        """Return the value of each block now; the smallest leaves first."""

    def forget(self, key: int) -> None:
        """Hear that a block left the cache."""


class Lfu:
    """A block is worth its uses since it came."""

    epoch = 0

    def __init__(self) -> None:
        self._uses: dict[int, int] = {}

    def use(
        self,
        keys: Sequence[int],
        *,
        told: int = 0,
        session: int = 0,  # noqa: ARG002
        sizes: Sequence[int] | None = None,  # noqa: ARG002
    ) -> None:
        for key in keys[told:]:
            self._uses[key] = self._uses.get(key, 0) + 1

    def price(self, keys: Sequence[int]) -> list[float]:
        return [float(self._uses.get(key, 0)) for key in keys]

    def forget(self, key: int) -> None:
        self._uses.pop(key, None)


class Slru(Lfu):
    """Two segments: what was used once since it came leaves before what was used again."""

    def price(self, keys: Sequence[int]) -> list[float]:
        return [float(self._uses.get(key, 0) > 1) for key in keys]


class Lru2:
    """A block is worth the time of its last use but one; remembers as many blocks as eight caches hold."""

    epoch = 0

    def __init__(self, capacity: int) -> None:
        self._limit = max(64, 8 * capacity)
        self._last: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._clock = 0

    def use(
        self,
        keys: Sequence[int],
        *,
        told: int = 0,
        session: int = 0,  # noqa: ARG002
        sizes: Sequence[int] | None = None,  # noqa: ARG002
    ) -> None:
        self._clock += 1
        for key in keys[told:]:
            self._last[key] = (self._last.pop(key, (0, 0))[1], self._clock)
        while len(self._last) > self._limit:
            self._last.popitem(last=False)

    def price(self, keys: Sequence[int]) -> list[float]:
        return [float(self._last.get(key, (0, 0))[0]) for key in keys]

    def forget(self, key: int) -> None:
        """What was used before an eviction counts after it."""


class GuardedPolicy:
    """Asks another policy until it fails; then every block is worth the same, which makes the cache an LRU cache."""

    def __init__(self, policy: EvictionPolicy, on_failure: Callable[[BaseException], None]) -> None:
        self._policy: EvictionPolicy | None = policy
        self._on_failure = on_failure

    @property
    def epoch(self) -> int:
        return -1 if self._policy is None else self._policy.epoch

    def use(self, keys: Sequence[int], *, told: int = 0, session: int = 0, sizes: Sequence[int] | None = None) -> None:
        self._ask(lambda policy: policy.use(keys, told=told, session=session, sizes=sizes))

    def price(self, keys: Sequence[int]) -> list[float]:
        return self._ask(lambda policy: _check_prices(policy.price(keys), len(keys))) or [0.0] * len(keys)

    def forget(self, key: int) -> None:
        self._ask(lambda policy: policy.forget(key))

    def _ask(self, question: Callable[[EvictionPolicy], T]) -> T | None:
        """The policy's answer; None from its first failure on, which is told."""
        if self._policy is None:
            return None
        try:
            return question(self._policy)
        except Exception as error:
            self._policy = None
            self._on_failure(error)
            return None


def _check_prices(prices: Sequence[float], blocks: int) -> list[float]:
    found = [float(price) for price in prices]
    if len(found) != blocks or any(price != price for price in found):  # NaN has no order
        raise ValueError(f"{len(found)} prices for {blocks} blocks, or not all of them numbers")
    return found


def make_policy(name: str, capacity: int, *, chained: bool = True, items: int | None = None) -> EvictionPolicy | None:
    """Make the policy of this name for a cache of so many blocks; None for ``lru``, which every cache is by itself.

    ``chained``: the blocks of a request follow each other. ``items``: how many fit, where the capacity counts something
    else; memory is bounded by it.

    >>> make_policy("lru", 100) is None
    True
    """
    if name not in EVICTION_POLICIES:
        raise ConfigError(f"eviction={name!r} is no policy", hint="one of " + ", ".join(EVICTION_POLICIES))
    items = capacity if items is None else items
    if name == "adaptive":
        from semblend.eviction.adaptive import Adaptive, compile_adaptive

        compile_adaptive()
        return Adaptive(capacity, chained=chained, plan=AdaptivePlan.build(capacity, history=limit_history(items)))
    if name == "lru2":
        return Lru2(items)
    return None if name == "lru" else Lfu() if name == "lfu" else Slru()


def guard_policy(
    policy: EvictionPolicy | None, on_failure: Callable[[BaseException], None] | None
) -> EvictionPolicy | None:
    """Put a policy behind a border: one that fails leaves an LRU cache, and ``on_failure`` hears why."""
    return None if policy is None else GuardedPolicy(policy, on_failure or (lambda _: None))
