"""Reuse at any offset is replayed as an engine would do it: moved KV is neither exact nor a donor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_any_offset import PlainAnyOffset

from semblend import Namespace, Prompt
from semblend.estimate.any_offset import BALANCED_SHARE, AnyOffsetReplay, Mode, ReuseCount
from semblend.estimate.prefix_cache import BlockHasher

RANDOM = np.random.default_rng(11)
DOCUMENT = RANDOM.integers(1000, 30_000, 400).tolist()
SHIFTED = [*range(1, 21), *DOCUMENT]
OTHER = RANDOM.integers(40_000, 60_000, 400).tolist()


def replay(
    *prompts: list[int], mode: Mode = "fast", tenants: tuple[str, ...] = (), size: int = 100_000, **options: Any
) -> list[ReuseCount]:
    return list(_replay(prompts, mode, tenants or ("",) * len(prompts), size, options))


def _replay(prompts: Any, mode: Mode, tenants: Any, size: int, options: dict[str, Any]) -> Iterator[ReuseCount]:
    hasher = BlockHasher(16)
    given = {"cache_tokens": size, "donor_tokens": size, "block_tokens": 16, "pass_tokens": 0} | options
    reuse = AnyOffsetReplay(mode, **given)
    for ids, tenant in zip(prompts, tenants, strict=True):
        prompt = Prompt(ids, namespace=Namespace(tenant=tenant))
        yield reuse.add(prompt, hasher.hash(prompt.token_ids, prompt.namespace), (len(ids) - 1) // 16)
    reuse.close()


def test_the_first_prompt_is_computed_in_full() -> None:
    assert replay(DOCUMENT) == [ReuseCount(0, 0, 400)]


def test_a_repeated_prompt_is_exact_but_for_the_last_token_that_an_engine_must_compute() -> None:
    assert replay(DOCUMENT, DOCUMENT)[1].exact_tokens == 384


def test_a_shifted_document_is_moved_and_its_first_tokens_are_computed_again() -> None:
    moved = replay(DOCUMENT, SHIFTED)[1]
    assert moved == ReuseCount(0, 399 - 16, 20 + 16 + 1)


def test_mode_balanced_computes_more_of_a_moved_document_again() -> None:
    moved = replay(DOCUMENT, SHIFTED, mode="balanced")[1]
    assert moved.moved_tokens == 399 - int(np.ceil(BALANCED_SHARE * 399))


def test_mode_balanced_prefills_what_comes_in_another_order() -> None:
    turned = [*DOCUMENT[200:], *DOCUMENT[:200]]
    assert replay(DOCUMENT, turned, mode="balanced")[1] == ReuseCount(0, 0, 400)
    assert replay(DOCUMENT, turned, mode="fast")[1].moved_tokens > 300


def test_mode_balanced_is_not_expected_to_serve_a_part_of_a_donor() -> None:
    part = [*DOCUMENT[:180], *DOCUMENT[230:]]
    assert replay(DOCUMENT, [7, *part], mode="balanced")[1].moved_tokens == 0
    assert replay(DOCUMENT, [7, *part], mode="fast")[1].moved_tokens > 300


def test_a_plan_that_saves_less_than_a_pass_costs_is_not_begun() -> None:
    assert replay(DOCUMENT, SHIFTED, pass_tokens=382)[1].moved_tokens == 383
    assert replay(DOCUMENT, SHIFTED, pass_tokens=383)[1].moved_tokens == 0


def test_a_donor_of_another_tenant_is_invisible() -> None:
    assert replay(DOCUMENT, DOCUMENT, tenants=("a", "b"))[1] == ReuseCount(0, 0, 400)
    assert replay(DOCUMENT, SHIFTED, tenants=("a", "b"))[1] == ReuseCount(0, 0, 420)


def test_moved_kv_is_no_donor_and_no_exact_prefix() -> None:
    behind = [*SHIFTED, *OTHER]  # what is computed behind moved KV is lost
    *_, last = replay(DOCUMENT, behind, [*range(50, 60), *OTHER])
    assert last == ReuseCount(0, 0, 410)
    # A longer prompt that begins with `behind` finds its document again, and computes OTHER again.
    *_, longer = replay(DOCUMENT, behind, [*behind, 5, 6, 7])
    assert longer.exact_tokens == 16  # the tokens in front of the first moved one
    assert longer.computed_tokens >= len(OTHER)


def test_an_equal_prompt_shares_the_blocks_that_were_loaded_for_the_first() -> None:
    *_, again = replay(DOCUMENT, SHIFTED, SHIFTED)
    assert again == ReuseCount(16, 416 - 16, 4)


def test_a_beginning_that_cost_as_much_as_computing_it_is_computed_and_exact_from_then_on() -> None:
    prompts = [DOCUMENT, *([*SHIFTED, *OTHER, *range(100, 100 + extra)] for extra in (1, 40, 80, 120, 160))]
    found = replay(*prompts)
    healed = next(at for at, one in enumerate(found) if at and one.moved_tokens == 0)
    assert healed > 1
    assert found[healed + 1].exact_tokens > 800


def test_with_room_for_one_donor_the_older_one_is_forgotten() -> None:
    *_, last = replay(DOCUMENT, OTHER, SHIFTED, size=480, max_donors=1)
    assert last == ReuseCount(0, 0, 420)
    *_, kept = replay(DOCUMENT, OTHER, SHIFTED, max_donors=2)
    assert kept.moved_tokens == 383


def test_a_prompt_larger_than_the_memory_of_donors_is_no_donor() -> None:
    *_, last = replay(DOCUMENT, SHIFTED, donor_tokens=399)
    assert last.moved_tokens == 0


@pytest.mark.parametrize("mode", ["fast", "balanced"])
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), min_size=1, max_size=8))
def test_the_parts_of_a_prompt_add_up_and_something_is_always_computed(mode: Mode, cuts: list[tuple[int, int]]) -> None:
    prompts = [DOCUMENT[start : start + length] or [1] for start, length in cuts]
    for ids, one in zip(prompts, replay(*prompts, mode=mode, size=600), strict=True):
        assert one.exact_tokens + one.moved_tokens + one.computed_tokens == len(ids)
        assert one.computed_tokens >= 1
        assert min(one.exact_tokens, one.moved_tokens) >= 0


class Log(list[Any]):
    """Prompts with answer, tenant and whether reuse is wanted; shown by their lengths, not by all of their tokens."""

    def __repr__(self) -> str:
        return str([(len(ids), ids[:3], len(answer), tenant, wanted) for ids, answer, tenant, wanted in self])


@st.composite
def logs(draw: st.DrawFn, longest: int = 8, scale: int = 1) -> Log:
    """Prompts of slices of three documents with new words between them, some of them again or longer.

    At most ``longest`` prompts, besides those of one beginning; documents are ``scale`` times as long.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    documents = [rng.integers(1000 * at, 1000 * at + 900, 150 * scale) for at in range(1, 4)]
    found = Log()
    if draw(st.booleans()):  # one beginning that is loaded again and again, until it heals
        begun = [*rng.integers(10_000, 2**30, 20), *documents[0], *rng.integers(10_000, 2**30, 200)]
        tails = [rng.integers(10_000, 2**30, length) for length in draw(st.lists(st.integers(1, 80), max_size=6))]
        begun_often = [documents[0], *(np.array([*begun, *tail]) for tail in tails)]
        found += [(tuple(ids.tolist()), (), "", True) for ids in begun_often]
    for _ in range(draw(st.integers(2, longest))):
        kind = draw(st.sampled_from(["again", "longer", "longer", "new", "new", "new"])) if found else "new"
        pieces = [rng.integers(10_000, 2**30, int(rng.integers(0, 24)))]
        for _ in range(draw(st.integers(1, 3))):
            document = documents[draw(st.integers(0, 2))]
            pieces += [document[draw(st.sampled_from([0, 0, 16, 50])) :], rng.integers(10_000, 2**30, rng.integers(8))]
        ids = tuple(np.concatenate(pieces).tolist())
        if kind != "new":
            before, answer, *_ = found[draw(st.integers(0, min(1, len(found) - 1)))]  # the same one often: it heals
            ids = before if kind == "again" else before + answer + ids
        answer = tuple(rng.integers(10_000, 2**30, draw(st.sampled_from([0, 0, 40]))).tolist())
        found.append(
            (ids, answer, draw(st.sampled_from(["", "", "", "b"])), draw(st.sampled_from([True] * 7 + [False])))
        )
    return found


