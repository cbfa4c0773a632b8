"""`semblend-trtllm`: words pass through, the connector is named in a file, mistakes stop it with a hint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from semblend.config import load_config, read_engine_variable
from semblend.integration.trtllm import launcher
from semblend.integration.versions import EngineTable


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """What the launcher writes for other processes is gone after a test."""
    for name in ("SEMBLEND_TRTLLM", "SEMBLEND_QUALITY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(EngineTable, "find_installed", lambda _: "1.2.1")


def start(*words: str) -> list[str]:
    started: list[list[str]] = []
    launcher.main(words, start=started.append)
    return started[0]


def test_every_word_passes_through_and_a_file_names_our_connector(capsys):
    command = start("some/model", "--port", "9000")
    assert command[:-1] == ["trtllm-serve", "some/model", "--port", "9000", "--extra_llm_api_options"]
    file = Path(command[-1])
    assert json.loads(file.read_text()) == launcher.CONNECTOR
    file.unlink()
    assert "never run" in capsys.readouterr().err


def test_settings_reach_the_processes_that_the_engine_starts():
    Path(start("m", "--semblend", "quality=fast", "--semblend", "staging_tokens=4096")[-1]).unlink()
    assert load_config().quality == "fast"
    assert read_engine_variable("trtllm") == {"staging_tokens": 4096}


@pytest.mark.parametrize(
    "words",
    [
        ["--semblend", "quality"],
        ["--semblend", "staging_tokens=many"],
        ["--semblend", "no_such_setting=1"],
        ["m", "--config", "mine.yaml"],
        ["m", "--extra_llm_api_options=mine.yaml"],
    ],
)
def test_a_mistake_stops_it_with_a_hint(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        start(*words)
    assert stopped.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "hint:" in said.err


def test_an_unknown_version_is_not_started(monkeypatch, capsys):
    monkeypatch.setattr(EngineTable, "find_installed", lambda _: "0.12.0")
    with pytest.raises(SystemExit):
        start("m")
    assert "never looked at" in capsys.readouterr().err


def test_the_lines_for_a_file_of_ones_own_are_data(capsys):
    launcher.main(["--print-config"])
    assert json.loads(capsys.readouterr().out) == launcher.CONNECTOR
