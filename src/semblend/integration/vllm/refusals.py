"""Why an engine is not served, in one line for its log. Such an engine runs exactly as without us.

Each line stands for something that our passes or our copies of KV would get wrong, not for something that nobody tried.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from semblend.integration.version_support import VersionEvidence
from semblend.integration.vllm.source_check import missing
from semblend.integration.vllm.versions import support
from semblend.integration.vllm.worker.model_access import read_rope_config
from semblend.materialize.kv.rope import refusal as rope_refusal

MOVABLE_TYPES = ("auto", "float32", "float16", "bfloat16", "half")


def refusal(vllm_config: Any, kv_cache_config: Any, version: str, package: Path) -> str | None:
    """Why this engine cannot be served; None when it can."""
    row = support(version)
    if row.evidence is VersionEvidence.NONE:
        return row.note
    if lacking := missing(package):
        return f"this build of vLLM differs from {row.version}: {lacking[0]}"
    if in_multi_connector():
        return (
            "in vLLM's MultiConnector the others would store approximate KV as exact; "
            'add "kv_connector_module_path":"semblend.integration.vllm.multi_connector" to it'
        )
    checks: tuple[Callable[[], str | None], ...] = (
        lambda: _refuse_role(vllm_config.kv_transfer_config),
        lambda: _refuse_ranks(vllm_config.parallel_config),
        lambda: _refuse_features(vllm_config),
        lambda: _refuse_model(vllm_config.model_config),
        lambda: _refuse_cache(vllm_config.cache_config, kv_cache_config.kv_cache_groups),
        lambda: rope_refusal(read_rope_config(vllm_config)),
    )
    return next((why for check in checks if (why := check())), None)


def in_multi_connector() -> bool:
    """Whether vLLM's MultiConnector, and not our own kind of it, is among the callers: nothing else says so."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = type(frame.f_locals.get("self"))
        if owner.__name__ == "MultiConnector" and owner.__module__.split(".")[0] == "vllm":
            return True
        frame = frame.f_back
    return False


def _refuse_role(transfer: Any) -> str | None:
    role = getattr(transfer, "kv_role", "kv_both")
    if role == "kv_both":
        return None
    return (
        f"with kv_role {role} KV goes to or comes from other engines, which take approximate KV as exact; use kv_both"
    )


def _refuse_ranks(parallel: Any) -> str | None:
    if parallel.pipeline_parallel_size != 1:
        return "in a pipeline no rank has all layers, and a pass of ours needs them"
    if getattr(parallel, "data_parallel_size", 1) != 1:  # 1 in each engine of a dense model, whatever was asked for
        return "data parallel experts wait for every pass of all ranks, and ours is one rank's own"
    for kind in ("decode", "prefill"):
        if getattr(parallel, f"{kind}_context_parallel_size", 1) != 1:
            return f"context parallel engines keep a prompt's KV on several ranks ({kind}_context_parallel_size)"
    return None


def _refuse_features(vllm_config: Any) -> str | None:
    if vllm_config.lora_config is not None:
        return (
            "LoRA: vLLM tells its kernels once a step which adapter each row of its own batch has; "
            "a pass of ours between that and the step would run with the wrong adapters, and so would the step after it"
        )
    if vllm_config.speculative_config is not None:
        return "a draft model has KV of its own, which donors do not hold"
    passes = getattr(getattr(vllm_config, "compilation_config", None), "pass_config", None)
    if getattr(passes, "fuse_attn_quant", False):
        return "attention writes a quantised output (fuse_attn_quant), which the attention of our passes does not"
    return None


def _refuse_model(model: Any) -> str | None:
    if getattr(model, "is_multimodal_model", False):
        return "a model for images or sound computes from embeddings, which token ids do not determine"
    if getattr(model, "enable_sleep_mode", False) or getattr(model, "enable_cumem_allocator", False):
        return "sleep mode takes away what was allocated beside the KV cache, donors and recorded passes too"
    if getattr(model.hf_text_config, "num_kv_shared_layers", 0):
        return "layers share the KV of other layers, and a donor would hold it twice or not at all"
    return None


def _refuse_cache(cache: Any, groups: Any) -> str | None:
    if getattr(cache, "kv_sharing_fast_prefill", False):
        return "layers share the KV of other layers (kv_sharing_fast_prefill): a prefill leaves them out"
    if len(groups) != 1 or not _full_attention(groups[0].kv_cache_spec):
        return "the model does not have one kind of full attention in all layers"
    if str(cache.cache_dtype) not in MOVABLE_TYPES:
        return (
            f"a KV cache of type {cache.cache_dtype} cannot be moved: keys are rotated to other positions, and "
            "rounding them to 8 bits once more adds an error that our checks were not calibrated for"
        )
    return None


def _full_attention(spec: Any) -> bool:
    windowed = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    return type(spec).__name__ == "FullAttentionSpec" and not windowed
