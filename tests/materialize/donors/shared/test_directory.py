"""A donor directory: who publishes what, who finds it, what is left when somebody dies; damage is never served."""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from endurance.directory_rounds import BUDGET_BYTES, make_parts, run_rounds
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend import Namespace, Prompt
from semblend.errors import StoreError
from semblend.materialize.contract import KvLayout
from semblend.materialize.donors.background import Background
from semblend.materialize.donors.directory import (
    GENERATION,
    LOOK_EVERY_S,
    UNFINISHED_S,
    DirectoryListing,
    DirectoryWatch,
    DirectoryWriter,
    DonorRecord,
    Lease,
    Publication,
    kv_name,
    record_name,
)
from semblend.materialize.donors.directory_kv import DirectoryKv, KvSignature, Publisher
from semblend.materialize.donors.store import PrivateFolder
from semblend.materialize.donors.tiers import DonorKv
from semblend.materialize.kv.rope import RopeSpec

LAYERS, HEADS, DIM = 2, 2, 16
ENGINE = Namespace(model="m", kv_dtype="float32")


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def signature(**changes):
    return KvSignature(
        **{
            "weights": "w",
            "dtype": "float32",
            "layers": LAYERS,
            "kv_heads": HEADS,
            "head_dim": DIM,
            "bits": 16,
            "rope": None,
        }
        | changes
    )


class World:
    """A folder with a clock, and engines that use it."""

    def __init__(self, path):
        self.path, self.clock = path, Clock()
        self.folder = PrivateFolder(path)

    def writer(self, budget=1 << 20, ranks=1):
        return DirectoryWriter(self.folder, budget, ranks=ranks, clock=self.clock, wall_clock=self.clock)

    def watch(self, engine=ENGINE, **options):
        options = {"every_s": 0.0, "clock": self.clock, "wall_clock": self.clock} | options
        return DirectoryWatch(self.folder, engine, **options)

    def kv(self, **changes):
        return DirectoryKv(self.folder, signature(**changes))

    def publish(self, writer, tokens, kv=None, salt="", ttl_s=0.0, nbytes=None):
        prompt = Prompt(tokens, namespace=Namespace(model="m", kv_dtype="float32", salt=salt))
        parts = make_parts(prompt.token_ids, 0)
        nbytes = sum(part.nbytes for part in parts.values()) if nbytes is None else nbytes
        record = writer.publish(prompt, "req", nbytes, ttl_s=ttl_s)
        if record is not None:
            worker = kv or self.kv()
            worker.write(record.key, record.tokens_digest, parts, None)
            if kv is None:
                worker.close()  # it must not keep the lease of a writer that dies
        return record


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path / "donors")
    yield made
    made.folder.close()


def bytes_of(tokens):
    return sum(part.nbytes for part in make_parts(np.asarray(tokens, dtype=np.int32), 0).values())


def die(writer):
    """What is left of a writer whose process was killed: its locks are free, its files are there."""
    writer._lease.close()
    for lease in writer._adopted.values():
        lease.close()


# -- publish and find ----------------------------------------------------------------------------------------------


def test_a_published_donor_is_found_and_read_byte_for_byte_by_a_neighbour(world):
    record = world.publish(world.writer(), range(50), salt="acme")
    (found,) = world.watch().poll().came
    assert (found.key, found.tokens.tolist(), found.namespace.salt) == (record.key, list(range(50)), "acme")
    held = world.kv().open(record.key)
    assert torch.equal(held.k, make_parts(record.tokens, 0)["k"])
    assert torch.equal(held.v, make_parts(record.tokens, 0)["v"])
    assert (held.donor_id, held.generation) == (record.key, GENERATION)


def test_a_donor_counts_only_when_every_rank_has_written_its_part(world):
    writer, watch = world.writer(ranks=2), world.watch(ranks=2)
    ranks = [world.kv(rank=rank, ranks=2) for rank in range(2)]
    record = writer.publish(Prompt(range(9), namespace=ENGINE), "req", 100)
    assert watch.poll().came == ()
    ranks[1].write(record.key, record.tokens_digest, make_parts(record.tokens, 1), None)
    assert watch.poll().came == ()
    ranks[0].write(record.key, record.tokens_digest, make_parts(record.tokens, 0), None)
    assert [one.key for one in watch.poll().came] == [record.key]
    for rank, kv in enumerate(ranks):
        assert torch.equal(kv.open(record.key).k, make_parts(record.tokens, rank)["k"])


