"""The policy that learns, while it runs, which blocks are used again and after how long.

Every use of a block is filed twice. *By block*: how much of its request was new, how often and after what gap the block
was used, whether several continuations of it are known. *By conversation*: which turn the request is, how long the
conversation was silent, how long its new part is; a session id says that exactly, the deepest known block says it
nearly. For every class and age it counts how long blocks waited and how many came back, cached or not: the return of an
evicted block teaches as much as a hit. These rates give an index: the best ratio of expected returns to expected
waiting that keeping a block of this class and age can still bring. The value of a block is the geometric mean of its
two indices; where blocks have no order (``chained`` is off), that of the view by block.

Nothing looks ahead, and memory is bounded: the last uses stand in a ring, and a block whose last use has left the ring
is unknown.

The loops are compiled (`kernels`); the tests hold them to a twin in plain Python, ``tests/plain_adaptive.py``, which is
the easier one to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from semblend.eviction.plan import KINDS, AdaptivePlan, find_group

_NO_TYPES = np.zeros(0, np.int64)


class AdaptiveState:
    """The arrays of one `Adaptive`, as the kernels want them; the simulator's loop takes them too."""

    def __init__(self, plan: AdaptivePlan, *, types: int = 1, chained: bool = True, longest: int = 4096) -> None:
        from semblend.eviction import kernels

        self.plan, self.edges, self.priors, self.numbers = plan, plan.edges, plan.priors, plan.to_array()
        self.longest = longest
        self.rows: Any = np.zeros((plan.history + longest + 1, kernels.COLUMNS), np.int64)
        self.heads: Any = np.zeros(1 << int(plan.history - 1).bit_length(), np.int64)
        self.ring: Any = np.zeros((plan.history, 4), np.int64)
        self.index: Any = np.tile(plan.build_first_index(), (types, 1))
        self.ledger: Any = np.zeros((*self.index.shape, 4))
        self.behind: Any = np.zeros(len(plan.edges), np.int64)
        self.groups: Any = np.array([find_group(kind) for kind in range(KINDS)])
        self.meta: Any = np.zeros(16, np.int64)
        self.meta[kernels.CHAINED] = chained

    def make_space_for(self, blocks: int) -> None:
        """Make sure that a request of so many blocks finds free rows."""
        if blocks > self.longest:
            self.rows = np.vstack((self.rows, np.zeros((blocks - self.longest, self.rows.shape[1]), np.int64)))
            self.longest = blocks


class Adaptive:
    """Learns which blocks return and when; see `semblend.eviction.adaptive`. Not thread-safe."""

    def __init__(
        self, capacity: int, *, types: int = 1, chained: bool = True, plan: AdaptivePlan | None = None
    ) -> None:
        from semblend.eviction import kernels

        self._kernels: Any = kernels
        self.plan = plan or AdaptivePlan.build(capacity)
        self.types = types
        self.state = AdaptiveState(self.plan, types=types, chained=chained)
        self._path: Any = np.empty(self.state.longest, np.int64)

    @property
    def epoch(self) -> int:
        return int(self.state.meta[self._kernels.EPOCH])

    def use(
        self,
        keys: Sequence[int],
        *,
        told: int = 0,
        session: int = 0,
        sizes: Sequence[int] | None = None,
        types: Sequence[int] | None = None,
    ) -> None:
        """Hear that a request used these blocks; see `policy.EvictionPolicy.use`."""
        state = self.state
        if len(keys) > state.longest:
            state.make_space_for(len(keys))
            self._path = np.empty(state.longest, np.int64)
        size = len(keys) - told if sizes is None else sum(sizes[told:])
        self._kernels.hear_use(
            state.rows, state.heads, state.ring, state.ledger, state.edges, state.behind, state.meta,
            np.asarray(keys, np.int64), _NO_TYPES if types is None else np.asarray(types, np.int64), size, told,
            session, self._path,
        )  # fmt: skip
        self._kernels.learn_if_due(
            state.ledger, state.index, state.edges, state.priors, state.groups, state.numbers, state.meta
        )

    def price(self, keys: Sequence[int]) -> list[float]:
        """Return the value of each block; the smallest leaves first. What is not known is worth nothing."""
        out = np.empty(len(keys))
        state = self.state
        self._kernels.price_keys(
            state.rows, state.heads, state.index, state.edges, state.meta, np.asarray(keys, np.int64), out
        )
        return out.tolist()

    def forget(self, key: int) -> None:
        """A block left the cache; what was learned of it stays until the ring has passed it."""

    @property
    def returns_by_type(self) -> list[float]:
        """Returns per cache-ful of waiting, by block type."""
        return self.plan.compute_returns(self.state.ledger, self.types)


def compile_adaptive() -> None:
    """Compile or load the kernels now: a cache is made when an engine starts, and its first request must not wait."""
    scratch = Adaptive(1, plan=AdaptivePlan.build(1, history=8))
    scratch.use([1])
    scratch.price([1])
