"""A store file that is saved over, forked, locked, bit-flipped or full of expired rows: nothing true is lost."""

from __future__ import annotations

import itertools
import os
import random
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from worlds import spans_of, tokens

from semblend import Prompt, SemBlend, SemBlendConfig, SemBlendError, StoreError
from semblend.discover import journal as journal_module
from semblend.discover.journal import TOUCHES_KEPT


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def opened(path: Path, clock: Clock | None = None, **settings: object) -> SemBlend:
    config = SemBlendConfig(embedder="none", metrics=False, max_bytes=1 << 24, store=str(path), **settings)  # type: ignore[arg-type]
    return SemBlend(config, clock=clock or Clock())


def ids(sb: SemBlend) -> list[str]:
    return [donor.donor_id for donor in sb.donors()]


def test_saving_over_a_store_in_use_is_refused_and_the_store_stays_whole(tmp_path):
    path = tmp_path / "s"
    with opened(path) as sb:
        for i in range(60):
            sb.register(Prompt(tokens(i, 2000)), donor_id=str(i))
        for i in range(0, 60, 2):
            sb.forget(str(i), reason="engine")
        with pytest.raises(StoreError, match="in use"):
            sb.save(path)
        sb.register(Prompt(tokens(99, 200)), donor_id="after")
    with opened(path) as sb:
        assert len(ids(sb)) == 31


def test_a_snapshot_never_takes_the_place_of_a_device(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(StoreError, match="not a file"):
        SemBlend(SemBlendConfig(embedder="none", metrics=False)).save(pipe)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_temporary_file_of_a_killed_process_does_not_stop_the_next_snapshot(tmp_path, monkeypatch):
    sb = SemBlend(SemBlendConfig(embedder="none", metrics=False))
    sb.register(Prompt(tokens(1, 200)), donor_id="a")
    sb.save(tmp_path / "s")
    monkeypatch.setattr(journal_module, "_SNAPSHOTS", itertools.count())
    (tmp_path / f".s.{os.getpid()}-0.tmp").write_bytes((tmp_path / "s").read_bytes())
    assert sb.save(tmp_path / "s") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["s"]


def test_forgotten_tokens_leave_the_log_of_the_open_file_too(tmp_path):
    secret = np.full(500, 123_456_789)
    with opened(tmp_path / "s") as sb:
        sb.register(Prompt(secret), donor_id="secret")
        sb.forget("secret")
        needle = secret.astype("<i4").tobytes()[:400]
        assert all(needle not in file.read_bytes() for file in tmp_path.iterdir())


def test_clearing_takes_expired_donors_out_of_memory_and_file(tmp_path):
    clock, path = Clock(), tmp_path / "s"
    with opened(path, clock) as sb:
        sb.register(Prompt(tokens(1, 200)), donor_id="a", ttl_s=5)
        clock.now += 10
        assert ids(sb) == []
        assert sb.clear() == 1
        assert sb.stats().donors == 0
    assert sqlite3.connect(path).execute("SELECT count(*) FROM donors").fetchone() == (0,)


def test_rows_that_expired_while_nobody_ran_leave_the_file_and_crowd_out_nobody(tmp_path):
    clock, path = Clock(), tmp_path / "s"
    with opened(path, clock) as sb:
        sb.register(Prompt(tokens(0, 200)), donor_id="keeps")
        for i in range(1, 6):
            clock.now += 1
            sb.register(Prompt(tokens(i, 200)), donor_id=str(i), ttl_s=60)
    clock.now += 100
    with opened(path, clock, max_donors=3) as sb:
        assert ids(sb) == ["keeps"]
    assert sqlite3.connect(path).execute("SELECT count(*) FROM donors").fetchone() == (1,)


def test_an_expired_donor_in_memory_does_not_keep_a_refresh_from_taking_in_others(tmp_path):
    clock, path = Clock(), tmp_path / "s"
    with opened(path, clock) as ours, opened(path, clock) as theirs:
        ours.register(Prompt(tokens(1, 200)), donor_id="a", ttl_s=5)
        theirs.register(Prompt(tokens(2, 200)), donor_id="b")
        clock.now += 10
        assert ours.refresh() == 1
        assert spans_of(ours.lookup(Prompt(tokens(2, 200))))


def test_a_file_that_is_locked_costs_recency_and_neither_claims_nor_pins(tmp_path):
    with opened(tmp_path / "s") as sb:
        for i in range(TOUCHES_KEPT + 4):
            sb.register(Prompt(tokens(i, 64)), donor_id=str(i))
        sb._journal._db.execute("PRAGMA busy_timeout = 1")
        other = sqlite3.connect(tmp_path / "s", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        for i in range(TOUCHES_KEPT + 4):
            plan = sb.lookup(Prompt(tokens(i, 64)))
            assert sb.claim(plan, f"r{i}") is plan
            sb.release(f"r{i}")
        other.execute("ROLLBACK")
        other.close()
        assert not any(donor.pinned for donor in sb.donors())


FORK = """
import os, sys
from semblend import Prompt, SemBlend, SemBlendConfig, StoreError
sb = SemBlend(SemBlendConfig(embedder="none", metrics=False, store=sys.argv[1]))
sb.register(Prompt(range(100)), donor_id="before")
child = os.fork()
if child == 0:
    try:
        sb.register(Prompt(range(200, 300)), donor_id="child")
    except StoreError as error:
        sb.close()
        os._exit(7 if error.hint else 1)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
sb.register(Prompt(range(300, 400)), donor_id="parent")
sb.close()
"""


def test_a_forked_child_is_told_to_open_the_file_itself(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(tmp_path / "s")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    with opened(tmp_path / "s") as sb:
        assert ids(sb) == ["before", "parent"]


def test_an_empty_file_is_made_private_before_tokens_go_in(tmp_path):
    path = tmp_path / "s"
    path.touch(mode=0o644)
    with opened(path) as sb:
        sb.register(Prompt(tokens(1, 200)), donor_id="a")
        assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}


def test_whatever_bits_flip_only_true_donors_are_served_or_the_file_is_refused(tmp_path):
    with opened(tmp_path / "good") as sb:
        for i in range(30):
            sb.register(Prompt(tokens(i, 150 + i)), donor_id=f"donor-{i}")
    good, chance, whole = (tmp_path / "good").read_bytes(), random.Random(7), 0
    for attempt in range(150):
        damaged = bytearray(good)
        for _ in range(chance.choice((1, 1, 3, 20))):
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        path = tmp_path / f"damaged-{attempt}"
        path.write_bytes(damaged)
        try:
            with opened(path) as sb:
                for donor in sb.donors():
                    truth = tokens(int(donor.donor_id.removeprefix("donor-")), 150 + int(donor.donor_id[6:]))
                    assert np.array_equal(sb.donor_tokens(donor.donor_id), truth)
                sb.register(Prompt(tokens(99, 100)), donor_id="new")
                whole += 1
        except SemBlendError:
            continue
    assert whole > 75  # one bad row must not cost the others


def test_a_damaged_counter_never_hands_out_a_generation_again(tmp_path):
    path = tmp_path / "s"
    with opened(path) as sb:
        first = sb.register(Prompt(tokens(1, 100)), donor_id="a")
    db = sqlite3.connect(path)
    db.execute("UPDATE counters SET value = 0")
    db.commit()
    db.close()
    with opened(path) as sb:
        assert sb.register(Prompt(tokens(2, 100)), donor_id="b").generation > first.generation
        assert ids(sb) == ["a", "b"]
