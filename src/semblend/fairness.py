"""Fairness between tenants: whose turn it is, and who gives memory back. The one place for both.

**Turns** (`FairClock`, `TenantLine`). Start-time fair queueing over tokens. Each tenant has a clock that advances by
the tokens it was served; next comes the tenant whose clock is furthest behind. Virtual time is the clock of the one
that was chosen last, at that moment. Who begins to wait starts at virtual time at least: time away earns no credit,
and nobody waits for the backlog of another. Between two tenants that both wait all the while, service differs by two
pieces at most: each is chosen only while it is not ahead, and is ahead by one piece afterwards. The server's
admission and the engine's scheduler both keep this order, each with its own clocks.

**Memory** (`TenantUsage`, `EvictionOrder`). Max-min fairness: when room is needed, the tenant that holds most gives
first, its least recently used item first, or the one that an eviction policy values least. A share is the capacity
divided by the tenants present; whoever holds a share or less is asked only where nobody else has anything to give. With
one tenant this is plain least recently used.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
MAX_REMEMBERED = 1000
"""Of so many tenants that do not wait now it is remembered what they were served."""
IDLE_PART = 2
"""Tenants within their share give up to one part in so many of the capacity to a newcomer: what was used last stays."""
KEPT_PART = 2
"""What is kept for conversations takes one part in so many of its tenant's share."""


class FairClock:
    """Tokens served, by tenant.

    >>> clock = FairClock()
    >>> clock.join("acme"); clock.serve("acme", 100); clock.serve("acme", 100)
    >>> clock.join("bolt")  # starts where acme's latest piece started
    >>> clock.read("acme"), clock.read("bolt"), clock.choose(["acme", "bolt"])
    (200, 100, 'bolt')
    """

    def __init__(self) -> None:
        self.now = 0
        self._served: dict[str, int] = {}

    def __len__(self) -> int:
        """Tenants that are remembered."""
        return len(self._served)

    def read(self, tenant: str) -> int:
        return self._served.get(tenant, self.now)

    def join(self, tenant: str) -> None:
        """A tenant begins to wait."""
        self._served[tenant] = max(self.read(tenant), self.now)

    def choose(self, tenants: Iterable[str]) -> str | None:
        """The one that is furthest behind, the first of equals; None where there is none."""
        return min(tenants, key=self.read, default=None)

    def serve(self, tenant: str, tokens: int) -> None:
        """A chosen tenant is served: virtual time moves to its clock, and its clock by the tokens."""
        self.now = max(self.now, self.read(tenant))
        self.charge(tenant, tokens)

    def charge(self, tenant: str, tokens: int) -> None:
        """Count tokens that were served without being chosen, or give some back (negative)."""
        self._served[tenant] = self.read(tenant) + tokens

    def forget_idle(self, busy: Collection[str]) -> None:
        """Drop tenants that are not busy, once there are many: who has no debt first, then who has least.

        Who has no debt starts at virtual time anyway. Where nobody is busy there is nobody to owe anything.
        """
        if busy and len(self._served) <= 2 * MAX_REMEMBERED + len(busy):
            return
        owing = ((at, name) for name, at in self._served.items() if at > self.now and name not in busy)
        kept = {name for _, name in heapq.nlargest(MAX_REMEMBERED if busy else 0, owing)}
        self._served = {name: at for name, at in self._served.items() if name in kept or name in busy}


