"""`semblend doctor` says what this machine has and what to run next, and no broken part of it keeps it from that."""

from __future__ import annotations

import json
import subprocess

import pytest

from semblend.cli.commands import doctor
from semblend.cli.commands.doctor import EngineVersions, choose_next, list_gpus, read_memory
from semblend.cli.main import main


def report(capsys):
    main(["doctor", "--json"])
    return json.loads(capsys.readouterr().out)["checks"]


def test_it_ends_with_the_next_command(capsys):
    checks = report(capsys)
    assert checks[-1]["section"] == "next"
    assert {"machine", "engines", "models"} <= {check["section"] for check in checks}


def test_settings_that_nobody_has_set_are_one_line_for_people(capsys, monkeypatch):
    monkeypatch.setenv("SEMBLEND_QUALITY", "fast")
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "'fast'" in shown
    assert "at their defaults" in shown
    assert "min_span_tokens" not in shown
    assert any(check["name"] == "min_span_tokens" for check in report(capsys))


def test_a_look_that_fails_is_a_finding_and_the_others_go_on(capsys, monkeypatch):
    def break_it():
        raise RuntimeError("broken on purpose\nwith a second line")

    monkeypatch.setattr(doctor, "list_gpus", break_it)
    monkeypatch.setattr(doctor, "list_pulled", break_it)
    checks = report(capsys)
    failed = [check for check in checks if "broken on purpose" in check["detail"]]
    assert [check["section"] for check in failed] == ["machine", "models", "next"]
    assert "second line" not in failed[0]["detail"]
    assert any(check["section"] == "self test" and check["status"] == "ok" for check in checks)


def test_a_version_that_was_never_looked_at_is_named_with_those_that_were(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "installed_version", lambda package: "0.1.0" if package == "vllm" else None)
    found = {check["name"]: check for check in report(capsys) if check["section"] == "engines"}
    assert found["vllm"]["status"] == "warn"
    assert "0.1.0; known: " in found["vllm"]["detail"]
    assert "install a newer semblend-suite" in found["vllm"]["hint"]
    assert found["sglang"]["detail"].startswith("not installed; known: ")


@pytest.mark.parametrize(
    ("answer", "gpus"),
    [
        (subprocess.CompletedProcess([], 0, "NVIDIA H200, 143771 MiB, 570.1\n"), 1),
        (subprocess.CompletedProcess([], 9, "no devices"), 0),
        (subprocess.CompletedProcess([], 0, "a line of another kind\n"), 0),
        (subprocess.TimeoutExpired("nvidia-smi", 10), 0),
        (PermissionError("not allowed"), 0),
    ],
)
def test_a_driver_that_hangs_or_lies_is_no_gpu(monkeypatch, answer, gpus):
    def run(*_, **__):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert len(list_gpus(run)) == gpus


def test_memory_is_unknown_where_the_system_does_not_say(monkeypatch):
    total = read_memory()[0]
    assert total is None or total > 0
    monkeypatch.delattr(doctor.os, "sysconf", raising=False)
    assert read_memory()[0] is None


@pytest.mark.parametrize(
    ("engines", "begins"),
    [
        ({"vllm": EngineVersions("0.32.0", "", "run"), "sglang": EngineVersions("0.5.23", "", "run")}, "vllm serve"),
        ({"sglang": EngineVersions("0.5.23", "", "run")}, "semblend-sglang"),
        ({"vllm": EngineVersions("9.9", "", "none")}, "semblend "),
    ],
)
def test_the_next_command_fits_what_is_here(engines, begins):
    assert choose_next(engines, [])[0].startswith(begins)
