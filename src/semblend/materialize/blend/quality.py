"""Settings and results of blending, as plain values, and the pace at which an engine has it done."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from semblend.config import SemBlendConfig
from semblend.errors import InputError
from semblend.materialize.gate.observers import DEEP_TOLERANCE
from semblend.materialize.gate.thresholds import DEFAULT, PassageOrder, RiskFeatures, Thresholds
from semblend.plan.selection import SELECTIONS, Positions
from semblend.quality import parse_quality

# -- Work in pieces: a generator that stops where it may be put aside, and whose result is what it returns.
#
# An engine with other work to do goes on with it in a later step, or closes it and the donors it held are released.
# Everybody else calls `finish`.


Result = TypeVar("Result")
Pieces = Generator[None, None, Result]

MIN_PIECE_ROWS = 128
"""On a GPU a piece is not smaller: the work of fewer rows would hide in what starting them costs."""

CPU_PIECE_ROWS = 16
"""On a CPU a piece is not smaller: 16 rows take it as long as 128 take a GPU, and longer."""

LONGER_BY = 0.25
"""The last rows of a pass may make its pieces so much longer than asked for."""


@dataclass(slots=True)
class Pace:
    """About how long a piece takes, in milliseconds; 0: all is done at once. An engine sets it as it has other work."""

    piece_ms: float = 0.0


class PieceRate:
    """How fast pieces are done, in rows through all layers a millisecond, by those done last.

    >>> rate = PieceRate()
    >>> rate.note(1024, ms=32.0)
    >>> rate.note(130, ms=10.0)  # what was left of a repair: few rows, and slow ones
    >>> rate.rows_per_ms, count_piece_rows(rate.rows_per_ms, ms=30.0, most=4096)
    (32.0, 896)
    """

    def __init__(self, least: int = MIN_PIECE_ROWS) -> None:
        self.rows_per_ms, self._rows, self._least = 0.0, 0.0, least

    def note(self, rows: float, ms: float) -> None:
        """So many rows are done. Few of them, done slowly, say nothing about many."""
        rate = rows / max(ms, 1e-6)
        if rows < self._least or (rate < self.rows_per_ms and rows < self._rows / 2):
            return
        self.rows_per_ms = (self.rows_per_ms + rate) / 2 if self.rows_per_ms else rate
        self._rows = rows


def count_piece_rows(
    rows_per_ms: float, ms: float, most: int, left: int | None = None, *, least: int = MIN_PIECE_ROWS
) -> int:
    """Rows of a piece that may take so long: a multiple of ``least``, and that at least.

    Where so many rows are ``left``, their pieces are equally long and may take up to a quarter longer, rather than
    leaving a few rows: a piece costs some milliseconds however small it is, and a step of the engine behind it.

    >>> count_piece_rows(0.0, ms=40.0, most=4096)
    128
    >>> count_piece_rows(29.0, ms=40.0, most=4096), count_piece_rows(29.0, ms=40.0, most=4096, left=2500)
    (1152, 1280)
    """
    fit = max(1, min(most, int(rows_per_ms * ms)) // least) * least
    if not rows_per_ms or not left:
        return fit
    pieces = max(1, int(left / fit + 1 - LONGER_BY))
    return max(least, min(most, -(-left // pieces // least) * least))


def finish(pieces: Pieces[Result]) -> Result:
    """Do all of it now.

    >>> def add(numbers):
    ...     total = 0
    ...     for number in numbers:
    ...         total += number
    ...         yield
    ...     return total
    >>> finish(add([1, 2, 3]))
    6
    """
    while True:
        try:
            next(pieces)
        except StopIteration as done:
            result: Result = done.value
            return result


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
    """Compute ``percent`` of the reused tokens again, chosen by ``rule``; by another one where passages kept their
    order. ``rule_at_once``: how the first step of an edited history chooses, which goes by layer 1 and is not preceded
    by a look at the question; empty: it is looked at like any other."""

    percent: int
    rule: str
    rule_in_order: str = ""
    rule_at_once: str = "cacheblend"

    def find_rule(self, order: PassageOrder) -> str:
        """The rule for a plan whose passages have this order."""
        return self.rule_in_order or self.rule if order is PassageOrder.IN_ORDER else self.rule


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
    schedule with this share of the layers (`count_leading_layers`), and these layers are exact then; 0 only looks.
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
        Step(20, "attended_and_deviating", "attended"),
        Step(40, "attended_and_deviating"),
    )
    refresh: bool = True
    most_work: float = 0.7
    layer_share: float = 0.0
    chunk_tokens: int = 8192
    piece_ms: float = 0.0
    piece_rows: int = MIN_PIECE_ROWS
    prefills: bool = True
    canary_tolerance: float | None = None
    deep_tolerance: float = DEEP_TOLERANCE

    @classmethod
    def of_config(cls, config: SemBlendConfig, thresholds: Thresholds, **more: Any) -> QualitySettings:
        """What the library's settings say, by a model's thresholds; ``more`` is the engine's own."""
        shared = {name: getattr(config, name) for name in ("seam_tokens", "layer_share", "deep_tolerance")}
        return cls(mode=config.quality, thresholds=thresholds, **shared, **more)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", parse_quality(self.mode))
        if self.over_budget not in ("prefill", "accept"):
            raise InputError(f"over_budget={self.over_budget!r} is unknown", hint="prefill or accept")
        if not 0 <= self.moved_ahead_share < 1:
            raise InputError(f"moved_ahead_share={self.moved_ahead_share} is no share", hint="0 reuses all spans")
        if not 0 <= self.layer_share <= 1:
            raise InputError(f"layer_share={self.layer_share} is no share", hint="0 recomputes no layer as a whole")
        for step in self.steps:
            rules = {step.rule, step.rule_in_order or step.rule, step.rule_at_once or step.rule}
            if not rules <= SELECTIONS.keys() or not 0 < step.percent <= 100:
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
    from cold, in nats, that ``features`` let expect; ``deep`` is the deviation of the canary's sample above layer 0, in
    what a layer's rows differ by.
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


OnPass = Callable[[Pass, Tensor], None]
"""Told after every pass with the logits of the prompt's last tokens; for calibration and benchmarks."""
