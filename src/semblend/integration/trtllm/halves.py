"""The scheduler half and the worker half: TensorRT-LLM's hooks, one call into the service each. No TensorRT-LLM import.

`connector` puts TensorRT-LLM's base classes under them. Hooks that we have no use for are here too: the base classes
demand them.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from semblend.integration.trtllm.reuse_service import Copy, MeetingPoint, ReuseService
from semblend.integration.trtllm.startup import open_service
from semblend.integration.trtllm.twin_model import find_model_of_caller

log = logging.getLogger("tensorrt_llm.semblend")
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
