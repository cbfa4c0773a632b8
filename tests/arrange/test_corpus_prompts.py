"""Documents into prompts: each once, none too large, and together what is asked for together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from semblend.arrange.arranger import group_documents

SIZES = st.lists(st.integers(1, 10), min_size=1, max_size=12)


@given(SIZES, st.data())
def test_every_document_stands_in_one_prompt_and_no_prompt_is_too_large(sizes, data):
    numbers = st.integers(0, len(sizes) - 1)
    retrievals = data.draw(st.lists(st.lists(numbers, min_size=1, max_size=5, unique=True), max_size=8))
    prompts = group_documents(sizes, retrievals, 12)
    assert sorted(number for prompt in prompts for number in prompt) == list(range(len(sizes)))
    assert all(sum(sizes[number] for number in prompt) <= 12 for prompt in prompts)


def test_what_is_retrieved_together_most_often_stands_together_in_that_order():
    retrievals = [[5, 1], [3, 2], [2, 3], [2, 3], [1, 4]]
    assert group_documents([1] * 6, retrievals, 2)[0] == (3, 2)


def test_documents_that_nothing_says_are_asked_for_together_stand_alone():
    assert group_documents([1] * 5, [[1, 3]], 100) == [(1, 3), (0,), (2,), (4,)]
    assert group_documents([1] * 3, [], 100) == [(0,), (1,), (2,)]


def test_two_groups_never_share_a_prompt_and_a_large_one_is_cut():
    assert group_documents([4] * 5, [[0, 1], [2, 3, 4]], 8) == [(0, 1), (2, 3), (4,)]