def test_an_engine_with_another_number_of_ranks_does_not_find_it(world):
    world.publish(world.writer(), range(9))
    assert world.watch(ranks=2).poll().came == ()


@pytest.mark.parametrize("field", ["model", "revision", "tokenizer", "rope", "kv_dtype"])
def test_an_engine_of_another_namespace_does_not_find_it(world, field):
    world.publish(world.writer(), range(9))
    assert len(world.watch().poll().came) == 1
    other = Namespace(**{"model": "m", "kv_dtype": "float32", field: "other"})
    assert world.watch(other).poll().came == ()


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "x"},
        {"dtype": "bfloat16"},
        {"layers": 3},
        {"kv_heads": 1},
        {"head_dim": 8},
        {"bits": 8},
        {"rope": RopeSpec.plain(DIM)},
    ],
)
def test_kv_of_another_model_type_or_bits_is_refused_and_left_to_others(world, change):
    record = world.publish(world.writer(), range(9))
    with pytest.raises(StoreError, match="another model"):
        world.kv(**change).open(record.key)
    assert world.kv().open(record.key).tokens == 9


def test_the_rotation_of_dynamic_models_comes_back_bit_for_bit(world):
    rope = RopeSpec(DIM, DIM, "half", tuple(0.1 ** (i / 7) for i in range(DIM // 2)), 1.1, True)
    record = world.writer().publish(Prompt(range(9), namespace=ENGINE), "req", 100)
    kv = world.kv()
    kv.write(record.key, record.tokens_digest, make_parts(record.tokens, 0), rope)
    assert kv.open(record.key).rope == rope


def test_a_half_written_file_is_not_there(world):
    writer, kv = world.writer(), world.kv()
    record = writer.publish(Prompt(range(9), namespace=ENGINE), "req", 100)
    name = kv_name(record.key, 0, 1)

    def fill(out):
        out.write(b"half of it")
        assert not DirectoryListing(world.folder).take().find(record.key).complete
        assert world.watch().poll().came == ()
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        world.folder.write(name, fill)
    with pytest.raises(StoreError, match="gone"):
        kv.open(record.key)


# -- budget --------------------------------------------------------------------------------------------------------


def test_the_donor_that_was_not_used_for_longest_makes_room_whoever_used_it(world):
    room = 3 * (bytes_of(range(50)) + 2000)
    writer = world.writer(room)
    keys = [world.publish(writer, range(start, start + 50)).key for start in range(3)]
    for age, key in enumerate(keys):
        os.utime(world.path / record_name(key), (age, age))
    neighbour = world.writer()
    neighbour.touch(keys[0])
    world.publish(writer, range(9, 59))
    assert [writer.owns(key) for key in keys] == [True, False, True]
    assert not any(name.startswith(keys[1]) for name in world.folder.list_names())
    assert writer.used_bytes <= room


def test_a_donor_larger_than_the_budget_is_not_published_and_pushes_nothing_out(world):
    writer = world.writer(bytes_of(range(50)) + 4000)
    kept = world.publish(writer, range(50))
    assert world.publish(writer, range(500)) is None
    assert writer.owns(kept.key)


def test_a_writer_removes_only_what_it_owns(world):
    one, two = world.writer(), world.writer(bytes_of(range(50)) + 2000)
    kept = world.publish(one, range(50))
    for start in range(5):
        world.publish(two, range(start, start + 50))
    assert not two.remove(kept.key)
    assert world.kv().open(kept.key).tokens == 50


def test_who_reads_a_donor_reads_on_when_it_is_removed(world):
    writer = world.writer()
    record = world.publish(writer, range(50))
    held = world.kv().open(record.key)
    writer.remove(record.key)
    assert torch.equal(held.k, make_parts(record.tokens, 0)["k"])
    with pytest.raises(StoreError, match="gone"):
        world.kv().open(record.key)


def test_a_donor_expires_for_everybody(world):
    writer, watch = world.writer(), world.watch()
    record = world.publish(writer, range(50), ttl_s=10)
    assert len(watch.poll().came) == 1
    world.clock.now += 11
    assert watch.poll().went == (record.key,)
    assert world.watch().poll().came == ()
    writer.look_over()
    assert not writer.owns(record.key)
    assert watch.poll() == watch.poll()  # it went once


# -- damage --------------------------------------------------------------------------------------------------------


def regions(world, record):
    """A byte offset in every region of every file of a donor: at its ends, and in its middle."""
    found = []
    for name in (record_name(record.key), kv_name(record.key, 0, 1)):
        size = world.folder.stat(name).st_size
        head = [0, 7, 8, 15, 16, 40, 47, 48, 52, 60, 90, 200, 400, 600]
        found += [(name, at) for at in {*head, *range(0, size, max(1, size // 40)), size - 1} if at < size]
    return found


def test_a_flipped_bit_anywhere_is_refused_and_set_aside(world):
    writer = world.writer()
    record = world.publish(writer, range(40))
    originals = {name: (world.path / name).read_bytes() for name in world.folder.list_names() if "lease" not in name}
    tried = regions(world, record)
    assert len(tried) > 60
    for name, at in tried:
        content = bytearray(originals[name])
        content[at] ^= 1 << (at % 8)
        (world.path / name).write_bytes(content)
        came = world.watch().poll().came
        with pytest.raises(StoreError, match="damaged"):
            world.kv().open(record.key)
        assert not came or name.endswith(".kv"), f"{name} at {at}"
        assert world.watch().poll().came == (), "set aside: nobody else tries"
        for restored, good in originals.items():
            (world.path / restored).write_bytes(good)
            (world.path / restored).chmod(0o600)
        (world.path / f"{record.key}.gone").unlink()
    assert torch.equal(world.kv().open(record.key).k, make_parts(record.tokens, 0)["k"])


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.999])
def test_a_truncated_file_is_refused(world, share):
    record = world.publish(world.writer(), range(40))
    path = world.path / kv_name(record.key, 0, 1)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(StoreError, match="damaged"):
        world.kv().open(record.key)


def test_bytes_behind_the_end_are_refused(world):
    record = world.publish(world.writer(), range(40))
    with open(world.path / kv_name(record.key, 0, 1), "ab") as file:
        file.write(b"\0" * 64)
    with pytest.raises(StoreError, match="damaged"):
        world.kv().open(record.key)


def test_a_file_that_changes_after_it_was_verified_is_verified_again(world):
    record = world.publish(world.writer(), range(40))
    kv = world.kv()
    kv.open(record.key)
    path = world.path / kv_name(record.key, 0, 1)
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(StoreError, match="checksum"):
        kv.open(record.key)


def test_files_of_another_donor_in_its_place_are_refused(world):
    writer = world.writer()
    one, two = world.publish(writer, range(40)), world.publish(writer, range(1, 41))
    kv_of = [world.path / kv_name(record.key, 0, 1) for record in (one, two)]
    kv_of[0].write_bytes(kv_of[1].read_bytes())
    with pytest.raises(StoreError, match="another donor"):
        world.kv().open(one.key)


def test_kv_of_other_tokens_than_its_record_says_is_refused(world):
    writer, kv = world.writer(), world.kv()
    record = writer.publish(Prompt(range(40), namespace=ENGINE), "req", 100)
    kv.write(record.key, "of another prompt", make_parts(record.tokens, 0), None)
    with pytest.raises(StoreError, match="another prompt"):
        kv.open(record.key)


def test_the_owner_removes_what_a_reader_has_set_aside(world):
    writer = world.writer()
    record = world.publish(writer, range(40))
    world.writer().withdraw(record.key)
    assert world.watch().poll().came == ()
    world.clock.now += LOOK_EVERY_S
    writer.look_over()
    assert not any(name.startswith(record.key) for name in world.folder.list_names())
    assert writer.used_bytes == 0


def test_a_reader_that_has_no_descriptors_left_blames_nobody(world, monkeypatch):
    record = world.publish(world.writer(), range(40))
    kv = world.kv()
    monkeypatch.setattr(kv._folder, "open", lambda name: (_ for _ in ()).throw(OSError(24, "Too many open files")))
    with pytest.raises(StoreError, match="cannot be read"):
        kv.open(record.key)
    monkeypatch.undo()
    assert len(world.watch().poll().came) == 1


# -- death and adoption --------------------------------------------------------------------------------------------


def test_donors_of_a_dead_writer_stay_readable_and_count_for_the_next(world):
    dead = world.writer()
    record = world.publish(dead, range(50))
    die(dead)
    following = world.writer()
    assert following.owns(record.key)
    assert following.used_bytes >= bytes_of(range(50))
    assert world.watch().poll().came[0].key == record.key


def test_the_next_start_brings_all_that_the_dead_left_below_one_budget(world):
    for start in range(4):
        dead = world.writer()
        for number in range(3):
            world.publish(dead, range(start * 10 + number, start * 10 + number + 50))
        die(dead)
        world.path.joinpath(f"{dead.writer}-00000009.0of1.kv.abcd.part").write_bytes(b"x" * 9999)
        world.path.joinpath(f"{dead.writer}-00000009.0of1.kv").write_bytes(b"x" * 9999)
    budget = 4 * (bytes_of(range(50)) + 2000)
    following = world.writer(budget)
    total = sum(os.lstat(world.path / name).st_size for name in world.folder.list_names())
    assert total <= budget + 64 * 5, "leases have a few bytes"
    assert following.used_bytes <= budget
    assert not [name for name in world.folder.list_names() if name.endswith(".part")]
    assert all(one.complete for one in DirectoryListing(world.folder).take().keys.values())


def test_a_living_writer_is_not_adopted_not_even_when_only_its_worker_lives(world):
    writer, kv = world.writer(), world.kv()
    record = world.publish(writer, range(50), kv)
    assert not world.writer().owns(record.key)
    writer._lease.close()  # its scheduler was killed
    assert not world.writer().owns(record.key)
    kv.close()
    assert world.writer().owns(record.key)


def test_two_writers_do_not_adopt_the_same_dead_one(world):
    dead = world.writer()
    record = world.publish(dead, range(50))
    die(dead)
    assert [world.writer().owns(record.key), world.writer().owns(record.key)].count(True) == 1


def test_a_worker_whose_writer_was_adopted_writes_nothing_any_more(world):
    dead = world.writer()
    record = dead.publish(Prompt(range(9), namespace=ENGINE), "req", 100)
    die(dead)
    world.writer()
    with pytest.raises(StoreError, match="gone"):
        world.kv().write(record.key, record.tokens_digest, make_parts(record.tokens, 0), None)


def test_an_adopter_that_dies_is_adopted_with_what_it_had_adopted(world):
    dead = world.writer()
    record = world.publish(dead, range(50))
    die(dead)
    second = world.writer()
    die(second)
    assert world.writer().owns(record.key)


def test_a_writer_that_leaves_nothing_leaves_no_lease_either(world):
    world.writer().close()
    assert world.folder.list_names() == []
    dead = world.writer()
    world.publish(dead, range(50))
    die(dead)
    following = world.writer(0)
    following.close()
    assert world.folder.list_names() == []


def test_donors_outlive_a_clean_end_and_belong_to_the_next_start(world):
    writer = world.writer()
    record = world.publish(writer, range(50))
    writer.close()
    assert world.writer().owns(record.key)


def test_a_donor_whose_ranks_never_wrote_is_given_up(world):
    writer = world.writer(ranks=2)
    record = writer.publish(Prompt(range(9), namespace=ENGINE), "req", 100)
    world.clock.now += UNFINISHED_S / 2
    writer.look_over()
    assert writer.owns(record.key)
    world.clock.now += UNFINISHED_S
    writer.look_over()
    assert (writer.owns(record.key), writer.used_bytes) == (False, 0)


def test_what_a_rank_writes_after_its_donor_was_removed_does_not_stay(world):
    writer, kv = world.writer(), world.kv()
    record = writer.publish(Prompt(range(9), namespace=ENGINE), "req", 100)
    writer.remove(record.key)
    kv.write(record.key, record.tokens_digest, make_parts(record.tokens, 0), None)
    kept = world.publish(writer, range(50))
    world.clock.now += LOOK_EVERY_S
    writer.look_over()
    assert not any(name.startswith(record.key) for name in world.folder.list_names())
    assert world.kv().open(kept.key).tokens == 50


def test_foreign_names_in_the_folder_are_left_alone(world):
    for name in ("notes.txt", "x.part", "0123-1.donor", ".lease"):
        (world.path / name).write_text("mine")
    os.mkdir(world.path / "0123456789abcdef-00000001.donor")
    writer = world.writer(0)
    world.watch().poll()
    writer.close()
    assert {"notes.txt", "x.part", "0123-1.donor", ".lease"} <= set(world.folder.list_names())


# -- watching ------------------------------------------------------------------------------------------------------


def test_a_donor_comes_once_and_goes_once(world):
    writer, watch = world.writer(), world.watch()
    record = world.publish(writer, range(50))
    assert [one.key for one in watch.poll().came] == [record.key]
    assert watch.poll() == watch.poll()
    writer.remove(record.key)
    assert watch.poll().went == (record.key,)
    assert watch.poll().went == ()


def test_an_own_donor_is_shown_only_when_the_engine_has_lost_its_own_copy(world):
    writer, watch = world.writer(), world.watch()
    record = world.publish(writer, range(50))
    watch.hide(record.key)
    assert watch.poll().came == ()
    watch.unhide(record.key)
    assert [one.key for one in watch.poll().came] == [record.key]


def test_a_refused_donor_never_comes_again(world):
    writer, watch = world.writer(), world.watch()
    first = world.publish(writer, range(50))
    watch.poll()
    watch.refuse(first.key)
    second = world.publish(writer, range(1, 51))
    changes = watch.poll()
    assert ([one.key for one in changes.came], changes.went) == ([second.key], ())
    watch.refuse_all()
    assert watch.poll().came == ()


def test_an_engine_that_gets_new_weights_loses_the_donors_of_the_old_and_finds_those_of_the_new(world):
    def of(revision):
        return Namespace(model="m", kv_dtype="float32", revision=revision)

    writer, watch, keys = world.writer(), world.watch(of("old")), {}
    for start, revision in enumerate(["old", "new", "new"]):
        record = writer.publish(Prompt(range(start, 20), namespace=of(revision)), "req", 100)
        world.kv().write(record.key, record.tokens_digest, make_parts(record.tokens, 0), None)
        keys.setdefault(revision, []).append(record.key)
    assert [one.key for one in watch.poll().came] == keys["old"]
    watch.refuse(keys["new"][0])
    watch.follow(of("new"))
    changes = watch.poll()
    assert (changes.went, [one.key for one in changes.came]) == (tuple(keys["old"]), keys["new"][1:])
    watch.follow(of("new"))
    assert watch.poll() == watch.poll()


def test_a_full_folder_is_taken_in_by_pieces(world):
    writer, watch = world.writer(), world.watch(at_once=4)
    for start in range(10):
        world.publish(writer, range(start, start + 5))
    assert [len(watch.poll().came) for _ in range(4)] == [4, 4, 2, 0]


def test_the_folder_is_listed_once_a_second_and_only_when_it_has_changed(world, monkeypatch):
    listings = []
    real = world.folder.list_names
    monkeypatch.setattr(world.folder, "list_names", lambda: listings.append(1) or real())
    writer = world.writer()
    world.publish(writer, range(5))
    old = time.time() - 10
    os.utime(world.path, (old, old))  # it has not changed for a while
    listings.clear()
    watch = world.watch(every_s=1.0)
    for _ in range(50):
        watch.poll()
    assert len(listings) == 1
    world.clock.now += 5
    watch.poll()
    assert len(listings) == 1
    record = world.publish(writer, range(1, 6))
    assert record.key not in [one.key for one in watch.poll().came]  # not before a second has passed
    world.clock.now += 1
    assert [one.key for one in watch.poll().came] == [record.key]


def test_donors_are_verified_before_anybody_asks(world):
    record = world.publish(world.writer(), range(50))
    kv = world.kv()
    kv.verify_ahead(every_s=0.01)
    deadline = time.monotonic() + 300
    while record.key not in kv._verified and time.monotonic() < deadline:
        time.sleep(0.01)
    kv.close()
    assert record.key in kv._verified


def test_what_is_damaged_is_set_aside_before_anybody_asks(world):
    record = world.publish(world.writer(), range(50))
    path = world.path / kv_name(record.key, 0, 1)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert world.kv().verify_new() == 0
    assert world.watch().poll().came == ()


def test_what_cannot_be_read_here_is_not_read_again_and_again(world, monkeypatch):
    world.publish(world.writer(), range(50))
    kv, tried = world.kv(weights="other"), []
    monkeypatch.setattr(kv._folder, "open", lambda *given, real=kv._folder.open: tried.append(given) or real(*given))
    assert [kv.verify_new() for _ in range(3)] == [0, 0, 0]
    assert len(tried) == 1
    assert world.kv(ranks=2).verify_new() == 0
    assert len(tried) == 1, "it has no part for an engine with two ranks"


# -- through DonorKv -----------------------------------------------------------------------------------------------


def layout_of(tokens):
    parts = make_parts(np.asarray(tokens, dtype=np.int32), 0)
    return KvLayout.of_pool(parts["k"], parts["v"])


@pytest.mark.parametrize("bits", [16, 8])
def test_a_neighbour_acquires_what_an_engine_has_captured_and_published(world, bits):
    ours = DonorKv(0, 1 << 20, bits=bits, directory=world.kv(bits=bits))
    theirs = DonorKv(0, 1 << 20, bits=bits, directory=world.kv(bits=bits))
    tokens = list(range(70))
    ours.capture("req", 3, layout_of(tokens), torch.arange(70))
    record = world.writer().publish(Prompt(tokens, namespace=ENGINE), "req", 1000)
    publisher = Publisher(ours)
    assert publisher.submit(Publication("req", 3, record.key, record.tokens_digest))
    publisher.flush()
    assert theirs.acquire(record.key, GENERATION) is None
    assert not theirs.await_rise(record.key, GENERATION, timeout_s=300.0)
    held = theirs.acquire(record.key, GENERATION)
    mine = ours.acquire("req", 3)
    assert held.packed == (bits == 8)
    for name, part in mine.parts.items():
        assert torch.equal(held.parts[name], part)
    again = theirs.acquire(record.key, GENERATION)
    assert again.k is held.k
    assert theirs.holders == 2
    theirs.release(held)
    theirs.release(again)
    assert theirs.holders == 0
    ours.release(mine)
    publisher.close()
    theirs.check()


def test_a_published_donor_that_went_is_told_and_not_served(world):
    told = []
    kv = DonorKv(0, 1 << 20, directory=world.kv(), on_evicted=lambda *gone: told.append(gone))
    writer = world.writer()
    record = world.publish(writer, range(50))
    writer.remove(record.key)
    assert kv.acquire(record.key, GENERATION) is None
    assert told == [(record.key, GENERATION, "published")]


def test_publishing_a_donor_that_is_gone_writes_nothing(world):
    kv = DonorKv(0, 1 << 20, directory=world.kv())
    record = world.writer().publish(Prompt(range(5), namespace=ENGINE), "req", 1000)
    assert kv.publish("req", 1, record.key, record.tokens_digest) == 0
    assert not DirectoryListing(world.folder).take().find(record.key).complete


def test_a_full_disk_costs_a_publication_and_nothing_else(world, monkeypatch):
    kv = DonorKv(0, 1 << 20, directory=world.kv())
    kv.capture("req", 1, layout_of(range(9)), torch.arange(9))
    record = world.writer().publish(Prompt(range(9), namespace=ENGINE), "req", 1000)
    monkeypatch.setattr(os, "rename", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    publisher = Publisher(kv)
    publisher.submit(Publication("req", 1, record.key, record.tokens_digest))
    publisher.flush()
    monkeypatch.undo()
    publisher.submit(Publication("req", 1, record.key, record.tokens_digest))
    publisher.flush()
    publisher.close()
    assert world.kv().open(record.key).tokens == 9
    assert kv.holders == 0


# -- histories -----------------------------------------------------------------------------------------------------

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["start", "publish", "publish", "read", "remove", "crash", "stop", "touch"]),
              st.integers(0, 1000)),
    max_size=40,
)  # fmt: skip


@settings(max_examples=60)
@given(ACTIONS)
def test_in_every_history_what_is_read_is_what_was_written_and_budgets_hold(tmp_path_factory, actions):
    world = World(tmp_path_factory.mktemp("history") / "donors")
    budget = 3 * (bytes_of(range(20)) + 1500)
    living, written = [], {}
    for action, number in actions:
        world.clock.now += LOOK_EVERY_S
        if action == "start" and len(living) < 3:
            living.append((world.writer(budget), world.kv()))
        elif not living:
            continue
        writer, kv = living[number % len(living)]
        if action == "publish":
            tokens = [number, *range(number % 30)]
            record = world.publish(writer, tokens, kv, salt=str(number % 3))
            if record is not None:
                written[record.key] = (tokens, str(number % 3))
        elif action == "remove" and written:
            writer.remove(sorted(written)[number % len(written)])
        elif action == "touch" and written:
            writer.touch(sorted(written)[number % len(written)])
        elif action in ("crash", "stop"):
            living.remove((writer, kv))
            die(writer) if action == "crash" else writer.close()
            kv.close()
        for writer, _ in living:
            writer.look_over()
            assert writer.used_bytes <= budget
        reader = world.kv()
        for record in world.watch(at_once=1000).poll().came:
            tokens, salt = written[record.key]
            assert (record.tokens.tolist(), record.namespace.salt) == (tokens, salt)
            assert torch.equal(reader.open(record.key).k, make_parts(record.tokens, 0)["k"])
    following = world.writer(budget)
    held = sum(os.lstat(world.path / name).st_size for name in world.folder.list_names() if ".lease" not in name)
    assert held <= budget * (len(living) + 1)
    following.close()
    world.folder.close()


def test_engines_that_publish_evict_and_read_at_once_never_read_anything_wrong(world):
    """Threads instead of processes: each has its own leases, as processes do."""
    wrong, ends = [], threading.Event()

    def engine(seed):
        chance = random.Random(seed)
        writer, kv = world.writer(4 * (bytes_of(range(60)) + 2000)), world.kv()
        while not ends.is_set():
            world.publish(writer, [seed, *range(chance.randrange(1, 60))], kv)

    def reader():
        kv = world.kv()
        while not ends.is_set():
            for record in world.watch(at_once=1000).poll().came:
                try:
                    if not torch.equal(kv.open(record.key).k, make_parts(record.tokens, 0)["k"]):
                        wrong.append(record.key)
                except StoreError as error:
                    if "gone" not in str(error):
                        wrong.append(str(error))

    threads = [threading.Thread(target=engine, args=(seed,)) for seed in range(2)] + [threading.Thread(target=reader)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    ends.set()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_kill_9_at_random_moments_leaves_nothing_wrong_and_at_most_one_budget(tmp_path, is_long):
    rounds = run_rounds(tmp_path / "donors", 25 if is_long else 2, seed=14)
    assert not any(one.wrong for one in rounds)
    assert all(one.read for one in rounds)
    assert all(one.bytes_after <= BUDGET_BYTES for one in rounds)
    assert all(one.left_behind == 0 for one in rounds)


def test_a_record_comes_back_as_it_was_and_not_under_another_key():
    record = DonorRecord("0011223344556677-00000001", "req", ENGINE, np.arange(5, dtype=np.int32), 2, 1.5, 9.25)
    found = DonorRecord.decode(record.encode(), record.key)
    assert (found.donor_id, found.namespace, found.ranks, found.expires_unix_s) == ("req", ENGINE, 2, 9.25)
    assert found.tokens.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="another donor"):
        DonorRecord.decode(record.encode(), "0011223344556677-00000002")


def test_a_lease_is_held_until_its_process_lets_go(world):
    lease = Lease.begin(world.folder)
    assert Lease.take_over(world.folder, lease.writer) is None
    joined = Lease.join(world.folder, lease.writer)
    lease.close()
    assert Lease.take_over(world.folder, lease.writer) is None
    joined.close()
    taken = Lease.take_over(world.folder, lease.writer)
    assert taken is not None
    assert Lease.join(world.folder, lease.writer) is None
    taken.end()
    assert world.folder.list_names() == []


# -- with a thread: what it reads and removes, nobody waits for ------------------------------------------------------


@pytest.fixture
def thread():
    """A thread that does nothing until it is let go."""
    go, made = threading.Event(), Background("test")
    made.go = go
    made.submit(lambda: go.wait(300))
    yield made
    go.set()
    made.close()


def test_a_record_is_shown_once_a_thread_has_read_it(world, thread):
    writer, watch = world.writer(), world.watch(thread=thread)
    record = world.publish(writer, range(50))
    for _ in range(3):  # would wait for ever if it read
        world.clock.now += 2
        assert watch.poll().came == ()
        assert not watch.is_settled
    thread.go.set()
    thread.flush()
    assert [one.key for one in watch.poll().came] == [record.key]
    assert watch.is_settled
    assert watch.poll().came == ()


def test_a_poll_takes_few_tokens_and_the_next_one_goes_on(world, monkeypatch):
    monkeypatch.setattr("semblend.materialize.donors.directory.TOKENS_AT_ONCE", 60)
    writer, watch = world.writer(), world.watch()
    for start in range(3):
        world.publish(writer, range(start, start + 50))
    assert [(len(watch.poll().came), watch.is_settled) for _ in range(3)] == [(2, False), (1, True), (0, True)]


def test_a_record_that_was_read_for_other_weights_is_not_shown_for_new_ones(world, thread):
    writer, watch = world.writer(), world.watch(thread=thread)
    world.publish(writer, range(50))
    watch.poll()
    watch.follow(replace(ENGINE, revision="new"))
    thread.go.set()
    thread.flush()
    assert watch.poll().came == ()


def test_who_makes_room_does_not_wait_until_files_are_gone(world, thread):
    writer = DirectoryWriter(world.folder, 4_000, thread=thread, clock=world.clock, wall_clock=world.clock)
    first = world.publish(writer, range(50), nbytes=3_000)
    writer.publish(Prompt(range(60), namespace=ENGINE), "second", 3_000)
    there = DirectoryListing(world.folder)
    assert not there.take().find(first.key).complete, "nobody finds it any more"
    assert there.take().find(first.key).names, "its KV is still there"
    thread.go.set()
    thread.flush()
    assert not there.refresh().find(first.key).names


def test_files_that_a_dead_thread_left_are_removed_by_the_next_look(world):
    dead = Background("test")
    dead.close()  # takes no job: as if the process had ended before its turn
    writer = DirectoryWriter(world.folder, 1 << 20, thread=dead, clock=world.clock, wall_clock=world.clock)
    record = world.publish(writer, range(50))
    writer.remove(record.key)
    assert DirectoryListing(world.folder).take().find(record.key).names
    writer.close()
    world.writer()
    assert not DirectoryListing(world.folder).take().find(record.key).names


def test_donors_of_a_dead_writer_are_owned_once_a_thread_has_read_their_records(world, thread):
    dead = world.writer()
    record = world.publish(dead, range(50))
    dead.close()
    writer = DirectoryWriter(world.folder, 1 << 20, thread=thread, clock=world.clock, wall_clock=world.clock)
    assert not writer.owns(record.key)
    thread.go.set()
    thread.flush()
    world.clock.now += 10
    assert writer.look_over()
    assert writer.owns(record.key)
