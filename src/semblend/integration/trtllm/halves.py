"""The scheduler half and the worker half: TensorRT-LLM's hooks, one call into the service each. No TensorRT-LLM import.

`connector` puts TensorRT-LLM's base classes under them. Hooks that we have no use for are here too: the base classes
demand them.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from semblend.config import read_engine_variable
from semblend.engine.model.model import PooledModel
from semblend.engine.model.paged_kv import KvPool
from semblend.errors import SemBlendError
from semblend.integration.trtllm.engine_support import TrtllmSettings, refusal, trtllm_settings
from semblend.integration.trtllm.reuse_service import (
    ENGINE,
    ORDERS,
    Copy,
    EngineParts,
    MeetingPoint,
    ReuseService,
    view_pool,
)
from semblend.integration.trtllm.twin_model import NO_TWIN, find_model_of_caller, make_twin
from semblend.integration.versions import TRTLLM
from semblend.materialize.kv.layout import DTYPES
from semblend.prompt import Namespace
from semblend.session.local import LocalSessions, SlotPool, open_sessions

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
    service.open(parts, lambda slots: make_sessions(parts, slots, settings, llm_args, module))


def make_sessions(
    parts: EngineParts, slots: SlotPool, settings: TrtllmSettings, llm_args: Any, module: torch.nn.Module
) -> LocalSessions:
    return open_sessions(
        parts.model,
        slots,
        settings,
        engine=ENGINE,
        engine_version=TRTLLM.find_installed() or "unknown",
        model_name=str(llm_args.model),
        module=module,
        engine_log=log,
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


HALVES = MeetingPoint()


class SchedulerHalf:
    """Asked by the block manager about every new request."""

    _service: ReuseService

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)  # type: ignore[call-arg]
        self._service = HALVES.meet(llm_args)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Never asynchronous: what is offered is ready, but for a copy."""
        return self._service.offer(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        self._service.place(request.request_id, block_ids)

    def build_connector_meta(self, scheduler_output: Any) -> list[Copy]:
        del scheduler_output  # what to copy follows from claims and blocks
        return self._service.take_copies()

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """False: the blocks are ours no longer when this returns."""
        self._service.finish(request, cache_block_ids)
        return False


class WorkerHalf:
    """Lives beside the model; it copies, and makes the twin when it sees the KV pool."""

    _service: ReuseService
    _metadata: Any

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)  # type: ignore[call-arg]
        self._service, self._args = HALVES.meet(llm_args), llm_args

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        try:
            open_service(self._service, self._args, find_model_of_caller(), kv_cache_tensor)
        except Exception as error:  # an engine that we cannot serve must start
            log.warning("SemBlend reuses nothing in this engine: %s", error)

    def start_load_kv(self, stream: Any) -> None:
        copies: list[Copy] = self._metadata or []
        if not copies:
            return
        if stream is None or not torch.cuda.is_available():
            self._service.copy(copies)
            return
        prepared_on = torch.cuda.current_stream()
        stream.wait_stream(prepared_on)
        with torch.cuda.stream(stream):
            self._service.copy(copies)
        prepared_on.wait_stream(stream)  # our slots are written again behind the copy

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """The copy of all layers was queued in front of the forward pass, on its stream."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Donors are captured whole, when their request has ended."""

    def wait_for_save(self, stream: Any) -> None:
        """Nothing is saved by the layer."""

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Nothing of ours is asynchronous."""
        del finished_gen_req_ids, started_loading_req_ids
        return [], []
