"""A `MultiConnector` for our connector together with others, such as LMCache or vLLM's own offloading.

vLLM's MultiConnector lets every connector store every request. One that we serve would then be stored elsewhere as
exact, because the others name KV by its tokens, or by hashes that they read before we claimed. This one is a
MultiConnector in which

1. the others are asked first, because what they hold is exact. Where they hold something we only write the receipt;
2. a request that we claim is hidden from them until its end: they neither load nor store it, nor the answer's KV. Its
   blocks are not: OffloadingConnector copies blocks of requests that have ended, and has to finish before anybody else
   writes them;
3. they are silent while our own passes run, which are no requests of vLLM.

Load it as vLLM's, with ``"kv_connector_module_path":"semblend.integration.vllm.multi_connector"`` beside it. It has the
same name because vLLM asks for that name where it looks into the parts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector as Parts
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata

from semblend.errors import ConfigError
from semblend.integration.vllm.connector_v1 import SemBlendConnectorV1


class MultiConnector(Parts):
    """See the module."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        ours = [index for index, part in enumerate(self._connectors) if isinstance(part, SemBlendConnectorV1)]
        if len(ours) != 1:
            raise ConfigError(f"SemBlendConnectorV1 stands {len(ours)} times among the connectors", hint="name it once")
        self._our_index = ours[0]
        self._hidden: set[str] = set()
        self._given: set[int] = set()  # blocks that hidden requests were given since the last step
        if role is KVConnectorRole.SCHEDULER and self._ours.serves:
            self._ours.stand_beside_others()
            self._ours.adapt(self._kv_transfer_config)

    @property
    def _ours(self) -> SemBlendConnectorV1:
        found = self._connectors[self._our_index]
        assert isinstance(found, SemBlendConnectorV1), "checked when we were made"
        return found

    def _others(self) -> list[tuple[int, KVConnectorBase_V1]]:
        return [(index, part) for index, part in enumerate(self._connectors) if index != self._our_index]

    # -- scheduler -------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        name = request.request_id
        if name in self._hidden or self._ours.holds_approximate(name):
            # Asked again: it waits for blocks, or was preempted. Others have not seen it and shall not now. Or vLLM has
            # found blocks of an equal prompt for it, which are no exact prefix to build on.
            return self._claim(request, num_computed_tokens)
        self._requests_to_connector.pop(name, None)
        best: tuple[int, bool] = (0, False)
        for index, part in self._others():
            tokens, later = part.get_num_new_matched_tokens(request, num_computed_tokens)
            if tokens is None:
                return None, False
            if tokens > 0 and not best[0]:
                best = (tokens, later)
                self._requests_to_connector[name] = index
        if best[0]:
            self._ours.leave_to_another(request, num_computed_tokens + best[0], num_computed_tokens)
            return best
        return self._claim(request, num_computed_tokens)

    def _claim(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens, later = self._ours.get_num_new_matched_tokens(request, num_computed_tokens)
        if tokens:
            self._requests_to_connector[request.request_id] = self._our_index
        else:
            self._requests_to_connector.pop(request.request_id, None)
        return tokens, later

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        name = request.request_id
        claimed = num_external_tokens and self._requests_to_connector.get(name) == self._our_index
        if claimed or self._ours.holds_approximate(name):
            self._hidden.add(name)
        if name in self._hidden:
            self._given.update(block for group in blocks.get_block_ids() for block in group)
            self._ours.update_state_after_alloc(request, blocks, num_external_tokens)
        else:
            super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> MultiKVConnectorMetadata:
        seen_by_others = without(scheduler_output, self._hidden)
        self._given.update(list_new_blocks(scheduler_output, self._hidden))
        for _, part in self._others():
            announce_blocks(part, self._given)
        self._given.clear()
        metadata = MultiKVConnectorMetadata(
            metadata=tuple(
                part.build_connector_meta(scheduler_output if index == self._our_index else seen_by_others)
                for index, part in enumerate(self._connectors)
            )
        )
        if self._extra_async_saves:
            metadata.extra_async_saves = dict(self._extra_async_saves)
            self._extra_async_saves.clear()
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        """With the output of a step: blocks that a part could not load come first, then what each part tells."""
        if connector_output.invalid_block_ids:
            self._ours.note_failed_loads(connector_output.invalid_block_ids)
        super().update_connector_output(connector_output)

    def request_finished(self, request: Any, blocks: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._hidden.discard(request.request_id)
        answer: tuple[bool, dict[str, Any] | None] = super().request_finished(request, blocks)
        return answer

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """vLLM calls this one in place of `request_finished`; where not all parts know it, it calls that one."""
        self._hidden.discard(request.request_id)
        answer: tuple[bool, dict[str, Any] | None] = super().request_finished_all_groups(request, block_ids)
        return answer

    # -- worker ----------------------------------------------------------------------------------------------------

    def get_handshake_metadata(self) -> Any:
        """The others': vLLM takes one, and theirs is how engines find each other. Ours waits for the first step."""
        told = (part.get_handshake_metadata() for _, part in self._others())
        return next((one for one in told if one is not None), None)

    def has_connector_metadata(self) -> bool:
        """False while ours computes: then no part is called back for layers of passes that are no requests."""
        return bool(super().has_connector_metadata() and self._ours.has_connector_metadata())


def announce_blocks(part: Any, block_ids: set[int]) -> None:
    """Let a part that copies blocks of requests which have ended know, before its step, that others write these now.

    That is OffloadingConnector. Other connectors of vLLM hold the blocks while they copy (reference counts in
    SimpleCPUOffload and MooncakeStore, a delayed free in those between engines), or copy within the step.
    """
    for inner in getattr(part, "_connectors", ()):  # a MultiConnector of vLLM's
        announce_blocks(inner, block_ids)
    allocated = getattr(getattr(part, "connector_scheduler", None), "_current_batch_allocated_block_ids", None)
    if isinstance(allocated, set):
        allocated.update(block_ids - {0})  # 0 is no block, but the place of one


def list_new_blocks(output: Any, hidden: set[str]) -> Iterator[int]:
    """The blocks that a step gives to these requests."""
    if not hidden.intersection(output.num_scheduled_tokens):
        return
    cached = output.scheduled_cached_reqs
    rows: list[tuple[str, Iterable[list[int]] | None]] = [
        (new.req_id, new.block_ids) for new in output.scheduled_new_reqs
    ]
    for name, groups in (*rows, *zip(cached.req_ids, cached.new_block_ids, strict=True)):
        if name in hidden:
            for group in groups or ():
                yield from group


def without(output: Any, hidden: set[str]) -> Any:
    """A step as it is for somebody who does not know these requests."""
    if not hidden.intersection(output.num_scheduled_tokens):
        return output
    cached = output.scheduled_cached_reqs
    rows = [index for index, name in enumerate(cached.req_ids) if name not in hidden]
    changed: dict[str, Any] = {}
    for item in fields(cached):
        value = getattr(cached, item.name)
        if isinstance(value, list) and len(value) == len(cached.req_ids):
            changed[item.name] = [value[index] for index in rows]
        elif isinstance(value, (set, dict)):
            changed[item.name] = _leave_out(value, hidden)
    shown = copy.copy(output)
    shown.scheduled_new_reqs = [new for new in output.scheduled_new_reqs if new.req_id not in hidden]
    shown.scheduled_cached_reqs = replace(cached, **changed)
    shown.num_scheduled_tokens = _leave_out(output.num_scheduled_tokens, hidden)
    shown.total_num_scheduled_tokens = sum(shown.num_scheduled_tokens.values())
    return shown


def _leave_out(value: Any, hidden: set[str]) -> Any:
    if isinstance(value, dict):
        return {name: item for name, item in value.items() if name not in hidden}
    return value - hidden
