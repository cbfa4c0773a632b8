"""Where a request should go among Dynamo's workers: a decision with its reason, and who takes it.

Evidence chooses a place and nothing else. What a worker reuses there is its engine's decision, token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, TypeVar

from semblend.confirm.outcome import Outcome
from semblend.prompt import Namespace

PromptT = TypeVar("PromptT")


class WorkerKey(NamedTuple):
    """One worker of Dynamo, or one rank of it where it runs data-parallel."""

    worker_id: int
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker at this moment, as Dynamo describes it.

    ``waiting_tokens`` are prompt tokens that it has still to compute. ``prefix_tokens`` is how much of this prompt's
    beginning stands in its cache by its KV events; None where nobody says.
    """

    key: WorkerKey
    running: int = 0
    waiting_tokens: int = 0
    prefix_tokens: int | None = None


class PlacementReason(StrEnum):
    """Why a request is pinned, or why it is not; docs/reference/dynamo.md says what each means."""

    DONORS = "donors"
    SPREAD = "spread"
    UNKNOWN = "unknown"
    LOAD = "load"
    CONSTRAINED = "constrained"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Placement:
    """A worker to pin the request to, or None for Dynamo's own choice; why; and what is known, in tokens.

    >>> Placement(None, PlacementReason.UNKNOWN).is_pinned
    False
    """

    worker: WorkerKey | None
    reason: PlacementReason
    outcome: Outcome = Outcome.COLD_FALLBACK
    known_tokens: int = 0
    """Of the prompt, the worker has computed so many before, wherever they stand."""
    expected_prefix_tokens: int = 0
    """Of its beginning, so many were sent to this worker before: what its answer should report as cached."""
    prompt_tokens: int = 0

    @property
    def is_pinned(self) -> bool:
        return self.worker is not None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, for an answer's ``engine_data``."""
        return {
            "placement": "pinned" if self.is_pinned else "dynamo",
            "reason": self.reason.value,
            "outcome": self.outcome.value,
            "known_tokens": self.known_tokens,
        }


class EvidenceProvider(Protocol[PromptT]):
    """Knows which worker has computed what. `choose` changes nothing; the ``note`` functions do."""

    def read(self, token_ids: Sequence[int], namespace: Namespace) -> PromptT:
        """What the provider looks at: computed once for a request."""

    def choose(self, prompt: PromptT, workers: Sequence[WorkerState]) -> Placement:
        """Choose a worker, or leave the choice to Dynamo."""

    def note_workers(self, workers: Sequence[WorkerKey]) -> None:
        """Dynamo lists these workers; what was known of any other is gone with it."""

    def note_placed(self, prompt: PromptT, worker: WorkerKey) -> None:
        """The worker computes this prompt from now on."""

    def note_answer(self, placement: Placement, cached_tokens: int) -> None:
        """A pinned request was answered; its worker found so many tokens of the beginning in its cache."""

    def note_fault(self, worker: WorkerKey) -> None:
        """The worker cannot be reached: its cache counts as lost."""
