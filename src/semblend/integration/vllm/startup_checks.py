"""Start-up: what the engine is, whether we can work in it, and the objects of each half."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from semblend.confirm.events import Event
from semblend.confirm.log_lines import format_line
from semblend.confirm.sinks import CallbackSink
from semblend.facade import SemBlend
from semblend.integration.vllm.metrics import MetricsTally
from semblend.integration.vllm.scheduler.records import EngineFacts
from semblend.integration.vllm.settings import ConnectorSettings
from semblend.integration.vllm.source_check import missing
from semblend.integration.vllm.versions import VersionEvidence, support
from semblend.integration.vllm.worker.model_access import StockModel, read_rope_config
from semblend.integration.vllm.worker.worker_half import WorkerHalf
from semblend.materialize.blend.quality import QualitySettings
from semblend.materialize.gate.thresholds import Thresholds, thresholds_for
from semblend.materialize.kv.rope import refusal as rope_refusal
from semblend.prompt import Namespace

log = logging.getLogger("vllm.semblend")


def engine_facts(vllm_config: Any, kv_cache_config: Any, version: str, package: Path) -> EngineFacts:
    """What does not change while this engine runs; its ``refusal`` is logged once, here."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    why = refusal(vllm_config, kv_cache_config, version, package)
    row = support(version)
    if row.evidence is VersionEvidence.STATIC:
        log.warning("SemBlend with vLLM %s: %s", version, row.note)
    if why:
        log.warning("SemBlend reuses nothing in this engine: %s", why)
    namespace = Namespace(
        model=str(model.model),
        revision=str(model.revision or ""),
        tokenizer=str(model.tokenizer or ""),
        kv_dtype=f"{model.dtype}/{cache.cache_dtype}",
        rope=str(read_rope_config(vllm_config).get("rope_parameters") or ""),
    )
    hashed = getattr(cache, "hash_block_size", None) or cache.block_size
    return EngineFacts(version, namespace, int(cache.block_size), int(hashed), why)


def refusal(vllm_config: Any, kv_cache_config: Any, version: str, package: Path) -> str | None:
    """Why this engine cannot be served, in one line; None when it can."""
    row = support(version)
    parallel, groups = vllm_config.parallel_config, kv_cache_config.kv_cache_groups
    if row.evidence is VersionEvidence.NONE:
        return row.note
    if lacking := missing(package):
        return f"this build of vLLM differs from {row.version}: {lacking[0]}"
    if in_multi_connector():
        return (
            "in vLLM's MultiConnector the others would store approximate KV as exact; "
            'add "kv_connector_module_path":"semblend.integration.vllm.multi_connector" to it'
        )
    if parallel.pipeline_parallel_size != 1:
        return "in a pipeline no rank has all layers, and a pass of ours needs them"
    if getattr(parallel, "data_parallel_size", 1) != 1:  # 1 in each engine of a dense model, whatever was asked for
        return "data parallel experts wait for every pass of all ranks, and ours is one rank's own"
    if getattr(parallel, "decode_context_parallel_size", 1) != 1:
        return "context parallel engines keep a prompt's KV on several ranks"
    if vllm_config.lora_config is not None:
        return "LoRA binds adapters to the rows of vLLM's own batch, which our passes are not part of"
    if vllm_config.speculative_config is not None:
        return "a draft model has KV of its own, which donors do not hold"
    if len(groups) != 1 or not _full_attention(groups[0].kv_cache_spec):
        return "the model does not have one kind of full attention in all layers"
    if str(vllm_config.cache_config.cache_dtype) not in ("auto", "float32", "float16", "bfloat16", "half"):
        return f"a KV cache of type {vllm_config.cache_config.cache_dtype} cannot be moved"
    return rope_refusal(read_rope_config(vllm_config))


def in_multi_connector() -> bool:
    """Whether vLLM's MultiConnector, and not our own kind of it, is among the callers: nothing else says so."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = type(frame.f_locals.get("self"))
        if owner.__name__ == "MultiConnector" and owner.__module__.split(".")[0] == "vllm":
            return True
        frame = frame.f_back
    return False


def _full_attention(spec: Any) -> bool:
    windowed = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    return type(spec).__name__ == "FullAttentionSpec" and not windowed


def make_semblend(settings: ConnectorSettings) -> tuple[SemBlend, MetricsTally]:
    """The library, telling vLLM's log and, by way of vLLM, its metrics endpoint."""
    tally = MetricsTally()
    semblend = SemBlend(settings.config, sinks=[CallbackSink(_log_line)], metrics=tally)
    semblend.warm_up()
    return semblend, tally


def quality_settings(settings: ConnectorSettings, vllm_config: Any) -> QualitySettings:
    """The gate's settings; a pass of ours is never larger than what vLLM has measured memory for."""
    model = str(vllm_config.model_config.model)
    thresholds = Thresholds.read(settings.thresholds) if settings.thresholds else thresholds_for(model)
    return QualitySettings(
        mode=settings.config.quality,
        thresholds=thresholds,
        latency_budget_ms=settings.latency_budget_ms,
        seam_tokens=settings.config.seam_tokens,
        layer_share=settings.config.layer_share,
        chunk_tokens=int(vllm_config.scheduler_config.max_num_batched_tokens),
    )


def may_queue_loads(vllm_config: Any) -> bool:
    """Whether the verdict on a load of mode fast may be read after vLLM's step: on a GPU, where vLLM recovers from it.

    vLLM recovers from a rejected load by computing the invalid blocks again. Two settings break that, and the answer
    is then computed on rejected KV (vLLM issue 49250; 0 of 24 tokens right on an H200 with vLLM 0.26):

    - async scheduling: the next step is already scheduled, and its placeholder tokens are not taken back;
    - model runner V2: the worker keeps its own count of computed tokens, which does not go back.

    There the verdict is read before the step. A setting that this version of vLLM does not tell counts as unsafe.
    """
    device = getattr(getattr(vllm_config, "device_config", None), "device_type", None)
    return device == "cuda" and recovers_rejected_blocks(vllm_config)


def recovers_rejected_blocks(vllm_config: Any) -> bool:
    """Whether this vLLM computes blocks again correctly that are reported invalid after a step."""
    scheduled_in_order = getattr(vllm_config.scheduler_config, "async_scheduling", None) is False
    return scheduled_in_order and getattr(vllm_config, "use_v2_model_runner", None) is False


def load_failure_policy(vllm_config: Any) -> str:
    """vLLM's ``kv_load_failure_policy`` for blocks that even a plain pass of ours could not fill.

    ``recompute`` where vLLM does that correctly. Otherwise ``fail``: an error is better than a wrong answer.
    """
    return "recompute" if recovers_rejected_blocks(vllm_config) else "fail"


def make_worker_half(model: StockModel, settings: ConnectorSettings, vllm_config: Any) -> WorkerHalf:
    """The worker half for a model that runs in this engine."""
    return WorkerHalf(
        model,
        model.block_tokens,
        quality_settings(settings, vllm_config),
        host_bytes=settings.donor_host_bytes,
        device_bytes=settings.donor_device_bytes,
        queues=may_queue_loads(vllm_config),
        warm_up_model=model.warm_up,
    )


def _log_line(event: Event) -> None:
    line = format_line(event, "vllm")
    if line is not None:
        log.info("%s", line)
