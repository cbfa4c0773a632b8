"""What goes wrong on the way: each fault has a clear message, no half-written result, and a way to go on."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path

import pytest
from aiohttp import web
from http_answers import answering
from live_cases import gateway_code, manifest, run_gateway
from lying_backend import LyingBackend

import sembench
from sembench.backends import post_stream
from sembench.cli import main


def sembench_(*words: object) -> int:
    return main([str(word) for word in words])


def spoiled(path: Path, line: int, **change: object) -> Path:
    """The manifest with one line changed."""
    lines = path.read_text().splitlines()
    lines[line] = json.dumps(json.loads(lines[line]) | change)
    path.write_text("\n".join(lines) + "\n")
    return path


def one_line_error(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr().err.splitlines()
    errors = [line for line in said if line.startswith("error: ")]
    assert len(errors) == 1
    assert any(line.startswith("hint: ") for line in said)
    return errors[0]


# -- manifests -----------------------------------------------------------------------------------------------------


def test_a_bad_line_far_down_the_manifest_is_told_before_anything_is_asked(tmp_path, capsys):
    cases = spoiled(manifest(tmp_path), 4, answers="not a list")
    with LyingBackend().serving() as server:
        assert gateway_code(server.url, tmp_path, cases=cases) == 2
        assert server.answered == 0
    assert "cases.jsonl line 5: field answers is a string" in one_line_error(capsys)
    assert not list(tmp_path.glob("result.json*"))


@pytest.mark.parametrize("command", ["run-live-gateway", "run-offline"])
def test_a_manifest_of_two_versions_is_refused_before_anything_is_asked(tmp_path, capsys, command):
    cases = spoiled(manifest(tmp_path), 2, benchmark_version="sembench.2031.01")
    with LyingBackend().serving() as server:
        if command == "run-offline":
            code = sembench_(command, "--manifest", cases, "--output", tmp_path / "result.json", "--quiet")
        else:
            code = gateway_code(server.url, tmp_path, cases=cases)
        assert server.answered == 0
    assert code == 2
    assert "mixes the benchmark versions sembench.2026.11, sembench.2031.01" in one_line_error(capsys)
    assert not (tmp_path / "result.json").exists()


# -- results -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def offline(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("offline")
    words = ("--manifest", manifest(folder), "--output", folder / "good.json", "--distractors", 0, "--quiet")
    assert sembench_("run-offline", *words) == 0
    return folder / "good.json"


@pytest.mark.parametrize("command", ["compare", "report", "assert-result-gates", "merge-results"])
@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda text: text[: len(text) // 2], "is not a whole JSON file"),
        (lambda text: text.replace("sembench.result.v2", "sembench.result.v9"), "is a sembench.result.v9"),
        (lambda text: text.replace('"prompt_tokens": ', '"prompt_tokens": "many", "x": ', 1), "prompt_tokens"),
        (lambda _: "[]", "holds no JSON object"),
    ],
)
def test_a_damaged_result_is_refused_by_every_command(offline, tmp_path, capsys, command, damage, told):
    bad = tmp_path / "bad.json"
    text = offline.read_text()
    requests = text.index('"requests"')
    bad.write_text(damage(text) if told != "prompt_tokens" else text[:requests] + damage(text[requests:]))
    output = tmp_path / "out.json"
    words = {
        "compare": (offline, bad, "--output", output),
        "report": ("--result", bad, "--output", output),
        "assert-result-gates": ("--result", bad, "--min-requests", 1, "--output", output),
        "merge-results": ("--cold", offline, "--warm", bad, "--output", output),
    }[command]
    assert sembench_(command, *words) == 2
    assert told in one_line_error(capsys)
    assert not output.exists()


def test_a_run_that_fails_while_writing_leaves_the_earlier_result_alone(tmp_path, monkeypatch, capsys):
    output = tmp_path / "result.json"
    output.write_text("the result of yesterday")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert sembench_("build", "--profile", "fixture", "--output", output) == 2
    assert "No space left on device" in one_line_error(capsys)
    assert output.read_text() == "the result of yesterday"
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


# -- servers -------------------------------------------------------------------------------------------------------


def test_a_stream_cut_in_the_middle_is_asked_again_by_resume_and_only_that(tmp_path, capsys):
    cases, backend = manifest(tmp_path), LyingBackend()
    cut = {"p1"}
    answer = backend.answer

    def sometimes(body, tenant):
        backend.cut_after = 2 if cut and "harbour1 " in body["messages"][0]["content"] else None
        return answer(body, tenant)

    backend.answer = sometimes
    with backend.serving() as server:
        first = run_gateway(server.url, tmp_path, cases=cases)
        assert {record.item_id for record in first.requests if record.error} == cut
        assert first.aggregate["error_count"] == 1
        assert all(r.quality_score is None and r.ttft_ms is not None for r in first.requests if r.error)
        assert "the stream was cut" in capsys.readouterr().err
        cut.clear()
        before = server.answered
        again = run_gateway(server.url, tmp_path, "--resume", cases=cases)
        assert server.answered - before == 1 + 2 + 2  # a warm-up, two probes, one donor and one recipient
    assert again.aggregate["error_count"] == 0
    assert [record.item_id for record in again.requests] == ["p0", "p1", "p2", "n0", "n1"]
    assert not (tmp_path / "result.json.partial.jsonl").exists()


def test_a_server_that_hangs_is_given_up_after_three_requests(tmp_path, capsys):
    backend = LyingBackend()
    answer = backend.answer

    def hangs(body, tenant):
        events, wait_s = answer(body, tenant)
        return events, 5.0 if backend.answered > 4 else wait_s

    backend.answer = hangs
    with backend.serving() as server:
        assert gateway_code(server.url, tmp_path, "--timeout-seconds", "0.4", cases=manifest(tmp_path)) == 1
        assert server.answered <= 4 + 3
    assert "stopped answering: no answer in time" in one_line_error(capsys)
    assert not (tmp_path / "result.json").exists()


def test_an_event_that_is_cut_inside_its_json_is_an_error():
    async def asked():
        async def half(_request):
            body = b'data: {"choices": [{"delta": {"content": "yes"}}]}\n\ndata: {"choices": [{"de'
            return web.Response(body=body, headers={"content-type": "text/event-stream"})

        async with answering(half) as (client, url):
            return await post_stream(client, url, {}, {})

    exchange = asyncio.run(asked())
    assert exchange.error == "the stream was cut: it ended without [DONE]"
    assert len(exchange.events) == 1


# -- diaries -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda lines: [lines[0].replace('"sembench_version": "', '"sembench_version": "9'), *lines[1:]], "version 9"),
        (lambda lines: [lines[0], "oops", *lines[1:]], "line 2 is damaged"),
        (lambda lines: [lines[0], '{"item_id": "p0"}', *lines[1:]], "line 2 is damaged"),
        (lambda lines: ["[]", *lines[1:]], "line 1 is damaged"),
    ],
)
def test_a_diary_that_cannot_be_trusted_is_not_continued_and_not_deleted(tmp_path, capsys, damage, told):
    cases = manifest(tmp_path)
    diary = tmp_path / "result.json.partial.jsonl"
    with LyingBackend(die_after=7).serving() as server:
        assert gateway_code(server.url, tmp_path, cases=cases) == 1
        capsys.readouterr()
        diary.write_text("\n".join(damage(diary.read_text().splitlines())) + "\n")
        before = diary.read_text()
        assert gateway_code(server.url, tmp_path, "--resume", cases=cases) in (1, 2)
    assert told in one_line_error(capsys)
    assert diary.read_text() == before


# -- clocks --------------------------------------------------------------------------------------------------------


def test_a_wall_clock_that_runs_backwards_changes_no_measured_time(tmp_path, monkeypatch):
    started, calls = time.time(), 0

    def backwards() -> float:
        nonlocal calls
        calls += 1
        return started - 3600.0 * calls

    monkeypatch.setattr(time, "time", backwards)
    with LyingBackend().serving() as server:
        result = run_gateway(server.url, tmp_path, "--paired", cases=manifest(tmp_path, 2, 1))
    assert calls > 0  # somebody looked at it: the server's Date header at least
    times = [value for record in result.requests for value in (record.ttft_ms, record.latency_ms)]
    assert all(0 < value < 60_000 for value in times)
    assert result.paired["pairs_used"] == 3


def test_no_duration_is_taken_from_a_clock_that_can_jump():
    source = Path(sembench.__file__).parent
    jumping = re.compile(r"\btime\.time(?:_ns)?\(|\butcnow\(|datetime\.now\(\)")
    assert [path.name for path in source.rglob("*.py") if jumping.search(path.read_text())] == []
