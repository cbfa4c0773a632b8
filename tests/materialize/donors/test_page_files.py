"""Pages in a folder: found again after a restart, never damaged, never of another model, never more than the budget."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semblend.errors import StoreError
from semblend.materialize.donors.store import LOST_AFTER_S, PageFiles

IDENTITY = {"weights": "abc", "page_tokens": 16, "ranks": {"tp_rank": 0}}


def make_page(seed: int, numbers: int = 256) -> torch.Tensor:
    return torch.randn(numbers, generator=torch.Generator().manual_seed(seed))


def read(files: PageFiles, key: str, numbers: int = 256) -> torch.Tensor | None:
    target = torch.zeros(numbers)
    return target if files.read_into(key, target) else None


def find_only_file(folder: Path) -> Path:
    (found,) = folder.glob("*.page")
    return found


def test_a_page_is_found_by_another_process_as_it_was(tmp_path):
    PageFiles(tmp_path / "pages", IDENTITY, 10**6).write("k", make_page(1))
    again = PageFiles(tmp_path / "pages", dict(reversed(IDENTITY.items())), 10**6)
    assert again.holds("k")
    assert torch.equal(read(again, "k"), make_page(1))
    assert not again.holds("another")


def test_every_number_type_comes_back_bit_for_bit(tmp_path):
    files = PageFiles(tmp_path / "pages", IDENTITY, 10**6)
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8):
        page = make_page(2).to(dtype)
        files.write(str(dtype), page)
        target = torch.zeros(256, dtype=dtype)
        assert files.read_into(str(dtype), target)
        assert torch.equal(target.view(torch.uint8), page.view(torch.uint8))


@pytest.mark.parametrize("name", IDENTITY)
def test_pages_of_another_identity_do_not_exist(tmp_path, name):
    PageFiles(tmp_path / "pages", IDENTITY, 10**6).write("k", make_page(1))
    other = PageFiles(tmp_path / "pages", IDENTITY | {name: "other"}, 10**6)
    assert not other.holds("k")
    assert read(other, "k") is None


@given(st.data())
def test_a_file_with_any_byte_changed_is_a_miss_and_is_removed(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("a") / "pages"
    files = PageFiles(folder, IDENTITY, 10**6)
    files.write("k", make_page(1))
    path = find_only_file(folder)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(content))
    assert read(files, "k") is None
    assert not files.holds("k")
    assert files.write("k", make_page(1)), "and it can be stored again"
    assert torch.equal(read(files, "k"), make_page(1))


@pytest.mark.parametrize("kept", [0, 10, 500])
def test_a_file_that_ends_too_early_is_a_miss(tmp_path, kept):
    files = PageFiles(tmp_path / "pages", IDENTITY, 10**6)
    files.write("k", make_page(1))
    path = find_only_file(tmp_path / "pages")
    path.write_bytes(path.read_bytes()[:kept])
    assert read(files, "k") is None
    assert files.damaged_files == 1


def test_a_file_under_another_pages_name_is_a_miss(tmp_path):
    files = PageFiles(tmp_path / "pages", IDENTITY, 10**6)
    files.write("k", make_page(1))
    path = find_only_file(tmp_path / "pages")
    files.write("other", make_page(2))
    (second,) = set((tmp_path / "pages").glob("*.page")) - {path}
    second.rename(path)
    assert read(files, "k") is None


def test_a_page_of_another_size_is_a_miss(tmp_path):
    files = PageFiles(tmp_path / "pages", IDENTITY, 10**6)
    files.write("k", make_page(1))
    assert read(files, "k", numbers=128) is None


def test_a_link_in_the_folder_is_not_followed(tmp_path):
    files = PageFiles(tmp_path / "pages", IDENTITY, 10**6)
    files.write("k", make_page(1))
    path = find_only_file(tmp_path / "pages")
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    assert read(files, "k") is None


def test_the_least_recently_used_pages_leave_first_and_the_budget_is_kept(tmp_path):
    folder = tmp_path / "pages"
    size = PageFiles(folder, IDENTITY, 10**6)
    size.write("0", make_page(0))
    one = find_only_file(folder).stat().st_size
    files = PageFiles(folder, IDENTITY, 10 * one)
    for number in range(1, 30):
        assert files.write(str(number), make_page(number))
        read(files, "0")
        os.utime(next(p for p in folder.glob("*.page") if p.name == files._name("0")), ns=(2**61, 2**61))
        assert sum(path.stat().st_size for path in folder.glob("*.page")) <= 10 * one
    assert files.holds("0"), "it was used all the time"
    assert files.holds("29")
    assert not files.holds("1")


def test_a_page_larger_than_the_budget_is_not_kept_and_pushes_nobody_out(tmp_path):
    files = PageFiles(tmp_path / "pages", IDENTITY, 4000)
    assert files.write("k", make_page(1))
    assert not files.write("large", make_page(2, 4000))
    assert files.holds("k")


def test_what_a_dead_writer_left_unfinished_is_removed(tmp_path):
    folder = tmp_path / "pages"
    PageFiles(folder, IDENTITY, 10**6)
    old, new = folder / "a.1234.part", folder / "b.1234.part"
    old.write_bytes(b"x")
    new.write_bytes(b"x")
    past = new.stat().st_mtime - LOST_AFTER_S - 1
    os.utime(old, (past, past))
    PageFiles(folder, IDENTITY, 10**6)
    assert not old.exists()
    assert new.exists(), "somebody may be writing it"


def test_a_disk_that_is_full_is_the_budget_from_then_on_and_raises_nothing(tmp_path, monkeypatch, caplog):
    files = PageFiles(tmp_path / "pages", IDENTITY, 10**6)
    for number in range(10):
        assert files.write(f"old {number}", make_page(number))
        os.utime(files._folder.path / files._name(f"old {number}"), (number, number))
    write, room = files._folder.write, files._bytes

    def write_if_there_is_room(name, fill):
        held = sum(path.stat().st_size for path in files._folder.path.glob("*.page"))
        if held + room // 10 > room:
            raise OSError(28, "No space left on device")
        return write(name, fill)

    monkeypatch.setattr(files._folder, "write", write_if_there_is_room)
    stored = [files.write(f"new {number}", make_page(number)) for number in range(10)]
    assert stored[0] is False, "the disk is full"
    assert sum(stored) >= 5, "older pages make room for newer ones"
    assert not files.holds("old 0")
    assert len(caplog.records) == 1, "not a line for every page"


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_what_is_no_file_is_no_page_and_holds_nobody_up(tmp_path, kind):
    files, page = PageFiles(tmp_path / "pages", IDENTITY, 10**6), make_page(1)
    place = files._folder.path / files._name("k")
    {"fifo": os.mkfifo, "link": lambda path: path.symlink_to("/etc/passwd"), "folder": os.mkdir}[kind](place)
    assert not files.holds("k")
    assert not files.read_into("k", torch.zeros_like(page))
    stored = files.write("k", page)
    assert stored == files.read_into("k", torch.zeros_like(page)) == (kind != "folder"), "a folder cannot be replaced"


def test_a_write_that_fails_for_another_reason_costs_one_page(tmp_path, monkeypatch):
    files = PageFiles(tmp_path / "pages", IDENTITY, 10**6)
    monkeypatch.setattr(files._folder, "write", lambda name, fill: (_ for _ in ()).throw(OSError(5, "broken")))
    assert not files.write("k", make_page(1))
    monkeypatch.undo()
    assert files.write("k", make_page(1))


def test_clear_removes_the_pages_of_this_identity_only(tmp_path):
    files = PageFiles(tmp_path / "pages", IDENTITY, 10**6)
    other = PageFiles(tmp_path / "pages", IDENTITY | {"weights": "new"}, 10**6)
    files.write("k", make_page(1))
    other.write("k", make_page(2))
    files.clear()
    assert not files.holds("k")
    assert torch.equal(read(other, "k"), make_page(2))


def test_a_folder_that_others_may_read_is_refused(tmp_path):
    folder = tmp_path / "pages"
    folder.mkdir(mode=0o755)
    with pytest.raises(StoreError, match="others may read"):
        PageFiles(folder, IDENTITY, 10**6)
