"""Orders of passages: what they keep, what they meet again, and that nothing else happens."""

from __future__ import annotations

import itertools
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend import Namespace
from semblend.arrange import Arranger, OrderLimits
from semblend.arrange.order_limits import measure_displaced
from semblend.errors import InputError

WORDS = st.lists(st.sampled_from([f"passage {n}" for n in range(12)]), max_size=9)


def send(arranger, passages, **asked):
    found = arranger.arrange(passages, **asked)
    arranger.record(found)
    return [passages[index] for index in found.order]


def count_exact(history, prompt):
    """Passages of a prompt that some earlier one begins with: what an exact prefix cache serves."""

    def count_same(one):
        pairs = zip(prompt, one, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    return max(map(count_same, history), default=0)


@given(st.lists(WORDS, max_size=8), WORDS, st.integers(0, 3), st.integers(0, 3), st.none() | st.integers(0, 4))
@settings(max_examples=100)
def test_every_passage_stands_once_where_it_may_and_what_is_promised_is_there(history, asked, first, last, within):
    arranger = Arranger(count=lambda passage: 1)
    sent = [send(arranger, passages) for passages in history]
    found = arranger.arrange(asked, keep=OrderLimits(first=first, last=last, within=within))
    order = found.order
    assert sorted(order) == list(range(len(asked)))
    fixed = [*range(min(first, len(asked))), *range(max(0, len(asked) - last), len(asked))]
    assert all(order[place] == place for place in fixed)
    if within is not None:
        assert all(abs(place - index) <= within for place, index in enumerate(order))
    placed = [asked[index] for index in order]
    assert count_exact(sent, placed) >= found.expected.exact
    assert found.expected.exact + found.expected.elsewhere + found.expected.unseen == len(asked)
    assert arranger.arrange(asked, keep=OrderLimits(first=first, last=last, within=within)) == found, (
        "asking changes nothing"
    )


@given(
    st.lists(st.permutations(range(6)).map(lambda p: p[:4]), min_size=1, max_size=6),
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.builds(OrderLimits, first=st.integers(0, 2), last=st.integers(0, 2), within=st.none() | st.integers(0, 3)),
)
@settings(max_examples=150)
def test_the_exact_prefix_is_the_longest_that_any_allowed_order_has(history, asked, keep):
    arranger = Arranger(count=lambda passage: 1)
    sent = [send(arranger, [str(one) for one in passages]) for passages in history]
    texts = [str(one) for one in asked]
    allowed = [order for order in itertools.permutations(range(len(asked))) if obeys(order, keep)]
    best = max(count_exact(sent, [texts[index] for index in order]) for order in allowed)
    assert arranger.arrange(texts, keep=keep).expected.exact == best


def obeys(order, keep):
    fixed = [*range(min(keep.first, len(order))), *range(max(0, len(order) - keep.last), len(order))]
    far = len(order) if keep.within is None else keep.within
    return all(order[place] == place for place in fixed) and all(abs(a - b) <= far for a, b in enumerate(order))


def test_the_rest_stands_as_in_one_earlier_prompt_and_what_nobody_has_seen_comes_last():
    arranger = Arranger()
    send(arranger, ["c", "a", "d", "b"], before="another instruction")
    order = arranger.arrange(["new", "a", "b", "c"]).order
    assert [["new", "a", "b", "c"][index] for index in order] == ["c", "a", "b", "new"]


def test_nothing_crosses_a_namespace_and_an_exact_prefix_needs_the_same_beginning():
    arranger = Arranger()
    send(arranger, ["b", "a"], namespace=Namespace(tenant="one"), before="You are kind.")
    other = arranger.arrange(["a", "b"], namespace=Namespace(tenant="two"), before="You are kind.")
    assert (other.order, other.expected.unseen) == ((0, 1), 2)
    elsewhere = arranger.arrange(["a", "b"], namespace=Namespace(tenant="one"), before="You are brief.")
    assert (elsewhere.order, elsewhere.expected.exact, elsewhere.expected.elsewhere) == ((1, 0), 0, 2)
    exact = arranger.arrange(["a", "b"], namespace=Namespace(tenant="one"), before="You are kind.")
    assert (exact.order, exact.expected.exact) == ((1, 0), 2)


def test_what_was_evicted_is_no_longer_met():
    arranger = Arranger()
    send(arranger, ["a", "b"])
    send(arranger, ["a", "c"])
    assert arranger.forget(["a", "b"])
    assert not arranger.forget(["a", "b"])
    assert arranger.arrange(["b", "a"]).expected.exact == 1
    assert arranger.forget(["a", "c"])
    assert len(arranger) == 0
    assert arranger.arrange(["b", "a"]).expected.unseen == 2


def test_memory_is_bounded_and_the_longest_unused_goes_first():
    arranger = Arranger(most_passages=6)
    for number in range(50):
        send(arranger, ["kept", "by use"])
        send(arranger, [f"a{number}", f"b{number}"])
    assert len(arranger) <= 3
    assert arranger.arrange(["by use", "kept"]).expected.exact == len("keptby use")
    assert arranger.arrange(["b3", "a3"]).expected.unseen == 4


def test_relevance_is_displaced_no_further_than_allowed():
    rng = random.Random(3)
    arranger = Arranger()
    passages = [f"p{number}" for number in range(10)]
    send(arranger, passages[::-1])
    scores = sorted((rng.random() for _ in passages), reverse=True)
    free = arranger.arrange(passages, scores=scores)
    assert free.order == tuple(range(9, -1, -1))
    for most in (0.0, 0.05, 0.2):
        found = arranger.arrange(passages, scores=scores, keep=OrderLimits(displaced=most))
        assert measure_displaced(found.order, scores) <= most
    assert found.order != tuple(range(10)), "and as far as allowed it moves"


def test_a_passage_that_is_there_twice_is_named():
    found = Arranger().arrange(["a", "b", "a"])
    assert found.repeats == ((2, 0),)
    assert sorted(found.order) == [0, 1, 2]


def test_many_threads_may_ask_and_tell():
    arranger, wrong = Arranger(most_passages=100), []

    def work(seed):
        rng = random.Random(seed)
        for _ in range(200):
            passages = rng.sample([f"p{number}" for number in range(20)], 6)
            if sorted(send(arranger, passages)) != sorted(passages):
                wrong.append(passages)
            arranger.forget(passages)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    "asked",
    [
        {"passages": "one text"},
        {"passages": ["a", 1]},
        {"passages": ["a"], "scores": [1, 2]},
        {"passages": ["a"], "scores": [float("nan")]},
        {"passages": ["a"], "keep": OrderLimits(displaced=0.1)},
    ],
)
def test_mistakes_are_named(asked):
    with pytest.raises(InputError):
        Arranger().arrange(**asked)


@pytest.mark.parametrize("wrong", [{"first": -1}, {"within": 1.5}, {"displaced": 2}])
def test_what_cannot_be_kept_is_named(wrong):
    with pytest.raises(InputError):
        OrderLimits(**wrong)
