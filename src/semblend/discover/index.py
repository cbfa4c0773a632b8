"""The fingerprint index: the seeds of all donors, in flat arrays for `semblend.discover.kernels`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from semblend.errors import CapacityError
from semblend.fingerprint.hashes import HashArray, PositionArray

MAX_REPEATS = 8  # postings of one k-gram within one donor: repeated text must not flood a chain


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

    def remove(self, slot: int) -> None:
        """Remove a donor's seeds."""
        self._kernels.remove(slot, self.heads, self.postings, self.state, self.first_of_slot)

    def probe(self, hashes: HashArray, namespace_key: np.uint64) -> npt.NDArray[np.uint32]:
        """Return the newest posting of every seed, 0 if there is none."""
        first = np.empty(len(hashes), np.uint32)
        self._kernels.probe(hashes, namespace_key, self.heads, self.postings, self.state, first)
        return first
