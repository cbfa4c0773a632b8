"""Memory that is taken once: pieces never overlap and come back; and copies under way, which nobody may overtake."""

from __future__ import annotations

import contextlib

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
    kv.flush()
    assert late[0].waits[-1:] == ["host"]
    kv.capture("new", 2, cache_filled(2.0), torch.arange(4), slots_stay=True)
    kv.flush()
    kv.acquire("old", 1)
    kv.flush()
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


def reserve(kv, **tiers):
    """Memory that is taken at once, as on a GPU."""
    for tier, nbytes in tiers.items():
        kv.memory.arenas[tier] = Arena(torch.zeros(nbytes, dtype=torch.uint8))


PIECE = 256
"""Each tensor of a small donor takes one piece of reserved memory, two tensors a donor."""


def test_what_finds_no_piece_of_reserved_memory_takes_that_of_older_donors():
    kv = DonorKv(0, 1 << 20)  # by its budget there would be room for all
    reserve(kv, host=4 * PIECE)
    for number, name in enumerate(("old", "newer", "newest")):
        kv.capture(name, number, cache_filled(float(number)), torch.arange(4))
    assert [kv.holds(name, number) for number, name in enumerate(("old", "newer", "newest"))] == [False, True, True]
    kv.check()


def test_room_in_no_single_piece_is_made_by_more_donors_that_go():
    kv = DonorKv(0, 8 * 256)
    reserve(kv, host=8 * PIECE)
    for number in range(4):
        kv.capture(f"small {number}", number, cache_filled(float(number)), torch.arange(4))
    kv.drop("small 0")
    kv.drop("small 2")  # half is free, in two holes of two pieces
    kv.capture("large", 9, cache_filled(9.0), torch.arange(24))  # two tensors of three pieces
    held = kv.acquire("large", 9)
    assert bool((held.k == 9.0).all() and (held.v == -9.0).all())
    assert not kv.holds("small 1", 1), "it lay between the holes"
    assert kv.holds("small 3", 3)
    kv.check()


def test_a_donor_is_not_kept_where_those_in_its_way_are_in_use():
    kv = DonorKv(0, 1 << 20)
    reserve(kv, host=2 * PIECE)
    kv.capture("held", 1, cache_filled(1.0), torch.arange(4))
    held = kv.acquire("held", 1)
    with pytest.raises(CapacityError, match="no memory"):
        kv.capture("next", 2, cache_filled(2.0), torch.arange(4))
    assert bool((held.k == 1.0).all())
    assert not kv.holds("next", 2)
    kv.release(held)
    del held
    kv.capture("next", 2, cache_filled(2.0), torch.arange(4))
    assert kv.holds("next", 2)
    assert not kv.holds("held", 1)


def test_memory_that_somebody_still_reads_costs_one_donor_and_not_all_of_them():
    kv = DonorKv(0, 1 << 20)
    reserve(kv, host=6 * PIECE)
    kv.capture("read on", 1, cache_filled(1.0), torch.arange(4))
    late = kv.acquire("read on", 1)
    kv.release(late)  # and goes on reading
    kv.capture("b", 2, cache_filled(2.0), torch.arange(4))
    kv.capture("c", 3, cache_filled(3.0), torch.arange(4))
    with pytest.raises(CapacityError, match="no memory"):
        kv.capture("d", 4, cache_filled(4.0), torch.arange(4))
    assert bool((late.k == 1.0).all())
    assert kv.holds("b", 2)
    assert kv.holds("c", 3)


@given(
    st.lists(
        st.tuples(st.integers(1, 32), st.sampled_from(["capture", "hold", "release", "drop", "rise"])), max_size=60
    )
)
def test_no_donor_lies_beside_reserved_memory_and_none_changes_there(steps):
    kv = DonorKv(6 * 1024, 10 * 1024, device_type="cpu")
    reserve(kv, device=6 * 1024, host=10 * 1024)
    inside = [(a._memory.data_ptr(), a._memory.data_ptr() + a._memory.numel()) for a in kv.memory.arenas.values()]
    held = []
    for number, (tokens, what) in enumerate(steps):
        if what == "capture":
            with contextlib.suppress(CapacityError):
                kv.capture(f"d{number}", number, cache_filled(float(number)), torch.arange(tokens))
        elif what in ("hold", "rise") and kv._books.current:
            name, entry = list(kv._books.current.items())[tokens % len(kv._books.current)]
            tensors = kv.acquire(name, entry.generation)
            if tensors is not None and what == "rise":
                kv.release(tensors)
            elif tensors is not None:
                held.append((entry.generation, tensors))
        elif what == "release" and held:
            kv.release(held.pop(tokens % len(held))[1])
        elif what == "drop" and kv._books.current:
            kv.drop(list(kv._books.current)[tokens % len(kv._books.current)])
        kv.check()
        found = [(e.generation, e.tensors) for tier in kv._books.tiers.values() for e in tier.values()]
        for value, parts in found + [(value, tensors.parts) for value, tensors in held]:
            assert bool((parts["k"] == value).all())
            assert bool((parts["v"] == -value).all())
            assert all(any(a <= part.data_ptr() < b for a, b in inside) for part in parts.values())
