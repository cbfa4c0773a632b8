"""A connector that claims a prompt, fills its blocks with noise, and says so: the double behind `test_late_outputs`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)


@dataclass
class NoiseOrders(KVConnectorMetadata):
    """Blocks to spoil in a step, by request."""

    loads: dict[str, list[int]] = field(default_factory=dict)


class NoiseConnector(KVConnectorBase_V1):
    """Both roles in one object. ``loads_async``: vLLM waits for the verdict before it schedules the request.

    Either way the blocks are reported as invalid with the output of the step that spoiled them, as vLLM asks.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, layout: Any, block_tokens: int, loads_async: bool):
        super().__init__(vllm_config, KVConnectorRole.WORKER, kv_cache_config)
        self._layout, self._block_tokens, self._async = layout, block_tokens, loads_async
        self._asked: set[str] = set()
        self._orders = NoiseOrders()
        self._invalid: set[int] = set()
        self._received: set[str] = set()
        self.spoiled = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if request.request_id in self._asked:
            return 0, False
        self._asked.add(request.request_id)
        return request.num_prompt_tokens - 1 - num_computed_tokens, self._async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            count = -(-(request.num_prompt_tokens - 1) // self._block_tokens)
            self._orders.loads[request.request_id] = list(blocks.get_block_ids()[0])[:count]

    def build_connector_meta(self, scheduler_output: Any) -> NoiseOrders:
        orders, self._orders = self._orders, NoiseOrders()
        return orders

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, NoiseOrders)
        for request_id, blocks in metadata.loads.items():
            at = torch.arange(self._block_tokens)
            slots = torch.cat([block * self._block_tokens + at for block in blocks])
            for layer in range(self._layout.layers):
                k, v = self._layout.gather(layer, slots)
                self._layout.scatter(layer, slots, torch.randn_like(k), torch.randn_like(v))
            self._invalid |= set(blocks)
            self.spoiled += len(blocks)
            if self._async:
                self._received.add(request_id)
        metadata.loads.clear()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        received, self._received = self._received, set()
        return None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are over before the forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""


@contextmanager
def put_noise_into(world: Any, *, loads_async: bool) -> Iterator[NoiseConnector]:
    """In place of our connector, in both halves of the engine.

    A step that is scheduled on a load which is then rejected asks the model for token -1, vLLM's placeholder. A CPU's
    embedding raises then; here it takes token 0, so that the engine lives and its answer can be looked at.
    """
    ours, theirs, policy = world.connector, world.worker_connector, world.scheduler.recompute_kv_load_failures
    layout, block_tokens = world.worker._model.layout, world.half.facts.block_tokens
    double = NoiseConnector(ours._vllm_config, ours._kv_cache_config, layout, block_tokens, loads_async)
    world.settle()
    world.scheduler.connector = kv_transfer_state._KV_CONNECTOR_AGENT = double
    world.scheduler.recompute_kv_load_failures = True
    embedding = world.core.model_executor.driver_worker.worker.model_runner.model.model.embed_tokens
    hook = embedding.register_forward_pre_hook(lambda module, given: (given[0].clamp(min=0),))
    try:
        yield double
    finally:
        world.settle()
        hook.remove()
        world.scheduler.connector, world.scheduler.recompute_kv_load_failures = ours, policy
        kv_transfer_state._KV_CONNECTOR_AGENT = theirs
