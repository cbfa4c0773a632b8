"""Who holds how much of a memory that tenants share, and who has to give some back.

The rule is max-min fairness: when room is needed, the tenant that holds most gives first, its least recently used
item first. A share is the capacity divided by the tenants present. Room is needed only when all amounts together
exceed the capacity, so that the largest amount then exceeds a share: whoever holds a share or less loses nothing.
With one tenant this is plain least recently used.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Shares:
    """Amounts by tenant. `add` and `find_largest` take O(log tenants) on average.

    >>> shares = Shares()
    >>> shares.add("acme", 3); shares.add("bolt", 5); shares.add("acme", 4)
    >>> shares.find_largest(), shares["acme"], len(shares)
    ('acme', 7, 2)
    """

    def __init__(self) -> None:
        self._amounts: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []  # (-amount, tenant); entries that are out of date are skipped

    def __getitem__(self, tenant: str) -> int:
        return self._amounts.get(tenant, 0)

    def __len__(self) -> int:
        """Tenants that hold something."""
        return len(self._amounts)

    def count_with(self, tenant: str) -> int:
        """How many tenants hold something, with this one, which may hold nothing yet."""
        return len(self._amounts) + (tenant not in self._amounts)

    def add(self, tenant: str, amount: int) -> None:
        """Change what a tenant holds by ``amount``, which may be negative."""
        if not amount:
            return
        held = self._amounts.get(tenant, 0) + amount
        if held < 0:
            raise ValueError(f"tenant {tenant!r} would hold {held}")
        if held == 0:
            del self._amounts[tenant]
        else:
            self._amounts[tenant] = held
            heapq.heappush(self._heap, (-held, tenant))
        if len(self._heap) > 64 + 4 * len(self._amounts):
            self._heap = [(-held, tenant) for tenant, held in self._amounts.items()]
            heapq.heapify(self._heap)

    def find_largest(self, without: Collection[str] = ()) -> str | None:
        """The tenant that holds most, besides those in ``without``; None where nobody is left."""
        aside: list[tuple[int, str]] = []
        found = None
        while self._heap and found is None:
            amount, tenant = self._heap[0]
            if self._amounts.get(tenant) != -amount:
                heapq.heappop(self._heap)
            elif tenant in without:
                aside.append(heapq.heappop(self._heap))
            else:
                found = tenant
        for entry in aside:
            heapq.heappush(self._heap, entry)
        return found

    def to_dict(self) -> dict[str, int]:
        return dict(self._amounts)


class FairLru(Generic[K]):
    """Items of several tenants, each with an amount; says in which order they leave when room is needed.

    >>> lru = FairLru[str]()
    >>> for item, tenant in (("a1", "acme"), ("b1", "bolt"), ("b2", "bolt"), ("b3", "bolt")):
    ...     lru.add(item, tenant, 1)
    >>> list(lru.order_leavers("acme", 1, capacity=4))  # bolt gives down to its share, two of four
    ['b1', 'a1']
    """

    def __init__(self) -> None:
        self.shares = Shares()
        self._items: dict[str, OrderedDict[K, int]] = {}
        self._tenant_of: dict[K, str] = {}

    def __len__(self) -> int:
        return len(self._tenant_of)

    def add(self, item: K, tenant: str, amount: int) -> None:
        """Take in a new item as the most recently used one of its tenant."""
        self._tenant_of[item] = tenant
        self._items.setdefault(tenant, OrderedDict())[item] = amount
        self.shares.add(tenant, amount)

    def remove(self, item: K) -> None:
        """Forget an item; one that is not there is ignored."""
        tenant = self._tenant_of.pop(item, None)
        if tenant is None:
            return
        items = self._items[tenant]
        self.shares.add(tenant, -items.pop(item))
        if not items:
            del self._items[tenant]

    def touch(self, item: K) -> None:
        """Make an item the most recently used one of its tenant; one that is not there is ignored."""
        tenant = self._tenant_of.get(item)
        if tenant is not None:
            self._items[tenant].move_to_end(item)

    def count(self, tenant: str) -> int:
        """Items of a tenant."""
        return len(self._items.get(tenant, ()))

    def find_oldest(self, tenant: str) -> K | None:
        """The least recently used item of a tenant; None where it has none."""
        return next(iter(self._items.get(tenant, ())), None)

    def clear(self) -> None:
        self.shares = Shares()
        self._items.clear()
        self._tenant_of.clear()

    def order_leavers(
        self, tenant: str, amount: int, capacity: int, may_leave: Callable[[K], bool] = lambda _: True
    ) -> Generator[K, None, None]:
        """Yield items in the order in which they leave so that ``tenant`` can add ``amount``; stop when that is enough.

        Each item counts as gone once the next one is asked for. Nothing changes here. An item of another tenant that
        holds its share of ``capacity`` or less is never yielded, also where the others may not leave.
        """
        share = capacity // self.shares.count_with(tenant)
        left: dict[str, Generator[tuple[K, int], None, None]] = {}  # what each tenant was not asked for yet
        undo = [(tenant, amount)]
        spent: set[str] = set()
        self.shares.add(tenant, amount)
        try:
            while (payer := self._find_payer(tenant, share, spent)) is not None:
                if payer not in left:
                    left[payer] = self._order_items(payer)
                item, freed = next(((one, size) for one, size in left[payer] if may_leave(one)), (None, 0))
                if item is None:
                    spent.add(payer)
                    continue
                yield item
                self.shares.add(payer, -freed)
                undo.append((payer, -freed))
        finally:
            for items in left.values():
                items.close()
            for owner, change in reversed(undo):
                self.shares.add(owner, -change)

    def _order_items(self, tenant: str) -> Generator[tuple[K, int], None, None]:
        """Yield a tenant's items with their amounts, in the order in which they leave."""
        yield from self._items.get(tenant, {}).items()

    def _find_payer(self, tenant: str, share: int, spent: Collection[str]) -> str | None:
        payer = self.shares.find_largest(spent)
        if payer is None or payer == tenant or self.shares[payer] > share:
            return payer
        return None if tenant in spent or not self.shares[tenant] else tenant
