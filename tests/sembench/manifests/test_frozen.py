"""Frozen manifests and windows between snapshots: what changed is told, and claims are held against counters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from live_cases import manifest, negative, positive
from verdict_samples import live_records, result_of

from sembench.cli import main
from sembench.manifests.cases import write_manifest
from sembench.result import write_result
from sembench.witnesses.prometheus import SNAPSHOT_VERSION


def run(*words: object) -> int:
    return main([str(word) for word in words])


@pytest.fixture
def frozen(tmp_path: Path) -> tuple[Path, Path]:
    folder = tmp_path / "manifests"
    folder.mkdir()
    manifest(folder)
    spec = tmp_path / "frozen.json"
    assert run("freeze", "--spec", spec, "--manifests-dir", folder) == 0
    return spec, folder


def test_what_was_frozen_is_verified_and_a_change_of_one_byte_is_told(frozen, capsys):
    spec, folder = frozen
    told = json.loads(spec.read_text())["manifests"]["cases.jsonl"]
    assert (told["items"], told["negative_controls"]) == (5, 2)
    capsys.readouterr()
    assert run("verify-frozen", "--spec", spec, "--manifests-dir", folder) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True
    text = (folder / "cases.jsonl").read_text()
    (folder / "cases.jsonl").write_text(text.replace("boats", "goats", 1))
    assert run("verify-frozen", "--spec", spec, "--manifests-dir", folder) == 1
    assert "cases.jsonl has the SHA-256" in capsys.readouterr().err
    (folder / "cases.jsonl").unlink()
    assert run("verify-frozen", "--spec", spec, "--manifests-dir", folder) == 1
    assert "cases.jsonl is missing" in capsys.readouterr().err


def test_a_manifest_with_a_negative_control_that_is_none_is_not_frozen(tmp_path, capsys):
    related = negative(0)
    donor = positive(100).donor_prompts[0]
    write_manifest(tmp_path / "bad.jsonl", [positive(100), related])
    assert donor.text[:40] != related.recipient_prompt[:40]
    assert run("freeze", "--spec", tmp_path / "f.json", "--manifests-dir", tmp_path) == 1
    assert "a negative control shares" in capsys.readouterr().err
    assert not (tmp_path / "f.json").exists()


@pytest.mark.parametrize(("text", "told"), [("{", "not a whole JSON"), ("{}", "is no sembench.frozen.v1")])
def test_a_frozen_file_that_is_none_is_refused(tmp_path, capsys, text, told):
    (tmp_path / "f.json").write_text(text)
    assert run("verify-frozen", "--spec", tmp_path / "f.json", "--manifests-dir", tmp_path) == 2
    assert told in capsys.readouterr().err


def test_an_empty_or_missing_folder_cannot_be_frozen(tmp_path, capsys):
    assert run("freeze", "--spec", tmp_path / "f.json", "--manifests-dir", tmp_path) == 2
    assert run("freeze", "--spec", tmp_path / "f.json", "--manifests-dir", tmp_path / "gone") == 2
    assert "is not a folder" in capsys.readouterr().err


# -- windows -------------------------------------------------------------------------------------------------------


def snapshot(path: Path, **counters: float) -> Path:
    samples = [["semblend_tokens_total", {"kind": kind}, value] for kind, value in counters.items()]
    endpoints = {"http://engine/metrics": {"error": None, "samples": samples}}
    taken = {"a.json": 90.0, "b.json": 210.0}[path.name]
    made = {"snapshot_version": SNAPSHOT_VERSION, "endpoints": endpoints, "taken_unix_s": taken}
    path.write_text(json.dumps(made))
    return path


@pytest.fixture
def claims(tmp_path: Path) -> tuple[Path, int]:
    records = live_records(3)
    total = sum(record.reused_tokens or 0 for record in records if record.arm == "warm")
    assert total > 0
    run = {"first_sent_unix_s": 100.0, "last_finished_unix_s": 200.0}
    write_result(tmp_path / "result.json", result_of(records, run=run))
    return tmp_path / "result.json", total


def window(tmp_path: Path, *flags: object) -> int:
    words = ("--before", tmp_path / "a.json", "--after", tmp_path / "b.json", "--output", tmp_path / "w.json")
    return run("engine-window", *words, *flags)


def test_counters_that_bear_the_receipts_out_pass(tmp_path, claims):
    result, total = claims
    snapshot(tmp_path / "a.json", reused=100)
    snapshot(tmp_path / "b.json", reused=100 + total)
    assert window(tmp_path, "--result", result, "--arm", "warm") == 0
    found = json.loads((tmp_path / "w.json").read_text())
    assert (found["claimed_tokens"], found["borne_out"]) == (total, True)
    assert found["delta"]["semblend_reused_tokens_delta"] == total
    assert window(tmp_path) == 0  # without a result there is nothing to hold against it


@pytest.mark.parametrize(
    ("after", "told"), [({"reused": 101}, "the counters moved by 1"), ({"reused": 3}, "was restarted")]
)
def test_counters_that_moved_by_less_than_was_claimed_fail(tmp_path, capsys, claims, after, told):
    snapshot(tmp_path / "a.json", reused=100)
    snapshot(tmp_path / "b.json", **after)
    assert window(tmp_path, "--result", claims[0], "--arm", "warm") == 1
    assert told in capsys.readouterr().err


def test_an_engine_without_counters_bears_nothing_out(tmp_path, capsys, claims):
    snapshot(tmp_path / "a.json")
    snapshot(tmp_path / "b.json")
    assert window(tmp_path, "--result", claims[0]) == 1
    assert "has no counter for them" in capsys.readouterr().err


@pytest.mark.parametrize("taken", [150.0, None])
def test_snapshots_that_were_not_taken_around_the_run_bear_nothing_out(tmp_path, capsys, claims, taken):
    result, total = claims
    snapshot(tmp_path / "a.json", reused=100)
    after = json.loads(snapshot(tmp_path / "b.json", reused=100 + total).read_text())
    (tmp_path / "b.json").write_text(json.dumps(after | {"taken_unix_s": taken}))
    assert window(tmp_path, "--result", result, "--arm", "warm") == 1
    assert "not taken around this run" in capsys.readouterr().err or taken is None


def test_a_file_that_is_no_snapshot_is_refused(tmp_path, capsys):
    (tmp_path / "a.json").write_text("{}")
    snapshot(tmp_path / "b.json")
    assert window(tmp_path) == 2
    assert "is no sembench.engine_snapshot.v1" in capsys.readouterr().err
