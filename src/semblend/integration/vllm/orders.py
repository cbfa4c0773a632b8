"""What the scheduler's side tells the worker's side each step, and what comes back, as plain values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from semblend.materialize.donors.directory import Publication
from semblend.plan.times import Timed
from semblend.session.session import LoadResult
from semblend.span import Span


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Fill positions ``exact_tokens`` … ``claim_end`` of a prompt that lies in ``block_ids``.

    ``tokens`` and ``spans`` reach to ``plan_tokens``: in mode balanced that is one further than the claim, because the
    gate wants the next-token distribution. Generations in ``spans`` are the worker's. Without spans it is a load that
    went wrong before it was ordered: the worker refuses it, and vLLM computes the prompt. ``tenant``: whose turn it is.
    ``repair``, ``moved_back``: as in a `ReusePlan`.
    """

    request_id: str
    tokens: npt.NDArray[np.integer[Any]]
    block_ids: tuple[int, ...]
    exact_tokens: int
    claim_end: int
    spans: tuple[Span, ...]
    mode: str
    tenant: str = ""
    repair: int = 0
    moved_back: int = 0

    @property
    def plan_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Capture:
    """Copy the KV of a prompt that was computed exactly, between this step's forward pass and the next step.

    ``publication``: where it goes in the donor directory. ``tenant``: whose share of the donor memory it takes.
    """

    donor_id: str
    generation: int
    tokens: int
    block_ids: tuple[int, ...]
    publication: Publication | None = None
    tenant: str = ""


@dataclass(slots=True)
class Orders:
    """One step.

    ``work_ms``: how long loads may take in this step, of those that were ordered before too; None where nothing else
    runs. ``cancels``: requests that ended while their load is under way. ``served``: requests whose prompt is complete
    with this step; they come back in the report. ``freed``: requests whose KV was to be copied and whose blocks belong
    to others from this step on. ``pins``: donors whose KV is to be held, or no longer, whatever else wants the room.
    ``publications``: donors captured before that go to the donor directory. ``heirs``: dropped donors, each with the
    one that holds all of its tokens. ``kept_first``: donors from which a conversation goes on, and for how many seconds
    they leave after others. ``ended``: as ``captures``, of requests whose blocks belong to others from this step on.
    """

    loads: list[Load] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    work_ms: float | None = None
    captures: list[Capture] = field(default_factory=list)
    drops: list[tuple[str, int]] = field(default_factory=list)
    served: list[str] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)
    pins: list[tuple[str, int, bool]] = field(default_factory=list)
    publications: list[Publication] = field(default_factory=list)
    heirs: list[tuple[tuple[str, int], tuple[str, int]]] = field(default_factory=list)
    kept_first: list[tuple[str, int, float]] = field(default_factory=list)
    ended: list[Capture] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """One step of one rank, or of several when merged: a donor counts as captured when every rank has it.

    ``weights``: the digest of the model's weights, where they are others than before; of all ranks when merged.
    ``times``: how long a pass over few rows, one over many, and a load took when the engine started.
    """

    loaded: dict[str, LoadResult] = field(default_factory=dict)
    captured: set[tuple[str, int]] = field(default_factory=set)
    not_captured: set[tuple[str, int]] = field(default_factory=set)
    evicted: set[tuple[str, int]] = field(default_factory=set)
    served: list[str] = field(default_factory=list)
    errors: list[tuple[str, str, str]] = field(default_factory=list)
    donor_bytes: dict[str, int] = field(default_factory=dict)
    weights: str = ""
    times: tuple[Timed, ...] = ()

    def __bool__(self) -> bool:
        told = self.loaded or self.captured or self.not_captured or self.evicted or self.served or self.errors
        return bool(told or self.weights or self.times)

    def merge(self, other: Report) -> Report:
        """Both ranks' word: the worse load, the donors that both hold."""
        loaded = dict(self.loaded)
        for request_id, theirs in other.loaded.items():
            ours = loaded.get(request_id, theirs)
            worse = theirs if theirs.reused_tokens < ours.reused_tokens else ours
            faulty = tuple(sorted({*ours.faulty_donors, *theirs.faulty_donors}))  # a rank sees its own heads only
            loaded[request_id] = replace(worse, faulty_donors=faulty)
        missing = self.not_captured | other.not_captured | (self.captured ^ other.captured)
        used = {tier: self.donor_bytes.get(tier, 0) + size for tier, size in other.donor_bytes.items()}
        return Report(
            loaded,
            (self.captured & other.captured) - missing,
            missing,
            self.evicted | other.evicted,
            list(dict.fromkeys((*self.served, *other.served))),
            self.errors + other.errors,
            {**self.donor_bytes, **used},
            join_digests([self.weights, other.weights]),
            self.times or other.times,
        )


def join_digests(digests: Iterable[str]) -> str:
    """One name for the weights of all ranks, whatever the order in which they speak.

    >>> join_digests(["b", "", "a"])
    'a.b'
    """
    return ".".join(sorted(part for digest in digests for part in digest.split(".") if part))
