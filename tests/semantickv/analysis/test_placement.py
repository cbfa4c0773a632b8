"""Policies compared on a trace: requests come at their times, side by side, and the same run gives the same numbers."""

from __future__ import annotations

import pytest

from semantickv.analysis.placement import PREFILL_TOKENS_S, TOKEN_S, place_trace
from semantickv.routing.policies import POLICIES
from semantickv.routing.router import EngineReuse
from semantickv.traces.trace import Trace, TraceRequest

DOCUMENT = tuple(range(100, 120))


def make_trace(gap_s: float, count: int = 40, output_tokens: int = 100) -> Trace:
    """One document that is asked for again and again, with another question each time."""
    return Trace.from_requests(
        TraceRequest(f"r{n}", n * gap_s, (*DOCUMENT, 1000 + n), (128,) * 21, ("rag",) * 20 + ("user",), output_tokens)
        for n in range(count)
    )


def place(trace: Trace, policy: str = "semantic_locality", **known):
    return place_trace(trace, policy, replicas=4, cache_tokens=20_000, **known)


def test_a_document_that_everybody_asks_for_at_once_is_not_all_on_one_replica():
    assert place(make_trace(gap_s=0.001)).busiest_over_mean <= 2


def test_a_document_that_is_asked_for_one_after_another_stays_where_it_is():
    alone_s = 21 * 128 / PREFILL_TOKENS_S + 100 * TOKEN_S
    assert place(make_trace(gap_s=2 * alone_s)).requests_by_replica.count(0) == 3


def test_the_same_trace_faster_is_spread_wider():
    slow, fast = (place(make_trace(gap_s=3.0), speed=speed).busiest_over_mean for speed in (1, 1000))
    assert (slow, fast) == (4.0, 2.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_and_the_numbers_repeat(policy):
    trace = make_trace(gap_s=0.05)
    first = place(trace, policy)
    assert sum(first.requests_by_replica) == len(trace)
    assert place(trace, policy) == first


def test_for_engines_that_reuse_beginnings_a_document_behind_other_text_is_new():
    trace = Trace.from_requests(
        TraceRequest(f"r{n}", 10.0 * n, (1000 + n, *DOCUMENT), (128,) * 21, ("system", *("rag",) * 20), 10)
        for n in range(20)
    )
    spans, prefix = (place(trace, reuse=reuse) for reuse in (EngineReuse.SPANS, EngineReuse.PREFIX))
    assert spans.busiest_over_mean == 4.0
    assert prefix.busiest_over_mean == 1.0
