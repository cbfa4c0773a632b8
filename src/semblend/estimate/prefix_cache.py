"""An exact prefix cache of whole blocks with LRU eviction, replayed for several sizes at once.

A block's key is a hash of the namespace and of every token up to the block's end. A prompt hits its leading blocks that
are held; then all its blocks are held, the first ones longest. Larger caches hold what smaller ones hold, so one list
in order of use serves every size: the first ``n`` blocks of it are what a cache of ``n`` blocks holds.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from semblend.errors import InputError
from semblend.pipeline import kernels_can_be_loaded
from semblend.prompt import Namespace, TokenArray

KeyArray = npt.NDArray[np.uint64]
_MASK = 2**64 - 1


class PrefixCache(Protocol):
    """What a replay asks of a cache."""

    def replay(self, keys: KeyArray, asked: int, held: int | None = None) -> list[int]:
        """Leading blocks of ``keys[:asked]`` that a cache of each size held; then ``keys[:held]`` are, or all of them.

        With ``held=0`` this is a look that changes nothing.
        """


def make_cache(sizes: Sequence[int], *, compiled: bool | None = None) -> PrefixCache:
    """A cache for several sizes in blocks, smallest first."""
    if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
        raise InputError(f"cache sizes {list(sizes)} are not growing numbers of blocks", hint="1 block or more")
    use = kernels_can_be_loaded() if compiled is None else compiled
    return CompiledPrefixCache(sizes) if use else PlainPrefixCache(sizes)


class PlainPrefixCache:
    """The specification: one ordered dictionary for each size."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._caches = [(size, OrderedDict[int, None]()) for size in sizes]

    def replay(self, keys: KeyArray, asked: int, held: int | None = None) -> list[int]:
        names = keys.tolist()
        held = len(names) if held is None else held
        return [self._replay_one(size, cache, names[:asked], names[:held]) for size, cache in self._caches]

    def _replay_one(self, size: int, cache: OrderedDict[int, None], asked: list[int], held: list[int]) -> int:
        hits = next((number for number, name in enumerate(asked) if name not in cache), len(asked))
        for name in reversed(held):
            cache[name] = None
            cache.move_to_end(name)
            if len(cache) > size:
                cache.popitem(last=False)
        return hits


class CompiledPrefixCache:
    """The same in numba; about 30 bytes for each block of the largest size."""

    def __init__(self, sizes: Sequence[int]) -> None:
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
        held = len(keys) if held is None else held
        self._replay(keys, asked, held, self._table, self._names, self._nodes, self._regions, self._meta, self._hits)
        hits: list[int] = self._hits.tolist()
        return hits


class BlockHasher:
    """Tokens to block keys; prompts of different namespaces never share a key."""

    def __init__(self, block_tokens: int, *, compiled: bool | None = None) -> None:
        self.block_tokens = block_tokens
        self._seeds: dict[Namespace, int] = {}
        self._hash: Any = None
        if kernels_can_be_loaded() if compiled is None else compiled:
            from semblend.estimate import kernels

            self._hash = kernels.hash_blocks

    def hash(self, tokens: TokenArray, namespace: Namespace) -> KeyArray:
        seed = self._seeds.get(namespace)
        if seed is None:
            if len(self._seeds) > 100_000:
                self._seeds.clear()
            digest = hashlib.blake2b(namespace.digest.encode(), digest_size=8).digest()
            seed = self._seeds[namespace] = int.from_bytes(digest, "big")
        if self._hash is None:
            return hash_plainly(tokens, self.block_tokens, seed)
        keys: KeyArray = self._hash(tokens, self.block_tokens, np.uint64(seed))
        return keys


def hash_plainly(tokens: TokenArray, block_tokens: int, seed: int) -> KeyArray:
    """The twin of `kernels.hash_blocks`."""
    keys, key = [], seed
    for number, token in enumerate(tokens[: len(tokens) // block_tokens * block_tokens].tolist(), start=1):
        mixed = (key + token + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        key = mixed ^ (mixed >> 31)
        if number % block_tokens == 0:
            keys.append(key)
    return np.array(keys, np.uint64)
