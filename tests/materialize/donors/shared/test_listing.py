"""The names in a donor directory: only changes are read, by a thread, and the result is that of a whole listing."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend import Namespace, Prompt
from semblend.materialize.donors.directory import DirectoryListing, DirectoryWatch, DirectoryWriter, Snapshot
from semblend.materialize.donors.store import PrivateFolder

WRITERS = ("00112233aabbccdd", "ffeeddccbbaa9988")
ENGINE = Namespace(model="m")
NAMES = st.one_of(
    st.builds(
        "{}-0000000{}.{}".format,
        st.sampled_from(WRITERS),
        st.integers(0, 2),
        st.sampled_from(["donor", "gone", "0of1.kv", "0of2.kv", "1of2.kv", "2of2.kv", "0of1.kv.ab.part", "junk"]),
    ),
    st.builds("{}.{}".format, st.sampled_from(WRITERS), st.sampled_from(["lease", "lease.ab.part", "text"])),
    st.just("somebody's notes"),
)


@pytest.fixture
def folder(tmp_path):
    made = PrivateFolder(tmp_path / "donors")
    yield made
    made.close()


def publish(folder, writer, tokens, tenant="", nbytes=1000):
    """A donor whose KV file has as many bytes as it says."""
    record = writer.publish(Prompt(tokens, namespace=Namespace(model="m", tenant=tenant)), "req", nbytes)
    if record is not None:
        folder.write(f"{record.key}.0of1.kv", lambda out: out.write(b"x" * nbytes))
    return record


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sets(NAMES, max_size=12), min_size=1, max_size=6))
def test_following_changes_gives_what_a_whole_listing_gives(tmp_path_factory, histories):
    folder = PrivateFolder(tmp_path_factory.mktemp("any") / "donors")
    following = DirectoryListing(folder)
    for wanted in histories:
        for name in set(folder.list_names()) ^ wanted:
            if name in wanted:
                folder.write(name, lambda out: out.write(b""))
            else:
                folder.remove(name)
        seen, whole = following.refresh(), DirectoryListing(folder).refresh()
        for field in fields(Snapshot):
            assert getattr(seen, field.name) == getattr(whole, field.name), field.name
        assert seen.writers == whole.writers
        for ranks in (1, 2):
            assert seen.list_complete(ranks) == {key for key, one in whole.keys.items()
                                                 if one.complete and one.ranks == ranks}  # fmt: skip
    folder.close()


def test_a_snapshot_stays_as_it_was(folder):
    listing = DirectoryListing(folder)
    folder.write(f"{WRITERS[0]}-00000001.donor", lambda out: out.write(b""))
    before = listing.refresh()
    folder.write(f"{WRITERS[0]}-00000001.0of1.kv", lambda out: out.write(b""))
    folder.write(f"{WRITERS[0]}-00000002.donor", lambda out: out.write(b""))
    after = listing.refresh()
    assert (len(before.keys), before.list_complete(1)) == (1, frozenset())
    assert (len(after.keys), len(after.list_complete(1))) == (2, 1)


def test_names_that_were_there_before_are_not_read_again(folder, monkeypatch):
    from semblend.materialize.donors import directory

    for number in range(50):
        folder.write(f"{WRITERS[0]}-{number:08x}.donor", lambda out: out.write(b""))
    listing = DirectoryListing(folder)
    listing.refresh()
    read = []
    describe = directory.describe_files
    monkeypatch.setattr(directory, "describe_files", lambda names: read.append(set(names)) or describe(names))
    folder.write(f"{WRITERS[0]}-00000007.0of1.kv", lambda out: out.write(b""))
    assert listing.refresh().list_complete(1) == {f"{WRITERS[0]}-00000007"}
    assert len(read) == 1


def wait_until(condition):
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_where_a_thread_lists_the_folder_the_caller_never_does(folder, monkeypatch):
    listing, lister = DirectoryListing(folder), folder.list_names
    writer = DirectoryWriter(folder, 1 << 20, listing=listing, clock=iter(range(0, 10_000, 10)).__next__)
    watch = DirectoryWatch(folder, ENGINE, listing=listing)
    by = []
    monkeypatch.setattr(folder, "list_names", lambda: by.append(threading.get_ident()) or lister())
    listing.start(0.005)
    neighbour = DirectoryWriter(PrivateFolder(folder.path), 1 << 20)
    record = publish(folder, neighbour, range(9))
    came = []
    wait_until(lambda: came.extend(watch.poll().came) or came)
    assert writer.look_over()
    neighbour.remove(record.key)
    went = []
    wait_until(lambda: went.extend(watch.poll().went) or went)
    listing.close()
    assert ([one.key for one in came], went) == ([record.key], [record.key])
    assert by
    assert threading.get_ident() not in by


def test_a_folder_that_went_away_is_told_to_the_caller_and_ends_the_thread(folder):
    listing = DirectoryListing(folder)
    listing.start(0.005)
    os.close(folder._descriptor)
    with pytest.raises(OSError, match="descriptor"):
        wait_until(lambda: not listing.take())
    listing.close()
    folder._descriptor = -1


def test_while_nothing_changes_a_poll_looks_at_no_donor(folder):
    writer = DirectoryWriter(folder, 1 << 20)
    for start in range(40):
        publish(folder, writer, range(start, start + 9))
    watch = DirectoryWatch(folder, ENGINE, every_s=0.0)
    shown = [len(watch.poll().came) for _ in range(4)]
    assert shown == [16, 16, 8, 0], "no more than 16 records are read at once"
    watch._shown = None  # whoever looks at a donor now fails
    assert watch.poll() == type(watch.poll())()


def test_the_budget_counts_true_sizes_once_a_donor_is_whole(folder):
    writer = DirectoryWriter(folder, 1 << 20)
    record = writer.publish(Prompt(range(9), namespace=ENGINE), "req", 1000)
    folder.write(f"{record.key}.0of1.kv", lambda out: out.write(b"x" * 400))
    written = sum(os.lstat(folder.path / f"{record.key}.{end}").st_size for end in ("donor", "0of1.kv"))
    assert writer.used_bytes == written + 600
    writer._looked = -1e9
    writer.look_over()
    assert writer.used_bytes == written
    writer.remove(record.key)
    assert writer.used_bytes == 0


# -- shares --------------------------------------------------------------------------------------------------------


def held(writer, records):
    return [writer.owns(record.key) for record in records]


def test_a_burst_of_one_tenant_takes_nothing_from_a_tenant_within_its_share(folder):
    writer = DirectoryWriter(folder, 20_000)
    quiet = [publish(folder, writer, range(start, start + 9), "quiet") for start in range(4)]
    for start in range(100, 150):
        assert publish(folder, writer, range(start, start + 9), "loud") is not None
        writer.look_over()
    assert held(writer, quiet) == [True] * 4
    assert writer.used_bytes <= writer.budget_bytes


def test_the_tenant_above_its_share_gives_what_it_has_not_used_for_longest(folder):
    writer = DirectoryWriter(folder, 10_000)
    loud = [publish(folder, writer, range(start, start + 9), "loud") for start in range(7)]
    for age, record in enumerate(loud):
        writer._owned[record.key].last_used = age
        os.utime(folder.path / f"{record.key}.donor", (age, age))
    writer.touch(loud[0].key)
    publish(folder, writer, range(500, 509), "quiet", nbytes=3000)
    assert held(writer, loud) == [True, False, False, True, True, True, True]


def test_a_donor_that_does_not_fit_into_its_tenants_share_pushes_nobody_out(folder):
    writer = DirectoryWriter(folder, 10_000)
    others = [publish(folder, writer, range(start, start + 9), f"t{start}") for start in range(5)]
    assert publish(folder, writer, range(500, 509), "greedy", nbytes=9_000) is None
    assert held(writer, others) == [True] * 5


def test_adopted_donors_count_for_their_tenants(folder):
    dead = DirectoryWriter(PrivateFolder(folder.path), 1 << 20)
    quiet = publish(folder, dead, range(9), "quiet")
    loud = [publish(folder, dead, range(start, start + 9), "loud") for start in range(50, 60)]
    dead._lease.close()
    writer = DirectoryWriter(folder, 8_000)
    assert writer.owns(quiet.key)
    assert 0 < sum(held(writer, loud)) < 10
    assert writer.used_bytes <= 8_000


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(200, 3_000)), min_size=1, max_size=25))
def test_whoever_holds_its_share_or_less_loses_nothing_to_others(tmp_path_factory, published):
    budget = 9_000
    folder = PrivateFolder(tmp_path_factory.mktemp("any") / "donors")
    writer = DirectoryWriter(folder, budget)
    records = {}
    for number, (tenant, nbytes) in enumerate(published):
        before = {}
        for key, owner in records.items():
            if writer.owns(key):
                before.setdefault(owner, {})[key] = writer._owned[key].nbytes
        share = budget // len({*before, tenant})
        record = publish(folder, writer, range(number, number + 9), tenant, nbytes)
        if record is not None:
            records[record.key] = tenant
        for owner, donors in before.items():
            if owner != tenant and sum(donors.values()) <= share:
                assert all(writer.owns(key) for key in donors)
        writer._looked = -1e9
        writer.look_over()
        assert writer.used_bytes <= budget
        assert writer.used_bytes == sum(one.nbytes for one in writer._owned.values())
    writer.close()
    folder.close()
