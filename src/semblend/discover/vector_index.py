"""Finds the nearest vectors by cosine: exactly in numpy, or in usearch's graph if there are many.

Keys are integers, vectors have length 1. `BruteForceIndex` is exact and the twin that `UsearchIndex` is tested against.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from semblend.errors import MissingDependencyError

Vector = npt.NDArray[np.float32]
Keys = npt.NDArray[np.int64]
Found = tuple[Keys, Vector]  # keys and their cosines, best first, equal cosines by key

_FIRST_ROWS = 64


class VectorIndex(Protocol):
    """Unit vectors by key; `search` returns the ``k`` nearest. Not locked: the owner does that."""

    def add(self, key: int, vector: Vector) -> None:
        """Keep ``vector`` under ``key``; a key that is already there is replaced."""
        ...

    def remove(self, key: int) -> bool:
        """Remove a key; return whether it was there."""
        ...

    def search(self, vector: Vector, k: int) -> Found: ...

    def __len__(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Memory held, about."""
        ...


class BruteForceIndex:
    """Compares every vector in one matrix product. Rows double when full; a removal moves the last row."""

    def __init__(self, dimension: int) -> None:
        self._rows: Vector = np.zeros((_FIRST_ROWS, dimension), dtype=np.float32)
        self._keys: Keys = np.zeros(_FIRST_ROWS, dtype=np.int64)
        self._row_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._row_of)

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes + self._keys.nbytes

    def add(self, key: int, vector: Vector) -> None:
        row = self._row_of.get(key, len(self._row_of))
        if row == len(self._keys):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
            self._keys = np.concatenate([self._keys, np.zeros_like(self._keys)])
        self._rows[row], self._keys[row], self._row_of[key] = vector, key, row

    def remove(self, key: int) -> bool:
        row = self._row_of.pop(key, None)
        if row is None:
            return False
        last = len(self._row_of)
        if row != last:
            self._rows[row], self._keys[row] = self._rows[last], self._keys[last]
            self._row_of[int(self._keys[row])] = row
        return True

    def search(self, vector: Vector, k: int) -> Found:
        count = len(self)
        k = min(k, count)
        if k <= 0:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
        cosines = self._rows[:count] @ vector
        worst = np.partition(cosines, count - k)[count - k]
        near = np.flatnonzero(cosines >= worst)  # more than k where cosines tie: the sort below decides by key
        return sort_best_first(self._keys[near], cosines[near], k)

    def copy_items(self) -> tuple[Keys, Vector]:
        """Return copies of all keys and vectors."""
        return self._keys[: len(self)].copy(), self._rows[: len(self)].copy()


class UsearchIndex:
    """An HNSW graph (usearch): search in logarithmic time, nearly always the true neighbours.

    ``dtype`` is how vectors are kept: ``f16`` halves the bytes at no measurable loss; ``i8`` quarters them, and costs
    recall and accuracy (docs/research/decisions/0012 has the figures).
    """

    def __init__(self, dimension: int, dtype: Literal["f32", "f16", "i8"] = "f16") -> None:
        try:
            from usearch.index import Index
        except ImportError:
            raise MissingDependencyError(
                "usearch is not installed", hint="pip install 'semblend-suite[embedder]'"
            ) from None
        self._index: Any = Index(ndim=dimension, metric="cos", dtype=dtype)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        return int(self._index.memory_usage)

    def add(self, key: int, vector: Vector) -> None:
        if key in self._index:
            self._index.remove(key)
        self._index.add(key, vector, threads=1)

    def remove(self, key: int) -> bool:
        if key not in self._index:
            return False
        self._index.remove(key)
        return True

    def search(self, vector: Vector, k: int) -> Found:
        if k <= 0 or not len(self):
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
        matches = self._index.search(vector, min(k, len(self)), threads=1)
        keys = np.asarray(matches.keys, dtype=np.int64)
        cosines = 1.0 - np.asarray(matches.distances, dtype=np.float32)
        return sort_best_first(keys, cosines, k)


def add_all(index: VectorIndex, keys: Iterable[int], vectors: Vector) -> None:
    """Add many vectors under their keys."""
    for key, vector in zip(keys, vectors, strict=True):
        index.add(int(key), vector)


def sort_best_first(keys: Keys, cosines: Vector, k: int) -> Found:
    """Return the ``k`` highest cosines with their keys, highest first; equal cosines by key."""
    order = np.lexsort((keys, -cosines))[:k]
    return keys[order], cosines[order]
