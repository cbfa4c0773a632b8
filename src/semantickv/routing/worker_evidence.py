"""Which worker of a Dynamo deployment has computed which passages: the evidence behind `semblend.integration.dynamo`.

The memory, the policy and the load guard are those of `semantickv router`. Two things differ. A worker's load, and what
it holds of a prompt's beginning, come from Dynamo, which follows the workers' KV events. And a prompt that nobody has
seen is not placed here: Dynamo chooses, and this memory learns where it went. A prompt of which little is known, such
as a common instruction, is placed here, by what the workers got of late: Dynamo would send all of them to the worker
that has the instruction in its cache, and we would keep them there.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from semantickv.routing.fingerprint import PromptPieces, cut_prompt
from semantickv.routing.locality import Column, HolderIndex, Overlap, ReplicaMemory
from semantickv.routing.policies import (
    ANSWER_TOKENS,
    RECENT_TOKENS,
    Standing,
    find_best,
    is_new,
    semantic_locality,
)
from semantickv.routing.prompt_view import PromptPart
from semantickv.routing.router import LEAST_OVERLAP_TOKENS, RECENT_PLACED, EngineReuse, LoadGuard, name_outcome
from semblend.integration.dynamo.placement import Placement, PlacementReason, WorkerKey, WorkerState
from semblend.prompt import Namespace

AVOID_S = 10.0
"""So long Dynamo goes on listing a worker that died: its lease."""
MOST_WORKERS = 4096
"""Workers, or ranks of them, that are remembered at a time; Dynamo chooses for prompts of any others."""


class WorkerEvidence:
    """An `EvidenceProvider` for one event loop; ``most_tokens`` are remembered of each worker.

    ``secret`` keys the hashes: routers that share what they know need one, or whoever reads it could guess prompts.

    >>> evidence = WorkerEvidence(most_tokens=100_000)
    >>> prompt = evidence.read(range(1000), Namespace())
    >>> here, there = WorkerKey(1), WorkerKey(2)
    >>> evidence.note_placed(prompt, there)
    >>> evidence.choose(prompt, [WorkerState(here), WorkerState(there)]).worker
    WorkerKey(worker_id=2, dp_rank=0)
    """

    def __init__(
        self,
        most_tokens: int,
        *,
        reuse: EngineReuse = EngineReuse.SPANS,
        guard: LoadGuard | None = None,
        secret: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most_tokens = most_tokens
        self.reuse = reuse
        self._guard = guard or LoadGuard()
        self._secret = secret.encode()[:64]
        self._clock = clock
        self._index = HolderIndex(MOST_WORKERS)
        self._rows = list(range(MOST_WORKERS))
        """Rows of the index that no worker has."""
        self._row_of: dict[WorkerKey, int] = {}
        self._memories: dict[WorkerKey, ReplicaMemory] = {}
        self._avoided: dict[WorkerKey, float] = {}
        self._last_turns: dict[WorkerKey, int] = {}
        self._recent: dict[WorkerKey, float] = {}
        """Requests that a worker got of late, as of its last turn; `_count_recent` lets them fade."""
        self._turn = 0

    def read(self, token_ids: Sequence[int], namespace: Namespace) -> PromptPieces:
        """Cut a prompt's tokens into pieces; ``namespace`` keys their hashes, so that tenants share none."""
        key = hashlib.blake2b(namespace.digest.encode(), key=self._secret, digest_size=16).digest()
        return cut_prompt([PromptPart("other", array("I", token_ids).tobytes())], key)

    def choose(self, prompt: PromptPieces, workers: Sequence[WorkerState]) -> Placement:
        """Pin the prompt to the worker that costs least; leave it to Dynamo if nobody, or nobody free, has seen it."""
        now = self._clock()
        able = [one for one in workers if self._avoided.get(one.key, 0.0) <= now]
        total = prompt.total_tokens
        unknown = Placement(None, PlacementReason.UNKNOWN, prompt_tokens=total)
        if not able:
            return unknown
        sent, prefix, anywhere = self._match(able, prompt)
        if anywhere.max() < LEAST_OVERLAP_TOKENS:
            return unknown
        running = [one.running for one in able]
        limit = self._guard.compute_limit(running)
        free = np.array([at for at, has in enumerate(running) if has < limit], np.int64)
        spreads = is_new(int(anywhere.max()), prompt)
        at = self._find_best(able, free, prefix, anywhere, total, spreads) if len(free) else None
        has_seen = at is not None and anywhere[at] >= LEAST_OVERLAP_TOKENS
        if at is None or not (has_seen or spreads):  # whoever has seen it has too much to do
            return Placement(None, PlacementReason.LOAD, prompt_tokens=total)
        return Placement(
            able[at].key,
            PlacementReason.DONORS if has_seen else PlacementReason.SPREAD,
            name_outcome(Overlap(int(prefix[at]), int(anywhere[at]))),
            known_tokens=int(anywhere[at]),
            expected_prefix_tokens=int(sent[at]),
            prompt_tokens=total,
        )

    def note_workers(self, workers: Sequence[WorkerKey]) -> None:
        """Forget workers that are gone. An empty list says nothing: Dynamo may just have started."""
        if not workers:
            return
        listed = set(workers)
        for key in self._memories.keys() - listed:
            self._forget(key)
        for known in (self._avoided, self._last_turns, self._recent):
            for key in known.keys() - listed:
                del known[key]

    def note_placed(self, prompt: PromptPieces, worker: WorkerKey) -> None:
        """Remember that a worker computes this prompt."""
        self._turn += 1
        self._recent[worker] = 1 + self._count_recent(worker)
        self._last_turns[worker] = self._turn
        if (memory := self._find_memory(worker)) is not None:
            memory.note(prompt)

    def note_known(self, worker: WorkerKey, entries: Iterable[tuple[int, int]]) -> None:
        """Remember pieces that another router knows of a worker: hashes with their tokens, oldest first."""
        if (memory := self._find_memory(worker)) is not None:
            for key, tokens in entries:
                memory.add(key, tokens)

    def list_known(self, most: int) -> dict[WorkerKey, list[tuple[int, int]]]:
        """Of each worker the most recent so many pieces, oldest first: what another router may `note_known`."""
        return {worker: memory.list_recent(most) for worker, memory in self._memories.items()}

    def note_answer(self, placement: Placement, cached_tokens: int) -> None:
        """Compare what was expected of a worker's cache with what its answer reports: a small cache forgets sooner."""
        if placement.worker is not None and (memory := self._memories.get(placement.worker)) is not None:
            memory.learn(placement.expected_prefix_tokens, cached_tokens)

    def note_fault(self, worker: WorkerKey) -> None:
        """A worker cannot be reached: leave it alone as long as Dynamo may list it, and take its cache for empty."""
        self._avoided[worker] = self._clock() + AVOID_S
        if worker in self._memories:
            self._forget(worker)

    @property
    def tracked_tokens(self) -> dict[WorkerKey, int]:
        """Tokens that are remembered of each worker."""
        return {key: memory.tokens for key, memory in self._memories.items()}

    def _find_memory(self, worker: WorkerKey) -> ReplicaMemory | None:
        """The memory of a worker, a new one where it has none; None where there is no row for it."""
        memory = self._memories.get(worker)
        if memory is None and self._rows:
            self._row_of[worker] = row = self._rows.pop()
            memory = self._memories[worker] = ReplicaMemory(self.most_tokens)
            memory.join(self._index, row)
        return memory

    def _forget(self, worker: WorkerKey) -> None:
        self._memories.pop(worker).clear()
        self._rows.append(self._row_of.pop(worker))

    def _match(self, workers: Sequence[WorkerState], prompt: PromptPieces) -> tuple[Column, Column, Column]:
        """What each worker has of a prompt: of its beginning what was sent there, the same with what Dynamo's index
        says, and anywhere.

        The larger one of both counts. Events come after the first token, and a burst of requests for one document
        comes before.
        """
        rows = np.array([self._row_of.get(one.key, -1) for one in workers])
        sent, anywhere = (np.where(rows < 0, 0, column[rows]) for column in self._index.match(prompt))
        prefix = np.maximum(sent, [one.prefix_tokens or 0 for one in workers])
        return sent, prefix, prefix if self.reuse is EngineReuse.PREFIX else np.maximum(prefix, anywhere)

    def _count_recent(self, worker: WorkerKey) -> float:
        """Requests that a worker got of late; they fade with every request that any worker gets."""
        if worker not in self._recent:
            return 0.0
        age = self._turn - self._last_turns[worker]
        return self._recent[worker] * (1 - 1 / (RECENT_PLACED * len(self._recent))) ** age

    def _find_best(
        self,
        workers: Sequence[WorkerState],
        free: Column,
        prefix: Column,
        anywhere: Column,
        total: int,
        spreads: bool,
    ) -> int:
        """The row of the free worker that costs least. What a worker got of late weighs against it for a new prompt."""
        running = np.array([one.running for one in workers])
        waiting = np.array([one.waiting_tokens for one in workers]) + ANSWER_TOKENS * running
        if spreads:
            recent = np.array([self._count_recent(one.key) for one in workers])
            waiting += np.rint(RECENT_TOKENS * (recent - recent.min())).astype(np.int64)
        standing = Standing(
            running=running[free],
            last_turn=np.array([self._last_turns.get(one.key, 0) for one in workers])[free],
            waiting_tokens=waiting[free],
            prompt_tokens=total,
            prefix_tokens=prefix[free],
            any_tokens=anywhere[free],
            hash_rank=0,
        )
        return int(free[find_best(semantic_locality(standing))])
