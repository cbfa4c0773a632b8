"""Donors that outlive the process: whole, true, private, and nothing lost when the disk says no."""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from worlds import spans_of, tokens

from semblend import Namespace, Prompt, SemBlend, SemBlendConfig, StoreError
from semblend.confirm.sinks import MemorySink


def opened(path: Path, **settings: object) -> SemBlend:
    return SemBlend(SemBlendConfig(embedder="none", metrics=False, store=str(path), **settings))  # type: ignore[arg-type]


def ids(sb: SemBlend) -> list[str]:
    return [donor.donor_id for donor in sb.donors()]


def test_donors_come_back_with_tokens_namespace_generation_and_order(tmp_path):
    path = tmp_path / "donors.semblend"
    spaced = Namespace(tenant="a", salt="pepper")
    with opened(path) as sb:
        for i in range(5):
            sb.register(Prompt(tokens(i, 200), namespace=spaced), donor_id=str(i))
        sb.forget("3")
        sb.claim(sb.lookup(Prompt(tokens(0, 200), namespace=spaced)), "r")
        before = sb.donors()
    with opened(path) as sb:
        assert [d.donor_id for d in sb.donors()] == ["1", "2", "4", "0"]
        assert {d.generation for d in sb.donors()} == {d.generation for d in before}
        plan = sb.lookup(Prompt(tokens(2, 200), namespace=spaced))
        assert spans_of(plan)[0].donor_id == "2"
        newest = sb.register(Prompt(tokens(9, 200)), donor_id="9")
        assert newest.generation > max(d.generation for d in before)


def test_a_smaller_budget_keeps_the_most_recent_of_what_fits(tmp_path):
    path = tmp_path / "s"
    with opened(path) as sb:
        for i in range(6):
            sb.register(Prompt(tokens(i, 200)), donor_id=str(i))
    with opened(path, max_donors=2) as sb:
        assert ids(sb) == ["4", "5"]


def test_the_file_is_readable_by_its_owner_alone(tmp_path):
    path = tmp_path / "s"
    with opened(path) as sb:
        sb.register(Prompt(tokens(1, 200)), donor_id="a")
        for file in tmp_path.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_forgotten_tokens_leave_the_file(tmp_path):
    path = tmp_path / "s"
    secret = np.full(500, 123_456_789)
    with opened(path) as sb:
        sb.register(Prompt(tokens(1, 200)), donor_id="keeps the file alive")
        sb.register(Prompt(secret), donor_id="secret")
        sb.forget("secret")
    needle = secret.astype("<i4").tobytes()[:400]
    assert all(needle not in file.read_bytes() for file in tmp_path.iterdir())


def test_a_row_whose_bytes_changed_is_left_out_and_reported(tmp_path):
    path = tmp_path / "s"
    with opened(path) as sb:
        for i in range(3):
            sb.register(Prompt(tokens(i, 200)), donor_id=str(i))
    with sqlite3.connect(path) as db:
        db.execute("UPDATE donors SET tokens = zeroblob(800) WHERE donor_id = '1'")
    db.close()
    sink = MemorySink()
    sb = SemBlend(SemBlendConfig(embedder="none", metrics=False, store=str(path)), sinks=[sink])
    assert ids(sb) == ["0", "2"]
    assert any(e.kind == "error" and "damaged" in e.fields["message"] for e in sink.events)
    sb.close()


@pytest.mark.parametrize("damage", ["garbage", "truncated", "foreign", "newer", "folder", "unreadable"])
def test_a_file_that_cannot_be_used_is_refused_with_a_hint_and_left_alone(tmp_path, damage):
    path = tmp_path / "s"
    with opened(path) as sb:
        for i in range(200):
            sb.register(Prompt(tokens(i, 500)), donor_id=str(i))
    if damage == "garbage":
        path.write_bytes(b"no database " * 1000)
    elif damage == "truncated":
        os.truncate(path, path.stat().st_size * 2 // 3)
    elif damage == "foreign":
        path.unlink()
        sqlite3.connect(path).execute("CREATE TABLE t (x)").connection.close()
    elif damage == "newer":
        db = sqlite3.connect(path)
        db.execute("PRAGMA user_version = 99")
        db.close()
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        if os.geteuid() == 0:
            pytest.skip("root reads everything")
        path.chmod(0)
    before = path.read_bytes() if path.is_file() and damage != "unreadable" else b""
    with pytest.raises(StoreError) as caught:
        opened(path)
    assert caught.value.hint
    assert not before or path.read_bytes() == before


FULL_DISK = """
import resource, signal, sys
from semblend import Prompt, SemBlend, SemBlendConfig, StoreError
from worlds import tokens
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
doing, path = sys.argv[1], sys.argv[2]
sb = SemBlend(SemBlendConfig(embedder="none", metrics=False, store=path if doing == "register" else ""))
for i in range(20):
    sb.register(Prompt(tokens(i, 1000)), donor_id=str(i))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
saved = 20
try:
    if doing == "save":
        sb.save(path)
    for i in range(20, 400):
        sb.register(Prompt(tokens(i, 1000)), donor_id=str(i))
        saved += 1
except StoreError as error:
    assert error.hint, error
    assert len(sb.donors()) == saved, "memory and file went apart"
    print("refused at", saved)
"""


@pytest.mark.parametrize("doing", ["register", "save"])
def test_a_full_disk_is_an_error_with_a_hint_and_nothing_saved_is_lost(tmp_path, doing):
    path = tmp_path / "s"
    with opened(path) as sb:
        for i in range(20):
            sb.register(Prompt(tokens(i, 1000)), donor_id=str(i))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, doing, str(path)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "refused at" in done.stdout
    assert not list(tmp_path.glob(".*tmp*"))
    with opened(path) as sb:
        assert {str(i) for i in range(20)} <= set(ids(sb))
        for donor in sb.donors():
            assert np.array_equal(sb.donor_tokens(donor.donor_id), tokens(int(donor.donor_id), 1000))


def test_saving_replaces_the_old_file_only_when_whole(tmp_path):
    path = tmp_path / "snapshot"
    sb = SemBlend(SemBlendConfig(embedder="none"))
    for i in range(4):
        sb.register(Prompt(tokens(i, 200)), donor_id=str(i))
    assert sb.save(path) == 4
    sb.forget("0")
    assert sb.save(path) == 3
    assert [file.name for file in tmp_path.iterdir()] == ["snapshot"]
    with opened(path) as restored:
        assert ids(restored) == ["1", "2", "3"]


def test_several_processes_share_a_file(tmp_path):
    path = tmp_path / "s"
    ours, theirs = opened(path), opened(path)
    a = ours.register(Prompt(tokens(1, 200)), donor_id="a")
    b = theirs.register(Prompt(tokens(2, 200)), donor_id="b")
    assert a.generation != b.generation
    assert ours.refresh() == 1
    assert theirs.refresh() == 1
    assert spans_of(ours.lookup(Prompt(tokens(2, 200))))[0].generation == b.generation
    theirs.forget("a")
    assert ours.refresh() == 1
    assert ids(ours) == ids(theirs) == ["b"]
    assert ours.refresh() == 0
    ours.close()
    theirs.close()


def test_a_copy_of_the_file_opens_like_the_file(tmp_path):
    path = tmp_path / "s"
    with opened(path) as sb:
        sb.register(Prompt(tokens(1, 200)), donor_id="a")
    shutil.copy(path, tmp_path / "copy")
    with opened(tmp_path / "copy") as sb:
        assert ids(sb) == ["a"]


assert resource  # the scripts above need it: fail at import where the platform has none
