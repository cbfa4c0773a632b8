"""From the name of an earlier request to the donor that holds it today."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from semblend.session.lineage import Lineage

NAMES = st.sampled_from("abcdef")


@given(st.lists(st.tuples(NAMES, NAMES)), NAMES, st.sets(NAMES))
def test_names_that_lead_in_circles_or_nowhere_end(notes, name, there):
    lineage = Lineage()
    for one, donor_id in notes:
        lineage.note(one, donor_id)
    found = lineage.find(name, there.__contains__)
    assert found is None or found in there
    if name in there:
        assert found == name


def test_the_oldest_names_are_forgotten():
    lineage = Lineage(most=3)
    for turn in range(10):
        lineage.note(f"turn{turn}", f"turn{turn + 1}")
    assert len(lineage) == 3
    assert lineage.find("turn7", "turn10".__eq__) == "turn10"
    assert lineage.find("turn0", "turn10".__eq__) is None


def test_a_caller_names_a_request_as_it_was_told():
    lineage = Lineage()
    lineage.note("cmpl-7f-0-1a2b3c4d", "donor")
    for told in ("cmpl-7f-0-1a2b3c4d", "cmpl-7f-0", "cmpl-7f"):
        assert lineage.find(told, "donor".__eq__) == "donor"
