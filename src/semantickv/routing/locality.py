"""Which replica has seen which pieces of which prompts: a bounded guess at what stands in each engine's cache.

`ReplicaMemory` holds what one replica has seen, `HolderIndex` which replicas hold a piece: one lookup a piece, whatever
their number. A replica is a bit of a number there. Most pieces have one holder, and their number is shared by all
pieces of that replica, so an entry costs what a dictionary's entry costs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import compress, islice

import numpy as np
import numpy.typing as npt

from semantickv.routing.fingerprint import PromptPieces

Column = npt.NDArray[np.int64]
FEW_BITS = 12
"""Bits that are found one by one; more are unpacked all at once."""
LEAST_EVIDENCE_TOKENS = 256
"""A receipt says something about evictions if so many tokens were expected."""
TOKENS_PER_ENTRY = 4
"""Pieces are 128 tokens long on average. The bound on their number holds where someone sends many that are shorter."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """What a replica has of a prompt, in tokens: from its beginning, and anywhere (weighted by type, then rescaled)."""

    prefix_tokens: int = 0
    any_tokens: int = 0


NO_OVERLAP = Overlap()


class ReplicaMemory:
    """The pieces that one replica has seen, least recently seen first; at most ``most_tokens`` of them.

    >>> from semantickv.routing.fingerprint import PromptPieces
    >>> memory = ReplicaMemory(most_tokens=100)
    >>> memory.note(PromptPieces((1, 2), (11, 12), (40, 40), (1.0, 1.0)))
    [2, 12, 1, 11]
    >>> memory.match(PromptPieces((2, 3), (22, 23), (40, 40), (1.0, 1.0)))
    Overlap(prefix_tokens=0, any_tokens=40)
    """

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = self._limit = most_tokens
        self.tokens = 0
        self._seen: OrderedDict[int, int] = OrderedDict()
        self._index: HolderIndex | None = None
        self._row = 0

    def join(self, index: HolderIndex | None, row: int) -> None:
        """Tell an index of many replicas what is held here, from now on; None: tell nobody any more."""
        self._index, self._row = index, row
        for key in self._seen if index is not None else ():
            assert index is not None
            index.add(key, row)

    def __len__(self) -> int:
        return len(self._seen)

    def match(self, pieces: PromptPieces) -> Overlap:
        """What of a prompt was seen here. Changes nothing."""
        has = self._seen.__contains__  # map and compress loop in C: five times as fast as a loop here
        begins = [*map(has, pieces.chains), False]
        prefix = sum(pieces.tokens[: begins.index(False)])
        found = sum(compress(pieces.worths, map(has, pieces.hashes)))
        return Overlap(prefix, round(found / pieces.total_worth * pieces.total_tokens) if found else 0)

    def note(self, pieces: PromptPieces) -> list[int]:
        """Remember a prompt, and return the pieces and chains that are new.

        The end goes in first: like an engine, this forgets the ends of prompts first.
        """
        seen, index = self._seen, self._index
        new: list[int] = []
        for at in reversed(range(len(pieces.hashes))):
            value, chain = pieces.hashes[at], pieces.chains[at]
            if value in seen:
                seen.move_to_end(value)
            else:
                seen[value] = pieces.tokens[at]
                self.tokens += pieces.tokens[at]
                new.append(value)
            if chain in seen:
                seen.move_to_end(chain)
            else:
                seen[chain] = 0
                new.append(chain)
        if index is not None:
            for key in new:
                index.add(key, self._row)
        self._make_room()
        return new

    def forget(self, keys: Iterable[int]) -> None:
        """Forget pieces and chains: the engine refused the prompt that brought them."""
        for key in keys:
            self.drop(key)

    def learn(self, expected_tokens: int, found_tokens: int) -> None:
        """Compare what this memory expected of a prompt's beginning with what the engine reused of it.

        An engine that has less has evicted earlier than this memory forgets: remember less of it from now on. The bound
        settles where one guess in ten is wrong.
        """
        if expected_tokens < LEAST_EVIDENCE_TOKENS:
            return
        if 2 * found_tokens < expected_tokens:
            self.most_tokens = max(self._limit // 64, self.most_tokens * 9 // 10)
            self._make_room()
        else:
            self.most_tokens = min(self._limit, self.most_tokens + self.most_tokens // 90)

    def add(self, key: int, tokens: int) -> None:
        """Remember one piece or chain: the engine says that it holds it."""
        seen = self._seen
        if key in seen:
            seen.move_to_end(key)
            return
        seen[key] = tokens
        self.tokens += tokens
        if self._index is not None:
            self._index.add(key, self._row)
        self._make_room()

    def drop(self, key: int) -> bool:
        """Forget one piece or chain: the engine has evicted it. False if it was not there."""
        tokens = self._seen.pop(key, None)
        self.tokens -= tokens or 0
        if self._index is not None and tokens is not None:
            self._index.drop(key, self._row)
        return tokens is not None

    def list_recent(self, most: int) -> list[tuple[int, int]]:
        """The most recent pieces and chains with their tokens, oldest first."""
        skipped = max(0, len(self._seen) - most)
        return list(islice(self._seen.items(), skipped, None))

    def clear(self) -> None:
        """Forget everything: the engine has restarted, or its cache was emptied."""
        if self._index is not None:
            self._index.drop_all(self._seen, self._row)
        self._seen.clear()
        self.tokens = 0

    def _make_room(self) -> None:
        seen = self._seen
        while seen and (self.tokens > self.most_tokens or len(seen) > self.most_tokens // TOKENS_PER_ENTRY):
            key, tokens = seen.popitem(last=False)
            self.tokens -= tokens
            if self._index is not None:
                self._index.drop(key, self._row)


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
