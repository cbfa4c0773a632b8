"""Eviction policies for vLLM's CPU offload, loaded by module path; vLLM's offload itself stays as it is.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config":
      {"eviction_policy": "Adaptive", "cache_policy_module_path": "semblend.integration.vllm.offload_policy"}}'

vLLM 0.26 has no module path for a policy, only one for the whole offload: see `offload_spec`.

A request is one use of its chunks: at its end, where vLLM says when that is (0.32), else when they are looked up. In
the first case a chunk that its request has not finished with is worth more than any other. A policy that fails leaves
least recently used, with a warning in the log; the offload goes on.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx
from vllm.v1.kv_offload.cpu.policies import base
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

from semblend.eviction.policy import GuardedPolicy, make_policy

if TYPE_CHECKING:
    from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

log = logging.getLogger("vllm.semblend")
Entry = tuple[float, int, OffloadKey]  # worth, rank, key
HEARS_THE_END = hasattr(CachePolicy, "on_request_finished")
MAX_REQUESTS = 4096
"""Requests whose chunks are known to be counted, where their end is not told."""


class Adaptive(CachePolicy):
    """Keeps what is likely to come back soon; see `semblend.eviction.adaptive`."""

    policy: ClassVar[str] = "adaptive"

    def __init__(self, cache_capacity: int) -> None:
        self.cache_capacity = cache_capacity
        self.clear()

    def clear(self) -> None:
        """Forget all chunks and all that was learned."""
        found = make_policy(self.policy, self.cache_capacity)
        assert found is not None
        self._policy = GuardedPolicy(found, _report)
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._ranks: dict[OffloadKey, int] = {}  # order of last use
        self._under_way: set[OffloadKey] = set()  # no request has finished with them yet
        self._told: dict[tuple[str, int], int] = {}  # chunks of a request and group whose use is counted
        self._evictable: set[OffloadKey] = set()
        self._heap: list[Entry] = []  # entries that are out of date are skipped
        self._next_rank = self._used = self._epoch = 0

    # -- chunks ------------------------------------------------------------------------------------------------------

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        return self._chunks.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus) -> None:
        self._chunks[key] = chunk
        if HEARS_THE_END:
            self._under_way.add(key)
        self._rank([key])
        if chunk.ref_cnt == 0:
            self.mark_evictable(key)

    def remove(self, key: OffloadKey) -> None:
        del self._chunks[key], self._ranks[key]
        self._evictable.discard(key)
        self._under_way.discard(key)

    def mark_evictable(self, key: OffloadKey) -> None:
        self._evictable.add(key)
        self._push([key])

    def mark_non_evictable(self, key: OffloadKey) -> None:
        self._evictable.discard(key)

    # -- uses --------------------------------------------------------------------------------------------------------

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        keys = list(keys)
        if keys and not HEARS_THE_END:
            self._use_so_far(keys, req_context.req_id)
        self._rank(reversed(keys))

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Nothing yet: a request is one use of its chunks, at its end."""

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        del insertion_only_keys, reused_keys
        keys = base.order_request_keys(key_groups, req_context)
        self._policy.use([hash(key) for key in keys])
        self._used += len(keys)
        self._under_way.difference_update(keys)
        self._rank(reversed(keys))

    def _use_so_far(self, keys: list[OffloadKey], request: str) -> None:
        """Count a request's chunks once: vLLM names all of them again whenever it looks them up or stores some."""
        place = request, get_offload_group_idx(keys[0])
        told = self._told.pop(place, 0)
        if len(keys) > told:
            self._policy.use([hash(key) for key in keys], told=told)
            self._used += len(keys) - told
        self._told[place] = max(told, len(keys))
        if len(self._told) > MAX_REQUESTS:
            del self._told[next(iter(self._told))]

    # -- room --------------------------------------------------------------------------------------------------------

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Evict exactly ``n`` chunks, the least valued first; None, and no change, where so many may not leave."""
        if (
            self._policy.epoch != self._epoch
            or self._used >= len(self._heap)
            or len(self._heap) > 2 * len(self._chunks) + 64
        ):
            self._price_again()
        chosen: dict[OffloadKey, Entry] = {}
        aside: list[Entry] = []
        while self._heap and len(chosen) < n:
            entry = heapq.heappop(self._heap)
            if not self._is_current(entry) or entry[2] in chosen:
                continue
            if entry[2] in protected:
                aside.append(entry)
            else:
                chosen[entry[2]] = entry
        enough = len(chosen) >= n
        for entry in aside if enough else [*aside, *chosen.values()]:
            heapq.heappush(self._heap, entry)
        if not enough:
            return None
        leaving = [(key, self._chunks[key]) for key in chosen]
        for key, _ in leaving:
            self.remove(key)
            self._policy.forget(hash(key))
        return leaving

    def _rank(self, keys: Iterable[OffloadKey]) -> None:
        """Make these chunks the most recently used, the last one most of all."""
        known = [key for key in keys if key in self._chunks]
        for key in known:
            self._next_rank += 1
            self._ranks[key] = self._next_rank
        self._push([key for key in known if key in self._evictable])

    def _push(self, keys: list[OffloadKey]) -> None:
        for entry in self._price(keys):
            heapq.heappush(self._heap, entry)

    def _price(self, keys: list[OffloadKey]) -> list[Entry]:
        prices = self._policy.price([hash(key) for key in keys])
        return [
            (math.inf if key in self._under_way else price, self._ranks[key], key)
            for key, price in zip(keys, prices, strict=True)
        ]

    def _price_again(self) -> None:
        self._heap = self._price(list(self._evictable))
        heapq.heapify(self._heap)
        self._epoch, self._used = self._policy.epoch, 0

    def _is_current(self, entry: Entry) -> bool:
        return entry[2] in self._evictable and self._ranks[entry[2]] == entry[1]


class Lfu(Adaptive):
    """Least often used since it was stored."""

    policy = "lfu"


class Slru(Adaptive):
    """What was used once leaves before what was used again."""

    policy = "slru"


class Lru2(Adaptive):
    """The oldest last use but one leaves first."""

    policy = "lru2"


def _report(error: BaseException) -> None:
    log.warning("SemBlend's eviction policy failed, lru goes on: %s: %s", type(error).__name__, error)
