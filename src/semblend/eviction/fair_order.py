"""The order in which items of several tenants leave where a policy says what they are worth."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator
from typing import TypeVar

from semblend.eviction.policy import EvictionPolicy
from semblend.shares import FairLru

K = TypeVar("K", bound=int)


class FairOrder(FairLru[K]):
    """`FairLru` in which a tenant's least valued item leaves first, among equals the least recently used one.

    Who owns the items tells the policy of their uses before it adds or touches them here; ``find_key`` says under which
    key the policy knows an item. `add` and `touch` take O(log items); all items are priced again when the policy has
    learned, or after as many changes as there are items.

    >>> from semblend.eviction.policy import Lfu
    >>> policy = Lfu()
    >>> order = FairOrder(policy, lambda item: item)
    >>> for item in (1, 2, 1):
    ...     policy.use([item])
    >>> order.add(1, "acme", 1); order.add(2, "acme", 1)
    >>> list(order.order_leavers("acme", 1, capacity=2))
    [2, 1]
    """

    def __init__(self, policy: EvictionPolicy, find_key: Callable[[K], int]) -> None:
        super().__init__()
        self._policy, self._find_key = policy, find_key
        self._heaps: dict[str, list[tuple[float, int, K]]] = {}  # worth, rank, item; what is out of date is skipped
        self._ranks: dict[K, int] = {}
        self._next_rank = itertools.count()
        self._epoch, self._changes = policy.epoch, 0

    def add(self, item: K, tenant: str, amount: int) -> None:
        super().add(item, tenant, amount)
        self._rank(item)

    def touch(self, item: K) -> None:
        super().touch(item)
        if item in self._tenant_of:
            self._rank(item)

    def remove(self, item: K) -> None:
        tenant = self._tenant_of.get(item, "")
        super().remove(item)
        self._ranks.pop(item, None)
        if tenant not in self._items:
            self._heaps.pop(tenant, None)

    def clear(self) -> None:
        super().clear()
        self._heaps.clear()
        self._ranks.clear()

    def order_leavers(
        self, tenant: str, amount: int, capacity: int, may_leave: Callable[[K], bool] = lambda _: True
    ) -> Generator[K, None, None]:
        if self._policy.epoch != self._epoch or self._changes >= len(self):
            self._price_again()
        yield from super().order_leavers(tenant, amount, capacity, may_leave)

    def _rank(self, item: K) -> None:
        """Make an item the most recently used one, at its present worth."""
        self._changes += 1
        self._ranks[item] = next(self._next_rank)
        heap = self._heaps.setdefault(self._tenant_of[item], [])
        heapq.heappush(heap, (self._policy.price([self._find_key(item)])[0], self._ranks[item], item))
        if len(heap) > 64 + 4 * self.count(self._tenant_of[item]):  # every touch leaves an outdated entry behind
            heap[:] = [entry for entry in heap if self._is_current(entry)]
            heapq.heapify(heap)

    def _is_current(self, entry: tuple[float, int, K]) -> bool:
        return self._ranks.get(entry[2]) == entry[1]

    def _price_again(self) -> None:
        """Ask the policy what every item is worth; entries that are out of date go."""
        self._heaps = {}
        for tenant, items in self._items.items():
            prices = self._policy.price([self._find_key(item) for item in items])
            heap = [(price, self._ranks[item], item) for price, item in zip(prices, items, strict=True)]
            heapq.heapify(heap)
            self._heaps[tenant] = heap
        self._epoch, self._changes = self._policy.epoch, 0

    def _order_items(self, tenant: str) -> Generator[tuple[K, int], None, None]:
        heap, shown = self._heaps.get(tenant, []), list[tuple[float, int, K]]()
        try:
            while heap:
                entry = heapq.heappop(heap)
                if self._is_current(entry):
                    shown.append(entry)
                    yield entry[2], self._items[tenant][entry[2]]
        finally:  # asking changes nothing
            for entry in shown:
                heapq.heappush(heap, entry)
