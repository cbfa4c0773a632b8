"""Repeats of a passage: replaced on request, and put back to the character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend.arrange import replace_repeats
from semblend.errors import InputError

LONG = "A passage about tariffs, long enough to be worth a reference. " * 3
TURNS = st.lists(
    st.lists(st.sampled_from([LONG, LONG[1:], "short", "", "[same as passage 1]" * 5]), max_size=6), max_size=4
)


@given(
    TURNS, st.sampled_from(["[same as passage {number}]", "see “{start} …”", "{number}{start}"]), st.integers(0, 300)
)
def test_what_was_replaced_comes_back_to_the_character(turns, template, least):
    found = replace_repeats(turns, template=template, least_chars=least)
    assert found.restore() == tuple(map(tuple, turns))
    before = sum(len(passage) for turn in turns for passage in turn)
    assert before - sum(len(passage) for turn in found.turns for passage in turn) == found.saved_chars >= 0
    flat = [passage for turn in turns for passage in turn]
    for index, passage in enumerate(flat):
        assert flat[found.find_source(index)] == passage


def test_a_repeat_points_to_its_first_place_over_all_turns():
    found = replace_repeats(
        [["other " * 20, LONG], ["new " * 20, LONG], [LONG]], template="(passage {number}: {start})"
    )
    reference = "(passage 2: A passage about tariffs, long enough)"
    assert (found.turns[1][1], found.turns[2][0]) == (reference, reference)
    assert [(one.index, one.first) for one in found.references] == [(3, 1), (4, 1)]
    assert found.find_source(4) == 1
    assert found.saved_chars == 2 * (len(LONG) - len(reference))


def test_nothing_is_replaced_that_is_short_or_only_alike():
    turns = [["short", LONG], ["short", LONG + " "]]
    assert replace_repeats(turns).turns == tuple(map(tuple, turns))


@pytest.mark.parametrize(
    "template", ["no place", "{number", "{other}", "{number.__class__}", "{}", "{0}", "{number:>99999999}"]
)
def test_a_template_that_names_nothing_or_something_else_is_refused(template):
    with pytest.raises(InputError, match="template"):
        replace_repeats([["a"]], template=template)


def test_a_turn_that_is_one_text_is_refused():
    with pytest.raises(InputError, match="list of passages"):
        replace_repeats(["a passage"])
