"""What stock SGLang lacks on a CPU for which sgl-kernel has no build: a few functions, in plain torch. For tests only.

SGLang loads this as a plugin of its own (entry point ``sglang.srt.plugins``), in every process that it starts.
"""

from __future__ import annotations

import sys
import types
from typing import Any


def register() -> None:
    """Leave out what only an accelerator has, and offer the rotation that SGLang takes from vLLM otherwise."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.distributed.bootstrap._init_cpu_threads_env", _bind_nothing, HookType.REPLACE)
    HookRegistry.register("sglang.srt.mem_cache.pool_host.base.HostKVCache.__init__", _lock_nothing, HookType.BEFORE)
    HookRegistry.register(
        "sglang.srt.mem_cache.pool_host.base.host_memory_budget_bytes", _count_free_memory, HookType.REPLACE
    )
    if "vllm" not in sys.modules:
        package, operations = types.ModuleType("vllm"), types.ModuleType("vllm._custom_ops")
        operations.rotary_embedding = _rotate_in_place  # type: ignore[attr-defined]
        package._custom_ops = operations  # type: ignore[attr-defined]
        sys.modules["vllm"], sys.modules["vllm._custom_ops"] = package, operations


def _bind_nothing(*, local_omp_cpuid: Any = None, dist_init_method: Any = None) -> None:
    """SGLang binds its threads by an operation of sgl-kernel."""


def _lock_nothing(*args: Any, **named: Any) -> tuple[Any, Any]:
    """HiCache's host pool: nothing is locked into memory where no accelerator reads it.

    SGLang imports the copies between the pools from sgl-kernel, and on a CPU not at all.
    """
    from sglang.srt.mem_cache.pool_host import mha

    mha.transfer_kv_direct = _copy_rows
    return args, named | {"pin_memory": False}


def _count_free_memory(requested_bytes: int) -> int:
    """Bytes of memory that HiCache may take. SGLang leaves 10 GiB to others, which a machine for tests may not have."""
    import psutil

    del requested_bytes
    return int(psutil.virtual_memory().available)


def _copy_rows(src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    """Copy the rows of tokens from one pool to the other, buffer by buffer."""
    del page_size
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def _rotate_in_place(positions: Any, query: Any, key: Any, head_size: int, cos_sin_cache: Any, is_neox: bool) -> None:
    """Rotate queries and keys ``[tokens, heads * head_size]`` to their positions, halves against halves."""
    import torch

    assert is_neox, "the models of the tests rotate halves"
    table = cos_sin_cache.index_select(0, positions.flatten())
    cos, sin = (part[:, None].float() for part in table.chunk(2, -1))
    for rows in (query, key):
        heads = rows.view(positions.numel(), -1, head_size)
        first, second = heads[..., : table.shape[-1]].float().chunk(2, -1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        heads[..., : table.shape[-1]] = turned.to(rows.dtype)
