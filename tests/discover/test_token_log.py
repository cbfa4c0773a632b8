"""The ring keeps every live donor whole, however donors come and go."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend.discover.slots import SlotTable, TokenLog
from semblend.errors import CapacityError


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 90), st.integers(0, 9)), max_size=120))
@settings(max_examples=100)
def test_tokens_stay_what_they_were_through_wraps_and_moves(steps):
    log = TokenLog(300, SlotTable())
    kept: dict[int, np.ndarray] = {}
    for n, (adding, length, slot) in enumerate(steps):
        if adding and slot not in kept:
            content = np.arange(n * 1000, n * 1000 + length, dtype=np.int32)
            if log.live_tokens + length > log.capacity:
                with pytest.raises(CapacityError):
                    log.append(slot, content)
                continue
            log.append(slot, content)
            kept[slot] = content
        elif not adding and slot in kept:
            log.remove(slot)
            del kept[slot]
        assert log.live_tokens == sum(map(len, kept.values()))
        for slot_kept, content in kept.items():
            assert np.array_equal(log.view(slot_kept), content)


def test_adding_to_a_full_ring_moves_a_few_times_what_is_added():
    log = TokenLog(125_000, SlotTable())
    moved = 0
    original = log._write

    def counting(slot: int, content: np.ndarray) -> None:
        nonlocal moved
        moved += len(content)
        original(slot, content)

    for slot in range(100):
        log.append(slot, np.full(1000, slot, np.int32))
    log._write = counting  # type: ignore[method-assign]
    rng = np.random.default_rng(0)
    for n in range(2000):
        victim = int(rng.integers(100))
        log.remove(victim)
        log.append(victim, np.full(1000, n, np.int32))
    assert moved <= 8 * 2_000_000
