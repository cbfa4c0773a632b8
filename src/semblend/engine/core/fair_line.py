"""Fair order between tenants: who is served next, where each waits its turn, and who may have a place.

Start-time fair queueing over tokens. Each tenant has a clock that advances by the tokens it was served; next comes the
tenant whose clock is furthest behind. Virtual time is the clock of the one that was chosen last, at that moment. Who
begins to wait starts at virtual time at least: time away earns no credit, and nobody waits for the backlog of another.
Between two tenants that both wait all the while, service differs by two pieces at most: each is chosen only while it
is not ahead, and is ahead by one piece afterwards.

The server's gate and the engine's scheduler both keep this order, each with its own clocks.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
MOST_REMEMBERED = 1000
"""Of so many tenants that do not wait now it is remembered what they were served."""


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
        if busy and len(self._served) <= 2 * MOST_REMEMBERED + len(busy):
            return
        owing = ((at, name) for name, at in self._served.items() if at > self.now and name not in busy)
        kept = {name for _, name in heapq.nlargest(MOST_REMEMBERED if busy else 0, owing)}
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
