"""Start-up: whether an engine can be served, and the desk that serves it."""

from __future__ import annotations

import logging
from typing import Any

import torch

from semblend.config import read_engine_variable
from semblend.confirm.events import Event
from semblend.confirm.log_lines import format_line
from semblend.confirm.sinks import CallbackSink
from semblend.engine.model.paged_kv import KvPool
from semblend.engine.model.pooled_model import PooledModel
from semblend.errors import SemBlendError
from semblend.facade import SemBlend
from semblend.integration.desk.records import SlotPool
from semblend.integration.desk.reuse_desk import ReuseDesk
from semblend.integration.trtllm.block_pool import ORDERS, view_pool
from semblend.integration.trtllm.refusals import refusal
from semblend.integration.trtllm.reuse_service import ENGINE, EngineParts, ReuseService
from semblend.integration.trtllm.settings import TrtllmSettings, trtllm_settings
from semblend.integration.trtllm.twin_model import NO_TWIN, make_twin
from semblend.integration.trtllm.versions import find_version
from semblend.materialize.blend.quality import QualitySettings
from semblend.materialize.gate.thresholds import choose_table
from semblend.materialize.kv.layout import DTYPES
from semblend.materialize.weights_watch import WeightsWatch
from semblend.prompt import Namespace

log = logging.getLogger("tensorrt_llm.semblend")


def open_service(
    service: ReuseService,
    llm_args: Any,
    module: torch.nn.Module,
    pool: torch.Tensor,
    settings: TrtllmSettings | None = None,
) -> None:
    """Serve an engine: its arguments, its model and its KV pool. Raises where it cannot be served, with the reason."""
    if why := refusal(llm_args):
        raise SemBlendError(why, hint=NO_TWIN)
    if pool.dtype not in DTYPES:
        raise SemBlendError(f"a KV cache of type {pool.dtype} cannot be moved", hint=NO_TWIN)
    settings = trtllm_settings(read_engine_variable(ENGINE)) if settings is None else settings
    twin = make_twin(module)
    spec = twin.spec
    orders = tuple(view_pool(pool, order, kv_heads=spec.kv_heads, head_dim=spec.head_dim) for order in ORDERS)
    if orders[0].layers != spec.layers:
        raise SemBlendError(f"a KV pool of {orders[0].layers} layers for a model of {spec.layers}", hint=NO_TWIN)
    staged = KvPool.for_model(
        spec,
        tokens=settings.staging_tokens,
        device=pool.device,
        dtype=pool.dtype,
        block_tokens=orders[0].block_tokens,
    )
    parts = EngineParts(
        PooledModel(twin, staged),
        orders,
        build_namespace(llm_args, pool.dtype, spec.rope),
        reuses_blocks=bool(getattr(llm_args.kv_cache_config, "enable_block_reuse", True)),
    )
    service.open(parts, lambda slots: make_desk(parts, slots, settings, llm_args, module))


def make_desk(
    parts: EngineParts, slots: SlotPool, settings: TrtllmSettings, llm_args: Any, module: torch.nn.Module
) -> ReuseDesk:
    semblend = SemBlend(settings.config, sinks=[CallbackSink(_log_line)])
    semblend.warm_up()
    gate = choose_table(str(llm_args.model))
    log.info("SemBlend's quality gate: %s", gate.describe())
    quality = QualitySettings(
        mode=settings.config.quality,
        thresholds=gate.thresholds,
        seam_tokens=settings.config.seam_tokens,
        layer_share=settings.config.layer_share,
        deep_tolerance=settings.config.deep_tolerance,
        prefills=False,  # the engine does that itself, and nothing was promised
    )
    return ReuseDesk(
        parts.model,
        semblend,
        slots,
        settings,
        quality,
        engine=ENGINE,
        engine_version=find_version() or "unknown",
        watch=WeightsWatch(module),
    )


def build_namespace(llm_args: Any, dtype: torch.dtype, rope: Any) -> Namespace:
    """What every request of this engine has in common."""
    return Namespace(
        model=str(llm_args.model),
        revision=str(getattr(llm_args, "revision", None) or ""),
        tokenizer=str(getattr(llm_args, "tokenizer", None) or ""),
        kv_dtype=str(dtype).removeprefix("torch."),
        rope=str(rope),
    )


def _log_line(event: Event) -> None:
    line = format_line(event, "trtllm")
    if line is not None:
        log.info("%s", line)
