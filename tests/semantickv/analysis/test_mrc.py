"""Curves from samples stay near the curves of full runs, and say how near."""

from __future__ import annotations

import numpy as np
import pytest

from semantickv.analysis.mrc import sample_forest, simulate_curve
from semantickv.simulator.simulate import build_forest
from semantickv.traces.trace import Trace, TraceRequest
from semblend.errors import InputError


def conversations(count=1200, seed=1):
    """Chats that grow by a block a turn, with a popular beginning."""
    rng = np.random.default_rng(seed)
    chats: dict[int, list[int]] = {}
    requests, fresh = [], 1000
    for r in range(count):
        chat = int(rng.zipf(1.4)) % 200
        ids = chats.setdefault(chat, [0])
        for _ in range(int(rng.integers(1, 4))):
            ids.append(fresh := fresh + 1)
        requests.append(TraceRequest(str(r), float(r), tuple(ids), (16,) * len(ids), ("other",) * len(ids)))
        if len(ids) > 40:
            del chats[chat]
    return Trace.from_requests(requests)


@pytest.mark.parametrize("policy", ["lru", "lfu", "s3fifo", "arc", "belady_bypass"])
def test_a_sampled_curve_is_near_the_full_one(policy):
    forest = build_forest(conversations())
    sizes = [200, 500, 1000, 2000]
    full, sampled = (
        simulate_curve(forest, policy, sizes, rate=1.0),
        simulate_curve(forest, policy, sizes, rate=0.25, samples=4),
    )
    assert (full.method, sampled.method) == ("full", "miniature")
    assert np.abs(full.hit_rates - sampled.hit_rates).max() < 0.05
    assert (sampled.errors >= 0).all()
    assert (full.errors == 0).all()


def test_samples_of_one_seed_share_nothing_and_keep_the_tree_closed():
    forest = build_forest(conversations(200))
    parts = [sample_forest(forest, 0.25, number=number) for number in range(4)]
    assert sum(part.nodes for part in parts) == forest.nodes
    assert sum(len(part.node) for part in parts) == len(forest.node)
    for part in parts:
        assert (part.parent < np.arange(part.nodes)).all()  # a parent is older than its child


def test_a_rate_out_of_range_is_refused():
    with pytest.raises(InputError, match="sampling rate"):
        simulate_curve(build_forest(conversations(10)), "lru", [10], rate=1.5)
