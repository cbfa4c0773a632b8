"""The zoo: every way of lying that can be seen from outside is refused by the default gates, by its name.

Each liar runs as a stranger would run it: the command, then ``assert-result-gates`` without any gate, then ``report``.
The report says the same name on its top, and no speed-up.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from live_cases import gateway_code, manifest
from lying_backend import SLOW_S, Lie, LyingBackend

from sembench.cli import main
from sembench.result import read_result

FLAGS = ("--paired", "--tenant-pairs", "2", "--recipient-max-tokens", "24")
Capture = pytest.CaptureFixture[str]


def judge(capsys: Capture, result: Path, *flags: str) -> tuple[int, list[str]]:
    """The exit code of the default gates and the names of the doubts."""
    capsys.readouterr()
    code = main(["assert-result-gates", "--result", str(result), *flags])
    return code, [doubt["name"] for doubt in json.loads(capsys.readouterr().out)["doubts"]]


def read_top(result: Path, *flags: str) -> str:
    """The report above its tiles."""
    page = result.with_suffix(".html")
    assert main(["report", "--result", str(result), "--output", str(page), *flags]) == 0
    return page.read_text().partition('<ul class="tiles">')[0]


def measure(lie: Lie, folder: Path, *flags: str, positives: int = 4, slow_s: float = SLOW_S) -> Path:
    with LyingBackend(lie, slow_s=slow_s).serving() as server:
        assert gateway_code(server.url, folder, *FLAGS, *flags, cases=manifest(folder, positives, 4)) == 0
    return folder / "result.json"


PLAIN = {"positives": 8, "slow_s": 0.15}  # what is saved is seen on a busy machine, too


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return measure(Lie.NONE, tmp_path_factory.mktemp("honest"), **PLAIN)


def test_an_honest_server_passes_the_default_gates_and_its_report_states_its_speed(honest: Path, capsys: Capture):
    assert judge(capsys, honest) == (0, [])
    top = read_top(honest)
    assert "Warm requests reached their first token" in top
    assert "Reasons not to believe" not in top


@pytest.mark.parametrize(
    ("lie", "name"),
    [
        (Lie.ECHO, "overlong_answers"),
        (Lie.SHORT_ECHO, "echo"),
        (Lie.RECEIPTS_ONLY, "one_witness"),
        (Lie.USAGE_ONLY, "one_witness"),
        (Lie.CLAIMS, "contradicted"),
        (Lie.CLAIMS_EVERYWHERE, "reuse_on_negatives"),
        (Lie.SAVES_NOTHING, "hits_save_nothing"),
        (Lie.LUCKY, "speed_without_reuse"),
        (Lie.WRONG_DONOR, "wrong_kv"),
        (Lie.LEAKS_TENANTS, "tenant_leak"),
        (Lie.NAN, "malformed_counts"),
    ],
)
def test_a_liar_is_refused_by_name_and_the_report_says_so_on_top(lie: Lie, name: str, tmp_path: Path, capsys: Capture):
    result = measure(lie, tmp_path, *(["--capture-logprobs"] if lie is Lie.NAN else []))
    code, names = judge(capsys, result)
    assert code == 1
    assert name in names
    top = read_top(result)
    assert "Do not believe this result" in top
    assert f"<b>{name.replace('_', ' ')}</b>" in top
    assert "reached their first token" not in top
    assert "faster to first token" not in result.with_suffix(".html").read_text()


def test_a_log_of_another_run_is_refused(honest: Path, tmp_path: Path, capsys: Capture):
    log, summary = tmp_path / "engine.log", tmp_path / "engine.json"
    lines = [
        "SemBlend semantic lookup hit request_id=sb-0badc0de-p0-warm donor_id=d0 similarity=0.9 reusable_tokens=900",
        "SemBlend materialized request_id=sb-0badc0de-p0-warm donor_id=d0 tokens=900",
    ]
    log.write_text("".join(f"INFO 11-16 14:00:00 [connector.py:1] {line}\n" for line in lines))
    words = ["summarize-engine-events", "--engine", "vllm", "--input", str(log), "--output", str(summary)]
    assert main(words) == 0
    code, names = judge(capsys, honest, "--engine-summary", str(summary))
    assert (code, names) == (1, ["evidence_of_another_run"])
    assert "names no request of this run" in read_top(honest, "--engine-summary", str(summary))
    # the gate itself finds nothing in it, either: no event of this run
    gates = ["--engine-summary", str(summary), "--require-no-engine-errors", "--min-materialized-tokens", "1"]
    assert main(["assert-result-gates", "--result", str(honest), *gates]) == 1
    assert "materialized_tokens was not observed" in capsys.readouterr().err


FORGERIES = {
    "an aggregate was raised": (
        lambda value: value["aggregate"].update(backend_confirmed_block_rate=39215.0), "edited_result"
    ),
    "a request was improved": (lambda value: value["requests"][1].update(ttft_ms=0.5), "edited_result"),
    "a failure was left out": (lambda value: value["requests"].pop(), "edited_result"),
    "another model was named": (lambda value: value["config"].update(model="larger"), "edited_result"),
    "the requests are gone": (lambda value: value.update(requests=[]), "edited_result"),
    "the digest is gone": (lambda value: value.pop("digest"), "edited_result"),
    "more was confirmed than asked": (
        lambda value: value["requests"][1].update(backend_confirmed_tokens=10**6), "impossible_numbers"
    ),
    "another server was mixed in": (
        lambda value: value["run"]["sessions"].insert(0, {"servers": [{"url": "http://other"}]}), "mixed_servers"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_result_is_refused(name: str, honest: Path, tmp_path: Path, capsys: Capture):
    change, doubt = FORGERIES[name]
    value = json.loads(honest.read_text())
    change(value)
    forged = tmp_path / "forged.json"
    forged.write_text(json.dumps(value))
    code, names = judge(capsys, forged)
    assert code == 1
    assert doubt in names
    assert "Do not believe this result" in read_top(forged)
    # gates of one's own do not let it pass, either
    assert main(["assert-result-gates", "--result", str(forged), "--min-requests", "0", "--only-requested"]) == 1


def test_another_manifest_is_refused(honest: Path, tmp_path: Path, capsys: Capture):
    own, other = honest.with_name("cases.jsonl"), manifest(tmp_path, 2, 1)
    assert judge(capsys, honest, "--manifest", str(own)) == (0, [])
    assert judge(capsys, honest, "--manifest", str(other)) == (1, ["evidence_of_another_run"])


def test_a_run_is_not_continued_on_another_server(tmp_path: Path, capsys: Capture):
    cases = manifest(tmp_path, 4, 2)
    with LyingBackend(die_after=9).serving() as first:
        assert gateway_code(first.url, tmp_path, *FLAGS, cases=cases) == 1
    with LyingBackend().serving() as second:
        assert gateway_code(second.url, tmp_path, *FLAGS, "--resume", cases=cases) == 2
        assert second.answered == 0
    assert "was begun with servers" in capsys.readouterr().err


def test_arms_of_two_servers_are_found_when_they_are_merged(tmp_path: Path, capsys: Capture):
    cases, files = manifest(tmp_path, 2, 1), {}
    for arm in ("cold", "warm"):  # the cold arm comes from a slower server
        with LyingBackend(slow_s=0.2 if arm == "cold" else 0.02).serving() as server:
            assert gateway_code(server.url, tmp_path, "--arm", arm, cases=cases) == 0
        files[arm] = (tmp_path / "result.json").rename(tmp_path / f"{arm}.json")
    merged = tmp_path / "merged.json"
    assert (
        main(["merge-results", "--cold", str(files["cold"]), "--warm", str(files["warm"]), "--output", str(merged)])
        == 0
    )
    code, names = judge(capsys, merged)
    assert code == 1
    assert "mixed_servers" in names


def test_a_continued_run_keeps_its_name_and_passes(tmp_path: Path, capsys: Capture):
    cases, backend = manifest(tmp_path, 8, 2), LyingBackend(die_after=9, slow_s=PLAIN["slow_s"])
    with backend.serving() as server:
        assert gateway_code(server.url, tmp_path, *FLAGS, cases=cases) == 1
        backend.die_after = None
        assert gateway_code(server.url, tmp_path, *FLAGS, "--resume", cases=cases) == 0
    run = read_result(tmp_path / "result.json").run or {}
    assert len(run["sessions"]) == 2
    records = read_result(tmp_path / "result.json").requests
    assert all(record.request_ids[0].startswith(run["request_prefix"] + "-") for record in records)
    assert judge(capsys, tmp_path / "result.json") == (0, [])


def test_one_witness_is_enough_for_whoever_says_so(tmp_path: Path, capsys: Capture):
    result = measure(Lie.RECEIPTS_ONLY, tmp_path, **PLAIN)
    assert judge(capsys, result, "--min-witnesses", "1") == (0, [])
