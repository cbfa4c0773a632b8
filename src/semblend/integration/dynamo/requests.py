"""Dynamo's requests and answers in our words: preprocessed ones inside a deployment, and HTTP before a stock frontend.

A request that reaches the router carries routing hints of two kinds. Those that name *this router* (the frontend chose
it: ``backend_instance_id``, ``dp_rank``) end here. Those that describe the request stay.
"""

from __future__ import annotations

import re
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


# -- Dynamo's pin over HTTP, for a stock frontend: which workers there are, how a request names one, who answered.
#
# Nothing here imports Dynamo. An operator can switch the pin off (``DYN_ENABLE_FRONTEND_NVEXT=false``); then a request
# goes where Dynamo sends it, and its answer does not say where that was.


WORKER_HEADER = b"x-dynamo-worker-instance-id"
RANK_HEADER = b"x-dynamo-dp-rank"
DEFAULT_ENDPOINT = "dynamo.backend.generate"
_MAX_CARRIED = 64
# In JSON a quote inside a text is escaped, so no answer can hold these by what a model writes.
_WORKER = re.compile(rb'"(?:prefill|decode)_worker_id":\s*(\d{1,20})\b')
_RANK = re.compile(rb'"(?:prefill|decode)_dp_rank":\s*(\d{1,6})\b')
_CACHED = re.compile(rb'"cached_tokens":\s*(\d{1,9})\b')


def read_workers(health: Any, endpoint: str = DEFAULT_ENDPOINT) -> tuple[WorkerKey, ...]:
    """The workers that a frontend's ``GET /health`` lists under one endpoint.

    >>> one = {"namespace": "dynamo", "component": "backend", "endpoint": "generate", "instance_id": 7}
    >>> read_workers({"instances": [one, one | {"endpoint": "other", "instance_id": 8}]})
    (WorkerKey(worker_id=7, dp_rank=0),)
    """
    rows = health.get("instances") if isinstance(health, Mapping) else None
    wanted = endpoint.split(".")
    return tuple(
        WorkerKey(row["instance_id"])
        for row in (rows if isinstance(rows, list) else ())
        if isinstance(row, Mapping)
        and [row.get("namespace"), row.get("component"), row.get("endpoint")] == wanted
        and type(row.get("instance_id")) is int
    )


def write_pin_headers(worker: WorkerKey) -> list[tuple[bytes, bytes]]:
    """The headers that pin a request to a worker.

    >>> write_pin_headers(WorkerKey(7))
    [(b'x-dynamo-worker-instance-id', b'7')]
    """
    headers = [(WORKER_HEADER, b"%d" % worker.worker_id)]
    return [*headers, (RANK_HEADER, b"%d" % worker.dp_rank)] if worker.dp_rank else headers


def has_rules(fields: Mapping[str, Any]) -> bool:
    """Whether a request's body pins or constrains itself already: then its place is its own business."""
    own = fields.get("nvext")
    if not isinstance(own, Mapping):
        return False
    return any(own.get(name) for name in ("backend_instance_id", "prefill_worker_id", "routing_constraints"))


def ask_for_worker(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The ``nvext`` of a request, so that its answer says which worker computed it.

    >>> ask_for_worker({"nvext": {"extra_fields": ["timing"]}})
    {'extra_fields': ['timing', 'worker_id']}
    """
    own = fields.get("nvext")
    kept = dict(own) if isinstance(own, Mapping) else {}
    wanted = kept.get("extra_fields")
    listed = list(wanted) if isinstance(wanted, list) else []
    return kept | {"extra_fields": listed if "worker_id" in listed else [*listed, "worker_id"]}


class PinnedAnswer:
    """Reads, as its bytes pass by, who computed an answer and what stood in that worker's cache.

    >>> answer = PinnedAnswer()
    >>> answer.observe(b'{"nvext":{"worker_id":{"prefill_wor')
    >>> answer.observe(b'ker_id":7}}, "usage": {"prompt_tokens_details": {"cached_tokens": 32}}}')
    >>> answer.worker, answer.cached_tokens
    (WorkerKey(worker_id=7, dp_rank=0), 32)
    """

    def __init__(self) -> None:
        self.cached_tokens: int | None = None
        self._worker_id: int | None = None
        self._rank = 0
        self._carried = b""

    @property
    def worker(self) -> WorkerKey | None:
        return None if self._worker_id is None else WorkerKey(self._worker_id, self._rank)

    def observe(self, piece: bytes) -> None:
        """Look at the next bytes of the answer."""
        data = self._carried + piece
        if self._worker_id is None and (found := _WORKER.search(data)):
            self._worker_id = int(found[1])
            self._rank = int(rank[1]) if (rank := _RANK.search(data)) else 0
        for found in _CACHED.finditer(data):
            self.cached_tokens = int(found[1])
        self._carried = data[-_MAX_CARRIED:]
