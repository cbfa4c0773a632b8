"""One request among Dynamo's workers: ask the evidence, pin it or let Dynamo choose, go around a worker that is gone.

::

    frontend ─tokens─▶ SemanticRouter ─pin or none─▶ Dynamo's KvRouter ─▶ worker
                          │    ▲ loads, exact prefixes      │
                          ▼    └────────────────────────────┘
                     EvidenceProvider

A fault of ours costs the evidence and never the request: it goes where Dynamo would send it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol

from semblend.integration.dynamo.placement import (
    EvidenceProvider,
    Placement,
    PlacementReason,
    PromptT,
    WorkerKey,
    WorkerState,
)
from semblend.integration.dynamo.requests import (
    RoutedPrompt,
    add_evidence,
    read_cached_tokens,
    read_request,
    read_worker,
    write_pin,
)

MAX_ATTEMPTS = 3
"""One pinned and two of Dynamo's choice: its first may still name the worker that has just died."""
_GONE = ("Unavailable", "no endpoints", "does not identify a known worker")
"""How Dynamo's errors begin or end where a worker cannot be reached. They have no types of their own."""
log = logging.getLogger("semblend")


class DynamoWorkers(Protocol):
    """The workers behind Dynamo's router."""

    async def list_states(self, prompt: RoutedPrompt) -> Sequence[WorkerState]:
        """Every worker that Dynamo lists, with its load and what it holds of the prompt's beginning."""

    async def send(self, request: Mapping[str, Any]) -> AsyncIterator[Any]:
        """Send a request, pinned or free; its chunks come back as they are computed."""


class SemanticRouter(Generic[PromptT]):
    """Serves preprocessed requests. ``counts`` holds how many were placed for which reason, and the faults."""

    def __init__(self, workers: DynamoWorkers, evidence: EvidenceProvider[PromptT]) -> None:
        self._workers = workers
        self._evidence = evidence
        self.counts: Counter[str] = Counter()

    async def generate(self, request: Mapping[str, Any], context: Any = None) -> AsyncIterator[Any]:
        """Serve one request: Dynamo calls this and passes the chunks on."""
        del context  # a client that leaves ends this generator, and with it the worker's stream
        routed, prompt, placement = await self._place(request)
        self.counts[placement.reason.value] += 1
        wants_evidence = routed is not None and routed.wants_evidence
        for attempt in range(1, MAX_ATTEMPTS + 1):
            worker = placement.worker
            has_begun = False
            if worker is not None:
                self._note_placed(prompt, worker)  # at once: the next request for this document may come before a token
            try:
                async for chunk in await self._workers.send(write_pin(request, worker)):
                    if not has_begun:
                        worker = read_worker(chunk) or worker
                        self._note_begun(prompt, placement, worker, chunk)
                        has_begun = True
                    yield add_evidence(chunk, placement, worker) if wants_evidence else chunk
                return
            except Exception as error:
                is_gone = _is_gone(error)
                if worker is not None and is_gone:
                    self._note_fault(worker)
                if has_begun or attempt == MAX_ATTEMPTS or not (placement.is_pinned or is_gone):
                    raise
                self.counts["retried"] += 1
                log.warning("a request is sent again, to a worker that Dynamo chooses: %s", error)
                placement = Placement(None, PlacementReason.FAULT, prompt_tokens=placement.prompt_tokens)

    def describe(self) -> dict[str, int]:
        """Counts for the operator."""
        return dict(self.counts)

    async def _place(self, request: Mapping[str, Any]) -> tuple[RoutedPrompt | None, PromptT | None, Placement]:
        """Decide about a request; whatever fails here leaves it to Dynamo."""
        routed = None
        try:
            routed = read_request(request)
            if routed.is_constrained:
                return routed, None, Placement(None, PlacementReason.CONSTRAINED)
            prompt = self._evidence.read(routed.token_ids, routed.namespace)
            states = await self._workers.list_states(routed)
            self._evidence.note_workers([state.key for state in states])
            return routed, prompt, self._evidence.choose(prompt, states)
        except Exception as error:
            self._report(error)
            return routed, None, Placement(None, PlacementReason.FAULT)

    def _note_placed(self, prompt: PromptT | None, worker: WorkerKey) -> None:
        if prompt is not None:
            with self._reporting():
                self._evidence.note_placed(prompt, worker)

    def _note_begun(self, prompt: PromptT | None, placement: Placement, worker: WorkerKey | None, chunk: Any) -> None:
        """Take what the first chunk says: who serves, and what its cache had."""
        if worker is None or prompt is None:
            return
        if worker != placement.worker:
            self._note_placed(prompt, worker)
        elif (cached := read_cached_tokens(chunk)) is not None:
            with self._reporting():
                self._evidence.note_answer(placement, cached)

    def _note_fault(self, worker: WorkerKey) -> None:
        self.counts["worker_faults"] += 1
        with self._reporting():
            self._evidence.note_fault(worker)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """A fault in here is reported and goes no further."""
        try:
            yield
        except Exception as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        """Count a fault of ours; log the first, the second, the fourth …: a lasting one must not fill a disk."""
        self.counts["evidence_faults"] += 1
        count = self.counts["evidence_faults"]
        if count.bit_count() == 1:
            log.warning("the evidence failed (%d times), Dynamo chooses: %s: %s", count, type(error).__name__, error)


def _is_gone(error: Exception) -> bool:
    """Whether an error says that a worker cannot be reached."""
    text = str(error)
    return any(words in text for words in _GONE)
