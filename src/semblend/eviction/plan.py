"""The classes, ages and learning rates of the learning policy; `adaptive` says what they are for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# The view by block. New blocks: four groups of four, by how much of the request is new. Blocks used before:
# 16 + fame * 6 + gap (fame: a step of the use count), or 58 + gap if several continuations are known.
BLOCK_KINDS: Final = 64
NEW_KINDS: Final = 16
SEVERAL: Final = 58
# The view by conversation: 8 contexts (see `find_context`). Ends of prompts by context and length of the new part,
# other new blocks by context, silence and length, blocks that came with the conversation by context, silence and fan,
# and blocks that others used meanwhile as in the view by block.
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
