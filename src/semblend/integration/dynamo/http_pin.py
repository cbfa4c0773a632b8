"""Dynamo's pin over HTTP, for a stock frontend: which workers there are, how a request names one, who answered.

Nothing here imports Dynamo. An operator can switch the pin off (``DYN_ENABLE_FRONTEND_NVEXT=false``); then a request
goes where Dynamo sends it, and its answer does not say where that was.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from semblend.integration.dynamo.placement import WorkerKey

WORKER_HEADER = b"x-dynamo-worker-instance-id"
RANK_HEADER = b"x-dynamo-dp-rank"
DEFAULT_ENDPOINT = "dynamo.backend.generate"
_MOST_CARRIED = 64
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
        self._carried = data[-_MOST_CARRIED:]
