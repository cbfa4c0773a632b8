"""The names in TensorRT-LLM that we lean on: its KV cache connector, as two published versions have it.

`TensorRT-LLM` has moved the module and added optional hooks. What both versions demand is listed here; a version that
demands more is refused at start, by name of the hook.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

MODULES: Final = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
)
"""Where the base classes are, the newer place first."""
SCHEDULER_BASE: Final = "KvCacheConnectorScheduler"
WORKER_BASE: Final = "KvCacheConnectorWorker"

SCHEDULER_HOOKS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
        "update_state_after_alloc": ("request", "block_ids"),
        "build_connector_meta": ("scheduler_output",),
        "request_finished": ("request", "cache_block_ids"),
    }
)
WORKER_HOOKS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "register_kv_caches": ("kv_cache_tensor",),
        "start_load_kv": ("stream",),
        "wait_for_layer_load": ("layer_idx", "stream"),
        "save_kv_layer": ("layer_idx", "stream"),
        "wait_for_save": ("stream",),
        "get_finished": ("finished_gen_req_ids", "started_loading_req_ids"),
    }
)


def find_differences(base: type, hooks: Mapping[str, Sequence[str]]) -> list[str]:
    """Where a base class asks for something else than these hooks, one line each; empty where it does not."""
    unknown = sorted(set(getattr(base, "__abstractmethods__", ())) - set(hooks))
    told = [f"{base.__name__} demands {name}, which this SemBlend does not have" for name in unknown]
    for name, wanted in hooks.items():
        found = list_parameters(getattr(base, name, None))
        if found is None:
            told.append(f"{base.__name__} has no {name}")
        elif found != tuple(wanted):
            told.append(f"{base.__name__}.{name} takes {', '.join(found)} and not {', '.join(wanted)}")
    return told


def list_parameters(hook: Any) -> tuple[str, ...] | None:
    """Names of a hook's parameters without ``self``; None where there is no hook.

    >>> list_parameters(lambda self, request, block_ids: None)
    ('request', 'block_ids')
    """
    return tuple(inspect.signature(hook).parameters)[1:] if callable(hook) else None
