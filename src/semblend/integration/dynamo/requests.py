"""Dynamo's preprocessed requests and the chunks of its answers, in our words. Plain dicts; nothing is kept.

A request that reaches the router carries routing hints of two kinds. Those that name *this router* (the frontend chose
it: ``backend_instance_id``, ``dp_rank``) end here. Those that describe the request stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from semblend.integration.dynamo.placement import Placement, WorkerKey
from semblend.prompt import Namespace

OURS = ("backend_instance_id", "dp_rank")
"""Hints that named this router and must not reach the workers."""
DESCRIBING = frozenset({*OURS, "expected_output_tokens", "cache_salt", "cache_namespace", "lora_name"})
"""Hints beside which a pin changes nothing but the place. Any other one (constraints, priorities) is Dynamo's alone."""
MEDIA = ("multi_modal_data", "mm_routing_info", "prompt_embeds")
"""With these, equal token ids do not mean equal prompts."""
STAGED = ("prefill_result", "bootstrap_info")
"""With these, a prefill worker has done its part already."""
EVIDENCE = "semblend"


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """A request as far as its place is concerned."""

    token_ids: list[int]
    namespace: Namespace
    is_constrained: bool = False
    wants_evidence: bool = False

    @property
    def lora_name(self) -> str | None:
        return self.namespace.adapter or None

    @property
    def cache_salt(self) -> str | None:
        return self.namespace.salt or None


def read_request(request: Mapping[str, Any]) -> RoutedPrompt:
    """Read a preprocessed request.

    >>> read_request({"model": "m", "token_ids": [1, 2], "routing": {"cache_salt": "a"}}).namespace.salt
    'a'
    """
    routing = _read_routing(request)
    told = {name for name, value in routing.items() if value not in (None, [], {}, "")}
    salt = routing.get("cache_salt") or routing.get("cache_namespace") or ""
    namespace = Namespace(
        model=str(request.get("model") or ""), adapter=str(routing.get("lora_name") or ""), salt=str(salt)
    )
    is_constrained = bool(told - DESCRIBING) or any(request.get(name) for name in (*MEDIA, *STAGED))
    return RoutedPrompt(list(request["token_ids"]), namespace, is_constrained, _wants_evidence(request))


def write_pin(request: Mapping[str, Any], worker: WorkerKey | None) -> dict[str, Any]:
    """The request for the workers: pinned to one of them, or free.

    >>> write_pin({"token_ids": [1], "routing": {"dp_rank": 0, "cache_salt": "a"}}, WorkerKey(7, 1))["routing"]
    {'cache_salt': 'a', 'backend_instance_id': 7, 'dp_rank': 1}
    """
    routing = {name: value for name, value in _read_routing(request).items() if name not in OURS}
    if worker is not None:
        routing |= {"backend_instance_id": worker.worker_id, "dp_rank": worker.dp_rank}
    return {"model": "unknown", **request, "routing": routing or None}


def read_worker(chunk: Any) -> WorkerKey | None:
    """The worker that a chunk comes from; only the first chunk of an answer says so.

    >>> read_worker({"routing_data": {"worker_id": {"decode_worker_id": 7, "decode_dp_rank": 0}}})
    WorkerKey(worker_id=7, dp_rank=0)
    """
    ids = _descend(chunk, "routing_data", "worker_id")
    if not isinstance(ids, Mapping):
        return None
    # The prompt's KV is where it was prefilled; the two differ only where prefill and decode are apart.
    for stage in ("prefill", "decode"):
        if type(worker_id := ids.get(f"{stage}_worker_id")) is int:
            return WorkerKey(worker_id, ids.get(f"{stage}_dp_rank") or 0)
    return None


def read_cached_tokens(chunk: Any) -> int | None:
    """Tokens that the worker found in its cache, as it reports them; None where a chunk does not say.

    >>> read_cached_tokens({"completion_usage": {"prompt_tokens_details": {"cached_tokens": 400}}})
    400
    """
    found = _descend(chunk, "completion_usage", "prompt_tokens_details", "cached_tokens")
    return found if type(found) is int else None


def add_evidence(chunk: Any, placement: Placement, worker: WorkerKey | None) -> Any:
    """The chunk with our decision in its ``engine_data``, for a caller who asked for it."""
    if not isinstance(chunk, Mapping):
        return chunk
    data = chunk.get("engine_data")
    kept = data if isinstance(data, Mapping) else {} if data is None else {"engine": data}
    told = placement.to_dict() | ({} if worker is None else {"worker_id": worker.worker_id, "dp_rank": worker.dp_rank})
    return {**chunk, "engine_data": {**kept, EVIDENCE: told}}


def _read_routing(request: Mapping[str, Any]) -> Mapping[str, Any]:
    routing = request.get("routing")
    return routing if isinstance(routing, Mapping) else {}


def _wants_evidence(request: Mapping[str, Any]) -> bool:
    fields = _descend(request, "extra_args", "nvext", "extra_fields")
    return isinstance(fields, list) and "engine_data" in fields


def _descend(value: Any, *names: str) -> Any:
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
