"""Which worker of a Dynamo deployment has computed which passages: the evidence behind `semblend.integration.dynamo`.

The memory, the policy and the load guard are those of `semantickv router`. Two things differ. A worker's load, and what
it holds of a prompt's beginning, come from Dynamo, which follows the workers' KV events. And a prompt that nobody has
seen is not placed here: Dynamo chooses, and this memory learns where it went.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence

from semantickv.routing.fingerprint import PromptPieces, cut_prompt
from semantickv.routing.locality import Overlap, ReplicaMemory
from semantickv.routing.policies import Standing, semantic_locality
from semantickv.routing.prompt_view import PromptPart
from semantickv.routing.router import LEAST_OVERLAP_TOKENS, EngineReuse, LoadGuard, name_outcome
from semantickv.routing.standings import ANSWER_TOKENS
from semblend.integration.dynamo.placement import Placement, PlacementReason, WorkerKey, WorkerState
from semblend.prompt import Namespace

AVOID_S = 10.0
"""So long Dynamo goes on listing a worker that died: its lease."""


class WorkerEvidence:
    """An `EvidenceProvider` for one event loop; ``most_tokens`` are remembered of each worker.

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most_tokens = most_tokens
        self.reuse = reuse
        self._guard = guard or LoadGuard()
        self._clock = clock
        self._memories: dict[WorkerKey, ReplicaMemory] = {}
        self._avoided: dict[WorkerKey, float] = {}
        self._last_turns: dict[WorkerKey, int] = {}
        self._turn = 0

    def read(self, token_ids: Sequence[int], namespace: Namespace) -> PromptPieces:
        """Cut a prompt's tokens into pieces; ``namespace`` keys their hashes, so that tenants share none."""
        return cut_prompt([PromptPart("other", array("I", token_ids).tobytes())], namespace.digest.encode())

    def choose(self, prompt: PromptPieces, workers: Sequence[WorkerState]) -> Placement:
        """Pin the prompt to the worker that costs least, if that one has seen it; leave it to Dynamo otherwise."""
        able = [one for one in workers if self._avoided.get(one.key, 0.0) <= self._clock()]
        overlaps = {one.key: self._match(one, prompt) for one in able}
        total = prompt.total_tokens
        if max((one.any_tokens for one in overlaps.values()), default=0) < LEAST_OVERLAP_TOKENS:
            return Placement(None, PlacementReason.UNKNOWN, prompt_tokens=total)
        limit = self._guard.compute_limit([one.running for one in able])
        free = [one for one in able if one.running < limit]
        if not free:
            return Placement(None, PlacementReason.LOAD, prompt_tokens=total)
        best = max(free, key=lambda one: semantic_locality(self._describe(one, overlaps[one.key], total)))
        overlap = overlaps[best.key]
        if overlap.any_tokens < LEAST_OVERLAP_TOKENS:  # whoever has seen it has too much to do
            return Placement(None, PlacementReason.LOAD, prompt_tokens=total)
        return Placement(
            best.key,
            PlacementReason.DONORS,
            name_outcome(overlap),
            known_tokens=overlap.any_tokens,
            expected_prefix_tokens=self._recall(best.key, prompt).prefix_tokens,
            prompt_tokens=total,
        )

    def note_workers(self, workers: Sequence[WorkerKey]) -> None:
        """Forget workers that are gone. An empty list says nothing: Dynamo may just have started."""
        if not workers:
            return
        listed = set(workers)
        for known in (self._memories, self._avoided, self._last_turns):
            for key in known.keys() - listed:
                del known[key]

    def note_placed(self, prompt: PromptPieces, worker: WorkerKey) -> None:
        """Remember that a worker computes this prompt."""
        self._turn += 1
        self._last_turns[worker] = self._turn
        if worker not in self._memories:
            self._memories[worker] = ReplicaMemory(self.most_tokens)
        self._memories[worker].note(prompt)

    def note_answer(self, placement: Placement, cached_tokens: int) -> None:
        """Compare what was expected of a worker's cache with what its answer reports: a small cache forgets sooner."""
        if placement.worker is not None and (memory := self._memories.get(placement.worker)) is not None:
            memory.learn(placement.expected_prefix_tokens, cached_tokens)

    def note_fault(self, worker: WorkerKey) -> None:
        """A worker cannot be reached: leave it alone as long as Dynamo may list it, and take its cache for empty."""
        self._avoided[worker] = self._clock() + AVOID_S
        self._memories.pop(worker, None)

    @property
    def tracked_tokens(self) -> dict[WorkerKey, int]:
        """Tokens that are remembered of each worker."""
        return {key: memory.tokens for key, memory in self._memories.items()}

    def _recall(self, worker: WorkerKey, prompt: PromptPieces) -> Overlap:
        """What this memory alone knows."""
        memory = self._memories.get(worker)
        return Overlap() if memory is None or not prompt.hashes else memory.match(prompt)

    def _match(self, worker: WorkerState, prompt: PromptPieces) -> Overlap:
        """What a worker has of a prompt that it could reuse: by Dynamo's index, and by what was sent there.

        Both count, the larger one of each. Events come after the first token, and a burst of requests for one document
        comes before.
        """
        own = self._recall(worker.key, prompt)
        prefix = max(own.prefix_tokens, worker.prefix_tokens or 0)
        return Overlap(prefix, prefix if self.reuse is EngineReuse.PREFIX else max(prefix, own.any_tokens))

    def _describe(self, worker: WorkerState, overlap: Overlap, total: int) -> Standing:
        return Standing(
            running=worker.running,
            last_turn=self._last_turns.get(worker.key, 0),
            waiting_tokens=worker.waiting_tokens + ANSWER_TOKENS * worker.running,
            prompt_tokens=total,
            prefix_tokens=overlap.prefix_tokens,
            any_tokens=overlap.any_tokens,
            hash_rank=0,
        )
