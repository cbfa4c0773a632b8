"""Passages in the order of earlier prompts: what it adds, and that nothing else changes."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from semantickv.analysis.advise import Question, advise, arrange_trace
from semantickv.output import advise as advise_output
from semantickv.traces.trace import Trace, TraceRequest
from semantickv.workloads.families import generate_workload


def ask(at: int, passages: list[int], tenant: str = "a") -> TraceRequest:
    ids = (1, *passages, 1000 + at)
    kinds = ("system", *["retrieved_context"] * len(passages), "user")
    return TraceRequest(str(at), float(at), ids, (300,) * len(ids), kinds, tenant=tenant)


def make_trace(count: int = 60) -> Trace:
    chance = random.Random(4)
    return Trace.from_requests([ask(at, chance.sample(range(10, 14), 4)) for at in range(count)])


def list_blocks(trace: Trace, r: int) -> list[int]:
    blocks: list[int] = trace.ids[trace.starts[r] : trace.starts[r + 1]].tolist()
    return blocks


def test_a_prompt_keeps_its_blocks_and_only_passages_move() -> None:
    trace = make_trace()
    moved = arrange_trace(trace, 100_000)
    assert moved is not None
    for r in range(len(trace)):
        before, after = list_blocks(trace, r), list_blocks(moved, r)
        assert Counter(before) == Counter(after)
        assert (before[0], before[-1]) == (after[0], after[-1])


def test_the_same_passages_in_any_order_hit_as_one_prefix() -> None:
    made = advise(make_trace(), Question(memory="dram", gib_hour_cost=1e-9), policies=("lru",))
    assert made.arranged is not None
    # All but the first prompt hit the instruction and all four passages: five blocks of six.
    assert made.arranged.token_hit_rate == pytest.approx(59 * 5 / (60 * 6))
    gain = made.arranged.token_hit_rate - made.at_chosen.token_hit_rate
    assert gain > 0.05
    told = advise_output.describe_arranging(made)
    assert f"{made.arranged.token_hit_rate:.1%}" in told
    assert f"{gain * 100:+.1f} points" in told
    assert made.as_json()["arranged"]["token_hit_rate"] == made.arranged.token_hit_rate


def test_a_tenants_order_is_not_learnt_from_another() -> None:
    trace = Trace.from_requests(
        [ask(0, [10, 11, 12, 13], "a"), ask(1, [13, 12, 11, 10], "b"), ask(2, [13, 12, 11, 10], "a")]
    )
    moved = arrange_trace(trace, 100_000)
    assert moved is not None
    assert list_blocks(moved, 1)[1:5] == [13, 12, 11, 10]
    assert list_blocks(moved, 2)[1:5] == [10, 11, 12, 13]


def test_a_trace_without_passages_or_of_whole_prefixes_cannot_be_arranged() -> None:
    assert arrange_trace(generate_workload(["repeated_system"], sessions=2, requests=2, seed=1), 1000) is None
    alone = Trace.from_requests([ask(at, [10 + at]) for at in range(3)])
    assert arrange_trace(alone, 1000) is None
    assert advise_output.describe_arranging(advise(alone, policies=("lru",))) == ""
