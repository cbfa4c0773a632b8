"""A text beyond its budget is refused early, one within it never, and work stops when it is told to."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend.text.token_budget import CUT_TOKENS, TokenBudget, TooManyTokensError, cut_windows


class StoppedError(Exception):
    pass


@given(st.text(alphabet="ab \n日", max_size=200), st.integers(1, 50))
def test_windows_hold_the_whole_text_in_order(text: str, size: int) -> None:
    parts = list(cut_windows(text, size))
    assert "".join(parts) == text
    assert all(0 < len(part) <= size for part in parts) or text == ""


def test_a_long_text_is_refused_after_its_first_windows() -> None:
    counted: list[int] = []

    def count(part: str) -> int:
        counted.append(len(part))
        return len(part)

    with pytest.raises(TooManyTokensError, match="the context holds 2000") as refused:
        TokenBudget(2000).refuse_longer("7" * 1_000_000, count, window_chars=1000)
    assert sum(counted) == refused.value.chars == 3000
    assert refused.value.counted > 2000


def test_a_text_of_one_window_is_not_counted() -> None:
    TokenBudget(1).refuse_longer("7" * 1000, lambda part: pytest.fail("counted"), window_chars=1000)


def test_tokens_that_only_a_cut_made_do_not_refuse_a_text() -> None:
    """Each part may have some tokens more than it has within the text."""
    added = CUT_TOKENS
    TokenBudget(100).refuse_longer("x" * 1000, lambda part: len(part) // 10 + added, window_chars=1001)
    text = "x" * 5000  # 5 tokens of 1,000 characters, and 128 for each cut
    TokenBudget(5 + added).refuse_longer(text, lambda part: 1 + added, window_chars=1000)


def test_work_stops_at_the_next_check() -> None:
    windows = 0

    def check() -> None:
        if windows == 3:
            raise StoppedError

    def count(part: str) -> int:
        nonlocal windows
        windows += 1
        return 1

    with pytest.raises(StoppedError):
        TokenBudget(1000, check).refuse_longer("x" * 100_000, count, window_chars=1000)
    assert windows == 3


def test_a_rendered_text_is_given_up_when_it_cannot_fit() -> None:
    pieces = iter(["x" * 10] * 100)
    with pytest.raises(TooManyTokensError):
        TokenBudget(5).join(pieces, most_chars=35)
    assert len(list(pieces)) == 96
    assert TokenBudget(5).join(["a", "b"], most_chars=2) == "ab"


@settings(deadline=None)
@given(st.text(alphabet="ab 1#\n日🎉\u0301", max_size=400), st.integers(20, 100), st.integers(1, 60))
def test_a_text_that_fits_is_never_refused(text: str, window: int, word: int) -> None:
    """For a tokenizer that cuts words into pieces of up to ``word`` characters."""

    def count(part: str) -> int:
        return sum(-(-len(piece) // word) for piece in part.split(" ")) + part.count(" ")

    TokenBudget(max(count(text), 1)).refuse_longer(text, count, window_chars=window)
