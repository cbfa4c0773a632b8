"""Connectors that say what a connector costs a request: one that does nothing, and ours with a clock at each call."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

from semblend.integration.vllm.connector_v1 import SemBlendConnectorV1

CALLS = ("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
         "update_connector_output", "request_finished", "bind_connector_metadata", "start_load_kv", "save_kv_layer",
         "wait_for_layer_load", "wait_for_save", "get_finished", "build_connector_worker_meta",
         "take_events", "get_kv_connector_stats", "clear_connector_metadata")  # fmt: skip


class NullConnector(KVConnectorBase_V1):
    """Finds nothing, keeps nothing."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()


class TimedConnector(SemBlendConnectorV1):
    """Ours; each call's beginning and length go to a file, a line a call."""


def _timed(name: str, call: Any) -> Any:
    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        found = call(self, *args, **kwargs)
        took = time.perf_counter() - begun
        _lines.append((begun, name, took * 1e3, self.role.name if hasattr(self, "role") else ""))
        if name in ("request_finished", "clear_connector_metadata") and len(_lines) > 50:
            with open(f"{os.environ['TIMED_CALLS']}.{os.getpid()}", "a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in _lines)
            _lines.clear()
        return found

    return timed


_lines: list[Any] = []
for _name in CALLS:
    if hasattr(SemBlendConnectorV1, _name):
        setattr(TimedConnector, _name, _timed(_name, getattr(SemBlendConnectorV1, _name)))
