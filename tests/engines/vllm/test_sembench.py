"""sembench against real vLLM: a stock server with one's own log, by the guide alone; ours, through the default gates.

What the parsers read here was printed by vLLM itself, not by a fixture.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from forks import ForkedServer
from test_server import Server

from sembench.cli import main
from sembench.manifests.cases import read_manifest
from sembench.result import Result, read_load_result, read_result
from sembench.witnesses.engine_events import summarize_file

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
MODEL = "m"


@contextmanager
def serving(log: Path, *, connector: bool) -> Iterator[Server]:
    server = Server(log, os.environ["SEMBLEND_TEST_VLLM_MODEL"], connector=connector, start=ForkedServer)
    try:
        server.wait()
        yield server
    finally:
        server.process.terminate()
        try:
            server.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.process.pid, 9)


def write_document(seed: int, words: int = 150) -> str:
    rng = random.Random(seed)
    return " ".join(f"{rng.choice(['amber', 'basin', 'cedar', 'delta'])} {rng.randint(10, 99)}" for _ in range(words))


def write_log(path: Path, documents: int = 6) -> str:
    """A log of chats: each document is asked about under two instructions, and some chats have a second turn."""
    rows: list[dict[str, Any]] = []
    for number in range(documents):
        text = write_document(number)
        first = [{"role": "user", "content": f"List {number}. {text}\nHow many words does it have?"}]
        asked = f"Please read this closely.\n{text}\nWhich word comes first?"
        system = {"role": "system", "content": "You are an archivist and you answer with care."}
        later = [system, {"role": "user", "content": asked}]
        rows += [{"messages": first, "timestamp": 10.0 * number}, {"messages": later, "timestamp": 10.0 * number + 3}]
        if number == 0:
            more = [*first, {"role": "assistant", "content": "Many."}, {"role": "user", "content": "How many?"}]
            rows.append({"messages": more, "timestamp": 4.0})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(*words: object) -> int:
    return main([str(word) for word in words])


def measure(server: Server, folder: Path, *flags: object) -> Result:
    """The two commands of the guide: a manifest of one's own log, and a paired run."""
    manifest, output = folder / "own.jsonl", folder / "own.json"
    assert run("build", "--profile", "jsonl", "--input", write_log(folder / "log.jsonl"), "--output", manifest,
               "--negatives", 3, "--max-donors", 1, "--quiet") == 0  # fmt: skip
    assert all(case.metadata["messages"] for case in read_manifest(manifest) if not case.negative_control)
    url = f"http://127.0.0.1:{server.port}/v1"  # as OpenAI clients are given it
    assert run("run-live-gateway", "--paired", "--manifest", manifest, "--output", output, "--gateway-url", url,
               "--model", MODEL, "--recipient-max-tokens", 8, "--warmup-requests", 1, "--quiet", *flags
               ) == 0  # fmt: skip
    return read_result(output)


def summarize(server: Server, folder: Path) -> Path:
    summary = folder / "engine.json"
    assert run("summarize-engine-events", "--engine", "vllm", "--input", server.log, "--output", summary) == 0
    return summary


def test_an_honest_run_of_ours_passes_the_default_gates_with_the_engines_own_log(tmp_path, capsys):
    with serving(tmp_path / "log.txt", connector=True) as server:
        result = measure(server, tmp_path)
        summary = summarize(server, tmp_path)  # while it runs: a server that is told to end may log errors about that
    capsys.readouterr()
    code = run("assert-result-gates", "--result", tmp_path / "own.json", "--engine-summary", summary,
               "--manifest", tmp_path / "own.jsonl")  # fmt: skip
    said = capsys.readouterr()
    assert code == 0, said.err
    assert json.loads(said.out)["doubts"] == []
    gates = ("--require-materialized-reuse", "--require-no-engine-errors", "--min-materialized-tokens", 512)
    code = run("assert-result-gates", "--result", tmp_path / "own.json", "--engine-summary", summary, *gates)
    assert code == 0, capsys.readouterr().err
    found = json.loads(summary.read_text())
    assert found["materialization_events"] >= 4
    assert (result.run or {})["request_prefix"] in found["runs"], "vLLM's ids keep ours inside"
    reused = [record for record in result.requests if record.backend_confirmed_tokens]
    assert all({"usage", "prometheus"} <= set(record.confirmation_sources) for record in reused)


def test_a_stock_server_works_by_the_guide_alone(tmp_path, capsys):
    with serving(tmp_path / "log.txt", connector=False) as server:
        result = measure(server, tmp_path, "--max-items", 5)
        url = f"http://127.0.0.1:{server.port}"
        output = tmp_path / "load.json"
        assert run("run-load", "--log", tmp_path / "log.jsonl", "--output", output, "--csv", tmp_path / "load.csv",
                   "--base-url", url, "--model", MODEL, "--request-rate", 2, 8, "--num-prompts", 6, "--max-tokens", 4,
                   "--think-time", 0.1, "--slo", "ttft:60000", "--warmup-requests", 0, "--quiet") == 0  # fmt: skip
        found = summarize_file("vllm", str(server.log))
    assert result.aggregate["error_count"] == 0
    assert not result.aggregate["backend_confirmed_tokens"]  # it claims nothing beyond its prefix cache
    turns = [r for r in result.requests if r.transform == "next_turn" and r.arm == "warm"]
    assert all(record.exact_tokens > 64 for record in turns), "its own prefix cache is seen"
    capsys.readouterr()
    assert run("assert-result-gates", "--result", tmp_path / "own.json") == 1
    assert "gate failed: nothing_confirmed" in capsys.readouterr().err
    sweep = read_load_result(output)
    assert [point.request_rate for point in sweep.points] == [2.0, 8.0]
    assert all(point.engine["prefix_cache_hit_rate"] is not None for point in sweep.points)
    assert run("assert-result-gates", "--result", output, "--min-goodput-share", 0.9, "--max-failed-share", 0) == 0
    assert run("report", "--result", output, "--markdown", tmp_path / "load.md", "--output", tmp_path / "l.html") == 0
    assert run("report", "--result", tmp_path / "own.json") == 0
    assert (found["materialization_events"], found["semantic_hits"], found["errors"]) == (0, 0, 0)
    assert found["first_time_unix_s"] <= (result.run or {})["last_finished_unix_s"]
