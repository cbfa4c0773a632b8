"""An honest run of `semblend serve` passes the default gates: the guide's commands on a server in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from ports import find_port

httpx = pytest.importorskip("httpx", reason="live runs need httpx")
pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("uvicorn", reason="a real socket needs uvicorn")

from sembench.cli import main  # noqa: E402
from sembench.result import Result, read_result  # noqa: E402
from sembench.trust import Doubt  # noqa: E402
from semblend.models import find_model, is_pulled  # noqa: E402

MODEL = "smollm2-135m"
START_S = 120

pytestmark = [
    pytest.mark.slow,  # a real model answers
    pytest.mark.skipif(not is_pulled(find_model(MODEL)), reason=f"semblend models pull {MODEL} was not run"),
]


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Run `semblend serve` with its defaults and an event log, and give its address."""
    port = find_port()
    command = [
        sys.executable,
        "-m",
        "semblend.cli.main",
        "serve",
        "--model",
        MODEL,
        "--device",
        "cpu",
        "--threads",
        "1",
    ]
    variables = os.environ | {"SEMBLEND_EVENTS": str(folder / "events.jsonl"), "SEMBLEND_EMBEDDER": "none"}
    with (folder / "serve.log").open("w") as log:
        server = subprocess.Popen(
            [*command, "--threads", "1", "--port", str(port)], env=variables, stdout=log, stderr=log
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(server, url, folder / "serve.log")
        yield url
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(30)


def wait_until_ready(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and server.poll() is None:
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=30).status_code == 200:
                return
        time.sleep(0.5)
    pytest.fail(f"the server did not start: {log.read_text()[-2000:]}")


def sembench(*words: object) -> int:
    return main([str(word) for word in words])


def measure(url: str, folder: Path) -> Result:
    """The guide's commands: a manifest, a paired run with a second tenant, the engine's own events."""
    manifest = folder / "fixture.jsonl"
    assert sembench("build", "--profile", "fixture", "--output", manifest, "--quiet", "--transforms",
                    "instruction_variant", "swapped_numbers", "negative_control") == 0  # fmt: skip
    assert sembench("run-live-gateway", "--paired", "--manifest", manifest, "--output", folder / "run.json",
                    "--gateway-url", f"{url}/v1", "--model", MODEL, "--max-items", 10, "--recipient-max-tokens", 8,
                    "--warmup-requests", 1, "--tenant-pairs", 1, "--tenant-salt", "--quiet") == 0  # fmt: skip
    assert sembench("summarize-engine-events", "--engine", "semblend", "--input", folder / "events.jsonl",
                    "--output", folder / "events.json") == 0  # fmt: skip
    return read_result(folder / "run.json")


def find_doubts(folder: Path, capsys: pytest.CaptureFixture[str], *flags: object) -> list[str]:
    """Return the names of what the default gates find."""
    capsys.readouterr()
    sembench("assert-result-gates", "--result", folder / "run.json", "--engine-summary", folder / "events.json", *flags)
    said = capsys.readouterr().err.splitlines()
    return [line.split(": ")[1] for line in said if line.startswith("gate failed: ")]


def test_an_honest_run_passes_the_default_gates_and_its_evidence_serves_no_other_run(tmp_path, capsys):
    manifest = ("--manifest", tmp_path / "fixture.jsonl")
    with serving(tmp_path) as url:
        result = measure(url, tmp_path)
        if find_doubts(tmp_path, capsys, *manifest) == [Doubt.HITS_SAVE_NOTHING]:
            result = measure(url, tmp_path)  # a busy machine can hide once what was saved; it is asked once more
    strict = ("--min-witnesses", 3, "--require-materialized-reuse", "--require-no-engine-errors")
    assert find_doubts(tmp_path, capsys, *manifest, *strict) == []
    reused = [record for record in result.requests if record.backend_confirmed_tokens]
    assert len(reused) >= 5
    assert all(set(record.confirmation_sources) == {"receipt", "usage", "prometheus"} for record in reused)
    rename_requests(tmp_path / "events.jsonl")
    assert sembench("summarize-engine-events", "--engine", "semblend", "--input", tmp_path / "events.jsonl",
                    "--output", tmp_path / "events.json") == 0  # fmt: skip
    assert Doubt.FOREIGN_EVIDENCE in find_doubts(tmp_path, capsys, *manifest)


def rename_requests(log: Path) -> None:
    """Make a log of other requests: the same events and receipts under other names."""
    log.write_text(log.read_text().replace("chatcmpl-", "chatcmpl-0"))
