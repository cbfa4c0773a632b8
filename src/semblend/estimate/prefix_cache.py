"""An exact prefix cache of whole blocks with LRU eviction, replayed for several sizes at once.

A block's key is a hash of the namespace and of every token up to the block's end. A prompt hits its leading blocks that
are held; then all its blocks are held, the first ones longest. Larger caches hold what smaller ones hold, so one list
in order of use serves every size: the first ``n`` blocks of it are what a cache of ``n`` blocks holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from semblend.errors import InputError
from semblend.prompt import Namespace, TokenArray

KeyArray = npt.NDArray[np.uint64]


class PrefixCache:
    """A cache for several sizes in blocks, smallest first; about 30 bytes for each block of the largest size."""

    def __init__(self, sizes: Sequence[int]) -> None:
        if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
            raise InputError(f"cache sizes {list(sizes)} are not growing numbers of blocks", hint="1 block or more")
        from semblend.estimate import kernels

        largest = sizes[-1]
        self._replay = kernels.replay_prompt
        self._table = np.full(1 << (2 * largest).bit_length(), kernels.NONE, np.int32)
        self._names = np.zeros(largest, np.uint64)
        self._nodes = np.zeros((largest, 3), np.int32)
        self._regions = np.full((len(sizes), 3), kernels.NONE, np.int32)
        self._regions[:, kernels.ROOM] = np.diff(sizes, prepend=0)
        self._regions[:, kernels.COUNT] = 0
        self._meta = np.array([kernels.NONE, kernels.NONE, 0], np.int64)
        self._hits = np.zeros(len(sizes), np.int64)

    def replay(self, keys: KeyArray, asked: int, held: int | None = None) -> list[int]:
        """Leading blocks of ``keys[:asked]`` that a cache of each size held; then ``keys[:held]`` are, or all of them.

        With ``held=0`` this is a look that changes nothing.
        """
        held = len(keys) if held is None else held
        self._replay(keys, asked, held, self._table, self._names, self._nodes, self._regions, self._meta, self._hits)
        hits: list[int] = self._hits.tolist()
        return hits


class BlockHasher:
    """Tokens to block keys; prompts of different namespaces never share a key."""

    def __init__(self, block_tokens: int) -> None:
        from semblend.estimate import kernels

        self.block_tokens = block_tokens
        self._seeds: dict[Namespace, int] = {}
        self._hash = kernels.hash_blocks

    def hash(self, tokens: TokenArray, namespace: Namespace) -> KeyArray:
        seed = self._seeds.get(namespace)
        if seed is None:
            if len(self._seeds) > 100_000:
                self._seeds.clear()
            digest = hashlib.blake2b(namespace.digest.encode(), digest_size=8).digest()
            seed = self._seeds[namespace] = int.from_bytes(digest, "big")
        keys: KeyArray = self._hash(tokens, self.block_tokens, np.uint64(seed))
        return keys
