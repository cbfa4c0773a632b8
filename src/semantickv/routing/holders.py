"""Which replicas hold a piece, for fleets of many: one lookup a piece, in place of one a piece and replica.

A replica is a bit of a number. Most pieces have one holder, and their number is shared by all pieces of that replica,
so an entry costs what a dictionary's entry costs.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from semantickv.routing.fingerprint import PromptPieces

Column = npt.NDArray[np.int64]
FEW_BITS = 12
"""Bits that are found one by one; more are unpacked all at once."""


class HolderIndex:
    """What `ReplicaMemory.match` says of every replica, in one pass over the prompt.

    >>> index = HolderIndex(replicas=2)
    >>> index.add(2, 1)
    >>> [column.tolist() for column in index.match(PromptPieces((2, 3), (22, 23), (40, 40), (1.0, 1.0)))]
    [[0, 0], [0, 40]]
    """

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self._bits = [1 << number for number in range(replicas)]
        self._all = (1 << replicas) - 1
        self._bytes = -(-replicas // 8)
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, key: int, replica: int) -> None:
        """The replica holds this piece or chain."""
        bit, held = self._bits[replica], self._holders.get(key)
        self._holders[key] = bit if held is None else held | bit

    def drop(self, key: int, replica: int) -> None:
        """The replica no longer holds it."""
        left = self._holders.get(key, 0) & ~self._bits[replica]
        if not left:
            self._holders.pop(key, None)
        else:
            self._holders[key] = self._bits[left.bit_length() - 1] if left & (left - 1) == 0 else left

    def drop_all(self, keys: Iterable[int], replica: int) -> None:
        """The replica holds none of these any more."""
        for key in keys:
            self.drop(key, replica)

    def match(self, pieces: PromptPieces) -> tuple[Column, Column]:
        """Tokens of a prompt that each replica holds: from its beginning, and anywhere."""
        prefix, worth = np.zeros(self.replicas, np.int64), np.zeros(self.replicas)
        get = self._holders.get
        alive, reached = self._all, 0
        for chain, tokens in zip(pieces.chains, pieces.tokens, strict=True):
            still = get(chain, 0) & alive
            if still != alive and reached:
                prefix[self._list_rows(alive ^ still)] = reached
            alive = still
            if not alive:
                break
            reached += tokens
        if alive:
            prefix[self._list_rows(alive)] = reached
        held: dict[int, float] = {}
        for value, one in zip(pieces.hashes, pieces.worths, strict=True):
            if mask := get(value):
                held[mask] = held.get(mask, 0.0) + one
        for mask, one in held.items():
            worth[self._list_rows(mask)] += one
        scale = pieces.total_tokens / pieces.total_worth if pieces.total_worth else 0.0
        return prefix, np.rint(worth * scale).astype(np.int64)

    def _list_rows(self, mask: int) -> list[int] | npt.NDArray[np.int64]:
        """The replicas whose bits are set."""
        if mask.bit_count() > FEW_BITS:
            packed = np.frombuffer(mask.to_bytes(self._bytes, "little"), np.uint8)
            return np.flatnonzero(np.unpackbits(packed, bitorder="little"))
        rows = []
        while mask:
            low = mask & -mask
            rows.append(low.bit_length() - 1)
            mask ^= low
        return rows
