from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend.fingerprint.embedder import cut_text_windows, cut_token_windows, spread_windows


@given(length=st.integers(0, 5000), size=st.integers(1, 300), overlap_share=st.floats(0, 0.9), limit=st.integers(1, 20))
def test_windows_are_bounded_in_number_and_lie_inside(length: int, size: int, overlap_share: float, limit: int) -> None:
    windows = spread_windows(length, size=size, overlap=int(size * overlap_share), limit=limit)
    assert len(windows) <= limit
    assert all(0 <= start < end <= length and end - start <= size for start, end in windows)
    assert list(windows) == sorted(set(windows))


@given(length=st.integers(1, 5000), size=st.integers(2, 300), limit=st.integers(2, 20))
def test_the_first_and_the_last_item_are_always_seen(length: int, size: int, limit: int) -> None:
    windows = spread_windows(length, size=size, overlap=1, limit=limit)
    assert windows[0][0] == 0
    assert windows[-1][1] == length


@given(length=st.integers(1, 2000), size=st.integers(2, 300))
def test_nothing_is_left_out_and_neighbours_overlap_while_the_limit_allows(length: int, size: int) -> None:
    windows = spread_windows(length, size=size, overlap=size // 2, limit=length)
    assert all(nxt[0] <= this[1] - size // 2 for this, nxt in pairwise(windows))


@given(length=st.integers(1000, 100_000), limit=st.integers(2, 16))
def test_past_the_limit_the_gaps_are_equal(length: int, limit: int) -> None:
    starts = [start for start, _ in spread_windows(length, size=50, overlap=5, limit=limit)]
    steps = {b - a for a, b in pairwise(starts)}
    assert max(steps) - min(steps) <= 1


def test_one_window_over_a_long_text_takes_its_middle() -> None:
    assert spread_windows(100, size=10, overlap=0, limit=1) == ((45, 55),)


@pytest.mark.parametrize(("size", "overlap", "limit"), [(0, 0, 4), (10, 10, 4), (10, -1, 4), (10, 2, 0)])
def test_windows_that_could_not_advance_are_refused(size: int, overlap: int, limit: int) -> None:
    with pytest.raises(ValueError, match="overlap"):
        spread_windows(100, size=size, overlap=overlap, limit=limit)


def test_text_windows_hold_whole_words_from_all_of_the_text() -> None:
    words = [f"word{i}" for i in range(2000)]
    windows = cut_text_windows(" ".join(words), size=200, overlap=20, limit=8)
    assert len(windows) == 8
    assert windows[0].startswith("word0 ")
    assert windows[-1].endswith(" word1999")
    assert all(set(window.split()) <= set(words) for window in windows)


def test_a_text_without_spaces_is_cut_where_it_is() -> None:
    windows = cut_text_windows("字" * 1000, size=300, overlap=30, limit=4)
    assert [len(window) for window in windows] == [300, 300, 300, 300]


@pytest.mark.parametrize("text", ["", "   \n\t "])
def test_a_text_without_words_has_no_windows(text: str) -> None:
    assert cut_text_windows(text) == ()


@given(st.text(max_size=3000))
def test_any_text_gives_the_same_nonempty_windows_twice(text: str) -> None:
    windows = cut_text_windows(text, size=100, overlap=10, limit=5)
    assert windows == cut_text_windows(text, size=100, overlap=10, limit=5)
    assert all(window and window in text for window in windows)


def test_token_windows_are_views_spread_over_all_tokens() -> None:
    tokens = np.arange(10_000, dtype=np.int32)
    windows = cut_token_windows(tokens, size=100, limit=4)
    assert [int(window[0]) for window in windows] == [0, 3300, 6600, 9900]
    assert all(window.base is tokens for window in windows)
