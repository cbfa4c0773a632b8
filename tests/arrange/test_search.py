"""The fast search gives the very orders of the plain one."""

from __future__ import annotations

import plain_search
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend.arrange import Arranger, OrderLimits, search

NAMES = [f"p{number}" for number in range(9)]
PROMPTS = st.lists(st.lists(st.sampled_from(NAMES), max_size=8), max_size=14)
KEEPS = st.just(OrderLimits()) | st.builds(
    OrderLimits, first=st.integers(0, 2), last=st.integers(0, 2), within=st.none() | st.integers(0, 4)
)


@given(PROMPTS, st.lists(st.sampled_from([*NAMES, "new"]), max_size=9), KEEPS, st.none() | st.integers(1, 30))
@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("limits", [(1_500, 16, 300), (12, 2, 9)], ids=["as shipped", "cut short"])
def test_every_order_is_that_of_the_plain_search(limits, history, asked, keep, exact_size):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(("MAX_LOOKS", "MAX_HOLDERS", "MAX_PAIRS"), limits, strict=True):
            patch.setattr(search, name, value)
            patch.setattr(plain_search, name, value)
        # Sizes of some passages are equal and of one 0: ties are broken as before.
        arranger = Arranger(
            count=lambda passage: int(passage[1]) // 2 if passage != "new" else 3, exact_size=exact_size
        )
        for number, passages in enumerate(history):
            arranger.record(
                arranger.arrange(passages, keep=OrderLimits(within=number % 3 or None), before="x" * (number % 2))
            )
        found = arranger.arrange(asked, keep=keep)
        sizes = [found.sizes[found.order.index(at)] for at in range(len(asked))]
        keys = [found.keys[found.order.index(at)] for at in range(len(asked))]
        order, exact = plain_search.find_order(arranger._memory, keys, sizes, found.scope, found.root, keep)
        assert list(found.order) == order
        assert found.expected.exact == sum(sizes[at] for at in order[:exact])


def test_prompts_with_many_passages_of_a_donor_follow_it():
    arranger = Arranger()
    first = [f"passage {number}" for number in range(40)]
    arranger.record(arranger.arrange(first, before="another text"))
    order = arranger.arrange(first[::-1]).order
    assert order == tuple(reversed(range(40)))
