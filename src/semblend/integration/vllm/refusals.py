"""Why an engine is not served, in one line for its log. Such an engine computes every request as without us.

Each line stands for something that our passes or our copies of KV would get wrong, not for something that nobody tried.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from semblend.integration.versions import VLLM
from semblend.integration.vllm.plugin import CONNECTOR
from semblend.integration.vllm.source_check import missing, missing_for_offloading
from semblend.integration.vllm.worker.model_access import read_rope_config
from semblend.materialize.kv.rope import refusal as rope_refusal

LOADS_AHEAD = frozenset(
    "OffloadingConnector SimpleCPUOffloadConnector LMCacheMPConnector HF3FSKVConnector MooncakeConnector "  # noqa: SIM905
    "NixlConnector NixlPullConnector NixlPushConnector".split()
)
"""Connectors of vLLM that load before a request is scheduled: what fails to load is computed, and nothing builds on it.
With a load in the request's own step and asynchronous scheduling vLLM answers with wrong tokens in that case."""
READ_TEXT_PLAINLY = frozenset(
    "LlavaForConditionalGeneration Mistral3ForConditionalGeneration "  # noqa: SIM905
    "Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration Qwen3VLForConditionalGeneration "
    "Qwen3VLMoeForConditionalGeneration Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration".split()
)
"""Classes for images of which we know what a pass over text needs: token embeddings and positions, and of Qwen3-VL that
what images add to its layers is set aside meanwhile. Others may keep more in the model while a step runs."""
MOVABLE_TYPES = ("auto", "float32", "float16", "bfloat16", "half")


def refusal(vllm_config: Any, kv_cache_config: Any, version: str, package: Path) -> str | None:
    """Why this engine cannot be served; None when it can."""
    row = VLLM.find(version)
    if not row.is_known:
        return row.note
    if lacking := missing(package):
        return f"this build of vLLM differs from {row.version}: {lacking[0]}"
    multi_connector = find_multi_connector()
    if multi_connector is not None and is_of_vllm(multi_connector):
        return (
            "in vLLM's MultiConnector the others would store approximate KV as exact; "
            'add "kv_connector_module_path":"semblend.integration.vllm.multi_connector" to it'
        )
    checks: tuple[Callable[[], str | None], ...] = (
        lambda: _refuse_role(vllm_config.kv_transfer_config),
        lambda: _refuse_neighbours(multi_connector, package),
        lambda: _refuse_ranks(vllm_config.parallel_config),
        lambda: _refuse_features(vllm_config),
        lambda: _refuse_model(vllm_config.model_config),
        lambda: _refuse_cache(vllm_config.cache_config, kv_cache_config.kv_cache_groups),
        lambda: rope_refusal(read_rope_config(vllm_config)),
    )
    return next((why for check in checks if (why := check())), None)


def find_multi_connector() -> Any:
    """The MultiConnector, vLLM's or our own kind, that calls its part; None without one. Nothing else tells a part."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if type(owner).__name__ == "MultiConnector" and type(owner).__module__.split(".")[0] in ("vllm", "semblend"):
            return owner
        frame = frame.f_back
    return None


def is_of_vllm(multi_connector: Any) -> bool:
    """Whether it is vLLM's own kind, which lets every part store every request."""
    return type(multi_connector).__module__.split(".")[0] == "vllm"


def _refuse_neighbours(multi_connector: Any, package: Path) -> str | None:
    """What other parts of a MultiConnector of ours make impossible."""
    if multi_connector is None:
        return None
    transfer = multi_connector._kv_transfer_config
    parts = list(_iterate_parts(transfer.kv_connector_extra_config))
    for name, role in [("MultiConnector", transfer.kv_role), *((_name(part), part.get("kv_role")) for part in parts)]:
        if role in ("kv_producer", "kv_consumer"):
            return (
                f"{name} has kv_role {role}: KV goes to or comes from other engines, and which requests' it is, "
                "nobody tells us; use kv_both"
            )
    if any(_name(part) == "OffloadingConnector" for part in parts) and (lacking := missing_for_offloading(package)):
        return f"OffloadingConnector of this vLLM cannot be told which blocks we write: {lacking}"
    if transfer.kv_load_failure_policy == "recompute":
        return None
    for part in parts:
        if part.get("kv_load_failure_policy") == "fail":
            return (
                f"{_name(part)} asks for kv_load_failure_policy fail, and under it each load of ours that is refused "
                "would fail its request"
            )
        if not _loads_ahead(part):
            return (
                f"{_name(part)} may load KV in the step that computes on it, so its kv_load_failure_policy is not ours "
                "to change, and under fail each load of ours that is refused would fail its request; add "
                '"kv_load_failure_policy":"recompute" to the MultiConnector if failed loads of both may be computed'
            )
    return None


def _iterate_parts(extra: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The settings of every part of a MultiConnector, those of a MultiConnector in it too."""
    for part in extra.get("connectors") or ():
        if _name(part) == "MultiConnector":
            yield from _iterate_parts(part.get("kv_connector_extra_config") or {})
        yield part


def _name(part: Mapping[str, Any]) -> str:
    return str(part.get("kv_connector"))


def _loads_ahead(part: Mapping[str, Any]) -> bool:
    if _name(part) in (CONNECTOR, "MultiConnector"):  # ourselves; and the parts of another one are asked themselves
        return True
    return _name(part) in LOADS_AHEAD and not part.get("kv_connector_module_path")  # else it is somebody's own


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
    if getattr(model, "is_multimodal_model", False) and model.architecture not in READ_TEXT_PLAINLY:
        return f"how {model.architecture}, a class for images or sound, computes text while they are there is not known"
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
