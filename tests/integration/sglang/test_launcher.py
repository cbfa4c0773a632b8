"""`semblend-sglang`: SGLang's flags pass through, settings reach its processes, mistakes stop it with a hint."""

from __future__ import annotations

import pytest

from semblend.config import load_config, read_engine_variable
from semblend.integration.sglang import launcher
from semblend.integration.sglang.plugin import BACKEND
from semblend.integration.versions import EngineTable

PROVIDER = "semblend.integration.sglang.semantic_prefix:SemanticPrefixProvider"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """What the launcher writes for other processes is gone after a test."""
    for name in ("SEMBLEND_SGLANG", "SEMBLEND_QUALITY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(EngineTable, "find_installed", lambda _: "0.5.23")


def start(*words: str) -> list[str]:
    started: list[list[str]] = []
    launcher.main(words, start=started.append)
    return started[0]


def test_every_flag_of_sglang_passes_through_and_our_cache_is_added():
    command = start("--model-path", "m", "--tp", "2", "--unknown-to-us=7")
    assert command[1:] == [
        *("-m", "sglang.launch_server", "--model-path", "m", "--tp", "2", "--unknown-to-us=7"),
        *("--radix-cache-backend", BACKEND),
    ]


@pytest.mark.parametrize("words", [["--radix-cache-backend", "flexkv"], ["--radix-cache-backend=flexkv"]])
def test_a_cache_that_was_asked_for_is_not_replaced(words):
    assert start(*words)[3:] == words


def test_settings_reach_the_processes_that_sglang_starts():
    start("--semblend", "quality=fast", "--semblend", "step_work_ms=20", "--semblend-provider", PROVIDER)
    assert load_config().quality == "fast"
    assert read_engine_variable("sglang") == {"step_work_ms": 20, "provider": PROVIDER}


@pytest.mark.parametrize("path", ["words", ":Name", "module:", "no_such_module:Name", "json:NoSuchName", "breaks:Name"])
def test_a_provider_that_cannot_be_had_stops_it_before_sglang_loads_anything(path, tmp_path, monkeypatch, capsys):
    (tmp_path / "breaks.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        start("--semblend-provider", path, "--model-path", "m")
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.count("error:") == said.count("hint:") == 1


@pytest.mark.parametrize(
    "words",
    ["quality", "quality=best", "no_such_setting=1", "step_work_ms=often", "step_work_ms=0", "require_cache_salt=1"],
)
def test_a_mistake_stops_it_with_a_hint(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        start("--semblend", words)
    assert stopped.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "hint:" in said.err
    assert "Traceback" not in said.err
