"""vLLM's OffloadingConnector on a CPU: its own scheduler and worker, over copies that take as long as they may.

A stored block is copied when vLLM waits for the copy, and otherwise when the test lets copies go on. Each copy is
compared with what the block held when the copy was ordered: one that differs is a block that was given away too early.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

CHUNKS = 512
WORKERS: list[SlowWorker] = []
"""The worker of each engine in this process."""


class SlowOffloadingSpec(OffloadingSpec):
    """For ``spec_name`` and ``spec_module_path`` of the connector."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return dict(CPUOffloadingSpec.build_metric_definitions(extra_config))  # what its manager counts

    def get_manager(self) -> OffloadingManager:
        return CPUOffloadingManager(CHUNKS)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        WORKERS.append(SlowWorker([one.tensor for one in kv_caches.tensors]))
        return WORKERS[-1]


class SlowWorker(OffloadingWorker):
    """``slow``: a store is copied when somebody waits for it, and not before. ``torn`` blocks changed meanwhile."""

    def __init__(self, caches: list[torch.Tensor]) -> None:
        self._caches = caches
        self._chunks: dict[int, list[torch.Tensor]] = {}
        self._stores: dict[int, tuple[list[int], list[int], list[list[torch.Tensor]]]] = {}
        self._done: list[int] = []
        self.slow = True
        self.stored = self.flushed = self.torn = 0

    def _read(self, block: int) -> list[torch.Tensor]:
        return [cache[block].clone() for cache in self._caches]

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        blocks, chunks = [int(one) for one in src_spec.block_ids], [int(one) for one in dst_spec.block_ids]
        self._stores[job_id] = (blocks, chunks, [self._read(block) for block in blocks])
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for chunk, block in zip(src_spec.block_ids, dst_spec.block_ids, strict=True):
            for cache, kept in zip(self._caches, self._chunks[int(chunk)], strict=True):
                cache[int(block)] = kept
        self._done.append(job_id)
        return True

    def _copy(self, job_id: int) -> None:
        for block, chunk, before in zip(*self._stores.pop(job_id), strict=True):
            self._chunks[chunk] = self._read(block)
            same = all(torch.equal(old, new) for old, new in zip(before, self._chunks[chunk], strict=True))
            self.torn += not same
            self.stored += 1
        self._done.append(job_id)

    def wait(self, job_ids: set[int]) -> None:
        for job_id in sorted(job_ids & self._stores.keys()):
            self.flushed += 1
            self._copy(job_id)

    def get_finished(self) -> list[TransferResult]:
        if not self.slow:
            for job_id in sorted(self._stores):
                self._copy(job_id)
        done, self._done = self._done, []
        return [TransferResult(job_id=job_id, success=True) for job_id in done]
