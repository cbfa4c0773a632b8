"""Every compiled policy does what its plain twin does, block for block."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantickv.capacity import Capacity
from semantickv.plain import Block, PlainPolicy
from semantickv.policies import POLICIES, Policy, find_policy
from semantickv.simulator import Simulated, plant, simulate
from semantickv.trace import Trace, TraceRequest
from semblend.errors import InputError

TYPES = ("system", "user", "code", "other")


@st.composite
def traces(draw, repeats: bool = True, unit: bool = False):
    """Small traces with much sharing: few ids, so that prefixes and blocks come back."""
    count = draw(st.integers(1, 40))
    requests = []
    for r in range(count):
        ids = draw(st.lists(st.integers(0, 6), min_size=0, max_size=7, unique=not repeats))
        tokens = tuple(16 if unit else 8 + 8 * (i % 3) for i in ids)
        kinds = tuple(TYPES[i % 4] for i in ids)
        requests.append(TraceRequest(str(r), float(r // 2), tuple(ids), tokens, kinds, tenant="ab"[draw(st.integers(0, 1))]))
    return Trace.from_requests(requests)


def same(a: Simulated, b: Simulated) -> None:
    assert np.array_equal(a.hit_tokens_by_request, b.hit_tokens_by_request)
    for field in ("block_hits", "token_hits", "evictions", "evictions_by_type", "regret", "requests_with_a_hit"):
        assert getattr(a, field) == getattr(b, field), field
    assert a.utilization == pytest.approx(b.utilization)


@pytest.mark.parametrize("mode", ["prefix", "block"])
@pytest.mark.parametrize("name", POLICIES)
@given(trace=traces(), size=st.integers(0, 24), tokens=st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_compiled_policy_equals_its_plain_twin(name, mode, trace, size, tokens):
    capacity = Capacity.tokens(size * 12) if tokens else Capacity.blocks(size)
    forest = plant(trace, mode)
    same(simulate(forest, name, capacity, engine="compiled"), simulate(forest, name, capacity, engine="plain"))
