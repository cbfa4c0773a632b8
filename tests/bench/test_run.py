"""Every benchmark says what it needs, so that `make bench-all` leaves none out in silence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import run  # noqa: E402


def test_every_script_is_in_the_table_of_needs() -> None:
    scripts = {path.stem for path in BENCH.glob("*.py") if not path.stem.startswith("_")}
    assert scripts == set(run.NEEDS) | {"run", "publish"}
    assert {need for needs in run.NEEDS.values() for need in needs} == set(run.HOW)


def test_what_is_missing_is_named_with_the_way_to_get_it(monkeypatch, capsys) -> None:
    monkeypatch.setattr(run, "is_here", lambda need: need == "data")
    chosen = run.choose_everything()
    assert "recall" in chosen
    assert "vllm_load" not in chosen
    said = capsys.readouterr().err
    assert "left out: vllm_load, which needs a GPU" in said
    assert "left out: sglang_classes, which needs a model: semblend models pull" in said


def test_the_list_runs_nothing_and_names_all() -> None:
    done = subprocess.run([sys.executable, str(BENCH / "run.py"), "--list"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(run.NEEDS)
