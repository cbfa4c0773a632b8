"""Donor KV: what is held stays, what does not fit moves down or goes and is told, what is damaged is never served."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend.errors import CapacityError, InputError, StoreError
from semblend.materialize.contract import KvLayout
from semblend.materialize.donors import store
from semblend.materialize.donors.tiers import DonorKv
from semblend.materialize.kv.rope import RopeSpec

LAYERS, HEADS, DIM = 2, 1, 4
TOKEN_BYTES = 2 * LAYERS * HEADS * DIM * 4


def cache_filled(value: float, slots: int = 32) -> KvLayout:
    shape = (LAYERS, slots, HEADS, DIM)
    return KvLayout.of_pool(torch.full(shape, value), torch.full(shape, -value))


def capture(kv, donor_id, generation, tokens=4, value=None, tenant=""):
    """The writer is given the time to write what there is, so that what leaves memory next is on the disk."""
    value = float(generation) if value is None else value
    handle = kv.capture(donor_id, generation, cache_filled(value), torch.arange(tokens), tenant=tenant)
    kv.flush()
    return handle


def read_back(kv, donor_id, generation):
    """Held, also where it has to be read from the disk first."""
    held = kv.acquire(donor_id, generation)
    if held is None:
        kv.flush()
        held = kv.acquire(donor_id, generation)
    return held


def holds_value(tensors, value):
    return bool((tensors.k == value).all() and (tensors.v == -value).all())


def test_a_capture_is_a_copy_of_the_named_slots_in_their_order():
    pool = torch.randn(2, LAYERS, 32, HEADS, DIM)
    kv = DonorKv(0, 10_000)
    slots = torch.tensor([9, 3, 30])
    expected = pool[0][:, slots].clone()
    handle = kv.capture("d", 1, KvLayout.of_pool(*pool), slots)
    pool.zero_()
    held = kv.acquire("d", 1)
    assert (handle.tokens, handle.tier, handle.nbytes) == (3, "host", 3 * TOKEN_BYTES)
    assert torch.equal(held.k, expected)
    assert held.tokens == 3


def test_another_generation_or_an_unknown_donor_is_not_found():
    kv = DonorKv(0, 10_000)
    capture(kv, "d", 1)
    assert kv.acquire("d", 2) is None
    assert kv.acquire("e", 1) is None
    capture(kv, "d", 2)
    assert kv.acquire("d", 1) is None
    assert holds_value(kv.acquire("d", 2), 2)


def test_what_is_replaced_or_dropped_while_held_stays_readable_until_it_is_released():
    told = []
    kv = DonorKv(0, 10_000, on_evicted=lambda *gone: told.append(gone))
    capture(kv, "d", 1)
    held = kv.acquire("d", 1)
    capture(kv, "d", 1, value=7.0)  # the same generation again: still another copy
    assert holds_value(held, 1)
    newer = kv.acquire("d", 1)
    assert holds_value(newer, 7)
    assert kv.drop("d")
    assert kv.used_bytes["host"] == 8 * TOKEN_BYTES
    kv.check()
    kv.release(held)
    kv.release(newer)
    assert kv.used_bytes["host"] == 0
    assert not kv.drop("d")
    assert told == []  # replacing and dropping are the caller's own acts
    kv.check()


def test_a_hold_is_given_back_once():
    kv = DonorKv(0, 10_000)
    capture(kv, "d", 1)
    held = kv.acquire("d", 1)
    kv.release(held)
    with pytest.raises(InputError, match="not held"):
        kv.release(held)


def test_the_least_recently_used_goes_first_and_is_told():
    told = []
    kv = DonorKv(0, 8 * TOKEN_BYTES, on_evicted=lambda *gone: told.append(gone))
    capture(kv, "a", 1)
    capture(kv, "b", 2)
    kv.release(kv.acquire("a", 1))
    capture(kv, "c", 3)
    assert told == [("b", 2, "budget")]
    assert kv.holds("a", 1)
    assert not kv.holds("b", 2)


def test_a_flood_of_one_tenant_leaves_the_neighbour_its_share_of_every_tier(tmp_path):
    told = []
    kv = DonorKv(
        0,
        8 * TOKEN_BYTES,
        tmp_path,
        budget_disk_bytes=8 * TOKEN_BYTES,
        on_evicted=lambda donor, *_: told.append(donor),
    )
    for number in range(4):
        capture(kv, f"q{number}", number, tenant="quiet")  # alone it may have both tiers
    for number in range(20):
        capture(kv, f"l{number}", 10 + number, tenant="loud")
        kv.check()
    assert [kv.holds(f"q{number}", number) for number in range(4)] == [False, False, True, True]  # a share
    assert told == ["q0", "q1", *(f"l{number}" for number in range(19))]  # then the flood's own, oldest first


def test_a_tenant_cannot_push_out_others_by_holding_its_own():
    kv = DonorKv(0, 8 * TOKEN_BYTES)
    capture(kv, "q", 1, tenant="quiet")
    capture(kv, "l", 2, tenant="loud")
    held = kv.acquire("l", 2)
    with pytest.raises(CapacityError):
        capture(kv, "m", 3, tenant="loud")
    assert kv.holds("q", 1)
    kv.release(held)
    capture(kv, "m", 3, tenant="loud")
    assert (kv.holds("q", 1), kv.holds("l", 2)) == (True, False)


def test_held_donors_are_not_evicted_even_if_a_new_one_then_fits_nowhere():
    kv = DonorKv(0, 8 * TOKEN_BYTES)
    capture(kv, "a", 1)
    capture(kv, "b", 2)
    held = [kv.acquire("a", 1), kv.acquire("b", 2)]
    with pytest.raises(CapacityError, match="fits in no tier"):
        capture(kv, "c", 3)
    assert holds_value(held[0], 1)
    assert holds_value(held[1], 2)
    kv.check()


def test_a_donor_sinks_from_device_to_host_to_disk_and_rises_when_it_is_used(tmp_path):
    kv = DonorKv(4 * TOKEN_BYTES, 4 * TOKEN_BYTES, tmp_path, budget_disk_bytes=16 * TOKEN_BYTES, device_type="cpu")
    tiers = [capture(kv, name, 1, value=float(i)).tier for i, name in enumerate("abc")]
    assert tiers == ["device"] * 3
    assert kv.used_bytes == {"device": 4 * TOKEN_BYTES, "host": 4 * TOKEN_BYTES, "disk": 8 * TOKEN_BYTES}
    assert len(list(tmp_path.rglob("*.kv"))) == 2  # of "a", and a copy of "b", which leaves host memory next
    lowest = read_back(kv, "a", 1)  # rises to the host, then to the device; "c" sinks to the host, "b" to the disk
    assert holds_value(lowest, 0)
    assert kv.holds("b", 1)
    assert kv.holds("c", 1)
    kv.check()
    kv.release(lowest)
    kv.close()
    assert list(tmp_path.rglob("*.kv")) == []


def test_a_donor_on_disk_stays_there_while_what_is_held_leaves_it_no_room_in_memory(tmp_path):
    kv = DonorKv(0, 4 * TOKEN_BYTES, tmp_path, budget_disk_bytes=1 << 20)
    capture(kv, "a", 1)
    capture(kv, "b", 2)
    above = kv.acquire("b", 2)
    assert read_back(kv, "a", 1) is None
    assert kv.holds("a", 1)
    kv.flush()
    kv.release(above)
    assert holds_value(read_back(kv, "a", 1), 1)
    kv.check()


def test_asking_for_a_donor_on_disk_reads_nothing_and_says_that_it_is_on_its_way(tmp_path):
    kv = DonorKv(0, 4 * TOKEN_BYTES, tmp_path, budget_disk_bytes=1 << 20)
    capture(kv, "a", 1)
    capture(kv, "b", 2)
    disk = SlowDisk(kv, hold=True)
    assert kv.acquire("a", 1) is None  # would wait for ever if it read
    assert kv.is_rising("a", 1)
    assert kv.await_rise("a", 1, timeout_s=0.0)
    assert kv.acquire("a", 1) is None
    disk.go.set()
    assert not kv.await_rise("a", 1, timeout_s=300.0)
    assert holds_value(kv.acquire("a", 1), 1)
    kv.close()


def test_a_donor_that_is_dropped_while_it_is_read_leaves_nothing(tmp_path):
    kv = DonorKv(0, 4 * TOKEN_BYTES, tmp_path, budget_disk_bytes=1 << 20)
    capture(kv, "a", 1)
    capture(kv, "b", 2)
    disk = SlowDisk(kv, hold=True)
    kv.acquire("a", 1)
    assert kv.drop("a")
    disk.go.set()
    kv.check()
    assert not kv.holds("a", 1)
    assert kv.used_bytes["host"] + kv.used_bytes["disk"] <= 8 * TOKEN_BYTES
    kv.close()


def test_a_donor_that_the_writer_did_not_get_to_is_lost_when_it_leaves_memory_and_nobody_waits(tmp_path):
    told = []
    kv = DonorKv(0, 8 * TOKEN_BYTES, tmp_path, budget_disk_bytes=1 << 20, on_evicted=lambda *gone: told.append(gone))
    disk = SlowDisk(kv, hold=True)
    for number, name in enumerate("abc"):  # "a" is being written all the time, and held for it
        kv.capture(name, number, cache_filled(float(number)), torch.arange(4))
        assert disk.writing.wait(300)
    assert told == [("b", 1, "budget")]
    disk.go.set()
    kv.check()
    assert kv.holds("a", 0)
    assert kv.holds("c", 2)
    kv.close()


def test_copies_of_what_lies_in_memory_leave_half_of_the_disk_to_what_does_not(tmp_path):
    kv = DonorKv(0, 16 * TOKEN_BYTES, tmp_path, budget_disk_bytes=16 * TOKEN_BYTES)
    for number in range(4):
        capture(kv, f"d{number}", number)
    assert kv.used_bytes["disk"] == 8 * TOKEN_BYTES
    for number in range(4, 12):
        capture(kv, f"d{number}", number)
    kv.check()
    assert [number for number in range(12) if kv.holds(f"d{number}", number)] == [6, 7, 8, 9, 10, 11]
    kv.close()


def test_a_disk_without_memory_to_read_into_is_refused(tmp_path):
    with pytest.raises(InputError, match="need memory"):
        DonorKv(0, 0, tmp_path, budget_disk_bytes=1 << 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_donor_comes_back_from_disk_bit_for_bit(tmp_path, dtype):
    kv = DonorKv(0, 1 << 12, tmp_path, budget_disk_bytes=1 << 20)
    pool = torch.randn(2, LAYERS, 40, HEADS, DIM).to(dtype)
    kv.capture("a", 1, KvLayout.of_pool(*pool), torch.arange(37))
    kv.flush()
    kv.capture("b", 1, cache_filled(1.0, 64), torch.arange(60))
    kv.flush()
    held = read_back(kv, "a", 1)
    assert torch.equal(held.k, pool[0][:, :37])
    assert torch.equal(held.v, pool[1][:, :37])
    assert held.k.dtype == dtype


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-10])


def _flip(path):
    content = bytearray(path.read_bytes())
    content[-40] ^= 1
    path.write_bytes(content)


def _flip_header(path):
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [_truncate, _flip, _flip_header, lambda p: p.unlink(), lambda p: p.write_bytes(b"")])
def test_a_damaged_file_is_dropped_and_told_never_served(tmp_path, damage):
    told = []
    kv = DonorKv(0, 4 * TOKEN_BYTES, tmp_path, budget_disk_bytes=1 << 20, on_evicted=lambda *gone: told.append(gone))
    capture(kv, "a", 1)
    capture(kv, "b", 2)
    damage(min(tmp_path.rglob("*.kv")))
    assert read_back(kv, "a", 1) is None
    assert told == [("a", 1, "corrupt")]
    assert not kv.holds("a", 1)
    kv.check()


def test_donors_lost_to_a_full_disk_are_told_once_a_minute(tmp_path, monkeypatch):
    told, now = [], [0.0]
    kv = DonorKv(
        0, 4 * TOKEN_BYTES, tmp_path, budget_disk_bytes=1 << 20, on_disk_failure=told.append, clock=lambda: now[0]
    )

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write_donor_file", refuse)
    for number, name in enumerate("abcd"):
        capture(kv, name, number)
    now[0] = 61.0
    capture(kv, "e", 5)
    lost = f"donors not kept: {tmp_path} cannot be written to: No space left on device"
    assert told == [f"1 {lost}", f"4 {lost}"]
    assert [kv.holds(name, number) for name, number in (("a", 0), ("d", 3), ("e", 5))] == [False, False, True]
    kv.check()


def test_a_file_of_another_donor_in_its_place_is_not_served(tmp_path):
    kv = DonorKv(0, 4 * TOKEN_BYTES, tmp_path, budget_disk_bytes=1 << 20)
    for number, name in enumerate("abc"):
        capture(kv, name, number)
    first, second = sorted(tmp_path.rglob("*.kv"))[:2]
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    assert read_back(kv, "a", 0) is None
    assert read_back(kv, "b", 1) is None
    assert not kv.holds("a", 0)
    assert not kv.holds("b", 1)


FULL_DISK = """
import resource, sys, torch
from semblend.materialize.contract import KvLayout
from semblend.materialize.donors.tiers import DonorKv
told = []
size = 2 * 2 * 64 * 4 * 4
kv = DonorKv(0, size, sys.argv[1], budget_disk_bytes=1 << 20, on_evicted=lambda *gone: told.append(gone))
pool = KvLayout.of_pool(torch.ones(2, 64, 1, 4), torch.ones(2, 64, 1, 4))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
kv.capture("a", 1, pool, torch.arange(64))
kv.flush()
kv.capture("b", 2, pool, torch.arange(64))
kv.check()
assert told == [("a", 1, "budget")], told
assert kv.acquire("a", 1) is None and kv.acquire("b", 2) is not None
assert not list(kv._disk.files())
print("lives")
"""


def test_a_full_disk_costs_the_donor_that_should_go_there_and_nothing_else(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.strip() == "lives", done.stderr


def test_files_are_private_and_those_of_a_dead_process_are_swept(tmp_path):
    left = "import sys, os; from semblend.materialize.donors.store import DiskTier; DiskTier(sys.argv[1]); os._exit(0)"
    subprocess.run([sys.executable, "-c", left, str(tmp_path)], check=True, timeout=300)
    (orphan,) = tmp_path.iterdir()
    kv = DonorKv(0, 4 * TOKEN_BYTES, tmp_path, budget_disk_bytes=1 << 20)
    other = DonorKv(0, 4 * TOKEN_BYTES, tmp_path, budget_disk_bytes=1 << 20)  # sweeps too, and spares the living
    capture(kv, "a", 1)
    assert not orphan.exists()
    (file,) = tmp_path.rglob("*.kv")
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    kv.close()
    other.close()


def test_a_sweep_takes_what_died_before_it_had_a_lock_and_follows_no_link(tmp_path):
    parent, elsewhere = tmp_path / "kv", tmp_path / "elsewhere"
    (parent / "donor-kv-died-early").mkdir(parents=True)
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    (elsewhere / "precious").touch()
    (parent / "donor-kv-planted").symlink_to(elsewhere)
    (parent / "not-ours").mkdir()
    kv = DonorKv(0, 4 * TOKEN_BYTES, parent, budget_disk_bytes=1 << 20)
    kv.close()
    assert sorted(path.name for path in parent.iterdir()) == ["donor-kv-planted", "not-ours"]
    assert (elsewhere / "precious").exists()


def test_processes_that_start_together_do_not_sweep_each_other(tmp_path):
    script = (
        "import sys; from semblend.materialize.donors.store import DiskTier; "
        "made = [DiskTier(sys.argv[1]) for _ in range(20)]; "
        "assert all(tier.folder.exists() for tier in made); [tier.close() for tier in made]"
    )
    started = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)]) for _ in range(3)]
    assert [process.wait(120) for process in started] == [0, 0, 0]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be kept"):
        DonorKv(0, 1, tmp_path / "file", budget_disk_bytes=1)


operations = st.lists(
    st.tuples(st.sampled_from(["capture", "acquire", "release", "drop"]), st.sampled_from("abcd"), st.integers(1, 6)),
    max_size=40,
)


@given(operations)
def test_one_tier_behaves_as_a_plain_lru_of_bytes(steps):
    told, plain, budget = [], OrderedDict(), 10
    kv = DonorKv(0, budget * TOKEN_BYTES, on_evicted=lambda donor, generation, why: told.append((donor, generation)))
    gone = []
    for generation, (what, donor, tokens) in enumerate(steps):
        if what == "capture":
            plain.pop(donor, None)
            while sum(size for _, size in plain.values()) + tokens > budget:
                victim, (old, _) = plain.popitem(last=False)
                gone.append((victim, old))
            plain[donor] = (generation, tokens)
            capture(kv, donor, generation, tokens)
        elif what == "drop":
            assert kv.drop(donor) == (plain.pop(donor, None) is not None)
        else:
            seen = plain.get(donor, (-1, 0))[0]
            held = kv.acquire(donor, seen)
            assert (held is not None) == (donor in plain)
            if held is not None:
                assert holds_value(held, seen)
                kv.release(held)
                plain.move_to_end(donor)
        kv.check()
        assert told == gone
        assert {d for d in "abcd" if d in plain} == {d for d in "abcd" if kv.holds(d, plain.get(d, (-1, 0))[0])}


@settings(max_examples=40, deadline=None)
@given(operations)
def test_three_tiers_lose_nothing_in_silence_and_never_serve_another_donors_bytes(tmp_path_factory, steps):
    folder = tmp_path_factory.mktemp("kv")
    known, held, told = {}, [], []
    budgets = {"device": 6 * TOKEN_BYTES, "host": 4 * TOKEN_BYTES, "disk": 5 * TOKEN_BYTES}
    kv = DonorKv(
        budgets["device"],
        budgets["host"],
        folder,
        budget_disk_bytes=budgets["disk"],
        device_type="cpu",
        on_evicted=lambda donor, generation, why: told.append((donor, generation)),
    )
    for generation, (what, donor, tokens) in enumerate(steps):
        if what == "capture":
            known.pop(donor, None)
            try:
                capture(kv, donor, generation, tokens)
                known[donor] = generation
            except CapacityError:
                assert held
        elif what == "acquire" and donor in known:
            found = read_back(kv, donor, known[donor])
            if found is None:  # on the disk, and what is held leaves it no room in memory
                assert held or (donor, known[donor]) in told
            else:
                held.append(found)
                assert holds_value(found, known[donor])
        elif what == "release" and held:
            tensors = held.pop(tokens % len(held))
            assert holds_value(tensors, tensors.generation)
            kv.release(tensors)
        elif what == "drop":
            assert kv.drop(donor) == (known.pop(donor, None) is not None)
        for lost, old in told:
            assert known.get(lost) == old
            del known[lost]
        told.clear()
        kv.check()
        assert all(kv.holds(name, seen) for name, seen in known.items())
        assert len(kv) == len(known)
    kv.close()


def test_threads_that_capture_acquire_and_drop_at_once_leave_the_tiers_in_order(tmp_path):
    kv = DonorKv(6 * TOKEN_BYTES, 6 * TOKEN_BYTES, tmp_path, budget_disk_bytes=6 * TOKEN_BYTES, device_type="cpu")
    problems = []
    start = threading.Barrier(4)

    def work(number):
        start.wait()
        try:
            for step in range(60):
                donor, generation = "abcdefgh"[(step * 3 + number) % 8], step * 4 + number
                try:
                    capture(kv, donor, generation)
                except CapacityError:
                    continue
                tensors = kv.acquire(donor, generation)
                if tensors is not None:
                    if not holds_value(tensors, generation):
                        problems.append((donor, generation))
                    kv.release(tensors)
                if step % 7 == 0:
                    kv.drop(donor)
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert problems == []
    kv.check()
    kv.close()


def test_a_callback_may_ask_the_store_itself():
    seen = []
    kv = DonorKv(0, 4 * TOKEN_BYTES, on_evicted=lambda donor, generation, why: seen.append(kv.holds(donor, generation)))
    capture(kv, "a", 1)
    capture(kv, "b", 2)
    assert seen == [False]


# -- locks, memory, rotations --------------------------------------------------------------------------------------


class SlowDisk:
    """Stands before a DiskTier: notes whether the books were locked, and holds a write until it is let go."""

    def __init__(self, kv: DonorKv, *, hold: bool = False) -> None:
        self._kv, self._inner = kv, kv._disk
        self.locked: list[str] = []
        self.writing, self.go = threading.Event(), threading.Event()
        if not hold:
            self.go.set()
        kv._disk = self

    def _note(self, verb: str) -> None:
        if self._kv._lock.locked():
            self.locked.append(verb)

    def write(self, *given):
        self._note("write")
        self.writing.set()
        assert self.go.wait(300)
        return self._inner.write(*given)

    @property
    def folder(self):
        return self._inner.folder

    def load(self, *given):
        self._note("load")
        assert self.go.wait(300)
        return self._inner.load(*given)

    def remove(self, file):
        self._note("remove")
        return self._inner.remove(file)

    def files(self):
        self._note("files")
        return self._inner.files()

    def close(self):
        self._inner.close()


def test_no_file_is_touched_while_the_tiers_are_locked(tmp_path):
    kv = DonorKv(0, 8 * TOKEN_BYTES, tmp_path, budget_disk_bytes=16 * TOKEN_BYTES)
    disk = SlowDisk(kv)
    for generation, donor in enumerate("abcdea", start=1):  # sink, fall out, be replaced
        capture(kv, donor, generation)
    held = read_back(kv, "c", 3)  # rises from disk
    assert held is not None
    kv.drop("c")
    kv.release(held)
    kv.drop("a")
    kv.check()
    assert disk.locked == []
    kv.close()


def test_nobody_waits_for_a_disk_that_is_being_written_to(tmp_path):
    kv = DonorKv(0, 8 * TOKEN_BYTES, tmp_path, budget_disk_bytes=8 * TOKEN_BYTES)
    disk = SlowDisk(kv, hold=True)
    kv.capture("written", 1, cache_filled(1.0), torch.arange(4))
    assert disk.writing.wait(300)  # from here on every call below would wait for ever if it needed the disk
    kv.capture("stays", 2, cache_filled(2.0), torch.arange(4))
    assert kv.holds("stays", 2)
    for name, value in (("stays", 2), ("written", 1)):
        held = kv.acquire(name, value)
        assert holds_value(held, float(value))
        kv.release(held)
    kv.capture("new", 3, cache_filled(3.0), torch.arange(4))  # "stays" goes: it has no file
    assert kv.drop("written")  # the very donor that is being written
    disk.go.set()
    kv.check()  # the file of the dropped donor is gone, too
    assert kv.acquire("written", 1) is None
    assert kv.holds("new", 3)
    assert kv.used_bytes["disk"] == 4 * TOKEN_BYTES
    kv.close()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("cuda"), MemoryError("host"), RuntimeError("pinned")])
def test_no_memory_for_a_copy_costs_that_donor_and_nothing_else(monkeypatch, error):
    kv = DonorKv(0, 40 * TOKEN_BYTES)
    capture(kv, "kept", 1)

    def full(*given):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(kv.memory, "take", full)
        with pytest.raises(CapacityError, match="no memory"):
            capture(kv, "new", 2)
    kv.check()
    held = kv.acquire("kept", 1)
    assert holds_value(held, 1.0)
    kv.release(held)
    assert capture(kv, "new", 3).tier == "host"


@pytest.mark.parametrize("error", [MemoryError("no"), RuntimeError("no"), KeyError("a bug")])
def test_a_move_that_fails_in_any_way_leaves_the_tiers_in_order(tmp_path, monkeypatch, error):
    told = []
    kv = DonorKv(
        4 * TOKEN_BYTES, 8 * TOKEN_BYTES, tmp_path, budget_disk_bytes=8 * TOKEN_BYTES, device_type="cpu",
        on_evicted=lambda *gone: told.append(gone),
    )  # fmt: skip
    capture(kv, "a", 1)

    def fails(*given):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(kv.memory, "move", fails)
        try:
            capture(kv, "b", 2)  # "a" would have to sink
        except KeyError:
            pass
    kv.check()
    assert kv.holders == 0
    assert kv.holds("a", 1) or told[0][:2] == ("a", 1)
    capture(kv, "c", 3)
    kv.check()
    kv.close()


def test_a_donor_keeps_the_rotation_that_it_was_computed_with(tmp_path):
    usual, longer = RopeSpec.plain(DIM), RopeSpec.plain(DIM, theta=20_000.0)
    kv = DonorKv(0, 4 * TOKEN_BYTES, tmp_path, budget_disk_bytes=8 * TOKEN_BYTES, rope=usual)
    capture(kv, "a", 1)
    kv.capture("b", 2, cache_filled(2.0), torch.arange(4), longer)  # and "a" goes to disk
    kv.flush()  # "b" has a file too, and may make room
    held = kv.acquire("b", 2)
    assert held.rope == longer
    kv.release(held)
    assert read_back(kv, "a", 1).rope == usual
    kv.close()


@pytest.mark.parametrize("eviction", ["lfu", "slru", "lru2", "adaptive"])
def test_a_donor_that_is_taken_again_and_again_outlives_newer_ones_under_every_other_policy(eviction):
    kv = DonorKv(0, 4 * 32 * TOKEN_BYTES, eviction=eviction)
    capture(kv, "famous", 0, tokens=32)
    for number in range(1, 120):
        if number % 6 == 0 or number < 30:  # then by age it would be gone each time
            kv.release(kv.acquire("famous", 0))
        capture(kv, f"d{number}", number, tokens=32)
        kv.check()
    assert kv.holds("famous", 0)
    assert len(kv) == 4


def test_what_is_held_never_leaves_whatever_the_policy_values(monkeypatch):
    monkeypatch.setattr("semblend.eviction.policy.Lfu.price", lambda _self, keys: [-float(len(keys))] * len(keys))
    kv = DonorKv(0, 2 * 4 * TOKEN_BYTES, eviction="lfu")
    capture(kv, "held", 0)
    held = kv.acquire("held", 0)
    for number in range(1, 9):
        capture(kv, f"d{number}", number)
    assert kv.holds("held", 0)
    assert holds_value(held, 0.0)
    kv.release(held)
    kv.check()


def test_a_move_between_tiers_is_no_use(tmp_path):
    kv = DonorKv(0, 2 * 4 * TOKEN_BYTES, tmp_path, budget_disk_bytes=1 << 20, eviction="lfu")
    for number in range(4):
        capture(kv, f"d{number}", number)
    assert [kv._books.policy.price([kv._books.current[f"d{n}"].key])[0] for n in range(4)] == [1.0] * 4
    kv.release(read_back(kv, "d0", 0))  # it rises, another one sinks
    assert [kv._books.policy.price([kv._books.current[f"d{n}"].key])[0] for n in range(4)] == [2.0, 1.0, 1.0, 1.0]
    kv.close()


def test_a_failing_policy_leaves_donors_that_leave_by_age_and_says_so_once(monkeypatch):
    def fail(*_):
        raise RuntimeError("out of order")

    monkeypatch.setattr("semblend.eviction.policy.Lfu.price", fail)
    failures = []
    kv = DonorKv(0, 2 * 4 * TOKEN_BYTES, eviction="lfu", on_policy_failure=failures.append)
    for number in range(5):
        capture(kv, f"d{number}", number)
    assert [kv.holds(f"d{n}", n) for n in range(5)] == [False, False, False, True, True]
    assert len(failures) == 1


def test_a_donor_that_fits_nowhere_is_forgotten_by_the_policy_too():
    kv = DonorKv(0, 4 * TOKEN_BYTES, eviction="lfu")
    with pytest.raises(CapacityError):
        capture(kv, "large", 1, tokens=9)
    assert kv._books.policy._policy._uses == {}
