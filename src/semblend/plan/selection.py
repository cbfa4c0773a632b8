"""Rules that choose which reused tokens to compute again: plain arrays in, ascending target positions out.

Every rule of `SELECTIONS` has one signature, ``(Scores) -> positions``, so a benchmark or a gate can change the rule
and nothing else. The measurements are in docs/research/decisions/quality-gate.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from semblend.errors import InputError
from semblend.plan.reuse_plan import ReusePlan
from semblend.span import Span

Positions = npt.NDArray[np.int64]
Values = npt.NDArray[np.floating]

MOST_MOVED_BACK = 1 / 3
"""Where more of the reused tokens moved back, the prompt is another order: 1 % of edited histories, 14 % of those whose
reasoning was stripped."""


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What is known about the tokens that might be computed again.

    ``reused`` are target positions, ascending; ``mass`` (attention that the question pays to each) and ``deviation``
    (how far layer-1 KV is from what the model computes there) lie beside them. ``share`` of them is to be chosen.
    """

    reused: Positions
    mass: Values
    deviation: Values
    rng_seed: int = 0
    share: float = 0.1

    def __post_init__(self) -> None:
        if not len(self.reused) == len(self.mass) == len(self.deviation):
            raise InputError(
                f"{len(self.reused)} positions, {len(self.mass)} masses, {len(self.deviation)} deviations",
                hint="give one mass and one deviation for each position",
            )
        if not (math.isfinite(self.share) and 0 <= self.share <= 1):
            raise InputError(f"share {self.share} is not in [0, 1]", hint="0.1 chooses a tenth of the reused tokens")


def select_seams(spans: Sequence[Span], width: int) -> Positions:
    """Select the first ``width`` tokens of each span: their context differs most from the donor's.

    A span that continues exactly where the one before ended, in the same donor, has no seam.

    >>> select_seams([Span("d", 0, 10, 40)], width=3).tolist()
    [10, 11, 12]
    """
    heads: list[Positions] = []
    before: Span | None = None
    for span in spans:
        goes_on = (
            before is not None
            and (before.donor_id, before.generation) == (span.donor_id, span.generation)
            and before.target_end == span.target_start
            and before.donor_end == span.donor_start
        )
        if not goes_on:
            heads.append(np.arange(span.target_start, min(span.target_start + width, span.target_end)))
        before = span
    return np.concatenate(heads) if heads else np.empty(0, np.int64)


def keep_in_order(spans: Sequence[Span], most_share: float) -> tuple[Span, ...]:
    """Leave out the spans that stand before tokens which their donor has before them, if they are few.

    Their KV has seen what now comes later. What is left is in its donors' orders. ``most_share``: of the reused tokens;
    where more moved ahead, the prompt is another order altogether, and nothing is left out.

    >>> moved, others = Span("d", 90, 10, 5), Span("d", 0, 15, 45)
    >>> keep_in_order([moved, others], most_share=0.2) == (others,)
    True
    """
    first_behind: dict[tuple[str, int], int] = {}
    kept: list[Span] = []
    for span in reversed(spans):
        donor = (span.donor_id, span.generation)
        if span.donor_start <= first_behind.get(donor, span.donor_start):
            kept.append(span)
            first_behind[donor] = span.donor_start
    few = (1 - most_share) * sum(span.length for span in spans)
    return tuple(reversed(kept)) if sum(span.length for span in kept) >= few else tuple(spans)


