"""Dynamo's own KvRouter as our router sees it: loads and exact prefixes, from KV events that Dynamo follows itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from semblend.integration.dynamo.placement import WorkerKey, WorkerState
from semblend.integration.dynamo.requests import RoutedPrompt

_TIERS = ("device_blocks", "host_pinned_extension_blocks", "disk_extension_blocks")
"""A beginning in device memory, and how far host memory and disk prolong it."""


class KvRouterWorkers:
    """Implements `DynamoWorkers` with a ``dynamo.llm.KvRouter``."""

    def __init__(self, kv_router: Any) -> None:
        self._kv_router = kv_router

    async def list_states(self, prompt: RoutedPrompt) -> Sequence[WorkerState]:
        # An empty prompt asks for the load alone; to ask with the tokens would hash them a second time.
        loads = await self._kv_router.get_potential_loads([])
        overlaps = await self._kv_router.get_overlap_scores(
            prompt.token_ids,
            lora_name=prompt.lora_name,
            include_shared=False,
            cache_namespace=prompt.cache_salt,
        )
        size = overlaps["block_size"]
        prefixes = {_read_key(row): size * sum(row[tier] or 0 for tier in _TIERS) for row in overlaps["workers"]}
        return [
            WorkerState(
                key=_read_key(row),
                running=row["active_requests"],
                waiting_tokens=row["potential_prefill_tokens"],
                prefix_tokens=min(len(prompt.token_ids), prefixes.get(_read_key(row), 0)),
            )
            for row in loads
        ]

    async def send(self, request: Mapping[str, Any]) -> AsyncIterator[Any]:
        chunks: AsyncIterator[Any] = await self._kv_router.generate_from_request(dict(request))
        return chunks


def _read_key(row: Mapping[str, Any]) -> WorkerKey:
    return WorkerKey(row["worker_id"], row["dp_rank"])
