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
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# The view by block. New blocks: four groups of four, by how much of the request is new. Blocks used before:
# 16 + fame * 6 + gap (fame: a step of the use count), or 58 + gap if several continuations are known.
BLOCK_KINDS: Final = 64
NEW_KINDS: Final = 16
SEVERAL: Final = 58
# The view by conversation: 8 contexts, by turn and by uses of the deepest known block. Ends of prompts by context and
# length of the new part, other new blocks by context, silence and length, blocks that came with the conversation by
# context, silence and fan, and blocks that others used meanwhile as in the view by block.
ENDS: Final = 64
NEW: Final = ENDS + 32
OWN: Final = NEW + 128
SHARED: Final = OWN + 64
KINDS: Final = SHARED + 48
GROUPS: Final = 42
# Assumed rate of returns of a group without evidence, as a multiple of the rate of all blocks together, at ages beyond
# one cache-ful, where evidence comes late. A few observed returns outweigh it.
_FAME: Final = (4.0, 8.0, 16.0, 16.0, 16.0, 16.0, 16.0)
PRIORS: Final = (0.1, 1.0, 1.0, 1.0, *_FAME, *(0.1,) * 8, *(1.0,) * 8, *(4.0,) * 8, *_FAME)
FIRST_LESSON: Final = 16.0  # block accesses; later lessons come every eighth of what has been seen, up to the plan's
HISTORY: Final = 32  # cache-fuls of uses that are remembered, while that is no more than `limit_history` allows
SESSION: Final = 0x5E55104  # mixed into the number of a session, which stands in the same table as blocks


def find_group(kind: int) -> int:
    """Find the row of a class in `PRIORS`."""
    if kind < ENDS:
        return kind // 4 if kind < NEW_KINDS else 4 if kind >= SEVERAL else 4 + (kind - NEW_KINDS) // 6
    if kind < SHARED:
        return (
            11 + (kind - ENDS) // 4 if kind < NEW else 19 + (kind - NEW) // 16 if kind < OWN else 27 + (kind - OWN) // 8
        )
    return 35 if kind >= SHARED + 42 else 35 + (kind - SHARED) // 6


def limit_history(capacity: int) -> int:
    """Return how many uses are remembered for a cache of so many blocks: about 100 bytes each.

    >>> limit_history(100), limit_history(20_000), limit_history(10**7)
    (3200, 342144, 1048576)
    """
    return max(1024, min(HISTORY * capacity, (1 << 18) + 4 * capacity, 1 << 20))


@dataclass(frozen=True)
class AdaptivePlan:
    """Clock, ages and learning rates of `Adaptive`.

    The clock counts the requested blocks in the unit of the capacity: at an age of 1 capacity, as much as fits in the
    cache has been requested since. So ages mean the same at every size and speed, and need no times.
    """

    edges: Floats  # of the ages
    priors: Floats  # by group and age, see `PRIORS`
    every: float  # least clock between two lessons
    blocks: float  # block accesses between two lessons, once as many have been seen eight times over
    memory: float  # clock after which half of the old evidence is left, if
    memory_blocks: float  # as many block accesses have also passed
    trust: float  # returns of a class that weigh as much as what is assumed of it
    hope: float  # returns expected over the youngest age before anything is known
    doubt: float  # returns at an age that weigh as much as those at the age before
    history: int  # uses that are remembered

    @staticmethod
    def build(capacity: int, *, share: float = 1.0, history: int | None = None) -> AdaptivePlan:
        """Build the plan for a capacity. ``share``: of the blocks that are seen, when a sample stands for all."""
        unit = max(1.0, capacity / 32.0)
        edges = np.array([0.0] + [unit * 2.0 ** (k / 2) for k in range(20)])
        return AdaptivePlan(
            edges=edges,
            priors=np.where(edges[:-1] >= capacity, np.array(PRIORS)[:, None], 1.0),
            every=max(1.0, capacity / 8.0),
            blocks=1200.0 * share,
            memory=max(1.0, 100.0 * capacity),
            memory_blocks=50_000.0 * share,
            trust=0.5 * share,
            hope=0.05,
            doubt=10.0 * share,
            history=limit_history(capacity) if history is None else history,
        )

    def to_array(self) -> Floats:
        """Return the numbers as the kernels want them."""
        return np.array([self.every, self.blocks, self.memory, self.memory_blocks, self.trust, self.hope, self.doubt])

    def build_first_index(self) -> Floats:
        """Build the index before the first lesson, by class and age: the youngest blocks are worth most."""
        groups = [find_group(kind) for kind in range(KINDS)]
        return (self.priors / (1.0 + self.edges[1:]))[groups]

    def compute_returns(self, ledger: Floats, types: int) -> list[float]:
        """Compute for each block type the returns per cache-ful of waiting: what a run learned; NaN if none waited."""
        by_type = ledger.reshape(types, KINDS, -1, 4)[:, :BLOCK_KINDS].sum(axis=(1, 2))
        return [float(row[0] / row[1] * self.every * 8.0) if row[1] > 0 else np.nan for row in by_type]


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