def leave_out_repetitions(plan: ReusePlan, most_share: float = MOST_MOVED_BACK) -> ReusePlan:
    """Leave out spans whose tokens stand in a longer one too, and those behind what their donor has behind them.

    New messages of an agent repeat pieces of old ones: the name of a tool, a result that was asked for again. KV of the
    old one, read next to the question, is most of the damage to an edited history (docs/research/quality.md). They are
    computed, and what is left is in its donor's order. ``most_share``: of the reused tokens; where more than that moved
    back, the prompt is another order altogether, and only what stands twice is left out.

    >>> history, repeated = Span("d", 50, 10, 90), Span("d", 60, 120, 10)
    >>> leave_out_repetitions(ReusePlan((history, repeated), 150)).spans == (history,)
    True
    """
    spans = plan.spans
    ends: dict[tuple[str, int], int] = {}
    is_once = True
    for span in spans:
        donor = (span.donor_id, span.generation)
        is_once &= span.donor_start >= ends.get(donor, 0)
        ends[donor] = max(ends.get(donor, 0), span.donor_end)
    if is_once:  # nearly always: everything is in its donor's order
        return plan
    taken = {donor: np.zeros(end, dtype=bool) for donor, end in ends.items()}
    once: list[Span] = []
    for span in sorted(spans, key=lambda span: -span.length):
        mine = taken[span.donor_id, span.generation][span.donor_start : span.donor_end]
        if 2 * np.count_nonzero(mine) <= span.length:
            once.append(span)
            mine[:] = True
    once.sort(key=lambda span: span.target_start)
    reached = dict.fromkeys(ends, 0)
    kept: list[Span] = []
    for span in once:
        donor = (span.donor_id, span.generation)
        if span.donor_start >= reached[donor]:
            kept.append(span)
            reached[donor] = span.donor_end
    moved_back = sum(span.length for span in once) - sum(span.length for span in kept)
    if moved_back > most_share * sum(span.length for span in once):
        kept, moved_back = once, 0
    if len(kept) == len(spans):
        return plan
    return replace(plan, spans=tuple(kept), saving_ms=None, moved_back=moved_back)


def select_largest(positions: Positions, scores: Values, count: int) -> Positions:
    """Select the ``count`` ascending ``positions`` with the largest scores; ties go to the earlier, NaN comes last.

    >>> select_largest(np.array([4, 5, 6, 7]), np.array([.1, .9, .9, .2]), 2).tolist()
    [5, 6]
    """
    if not 0 < count < len(positions):
        return positions[: max(0, count)]
    ranked = np.where(np.isnan(scores), -np.inf, scores)
    least = np.partition(ranked, -count)[-count]  # sorting all of a long prompt takes milliseconds
    taken = ranked > least
    taken[np.flatnonzero(ranked == least)[: count - int(taken.sum())]] = True
    chosen: Positions = positions[taken]
    return chosen


def list_reused_positions(spans: Sequence[Span]) -> Positions:
    """List every target position that a span covers."""
    ranges = [np.arange(span.target_start, span.target_end) for span in spans]
    return np.concatenate(ranges) if ranges else np.empty(0, np.int64)


def _draw_values(scores: Scores) -> Values:
    return np.random.default_rng(scores.rng_seed).random(len(scores.reused))


def _select_by(value: Callable[[Scores], Values]) -> Callable[[Scores], Positions]:
    """The rule that selects the share of tokens with the largest values."""
    return lambda scores: select_largest(scores.reused, value(scores), round(scores.share * len(scores.reused)))


SELECTIONS: Mapping[str, Callable[[Scores], Positions]] = MappingProxyType(
    {
        "attended": _select_by(lambda scores: scores.mass),
        "attended_and_deviating": _select_by(lambda scores: scores.mass * scores.deviation),
        "cacheblend": _select_by(lambda scores: scores.deviation),
        "at_random": _select_by(_draw_values),
    }
)
"""Every rule by its name.

``attended``: what the question attends to most, seen from its final position. ``attended_and_deviating``: attention
times deviation, the better rule where passages changed their order. ``cacheblend``: deviation alone, whatever the
question is, a baseline. ``at_random``: the control that any rule must beat.

>>> scores = Scores(np.array([3, 4]), np.array([.1, .6]), np.array([9., 0.]), share=.5)
>>> [SELECTIONS[name](scores).tolist() for name in ("attended", "attended_and_deviating", "cacheblend")]
[[4], [3], [3]]
"""


def count_leading_layers(layers: int, share: float) -> int:
    """Layers from the first on, without a gap, among the ``share`` of layers that a bathtub schedule recomputes.

    Deviation is high at both ends, low in the middle, and decays exponentially inwards. On SmolLM2-135M recomputing
    layers as a whole cost 30 % of the prefill and gained nothing over recomputing the tokens after each seam.

    >>> [count_leading_layers(12, share) for share in (0, .25, .5, 1)]
    [0, 2, 4, 12]
    """
    at = np.arange(layers)
    rims = 0.35 * np.exp(-at / 3.0) + 0.20 * np.exp(-(layers - 1 - at) / 4.0)
    kept = np.argsort(-rims, kind="stable")[round(share * layers) :]
    return int(kept.min(initial=layers))
