"""Start-up: what the engine is, whether we can work in it, and the objects of each half."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from semblend.confirm.events import Event
from semblend.confirm.log_lines import format_line
from semblend.confirm.sinks import CallbackSink
from semblend.facade import SemBlend
from semblend.integration.vllm.metrics import MetricsTally
from semblend.integration.vllm.refusals import refusal
from semblend.integration.vllm.scheduler.records import EngineFacts
from semblend.integration.vllm.settings import ConnectorSettings
from semblend.integration.vllm.versions import VersionEvidence, support
from semblend.integration.vllm.worker.model_access import StockModel, read_rope_config
from semblend.integration.vllm.worker.worker_half import WorkerHalf
from semblend.materialize.blend.quality import QualitySettings
from semblend.materialize.gate.thresholds import Thresholds, thresholds_for
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
