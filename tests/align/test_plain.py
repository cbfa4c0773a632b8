"""Of overlapping matches, the cover that saves most."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_align import LOOK_BACK, choose_cover, drop_dominated

from semblend.align import kernels

SHORTEST = 4

intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(SHORTEST, 20)), max_size=8)


def as_matches(found: list[tuple[int, int]]) -> np.ndarray:
    rows = [(start, start + length, i, 100 + start) for i, (start, length) in enumerate(found)]
    return drop_dominated(np.array(rows, np.int64).reshape(-1, 4))


def best_saving(matches: np.ndarray, seam: int) -> int:
    """The optimum by trying every piece of every match that ends at each position."""
    end = int(matches[:, 1].max()) if len(matches) else 0
    best = [0] * (end + 1)
    for at in range(1, end + 1):
        best[at] = best[at - 1]
        for start, stop in matches[:, :2].tolist():
            for begin in range(start, min(at, stop) - SHORTEST + 1):
                if stop >= at:
                    best[at] = max(best[at], best[begin] + at - begin - seam)
    return best[end]


@given(intervals, st.sampled_from([0, 1, 3]))
@settings(max_examples=100)
def test_the_cover_is_feasible_and_close_to_the_optimum(found, seam):
    matches = as_matches(found)
    pieces = choose_cover(matches, SHORTEST, seam)
    end = 0
    for start, stop, slot, donor_start in pieces.tolist():
        (match,) = matches[matches[:, 2] == slot].tolist()
        assert end <= start
        assert stop - start >= SHORTEST
        assert match[0] <= start
        assert stop <= match[1]
        assert donor_start - start == match[3] - match[0]
        end = stop
    saving = sum(stop - start - seam for start, stop, *_ in pieces.tolist())
    optimum = best_saving(matches, seam)
    assert optimum - SHORTEST < saving <= optimum


@given(intervals, st.sampled_from([0, 1, 3]))
@settings(max_examples=100)
def test_the_compiled_cover_is_the_same(found, seam):
    matches = as_matches(found)
    assert np.array_equal(
        kernels.choose_cover(matches, SHORTEST, seam, LOOK_BACK), choose_cover(matches, SHORTEST, seam)
    )


@given(intervals)
def test_the_compiled_filter_of_dominated_matches_is_the_same(found):
    rows = [(start, start + length, i, 0) for i, (start, length) in enumerate(found)]
    matches = np.array(rows, np.int64).reshape(-1, 4)
    assert np.array_equal(kernels.drop_dominated(matches), drop_dominated(matches))


@given(intervals)
def test_matches_inside_another_are_dropped_and_the_rest_ascend(found):
    matches = as_matches(found)
    assert (np.diff(matches[:, 0]) > 0).all()
    assert (np.diff(matches[:, 1]) > 0).all()
    union = {t for start, length in found for t in range(start, start + length)}
    assert union == {t for start, stop in matches[:, :2].tolist() for t in range(start, stop)}


def test_more_overlapping_matches_than_are_looked_back_at_lose_nothing_before_them():
    first = (0, 1000, 0, 0)
    crowd = [(2000 + i, 3000 + i, 1 + i, 0) for i in range(100)]
    pieces = choose_cover(np.array([first, *crowd], np.int64), 32)
    assert pieces[0, :2].tolist() == [0, 1000]
    assert pieces[-1, 1] == 3099
