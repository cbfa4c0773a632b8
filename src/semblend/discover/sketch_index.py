"""Finds near-duplicate prompts: simhash filters all donors at once, min-hash decides about those that pass."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from semblend.fingerprint.hashes import HashArray
from semblend.fingerprint.simhash import Sketch, count_differing_bits, estimate_overlap

# 20 of 64 bits stand for a cosine of 0.56. One unrelated prompt in 800 passes (32 bits differ, give or take 4).
MAX_DIFFERING_BITS = 20
MAX_SETTLED = 64  # sketches compared in full per search
_FIRST_ROWS = 64


class SketchIndex:
    """Sketches by key. Not locked: the owner does that."""

    def __init__(self) -> None:
        self._simhashes: HashArray = np.zeros(_FIRST_ROWS, dtype=np.uint64)
        self._keys: npt.NDArray[np.int64] = np.zeros(_FIRST_ROWS, dtype=np.int64)
        self._row_of: dict[int, int] = {}
        self._sketches: dict[int, Sketch] = {}

    def __len__(self) -> int:
        return len(self._row_of)

    def add(self, key: int, sketch: Sketch) -> None:
        """Keep a sketch under a key; a key that is there is replaced."""
        row = self._row_of.get(key, len(self._row_of))
        if row == len(self._keys):
            self._simhashes = np.concatenate([self._simhashes, np.zeros_like(self._simhashes)])
            self._keys = np.concatenate([self._keys, np.zeros_like(self._keys)])
        self._simhashes[row], self._keys[row] = sketch.simhash, key
        self._row_of[key], self._sketches[key] = row, sketch

    def remove(self, key: int) -> bool:
        """Remove a key; return whether it was there."""
        row = self._row_of.pop(key, None)
        if row is None:
            return False
        del self._sketches[key]
        last = len(self._row_of)
        if row != last:
            self._simhashes[row], self._keys[row] = self._simhashes[last], self._keys[last]
            self._row_of[int(self._keys[row])] = row
        return True

    def search(self, sketch: Sketch, k: int) -> tuple[tuple[int, float], ...]:
        """Return the ``k`` keys with the largest overlap, as (key, overlap), best first, equal overlaps by key."""
        count = len(self)
        differing = count_differing_bits(sketch.simhash, self._simhashes[:count])
        near = np.flatnonzero(differing <= MAX_DIFFERING_BITS)
        nearest = near[np.lexsort((self._keys[near], differing[near]))[:MAX_SETTLED]]
        settled = [(key, estimate_overlap(sketch, self._sketches[key])) for key in self._keys[nearest].tolist()]
        return tuple(sorted(settled, key=lambda pair: (-pair[1], pair[0]))[:k])