class TenantLine(Generic[T]):
    """A line for each tenant, first come first served inside; together they count as one.

    >>> line = TenantLine[str]()
    >>> line.append("acme", "a1"); line.append("bolt", "b1"); line.append("acme", "a2")
    >>> list(line), line.pop_newest("acme"), len(line), line.count("acme")
    (['a1', 'a2', 'b1'], 'a2', 2, 1)
    """

    def __init__(self) -> None:
        self._lines: dict[str, deque[T]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        for line in list(self._lines.values()):
            yield from line

    @property
    def tenants(self) -> Collection[str]:
        """Tenants with somebody in line."""
        return self._lines.keys()

    def count(self, tenant: str) -> int:
        return len(self._lines.get(tenant, ()))

    def look(self, tenant: str, place: int = 0) -> T:
        """Who stands at a place of a tenant's line."""
        return self._lines[tenant][place]

    def append(self, tenant: str, one: T) -> None:
        self._lines.setdefault(tenant, deque()).append(one)
        self._size += 1

    def put_first(self, tenant: str, one: T) -> None:
        self._lines.setdefault(tenant, deque()).appendleft(one)
        self._size += 1

    def pop(self, tenant: str, place: int = 0) -> T:
        line = self._lines[tenant]
        one = line[place]
        del line[place]
        self._shrink(tenant)
        return one

    def pop_newest(self, tenant: str) -> T:
        return self.pop(tenant, -1)

    def remove(self, tenant: str, one: T) -> bool:
        """Take one out wherever it stands; False where it does not."""
        line = self._lines.get(tenant)
        if line is None or one not in line:
            return False
        line.remove(one)
        self._shrink(tenant)
        return True

    def _shrink(self, tenant: str) -> None:
        self._size -= 1
        if not self._lines[tenant]:
            del self._lines[tenant]


def may_start(running: int, most: int, own: int) -> bool:
    """Whether a tenant with ``own`` running requests may start one more where ``most`` run at once.

    Whoever has nothing running may start beyond that, up to a quarter more: else a tenant alone would either have to
    leave places empty, or make a newcomer wait until one of its answers ends.

    >>> [may_start(4, 4, 1), may_start(4, 4, 0), may_start(5, 4, 0)]
    [False, True, False]
    """
    return running < (most if own else count_places(most))


def count_places(most: int) -> int:
    """Places in all, with those for newcomers."""
    return most + max(1, most // 4)


class TenantUsage:
    """Amounts by tenant. `add` and `find_largest` take O(log tenants) on average.

    >>> usage = TenantUsage()
    >>> usage.add("acme", 3); usage.add("bolt", 5); usage.add("acme", 4)
    >>> usage.find_largest(), usage["acme"], len(usage)
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


class Prices(Protocol):
    """What an eviction policy says of items; `semblend.eviction.policy.EvictionPolicy` is one."""

    @property
    def epoch(self) -> int: ...
    def price(self, keys: Sequence[int]) -> list[float]: ...


class EvictionOrder(Generic[K]):
    """Items of several tenants, each with an amount; says in which order they leave when room is needed.

    Without a ``policy`` a tenant's least recently used item leaves first; with one, the item that it values least,
    among equals the least recently used. Who owns the items tells the policy of their uses before it adds or touches
    them here; ``find_key`` says under which key the policy knows an item. `add` and `touch` then take O(log items); all
    items are priced again when the policy has learned, or after as many changes as there are items.

    >>> order = EvictionOrder[str]()
    >>> for item, tenant in (("a1", "acme"), ("b1", "bolt"), ("b2", "bolt"), ("b3", "bolt")):
    ...     order.add(item, tenant, 1)
    >>> list(order.order_leavers("acme", 1, capacity=4))  # bolt gives down to its share, two of four; then acme
    ['b1', 'a1', 'b2', 'b3']
    """

    def __init__(
        self,
        policy: Prices | None = None,
        find_key: Callable[[K], int] = hash,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.usage = TenantUsage()
        self._items: dict[str, OrderedDict[K, int]] = {}
        self._tenant_of: OrderedDict[K, str] = OrderedDict()  # of all tenants, the least recently used item first
        self._policy, self._find_key, self._clock = policy, find_key, clock
        self._kept: OrderedDict[K, float] = OrderedDict()  # until when, the last one that was kept at the end
        self._heaps: dict[str, list[tuple[float, int, K]]] = {}  # worth, rank, item; what is out of date is skipped
        self._ranks: dict[K, int] = {}
        self._next_rank = itertools.count()
        self._epoch, self._changes = 0 if policy is None else policy.epoch, 0

    def __len__(self) -> int:
        return len(self._tenant_of)

    def __iter__(self) -> Iterator[K]:
        """All items, the least recently used first."""
        return iter(self._tenant_of)

    def add(self, item: K, tenant: str, amount: int) -> None:
        """Take in a new item as the most recently used one of its tenant."""
        self._tenant_of[item] = tenant
        self._items.setdefault(tenant, OrderedDict())[item] = amount
        self.usage.add(tenant, amount)
        self._rank(item)

    def remove(self, item: K) -> None:
        """Forget an item; one that is not there is ignored."""
        tenant = self._tenant_of.pop(item, None)
        if tenant is None:
            return
        items = self._items[tenant]
        self._kept.pop(item, None)
        self.usage.add(tenant, -items.pop(item))
        self._ranks.pop(item, None)
        if not items:
            del self._items[tenant]
            self._heaps.pop(tenant, None)

    def touch(self, item: K) -> None:
        """Make an item the most recently used one; one that is not there is ignored."""
        tenant = self._tenant_of.get(item)
        if tenant is not None:
            self._tenant_of.move_to_end(item)
            self._items[tenant].move_to_end(item)
            self._rank(item)

    def keep(self, item: K, seconds: float) -> None:
        """For so long an item leaves after the others of its tenant; of several, half of a share's worth does.

        What a conversation goes on from is wanted again, however long its next turn takes and whatever comes meanwhile.
        """
        if item in self._tenant_of:
            self.touch(item)
            self._kept[item] = self._clock() + seconds
            self._kept.move_to_end(item)

    def count(self, tenant: str) -> int:
        """Items of a tenant."""
        return len(self._items.get(tenant, ()))

    def find_oldest(self, tenant: str) -> K | None:
        """The least recently used item of a tenant; None where it has none."""
        return next(iter(self._items.get(tenant, ())), None)

    def clear(self) -> None:
        self.usage = TenantUsage()
        for held in (self._items, self._tenant_of, self._heaps, self._ranks, self._kept):
            held.clear()

    def order_leavers(
        self, tenant: str, amount: int, capacity: int, may_leave: Callable[[K], bool] = lambda _: True
    ) -> Generator[K, None, None]:
        """Yield items in the order in which they leave so that ``tenant`` can add ``amount``; stop when that is enough.

        Each item counts as gone once the next one is asked for. Nothing changes here. Tenants above their share of
        ``capacity`` give first, then ``tenant`` itself. Where it has nothing left but what it wants to add, the others
        give what was used least recently, whoever's it is, up to a part of the capacity (`IDLE_PART`): an idle tenant
        must not keep a newcomer out for ever, and a busy one must not lose what it has just used.
        """
        if self._policy is not None and (self._policy.epoch != self._epoch or self._changes >= len(self)):
            self._price_again(self._policy)
        share = capacity // self.usage.count_with(tenant)
        left: dict[str, Generator[tuple[K, int], None, None]] = {}  # what each tenant was not asked for yet
        undo = [(tenant, amount)]
        gone: set[K] = set()
        spent: set[str] = set()
        self.usage.add(tenant, amount)
        try:
            while (payer := self._find_payer(tenant, share, spent)) is not None:
                if payer not in left:
                    left[payer] = self._order_items(payer, share)
                item, freed = next(((one, size) for one, size in left[payer] if may_leave(one)), (None, 0))
                if item is None:
                    spent.add(payer)
                    continue
                yield item
                gone.add(item)
                self.usage.add(payer, -freed)
                undo.append((payer, -freed))
            if self.usage[tenant] == amount:
                yield from self._order_by_age(capacity // IDLE_PART, lambda one: one not in gone and may_leave(one))
        finally:
            for items in left.values():
                items.close()
            for owner, change in reversed(undo):
                self.usage.add(owner, -change)

    def _find_payer(self, tenant: str, share: int, spent: Collection[str]) -> str | None:
        payer = self.usage.find_largest(spent)
        if payer is None or payer == tenant or self.usage[payer] > share:
            return payer
        return None if tenant in spent or not self.usage[tenant] else tenant

    def _order_by_age(self, most: int, may_leave: Callable[[K], bool]) -> Iterator[K]:
        """Yield items of all tenants, the least recently used first, that take ``most`` in sum at most."""
        for item, owner in self._tenant_of.items():
            if may_leave(item):
                most -= self._items[owner][item]
                if most < 0:
                    return
                yield item

    def _order_items(self, tenant: str, share: int) -> Generator[tuple[K, int], None, None]:
        """Yield a tenant's items with their amounts, in the order in which they leave, those that are kept last."""
        kept = self._list_kept(tenant, share // KEPT_PART) if self._kept else {}
        with closing(self._order_by_worth(tenant)) as items:
            yield from ((item, amount) for item, amount in items if item not in kept)
        yield from kept.items()

    def _list_kept(self, tenant: str, most: int) -> dict[K, int]:
        """What is kept of a tenant now, with amounts; those that were kept last count first, up to ``most`` in sum."""
        now, kept = self._clock(), dict[K, int]()
        for item in reversed([one for one, until in self._kept.items() if until > now]):
            if self._tenant_of[item] == tenant and (amount := self._items[tenant][item]) <= most:
                kept[item] = amount
                most -= amount
        return dict(reversed(kept.items()))

    def _order_by_worth(self, tenant: str) -> Generator[tuple[K, int], None, None]:
        """Yield a tenant's items with their amounts, what is worth least first."""
        if self._policy is None:
            yield from self._items.get(tenant, {}).items()
            return
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

    def _rank(self, item: K) -> None:
        """Make an item the most recently used one, at its present worth."""
        if self._policy is None:
            return
        self._changes += 1
        self._ranks[item] = next(self._next_rank)
        heap = self._heaps.setdefault(self._tenant_of[item], [])
        heapq.heappush(heap, (self._policy.price([self._find_key(item)])[0], self._ranks[item], item))
        if len(heap) > 64 + 4 * self.count(self._tenant_of[item]):  # every touch leaves an outdated entry behind
            heap[:] = [entry for entry in heap if self._is_current(entry)]
            heapq.heapify(heap)

    def _is_current(self, entry: tuple[float, int, K]) -> bool:
        return self._ranks.get(entry[2]) == entry[1]

    def _price_again(self, policy: Prices) -> None:
        """Ask the policy what every item is worth; entries that are out of date go."""
        self._heaps = {}
        for tenant, items in self._items.items():
            prices = policy.price([self._find_key(item) for item in items])
            heap = [(price, self._ranks[item], item) for price, item in zip(prices, items, strict=True)]
            heapq.heapify(heap)
            self._heaps[tenant] = heap
        self._epoch, self._changes = policy.epoch, 0
