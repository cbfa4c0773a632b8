"""Several routers in one Dynamo deployment: what each places, the others know. Loads are Dynamo's to tell."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from semantickv.routing.fingerprint import PromptPieces
from semantickv.routing.worker_evidence import WorkerEvidence
from semantickv.shared_state.messages import MOST_KEYS, Hello, Known, Message, Placed
from semantickv.shared_state.outbox import MOST_SNAPSHOT_KEYS, Outbox, split_entries
from semblend.integration.dynamo.placement import Placement, WorkerKey, WorkerState
from semblend.prompt import Namespace


class SharedEvidence:
    """An `EvidenceProvider` that tells other routers what it learns, and takes what they tell.

    It decides by its own memory alone, so a Redis that is gone costs news and nothing else. A worker that cannot be
    reached is not told: others see that with their own next request, and a wrong word could take a good worker away.

    >>> here, there = (SharedEvidence(WorkerEvidence(100_000, secret="s")) for _ in range(2))
    >>> prompt = here.read(range(1000), Namespace())
    >>> here.note_placed(prompt, WorkerKey(7))
    >>> there.take("here", here.list_outgoing(9))
    >>> there.choose(prompt, [WorkerState(WorkerKey(1)), WorkerState(WorkerKey(7))]).worker
    WorkerKey(worker_id=7, dp_rank=0)
    """

    def __init__(self, evidence: WorkerEvidence, clock: Callable[[], float] = time.monotonic) -> None:
        self.evidence = evidence
        self.taken = self.unknown = 0
        self._outbox = Outbox(clock)

    # -- as an EvidenceProvider ----------------------------------------------------------------------------------------

    def read(self, token_ids: Sequence[int], namespace: Namespace) -> PromptPieces:
        return self.evidence.read(token_ids, namespace)

    def choose(self, prompt: PromptPieces, workers: Sequence[WorkerState]) -> Placement:
        return self.evidence.choose(prompt, workers)

    def note_workers(self, workers: Sequence[WorkerKey]) -> None:
        self.evidence.note_workers(workers)

    def note_placed(self, prompt: PromptPieces, worker: WorkerKey) -> None:
        self.evidence.note_placed(prompt, worker)
        most = MOST_KEYS
        self._outbox.put(
            Placed(
                write_worker(worker), list(prompt.hashes[:most]), list(prompt.chains[:most]), list(prompt.tokens[:most])
            )
        )

    def note_answer(self, placement: Placement, cached_tokens: int) -> None:
        self.evidence.note_answer(placement, cached_tokens)

    def note_fault(self, worker: WorkerKey) -> None:
        self.evidence.note_fault(worker)

    # -- as a Sync ----------------------------------------------------------------------------------------------------

    def note_joined(self) -> None:
        """Redis is there, for the first time or again: ask the others, and tell them."""
        self._outbox.forget_pause()
        self._outbox.put(Hello())
        self._put_snapshot()

    def list_outgoing(self, most: int) -> list[Message]:
        """Take the next messages that wait."""
        return self._outbox.take(most)

    def list_loads(self) -> list[Message]:
        """Nothing: Dynamo knows the loads. A snapshot that is owed is put among what waits."""
        if self._outbox.owes_snapshot:
            self._put_snapshot()
        return []

    def update_loads(self) -> None:
        """Nothing to let go."""

    def take(self, sender: str, messages: list[Message]) -> None:
        """Take what another router says about workers; whatever else is in the stream is counted and left out."""
        del sender
        for message in messages:
            self.taken += 1
            if isinstance(message, Hello):
                self._put_snapshot()
                continue
            worker = read_worker(message.replica)
            if worker is None or not isinstance(message, (Placed, Known)):
                self.unknown += 1
            elif isinstance(message, Known):
                self.evidence.note_known(worker, zip(message.keys, message.tokens, strict=True))
            else:
                weights = (1.0,) * len(message.hashes)
                pieces = PromptPieces(tuple(message.hashes), tuple(message.chains), tuple(message.tokens), weights)
                self.evidence.note_placed(pieces, worker)

    def describe(self) -> dict[str, Any]:
        """Counts for the operator."""
        return {
            "taken": self.taken,
            "unknown_workers": self.unknown,
            "waiting": len(self._outbox),
            "dropped": self._outbox.dropped,
        }

    def _put_snapshot(self) -> None:
        if not self._outbox.is_snapshot_due():
            return
        for worker, entries in self.evidence.list_known(MOST_SNAPSHOT_KEYS).items():
            for keys, tokens in split_entries(entries):
                self._outbox.put(Known(write_worker(worker), keys, tokens))


def write_worker(worker: WorkerKey) -> str:
    """The name of a worker between routers: its ids in Dynamo.

    >>> read_worker(write_worker(WorkerKey(7587890, 1))), read_worker("0c1f"), read_worker("1.2.3")
    (WorkerKey(worker_id=7587890, dp_rank=1), None, None)
    """
    return f"{worker.worker_id}.{worker.dp_rank}"


def read_worker(name: str) -> WorkerKey | None:
    """The worker of a name; None for any other."""
    words = name.split(".")
    if len(words) != 2 or not all(word.isascii() and word.isdigit() for word in words):
        return None
    return WorkerKey(int(words[0]), int(words[1]))
