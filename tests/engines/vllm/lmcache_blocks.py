"""LMCache without a GPU: its own adapter, its own books and its own store, and a copier of ours beneath them.

LMCache moves KV between the pages of vLLM and its own memory by kernels for accelerators. `install` gives it something
for a CPU: whole blocks are copied, whatever lies in them.
"""

from __future__ import annotations

from typing import Any

import torch

BLOCK, CHUNK = 32, 64
SETTINGS = {"LMCACHE_CHUNK_SIZE": str(CHUNK), "LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": "1"}
STORED: list[int] = []
"""Tokens of every chunk that was stored."""


def install() -> None:
    """To be called before an engine is made.

    LMCache is imported no earlier than vLLM would: its wrappers around libraries are not made for what vLLM does to
    the modules that it finds when an engine starts.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    make = KVConnectorFactory.create_connector.__func__  # type: ignore[attr-defined]

    def made(cls: Any, *given: Any, **named: Any) -> Any:
        from lmcache.integration.vllm import vllm_service_factory
        from lmcache.v1 import gpu_connector

        for module in (vllm_service_factory, gpu_connector):
            module.CreateGPUConnector = lambda config, metadata, engine, **_: _copier(metadata.kv_shape)
        return make(cls, *given, **named)

    KVConnectorFactory.create_connector = classmethod(made)  # type: ignore[assignment]


def _copier(shape: tuple[int, ...]) -> Any:
    from lmcache.v1.gpu_connector import GPUConnectorInterface
    from lmcache.v1.memory_management import MemoryFormat

    class WholeBlocks(GPUConnectorInterface):  # type: ignore[misc]
        kvcaches: Any = None

        def get_shape(self, num_tokens: int) -> torch.Size:
            layers, two, _, heads, size = shape
            return torch.Size((two, layers, num_tokens, heads * size))

        def initialize_kvcaches_ptr(self, **named: Any) -> None:
            self.kvcaches = named.get("kvcaches", self.kvcaches)

        def _pages(self, start: int, end: int, named: dict[str, Any]) -> tuple[list[torch.Tensor], torch.Tensor]:
            self.initialize_kvcaches_ptr(**named)
            pages = list(self.kvcaches.values()) if isinstance(self.kvcaches, dict) else list(self.kvcaches)
            return pages, named["slot_mapping"][start:end][::BLOCK] // BLOCK

        def from_gpu(self, memory_obj: Any, start: int, end: int, **named: Any) -> None:
            pages, blocks = self._pages(start, end, named)
            memory_obj.tensor.view(-1).copy_(torch.stack([page[blocks] for page in pages]).flatten())
            memory_obj.metadata.fmt = MemoryFormat.KV_2LTD
            STORED.append(end - start)

        def to_gpu(self, memory_obj: Any, start: int, end: int, **named: Any) -> None:
            pages, blocks = self._pages(start, end, named)
            held = memory_obj.tensor.view(len(pages), len(blocks), *pages[0].shape[1:])
            for page, kept in zip(pages, held, strict=True):
                page[blocks] = kept

        def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **named: Any) -> None:
            for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
                self.from_gpu(memory_obj, start, end, **named)

        def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **named: Any) -> None:
            for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
                self.to_gpu(memory_obj, start, end, **named)

    return WholeBlocks()
