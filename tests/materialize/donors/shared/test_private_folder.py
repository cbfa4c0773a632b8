"""The folder of donors belongs to one user; its files are whole or absent, and never reached through a link."""

from __future__ import annotations

import os

import pytest

from semblend.errors import StoreError
from semblend.materialize.donors.store import PrivateFolder


def write(folder, name, content):
    return folder.write(name, lambda out: out.write(content))


def test_a_missing_folder_is_made_for_its_owner_alone(tmp_path):
    folder = PrivateFolder(tmp_path / "a" / "donors")
    assert os.stat(folder.path).st_mode & 0o777 == 0o700
    write(folder, "x", b"content")
    assert os.stat(folder.path / "x").st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_a_folder_that_others_may_enter_is_refused_with_a_hint(tmp_path, mode):
    (tmp_path / "donors").mkdir()
    (tmp_path / "donors").chmod(mode)
    with pytest.raises(StoreError, match="chmod 700"):
        PrivateFolder(tmp_path / "donors")


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    (tmp_path / "donors").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    with pytest.raises(StoreError, match="belongs to user"):
        PrivateFolder(tmp_path / "donors")


def test_a_link_to_a_folder_is_refused(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(StoreError, match="not a link"):
        PrivateFolder(tmp_path / "link")


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be used"):
        PrivateFolder(tmp_path / "file")


def test_links_pipes_and_files_that_others_may_read_are_not_opened(tmp_path):
    folder = PrivateFolder(tmp_path / "donors")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o600)
    (folder.path / "link").symlink_to(secret)
    os.mkfifo(folder.path / "pipe", 0o600)
    (folder.path / "loose").write_text("x")
    (folder.path / "loose").chmod(0o640)
    for name in ("link", "pipe", "loose"):
        with pytest.raises(OSError):  # noqa: PT011 - whichever the system says
            folder.read(name, 100)


def test_writing_over_a_link_replaces_the_link_and_leaves_its_target(tmp_path):
    folder = PrivateFolder(tmp_path / "donors")
    target = tmp_path / "target"
    target.write_bytes(b"mine")
    (folder.path / "x").symlink_to(target)
    write(folder, "x", b"donor")
    assert target.read_bytes() == b"mine"
    assert folder.read("x", 10) == b"donor"


def test_a_file_that_fails_half_way_leaves_nothing(tmp_path):
    folder = PrivateFolder(tmp_path / "donors")

    def fill(out):
        out.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        folder.write("x", fill)
    assert folder.list_names() == []


def test_a_folder_that_is_moved_away_stays_the_same_folder(tmp_path):
    folder = PrivateFolder(tmp_path / "donors")
    write(folder, "x", b"one")
    folder.path.rename(tmp_path / "elsewhere")
    (tmp_path / "donors").mkdir(mode=0o755)
    assert folder.read("x", 10) == b"one"
    assert folder.list_names() == ["x"]


def test_a_file_larger_than_asked_for_is_refused(tmp_path):
    folder = PrivateFolder(tmp_path / "donors")
    write(folder, "x", b"12345")
    assert folder.read("x", 5) == b"12345"
    with pytest.raises(OSError, match="larger"):
        folder.read("x", 4)