@pytest.mark.parametrize("mode", ["fast", "balanced"])
@settings(max_examples=20, deadline=None)
@given(
    log=logs(),
    room=st.sampled_from([3, 12, 30, 100, 1000]),
    block=st.sampled_from([4, 16]),
    pass_tokens=st.sampled_from([0, 40, 150]),
)
def test_every_prompt_is_counted_as_the_plain_twin_counts_it(
    mode: Mode, log: list[Any], room: int, block: int, pass_tokens: int
) -> None:
    compare(log, mode, room=room, block=block, pass_tokens=pass_tokens)


def compare(
    log: list[Any],
    mode: Mode,
    *,
    room: int,
    block: int,
    pass_tokens: int,
    donor_tokens: int = 1_000_000,
    most_donors: int = 1 << 30,
) -> PlainAnyOffset:
    """Replay a log by both, prompt by prompt; the twin as it is then."""
    bounds = {"pass_tokens": pass_tokens, "donor_tokens": donor_tokens}
    plain = PlainAnyOffset(mode, room=room, block=block, most_donors=most_donors, **bounds)
    hasher = BlockHasher(block)
    reuse = AnyOffsetReplay(mode, cache_tokens=room * block, block_tokens=block, max_donors=most_donors, **bounds)
    for ids, answer, tenant, wanted in log:
        prompt = Prompt(ids, namespace=Namespace(tenant=tenant))
        keys = hasher.hash(np.array(ids + answer, np.int32), prompt.namespace)
        found = reuse.add(prompt, keys, (len(ids) - 1) // block, wanted=wanted)
        expected = plain.add(ids, answer, tenant, wanted=wanted)
        assert (found.exact_tokens, found.moved_tokens, found.computed_tokens) == expected
    reuse.close()
    return plain


@pytest.mark.parametrize("mode", ["fast", "balanced"])
@settings(max_examples=20, deadline=None)
@given(
    log=logs(longest=12),
    room=st.sampled_from([12, 100]),
    most_donors=st.integers(1, 6),
    pass_tokens=st.sampled_from([0, 40]),
)
def test_donors_that_are_evicted_by_number_are_those_that_the_plain_twin_forgets(
    mode: Mode, log: list[Any], room: int, most_donors: int, pass_tokens: int
) -> None:
    compare(log, mode, room=room, block=16, pass_tokens=pass_tokens, most_donors=most_donors)


@pytest.mark.parametrize("mode", ["fast", "balanced"])
@settings(max_examples=10, deadline=None)
@given(log=logs(longest=10, scale=8), donor_tokens=st.sampled_from([7_500, 9_000]))
def test_donors_that_are_evicted_for_their_tokens_are_those_that_the_plain_twin_forgets(
    mode: Mode, log: list[Any], donor_tokens: int
) -> None:
    compare(log, mode, room=15, block=64, pass_tokens=0, donor_tokens=donor_tokens)


def test_the_tenant_that_holds_most_gives_up_the_donor_that_it_used_longest_ago() -> None:
    first, second, third, fourth = (tuple(RANDOM.integers(1000, 2**30, 200).tolist()) for _ in range(4))
    around = (*range(100, 120), *first)  # finds `first`, which is then the latest used
    log: list[Any] = [(first, (), "a", True), (second, (), "a", True), (around, (), "a", True)]
    log += [(third, (), "b", True), (fourth, (), "b", True)]
    log += [((*range(7), *ids), (), tenant, True) for ids, tenant in ((first, "a"), (second, "a"), (third, "b"))]
    assert compare(log, "fast", room=1000, block=16, pass_tokens=0, most_donors=2).forgotten > 1
