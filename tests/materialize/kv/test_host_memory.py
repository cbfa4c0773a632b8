"""Memory that is taken once: pieces never overlap and come back; and copies under way, which nobody may overtake."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semblend.errors import CapacityError
from semblend.materialize.contract import KvLayout
from semblend.materialize.donors.memory import MAX_BACKLOG, Arena, DonorMemory
from semblend.materialize.donors.tiers import DonorKv
from semblend.materialize.kv.layout import copy_to_device

SIZE = 1 << 14


@given(st.lists(st.tuples(st.integers(1, 1500), st.booleans()), max_size=40))
def test_pieces_of_an_arena_never_overlap_and_all_of_it_comes_back(steps):
    arena = Arena(torch.zeros(SIZE, dtype=torch.uint8))
    held: list[torch.Tensor] = []
    for count, gives_back in steps:
        if gives_back and held:
            held.pop(len(held) // 2)
        piece = arena.take((count,), torch.float32)
        if piece is not None:
            held.append(piece)
        for number, one in enumerate(held):
            one.fill_(number)
        assert all(bool((one == number).all()) for number, one in enumerate(held))
        assert arena.free_bytes + sum(-(-one.numel() * 4 // 256) * 256 for one in held) == SIZE
    one = piece = None
    held.clear()
    assert arena.free_bytes == SIZE
    assert arena.take((SIZE,), torch.uint8) is not None, "in one piece again"


def test_on_a_cpu_sending_is_no_copy():
    values = torch.arange(3)
    assert copy_to_device(values, torch.device("cpu")) is values


class Late:
    """An arrival that says who waited for it; the copy runs when somebody does."""

    def __init__(self, copies):
        self.copies, self.waits = copies, []

    def _come(self, how):
        self.waits.append(how)
        copies, self.copies = self.copies, lambda: None
        copies()

    def query(self):
        return False

    def synchronize(self):
        self._come("host")

    def wait(self):
        self._come("stream")


def cache_filled(value):
    return KvLayout.of_pool(torch.full((2, 32, 1, 4), value), torch.full((2, 32, 1, 4), -value))


TOKEN_BYTES = 2 * 2 * 4 * 4


@pytest.fixture
def late(monkeypatch):
    """Donor KV whose copies are queued, as off a GPU."""
    arrivals = []

    def queued(self, source, nbytes, copies, *used):
        arrivals.append(Late(copies))
        return arrivals[-1]

    monkeypatch.setattr(DonorMemory, "queue", queued)
    return arrivals


def test_what_comes_after_a_capture_is_ordered_behind_its_copy(late):
    DonorKv(0, 10_000).capture("d", 1, cache_filled(1.0), torch.arange(4))
    assert late[0].waits == ["stream"]


def test_a_caller_that_keeps_the_slots_is_told_when_they_are_free(late):
    handle = DonorKv(0, 10_000).capture("d", 1, cache_filled(1.0), torch.arange(4), slots_stay=True)
    assert handle.arrives is late[0]
    assert late[0].waits == []


def test_whoever_acquires_a_donor_reads_it_after_it_arrived(late):
    kv = DonorKv(0, 10_000)
    kv.capture("d", 1, cache_filled(3.0), torch.arange(4), slots_stay=True)
    held = kv.acquire("d", 1)
    assert late[0].waits == ["stream"]
    assert bool((held.k == 3.0).all())


def test_the_disk_gets_a_donor_only_after_it_arrived(late, tmp_path):
    kv = DonorKv(0, 5 * TOKEN_BYTES, tmp_path, budget_disk_bytes=1 << 20)
    kv.capture("old", 1, cache_filled(1.0), torch.arange(4), slots_stay=True)
    kv.capture("new", 2, cache_filled(2.0), torch.arange(4), slots_stay=True)
    assert late[0].waits == ["host"]
    held = kv.acquire("old", 1)
    assert bool((held.k == 1.0).all())
    kv.release(held)
    kv.close()


def test_while_too_much_is_under_way_a_donor_is_not_kept():
    class Behind:
        backlog_bytes = MAX_BACKLOG + 1

    kv = DonorKv(0, 10_000)
    kv.capture("kept", 1, cache_filled(1.0), torch.arange(4))
    kv.memory.courier = Behind()
    with pytest.raises(CapacityError, match="on their way"):
        kv.capture("more", 2, cache_filled(2.0), torch.arange(4))
    assert kv.holds("kept", 1)
    kv.check()


def test_reserved_memory_is_used_first_and_what_does_not_fit_there_is_allocated():
    kv = DonorKv(0, 1 << 20)
    memory = torch.zeros(512, dtype=torch.uint8)
    kv.memory.arenas["host"] = Arena(memory)
    kv.capture("inside", 1, cache_filled(1.0), torch.arange(4))
    kv.capture("outside", 2, cache_filled(2.0), torch.arange(4))
    inside, outside = kv.acquire("inside", 1), kv.acquire("outside", 2)
    first, last = memory.data_ptr(), memory.data_ptr() + 512
    assert first <= inside.k.data_ptr() < last
    assert not first <= outside.k.data_ptr() < last
    assert bool((outside.v == -2.0).all())
