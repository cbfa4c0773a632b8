"""Workers of a Dynamo that is not there: each has a prefix cache of full blocks, and dies when a test says so.

They answer as Dynamo 1.6.1 does: the first chunk names the worker and its cached tokens, a free request goes to the
worker with the longest cached beginning and then to the one with the least to do, an unreachable worker is an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from semblend.integration.dynamo.placement import WorkerKey, WorkerState
from semblend.integration.dynamo.requests import RoutedPrompt

BLOCK_SIZE = 16


@dataclass(slots=True)
class FakeWorker:
    """One worker. ``busy`` and ``waiting_tokens`` are what others have sent it."""

    key: WorkerKey
    busy: int = 0
    waiting_tokens: int = 0
    is_alive: bool = True
    dies_after: int | None = None
    """After so many chunks of an answer."""
    served: int = 0
    _blocks: set[tuple[int, ...]] = field(default_factory=set)

    def count_cached(self, tokens: Sequence[int]) -> int:
        """Tokens of the beginning that stand in the cache, in full blocks."""
        at = 0
        while at + BLOCK_SIZE <= len(tokens) and tuple(tokens[: at + BLOCK_SIZE]) in self._blocks:
            at += BLOCK_SIZE
        return at

    def compute(self, tokens: Sequence[int]) -> None:
        """Put every full block of a prompt into the cache."""
        self._blocks |= {tuple(tokens[:end]) for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)}


class FakeDynamo:
    """Implements `DynamoWorkers`. ``requests`` holds what was sent, in order."""

    def __init__(self, count: int = 3) -> None:
        self.workers = {WorkerKey(100 + at): FakeWorker(WorkerKey(100 + at)) for at in range(count)}
        self.requests: list[Mapping[str, Any]] = []
        self.fault: Exception | None = None
        """Raised by `list_states`."""
        self.refusal: Exception | None = None
        """Raised by `send` for every pinned request."""
        self.release = asyncio.Event()
        """Answers begin when it is set."""
        self.release.set()

    def kill(self, key: WorkerKey) -> None:
        """A worker dies. Like Dynamo, the fake goes on listing it: its lease has not run out."""
        self.workers[key].is_alive = False

    def remove(self, key: WorkerKey) -> None:
        """A worker's lease has run out."""
        del self.workers[key]

    async def list_states(self, prompt: RoutedPrompt) -> Sequence[WorkerState]:
        if self.fault is not None:
            raise self.fault
        return [
            WorkerState(one.key, one.busy, one.waiting_tokens, one.count_cached(prompt.token_ids))
            for one in self.workers.values()
        ]

    async def send(self, request: Mapping[str, Any]) -> AsyncIterator[Any]:
        self.requests.append(request)
        routing = request.get("routing") or {}
        if "backend_instance_id" not in routing:
            worker = self._choose(request["token_ids"])
        elif self.refusal is not None:
            raise self.refusal
        else:
            key = WorkerKey(routing["backend_instance_id"], routing["dp_rank"])
            if key not in self.workers:
                raise Exception(  # Dynamo's own errors have no other type
                    f"InvalidRequest: nvext.backend_instance_id={key.worker_id} does not identify a known worker"
                )
            worker = self.workers[key]
        if not worker.is_alive:
            raise Exception(f"Unavailable: TCP connection to worker {worker.key.worker_id} failed")
        return self._answer(worker, request["token_ids"])

    def _choose(self, tokens: Sequence[int]) -> FakeWorker:
        """Dynamo's choice. It avoids a worker whose connection was refused once."""
        alive = [one for one in self.workers.values() if one.is_alive] or list(self.workers.values())
        return max(alive, key=lambda one: (one.count_cached(tokens), -one.busy, -one.served, -one.key.worker_id))

    async def _answer(self, worker: FakeWorker, tokens: Sequence[int]) -> AsyncIterator[Any]:
        await self.release.wait()
        cached = worker.count_cached(tokens)
        worker.compute(tokens)
        worker.served += 1
        ids = {"prefill_worker_id": worker.key.worker_id, "prefill_dp_rank": worker.key.dp_rank}
        usage = {"prompt_tokens": len(tokens), "prompt_tokens_details": {"cached_tokens": cached}}
        for number in range(3):
            if worker.dies_after == number:
                raise Exception("Unavailable: the stream ended before its end")
            first = {"routing_data": {"worker_id": ids}, "completion_usage": usage} if number == 0 else {}
            yield {"token_ids": [number], "finish_reason": "length" if number == 2 else None, **first}
