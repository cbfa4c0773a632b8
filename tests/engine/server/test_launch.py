"""A server starts whatever became of its store: damaged, of a newer version, in use, not a store at all."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("fastapi", reason="the server needs fastapi")

from worlds import tokens

from semblend import Prompt, SemBlend, SemBlendConfig
from semblend.discover import journal
from semblend.discover.journal import set_aside
from semblend.engine.server.config import ServeConfig
from semblend.engine.server.launch import Launch, open_library
from semblend.materialize.gate.thresholds import find_known


@pytest.fixture
def config(tmp_path):
    """A store with donors, and a file of events."""
    store = SemBlendConfig(
        embedder="none", metrics=False, store=str(tmp_path / "donors.db"), events=str(tmp_path / "events.jsonl")
    )
    with SemBlend(store) as library:
        for number in range(50):
            library.register(Prompt(tokens(number, 500)), donor_id=str(number))
    return store


def damage(path, how):
    if how == "garbage":
        path.write_bytes(b"no database " * 1000)
    elif how == "truncated":
        os.truncate(path, path.stat().st_size * 2 // 3)
    elif how == "header":
        with path.open("r+b") as file:
            file.write(b"\xff" * 100)
    elif how == "newer":
        db = sqlite3.connect(path)
        db.execute("PRAGMA user_version = 99")
        db.close()


def read_errors(config):
    lines = [json.loads(line) for line in Path(config.events).read_text(encoding="utf-8").splitlines()]
    return [line["message"] for line in lines if line["event"] == "error"]


@pytest.mark.parametrize("how", ["garbage", "truncated", "header", "newer"])
def test_a_store_that_cannot_be_read_is_set_aside_and_a_new_one_is_begun(config, tmp_path, caplog, how):
    path = tmp_path / "donors.db"
    damage(path, how)
    before = path.read_bytes()
    with open_library(config) as library:
        assert library.donors() == ()
        library.register(Prompt(tokens(1, 100)), donor_id="new")
    (aside,) = tmp_path.glob("donors.db.set-aside-*")
    assert aside.read_bytes() == before
    assert aside.name in caplog.text
    assert any(aside.name in message for message in read_errors(config))
    with open_library(config) as again:
        assert [donor.donor_id for donor in again.donors()] == ["new"]
    assert len(list(tmp_path.glob("*set-aside*"))) == 1


def test_a_database_of_another_program_is_left_alone(config, tmp_path, caplog):
    path = tmp_path / "donors.db"
    path.unlink()
    sqlite3.connect(path).execute("CREATE TABLE t (x)").connection.close()
    path.chmod(0o644)
    before = path.read_bytes()
    with open_library(config) as library:
        library.register(Prompt(tokens(1, 100)), donor_id="new")
    assert path.read_bytes() == before
    assert path.stat().st_mode & 0o777 == 0o644
    assert "left alone" in caplog.text
    assert read_errors(config)


HOLD = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA locking_mode = EXCLUSIVE")
db.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
sys.stdin.read()
"""
OPEN = """
import sys
from pathlib import Path
from semblend import SemBlend, SemBlendConfig
library = SemBlend(SemBlendConfig(embedder="none", metrics=False, store=sys.argv[1]))
print("open", flush=True)
sys.stdin.read()
"""


def test_a_store_that_another_process_holds_is_not_stolen(config, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(journal, "BUSY_S", 0.1)
    path = tmp_path / "donors.db"
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with open_library(config) as library:
            assert library.donors() == ()
        holder.communicate("")
    assert "locked" in caplog.text
    assert not list(tmp_path.glob("*set-aside*"))
    with open_library(config) as library:
        assert len(library.donors()) == 50


def test_a_store_that_another_process_has_open_is_not_renamed_under_it(config, tmp_path):
    path = tmp_path / "donors.db"
    command = [sys.executable, "-c", OPEN, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        assert set_aside(path) is None
        other.communicate("")
    assert set_aside(path) is not None


def test_a_store_that_others_may_read_is_told_and_closed_to_them(config, tmp_path, caplog):
    path = tmp_path / "donors.db"
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING), open_library(config) as library:
        assert len(library.donors()) == 50
        modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.glob("donors.db*")}
    assert set(modes.values()) == {0o600}, modes
    assert "others could read" in caplog.text
    caplog.clear()
    open_library(config).close()
    assert not caplog.text


def test_a_model_under_another_file_name_is_known_by_the_name_inside(tmp_path):
    gguf = pytest.importorskip("gguf", reason="the file is written with gguf")
    path = tmp_path / "weights.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_name("Qwen2.5 Coder 0.5B Instruct")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert Launch(ServeConfig(model=str(path))).gate.thresholds is find_known("qwen2.5-coder-0.5b")[1]
