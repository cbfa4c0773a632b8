"""The fingerprint index: in flat arrays, for compiled kernels, and as a dictionary where numba is absent."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from semblend.errors import CapacityError
from semblend.fingerprint.hashes import HashArray, PositionArray, mix64

MAX_REPEATS = 8  # postings of one k-gram within one donor: repeated text must not flood a chain


class PlainIndex:
    """Same interface and same answers as `FlatIndex`, at some hundred bytes a posting."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._chains: dict[int, list[int]] = {}  # key -> postings, newest last
        self._postings: dict[int, tuple[int, int, int]] = {}  # posting -> (key, slot, offset)
        self._of_slot: dict[int, list[int]] = {}
        self._next = 1

    @property
    def used(self) -> int:
        return len(self._postings)

    def add(self, slot: int, positions: PositionArray, hashes: HashArray, namespace_key: np.uint64) -> int:
        if self.used + len(positions) > self.capacity:
            raise CapacityError("the fingerprint index is full", hint="evict a donor first, or raise max_bytes")
        mine = self._of_slot[slot] = []
        repeats: dict[int, int] = {}
        for offset, key in zip(positions.tolist(), mix64(hashes ^ namespace_key).tolist(), strict=True):
            repeats[key] = repeats.get(key, 0) + 1
            if repeats[key] > MAX_REPEATS:
                continue
            self._postings[self._next] = (key, slot, offset)
            self._chains.setdefault(key, []).append(self._next)
            mine.append(self._next)
            self._next += 1
        return len(mine)

    def remove(self, slot: int) -> None:
        for posting in self._of_slot.pop(slot, ()):
            key, _, _ = self._postings.pop(posting)
            chain = self._chains[key]
            chain.remove(posting)
            if not chain:
                del self._chains[key]

    def probe(self, hashes: HashArray, namespace_key: np.uint64) -> npt.NDArray[np.uint32]:
        keys = mix64(hashes ^ namespace_key).tolist()
        return np.array([self._chains.get(key, (0,))[-1] for key in keys], np.uint32)

    def walk(self, posting: int) -> Iterator[tuple[int, int]]:
        for other in reversed(self._chains[self._postings[posting][0]]):
            yield self._postings[other][1:]


BYTES_PER_POSTING = 24 + 4  # a posting, and its share of the bucket heads


class FlatIndex:
    """Seeds of all donors; postings and buckets are reserved for ``capacity`` and touched only when used."""

    def __init__(self, capacity: int) -> None:
        from semblend.discover import kernels

        self._kernels = kernels
        self.capacity = capacity
        self.heads = np.zeros(max(capacity, kernels.FIRST_BUCKETS), np.uint32)
        self.postings = np.zeros((capacity + 1, 6), np.uint32)
        self.state = np.array([kernels.FIRST_BUCKETS, kernels.FIRST_BUCKETS, 0, 1, 0], np.int64)
        self.first_of_slot = np.zeros(1024, np.uint32)

    @property
    def used(self) -> int:
        return int(self.state[self._kernels.USED])

    def add(self, slot: int, positions: PositionArray, hashes: HashArray, namespace_key: np.uint64) -> int:
        """Index a donor's seeds; return how many postings they took."""
        if self.used + len(positions) > self.capacity:
            raise CapacityError("the fingerprint index is full", hint="evict a donor first, or raise max_bytes")
        if slot >= len(self.first_of_slot):
            self.first_of_slot = np.concatenate([self.first_of_slot, np.zeros(slot + 1, np.uint32)])
        return int(
            self._kernels.insert(
                slot,
                positions,
                hashes,
                namespace_key,
                MAX_REPEATS,
                self.heads,
                self.postings,
                self.state,
                self.first_of_slot,
            )
        )

    def walk(self, posting: int) -> Iterator[tuple[int, int]]:
        """Yield (slot, offset) of a posting and of the older ones with the same tag."""
        k = self._kernels
        tag = self.postings[posting, k.TAG]
        steps = 0
        while posting and steps < k.MAX_STEPS:
            if self.postings[posting, k.TAG] == tag:
                yield int(self.postings[posting, k.SLOT]), int(self.postings[posting, k.OFFSET])
            posting = int(self.postings[posting, k.NEXT])
            steps += 1

    def remove(self, slot: int) -> None:
        """Remove a donor's seeds."""
        self._kernels.remove(slot, self.heads, self.postings, self.state, self.first_of_slot)

    def probe(self, hashes: HashArray, namespace_key: np.uint64) -> npt.NDArray[np.uint32]:
        """Return the newest posting of every seed, 0 if there is none."""
        first = np.empty(len(hashes), np.uint32)
        self._kernels.probe(hashes, namespace_key, self.heads, self.postings, self.state, first)
        return first
