"""Why an engine is not served, in one line for its log. Such an engine runs exactly as without us."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from semblend.integration.trtllm.versions import find_version, support
from semblend.integration.version_support import VersionEvidence


def refusal(llm_args: Any, version: str | None = None) -> str | None:
    """Why this engine cannot be served; None when it can. ``llm_args`` is TensorRT-LLM's `TorchLlmArgs`.

    Model and KV pool are looked at when they are there: `twin_model` and `block_pool` refuse what they cannot read.
    """
    version = find_version() if version is None else version
    if version is not None and (row := support(version)).evidence is VersionEvidence.NONE:
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
