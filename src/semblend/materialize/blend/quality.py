"""Settings and results of blending, as plain values: what may be asked for, and what is said about a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from semblend.errors import InputError
from semblend.materialize.blend.pieces import LEAST_PIECE_ROWS
from semblend.materialize.gate.canary import DEEP_TOLERANCE
from semblend.materialize.gate.risk import RiskFeatures
from semblend.materialize.gate.thresholds import DEFAULT, Thresholds
from semblend.plan.selection import SELECTIONS, Positions
from semblend.quality import parse_quality


class Target(Protocol):
    """A prompt in the engine: its tokens, and the slot of every position."""

    @property
    def tokens(self) -> Sequence[int] | Tensor: ...

    @property
    def slots(self) -> Tensor | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """The smallest `Target`."""

    tokens: Sequence[int] | Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """One look of the gate: compute ``percent`` of the reused tokens again, chosen by ``rule``."""

    percent: int
    rule: str


@dataclass(frozen=True, slots=True)
class QualitySettings:
    """How much may be reused unchecked, and how long checking may take.

    ``mode``: a quality mode or a number of nats (`semblend.quality`).
    ``latency_budget_ms`` (0: none) caps the whole preparation: a further repair that would not fit is not begun, and
    ``over_budget`` says what happens instead: "prefill" in full at once, or "accept" what is there and report its risk.
    ``most_work``: no repair is begun that would bring all passes above this share of a prefill; the prefill is.
    ``moved_ahead_share``: passages that stand before what precedes them in their donor are computed, where they are at
    most this share of the reused tokens (`semblend.plan.selection.keep_in_order`); 0: they are reused as well.
    ``layer_share``: where deviation is measured, all reused tokens are computed through the leading layers of a bathtub
    schedule with this share of the layers (`semblend.plan.layers`), and these layers are exact then; 0 only looks.
    ``pass_rows``: what a pass costs beside its rows, in rows (`semblend.materialize.blend.pass_cost`); 0: not measured.
    ``piece_ms``: work stops after about so many milliseconds, so that an engine can do something else; 0: it does not.
    ``piece_rows``: pieces are multiples of so many rows.
    ``prefills`` off: a prompt that is to be prefilled in full is `Rejected`, because the engine does that better.
    ``canary_tolerance``: how far donor KV may be off in layer 0 (None: as its type rounds); ``deep_tolerance``: above
    (0: not looked at).
    ``refresh`` off leaves repaired tokens and gaps of earlier passes as they are: cheaper, and less exact.
    """

    mode: str = "balanced"
    thresholds: Thresholds = DEFAULT
    latency_budget_ms: float = 0.0
    over_budget: str = "prefill"
    first_seam_tokens: int = 32
    seam_tokens: int = 16
    question_tokens: int = 16
    moved_ahead_share: float = 0.2
    steps: tuple[Step, ...] = (
        Step(10, "attended"),
        Step(20, "attended_and_deviating"),
        Step(40, "attended_and_deviating"),
    )
    refresh: bool = True
    most_work: float = 0.7
    layer_share: float = 0.0
    chunk_tokens: int = 8192
    pass_rows: int = 0
    piece_ms: float = 0.0
    piece_rows: int = LEAST_PIECE_ROWS
    prefills: bool = True
    canary_tolerance: float | None = None
    deep_tolerance: float = DEEP_TOLERANCE

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", parse_quality(self.mode))
        if self.over_budget not in ("prefill", "accept"):
            raise InputError(f"over_budget={self.over_budget!r} is unknown", hint="prefill or accept")
        if not 0 <= self.moved_ahead_share < 1:
            raise InputError(f"moved_ahead_share={self.moved_ahead_share} is no share", hint="0 reuses all spans")
        if not 0 <= self.layer_share <= 1:
            raise InputError(f"layer_share={self.layer_share} is no share", hint="0 recomputes no layer as a whole")
        for step in self.steps:
            if step.rule not in SELECTIONS or not 0 < step.percent <= 100:
                raise InputError(f"{step} cannot be followed", hint="rules: " + ", ".join(SELECTIONS))


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass: ``rows`` tokens through ``layers`` layers, attending to ``keys`` positions in sum.

    ``kl`` is how far it moved the next-token distribution from the pass before; None for the first.
    """

    name: str
    rows: int
    keys: int
    layers: int
    ms: float
    kl: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Blended:
    """A prompt that is ready to be answered; the four kinds of tokens sum to the prompt.

    ``exact_until``: KV of positions before it is what a cold prefill computes; from it on it is an approximation and
    must enter no exact cache. ``decision``: exact, fast, accepted, over_budget, prefill. ``risk`` is the divergence
    from cold, in nats, that ``features`` let expect; ``glance`` is the layer-1 deviation seen before the first repair,
    ``deep`` that of the canary's sample above layer 0, in what a layer's rows differ by.
    ``compute_ms`` is the time of passes, with their canary and logits; what is worked out between them is not in it.
    ``work`` is what all passes computed, as a share of a cold prefill; more than 1 where the gate refused.
    """

    logits_last: Tensor
    exact_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    prefill_tokens: int
    exact_until: int
    decision: str
    risk: float | None
    escalations: int
    canary: float | None
    load_ms: float
    compute_ms: float
    passes: tuple[Pass, ...]
    recomputed_runs: tuple[tuple[int, int], ...] = ()
    """Runs ``[start, end)`` of the prompt that a donor held and that were computed again."""
    features: RiskFeatures | None = None
    glance: float | None = None
    deep: float | None = None
    work: float = 0.0

    @property
    def approximate(self) -> bool:
        """Whether any KV of the prompt may differ from a cold prefill's."""
        return self.exact_until < self.exact_tokens + self.reused_tokens + self.recomputed_tokens + self.prefill_tokens


@dataclass(frozen=True, slots=True)
class Rejected:
    """A prompt that the gate wants prefilled in full, and that the engine prefills itself.

    KV before ``exact_until`` is what a cold prefill computes. ``work`` is what the passes so far have cost, as a share
    of a cold prefill; the prefill comes on top.
    """

    exact_until: int
    risk: float | None
    escalations: int
    canary: float | None
    load_ms: float
    compute_ms: float
    work: float


@dataclass(frozen=True, slots=True, eq=False)
class Spliced:
    """A prompt with donor KV in place and nothing computed yet: the engine computes all but the positions ``held``.

    ``held`` ascends. ``recomputed_tokens`` of the spans are left to the engine too: heads of spans, the prompt's end.
    """

    held: Positions
    exact_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    prefill_tokens: int
    recomputed_runs: tuple[tuple[int, int], ...]
    canary: float | None
    load_ms: float
    compute_ms: float | None = None
    risk: float | None = None
    escalations: int = 0


OnPass = Callable[[Pass, Tensor], None]
"""Told after every pass with the logits of the prompt's last tokens; for calibration and benchmarks."""
