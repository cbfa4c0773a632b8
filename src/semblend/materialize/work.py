"""One request while it is prepared: what is known, what was computed, what passes showed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from semblend.materialize.quality import OnPass, Pass
from semblend.materialize.risk import Signs
from semblend.plan.reuse_plan import Decline, DeclineReason
from semblend.plan.selection import Positions
from semblend.span import Span

Mask = npt.NDArray[np.bool_]


class Refused(Exception):  # noqa: N818  (control flow of the blender)
    """Ends the work on a request with a decline."""

    def __init__(self, reason: DeclineReason, detail: str) -> None:
        super().__init__(detail)
        self.decline = Decline(reason, detail)


@dataclass(slots=True, eq=False)
class Work:
    """One request while it is prepared. ``computed`` marks what passes of ours have computed so far."""

    tokens: Tensor
    context: Tensor
    spans: tuple[Span, ...]
    exact: int
    on_pass: OnPass | None
    reused: Positions
    computed: Mask
    started: float = field(default_factory=time.perf_counter)
    passes: list[Pass] = field(default_factory=list)
    first_tail: Tensor | None = None
    tail: Tensor | None = None  # logits of the prompt's last tokens after the last pass, [rows, vocabulary]
    mass: npt.NDArray[np.floating[Any]] | None = None
    deviation: npt.NDArray[np.floating[Any]] | None = None
    canary: float | None = None
    risk: float | None = None
    signs: Signs | None = None
    glance: float | None = None
    escalations: int = 0
    repaired: int = 0  # chosen by steps of the gate; heads of spans and the prompt's end come on top
    load_ms: float = 0.0

    @property
    def stale(self) -> Positions:
        """Positions that still hold donor KV."""
        found: Positions = self.reused[~self.computed[self.reused]]
        return found

    def spent_rows(self, layers: int) -> float:
        """Rows that went through all ``layers`` so far; parts of a pass count as such."""
        return sum(one.rows * one.layers for one in self.passes) / layers

    @property
    def elapsed_ms(self) -> float:
        return (time.perf_counter() - self.started) * 1e3


def array_of(values: Tensor | None) -> npt.NDArray[np.floating[Any]]:
    """What an observer has seen, on the host."""
    if values is None:
        raise Refused(DeclineReason.ERROR, "the observer saw nothing")
    found: npt.NDArray[np.floating[Any]] = values.float().cpu().numpy()
    return found


def runs_of(positions: Positions) -> tuple[tuple[int, int], ...]:
    """Ascending positions as half-open runs.

    >>> runs_of(np.array([2, 3, 7]))
    ((2, 4), (7, 8))
    """
    if not len(positions):
        return ()
    cuts = np.flatnonzero(np.diff(positions) != 1) + 1
    starts, ends = np.append(0, cuts), np.append(cuts, len(positions))
    return tuple(zip(positions[starts].tolist(), (positions[ends - 1] + 1).tolist(), strict=True))
