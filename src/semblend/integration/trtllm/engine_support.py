"""What of TensorRT-LLM we know: versions, the hooks that we lean on, settings, and why an engine is not served.

All of it is known from published sources. Nothing was run: the package needs an NVIDIA GPU to be imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Final

from semblend.config import setting
from semblend.integration.versions import TRTLLM
from semblend.session.settings import LocalSettings, read_settings

# -- The names in TensorRT-LLM that we lean on: its KV cache connector, as two published versions have it.
#
# `TensorRT-LLM` has moved the module and added optional hooks. What both versions demand is listed here; a version that
# demands more is refused at start, by name of the hook.


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


# -- Settings of the TensorRT-LLM connector: those of local sessions, and the size of the slots for loads.


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmSettings(LocalSettings):
    """How the connector behaves; ``config`` holds what the library reads."""

    guide: ClassVar[str] = "docs/guides/tensorrt_llm.md"

    staging_tokens: int = setting(
        16384, "Tokens of accelerator memory in which loads are prepared; a longer prompt is computed without us."
    )


def trtllm_settings(own: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> TrtllmSettings:
    """The settings from environment and file, and ``own`` for those that only an engine has.

    >>> trtllm_settings({"staging_tokens": 4096}, {"SEMBLEND_QUALITY": "fast"}).staging_tokens
    4096
    """
    return read_settings(TrtllmSettings, own, environ)


# -- Why an engine is not served, in one line for its log. Such an engine runs exactly as without us.


def refusal(llm_args: Any, version: str | None = None) -> str | None:
    """Why this engine cannot be served; None when it can. ``llm_args`` is TensorRT-LLM's `TorchLlmArgs`.

    Model and KV pool are looked at when they are there: `twin_model` and `block_pool` refuse what they cannot read.
    """
    version = TRTLLM.find_installed() if version is None else version
    if version is not None and not (row := TRTLLM.find(version)).is_known:
        return row.note
    checks: tuple[Callable[[Any], str | None], ...] = (_refuse_ranks, _refuse_features, _refuse_cache)
    return next((why for check in checks if (why := check(llm_args))), None)


def _refuse_ranks(args: Any) -> str | None:
    for name, why in (
        ("tensor_parallel_size", "the scheduler half cannot hear from other ranks before it has to promise"),
        ("pipeline_parallel_size", "in a pipeline no rank has all layers, and a pass of ours needs them"),
        ("context_parallel_size", "a prompt's KV is on several ranks"),
    ):
        if (getattr(args, name, 1) or 1) != 1:
            return f"{why} ({name})"
    return "each rank schedules for itself (enable_attention_dp)" if getattr(args, "enable_attention_dp", 0) else None


def _refuse_features(args: Any) -> str | None:
    for name, why in (
        ("speculative_config", "a draft model has KV of its own, which donors do not hold"),
        ("lora_config", "an adapter changes what tokens compute, and the twin has none"),
        ("enable_lora", "an adapter changes what tokens compute, and the twin has none"),
        ("cache_transceiver_config", "KV goes to or comes from other engines, which take approximate KV as exact"),
        ("quant_config", "the twin computes plain weights only"),
    ):
        found = getattr(args, name, None)
        if name == "quant_config":
            found = getattr(found, "quant_algo", None) or getattr(found, "kv_cache_quant_algo", None)
        if found:
            return f"{why} ({name})"
    if (getattr(args, "max_beam_width", 1) or 1) != 1:
        return "beams share blocks of a prompt (max_beam_width)"
    return None


def _refuse_cache(args: Any) -> str | None:
    cache = getattr(args, "kv_cache_config", None)
    if cache is None:
        return "the KV cache is not configured (kv_cache_config)"
    if getattr(cache, "max_attention_window", None):
        return "with a sliding window not every token has a block (max_attention_window)"
    if str(getattr(cache, "dtype", "auto") or "auto") not in ("auto", "float16", "bfloat16", "float32"):
        return f"a KV cache of type {cache.dtype} cannot be moved (kv_cache_config.dtype)"
    return None
