"""Sweeps: every rate with every concurrency, conversations with think times, resume, CSV, gates, comparison, report."""

from __future__ import annotations

import asyncio
import csv
import html
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from live_cases import manifest
from lying_backend import LyingBackend

from sembench.backends import ServerAnswer
from sembench.cli import main
from sembench.live.load import RequestArrival, draw_conversations, play
from sembench.manifests.traffic import ConversationTurn
from sembench.result import read_load_result
from semblend._version import __version__

Capture = pytest.CaptureFixture[str]


def load(url: str, folder: Path, *flags: str, work: tuple[str, ...] = (), name: str = "load.json") -> int:
    work = work or ("--manifest", str(manifest(folder, 3, 1)))
    words = ["run-load", *work, "--output", str(folder / name), "--base-url", url, "--model", "liar", "--quiet"]
    return main([*words, "--slo", "ttft:10000", *flags])


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    flags = ("--request-rate", "20", "60", "--max-concurrency", "1", "4")
    with LyingBackend().serving() as server:
        assert load(server.url, folder, *flags, "--csv", str(folder / "load.csv")) == 0
    return folder / "load.json"


def test_every_rate_is_measured_with_every_concurrency_and_written_as_csv(swept: Path) -> None:
    result = read_load_result(swept)
    assert [(p.request_rate, p.max_concurrency) for p in result.points] == [(20, 1), (60, 1), (20, 4), (60, 4)]
    assert all(len(point.requests) == 8 and not point.summary["failed"] for point in result.points)
    assert result.config["isolation"] == "salt"  # every point starts with an empty cache
    rows = list(csv.DictReader(swept.with_suffix(".csv").read_text().splitlines()))
    assert [row["request_rate"] for row in rows] == ["20.0", "60.0", "20.0", "60.0"]
    assert float(rows[0]["median_ttft_ms"]) == pytest.approx(result.points[0].summary["median_ttft_ms"])


def test_gates_judge_every_point(swept: Path, capsys: Capture) -> None:
    base = ["assert-result-gates", "--result", str(swept)]
    assert main(base) == 0
    assert main([*base, "--min-goodput-share", "0.99", "--max-failed-share", "0", "--max-p99-ttft-ms", "60000"]) == 0
    capsys.readouterr()
    assert main([*base, "--max-median-ttft-ms", "0.1"]) == 1
    assert capsys.readouterr().err.count("gate failed: --max-median-ttft-ms: ") == 4
    assert main([*base, "--min-quality-pass-rate", "0.5"]) == 2
    assert "cannot be judged on a load result" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value["points"][0].update(request_throughput=1e6),
        lambda value: value["points"][0]["requests"][0].update(ttft_ms=0.1),
        lambda value: value["points"][1]["requests"].pop(),
        lambda value: value.pop("digest"),
        lambda value: value["config"].update(model="larger"),
    ],
)
def test_an_edited_load_result_is_refused_and_its_report_says_so(
    change: Any, swept: Path, tmp_path: Path, capsys: Capture
) -> None:
    value = json.loads(swept.read_text())
    change(value)
    forged = tmp_path / "forged.json"
    forged.write_text(json.dumps(value))
    assert main(["assert-result-gates", "--result", str(forged)]) == 1
    assert "gate failed: edited_result" in capsys.readouterr().err
    assert main(["report", "--result", str(forged)]) == 0
    assert "Do not believe this result" in forged.with_suffix(".html").read_text()


def test_the_report_draws_the_sweep(swept: Path, tmp_path: Path) -> None:
    page, text = tmp_path / "load.html", tmp_path / "load.md"
    assert main(["report", "--result", str(swept), "--output", str(page), "--markdown", str(text)]) == 0
    shown = html.unescape(page.read_text()).replace("\xa0", " ")
    assert all(f'id="{name}"' in shown for name in ("load-ttft", "load-goodput", "load-throughput"))
    assert "99 % of requests kept the promises" in shown
    assert "| 60 | 4 |" in text.read_text()
    assert '="nan"' not in shown


def test_a_run_compared_with_itself_is_equal_point_by_point(swept: Path, capsys: Capture) -> None:
    """Two runs of one server differ with the machine's other work; tests/sembench/scoring has the statistics."""
    again = shutil.copy(swept, swept.with_name("again.json"))
    assert main(["compare", str(swept), str(again), "--fail-on-worse"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["points_shared"] == 4
    assert {row["metric"] for row in found["points"][0]["metrics"]} >= {"ttft_ms", "e2el_ms", "goodput_share"}


def test_a_load_result_is_not_compared_with_another_kind(swept: Path, tmp_path: Path, capsys: Capture) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"result_version": "sembench.result.v2"}))
    assert main(["compare", str(swept), str(other)]) == 2
    assert "one file is a load result" in capsys.readouterr().err


def test_an_interrupted_sweep_goes_on_and_asks_nothing_twice(tmp_path: Path, capsys: Capture) -> None:
    work = ("--manifest", str(manifest(tmp_path, 2, 1)))
    flags = ("--request-rate", "50", "80", "--warmup-requests", "0")
    backend = LyingBackend()
    with backend.serving() as server:
        assert load(server.url, tmp_path, *flags, work=work) == 0
        whole = json.loads((tmp_path / "load.json").read_text())
        what = {**whole["config"], "server_identity": whole["run"]["server_identity"]}
        header = {"partial_version": "sembench.partial.v1", "sembench_version": __version__, "what": what}
        lines = [header, {"item_id": "50.0 None", "records": whole["points"][0]}]
        (tmp_path / "load.json.partial.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        before = backend.answered
        assert load(server.url, tmp_path, *flags, "--resume", work=work) == 0
        assert backend.answered - before == 6  # one point of two
        assert "1 points are done already" in capsys.readouterr().err
        assert not (tmp_path / "load.json.partial.jsonl").exists()
        again = json.loads((tmp_path / "load.json").read_text())
        assert again["points"][0] == whole["points"][0]
        # another seed is another run
        (tmp_path / "load.json.partial.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert load(server.url, tmp_path, *flags, "--resume", "--seed", "7", work=work) == 2
        assert "was begun with seed 0" in capsys.readouterr().err
    with LyingBackend().serving() as other:
        assert load(other.url, tmp_path, *flags, "--resume", work=work) == 2
        assert other.answered == 0


class Recorder:
    """Answers at once, and remembers what was sent and when."""

    name = "recorder"

    def __init__(self, fail: str = "") -> None:
        self.sent: list[tuple[float, str]] = []
        self._fail = fail

    async def ask(self, call: Any, *, donor: bool = False) -> ServerAnswer:
        self.sent.append((asyncio.get_running_loop().time(), call.text))
        await asyncio.sleep(0.01)
        error = "no" if call.text == self._fail else None
        return ServerAnswer(text="x", ttft_ms=5.0, latency_ms=10.0, output_tokens=1, error=error)


def turns(*texts: str, gap_s: float | None = None) -> tuple[ConversationTurn, ...]:
    return tuple(ConversationTurn(text, gap_s=gap_s if at else None) for at, text in enumerate(texts))


def test_a_turn_waits_for_the_answer_before_it_and_then_thinks() -> None:
    arrivals = draw_conversations([turns("a1", "a2"), turns("b1", "b2")], 1000.0, think_s=None)
    assert [arrival.think_s for arrival in arrivals] == [0.0] * 4
    arrivals = draw_conversations([turns("a1", "a2", gap_s=0.5), turns("b1")], 1000.0)
    backend = Recorder()
    timed, _ = asyncio.run(play(backend, arrivals, output_tokens=1))
    at = {text: when for when, text in backend.sent}
    assert at["a2"] - at["a1"] >= 0.505
    assert [one.turn for one in timed] == [0, 1, 0]
    assert timed[1].due_s == pytest.approx(timed[0].finished_s + 0.5)  # thinking is no waiting


def test_pauses_are_drawn_and_bounded() -> None:
    talks = [turns("a", "b", "c")] * 50
    drawn = draw_conversations(talks, 10.0, think_s=2.0, longest_think_s=5.0, seed=3)
    pauses = [arrival.think_s for arrival in drawn if arrival.turn]
    assert 1.0 < sum(pauses) / len(pauses) < 2.5
    assert max(pauses) <= 5.0
    assert drawn == draw_conversations(talks, 10.0, think_s=2.0, longest_think_s=5.0, seed=3)
    assert len(draw_conversations(talks, 10.0, limit=7)) == 7


def test_a_conversation_ends_with_its_first_failure() -> None:
    arrivals = draw_conversations([turns("a1", "a2", "a3"), turns("b1")], 1000.0, think_s=0.0)
    timed, _ = asyncio.run(play(Recorder(fail="a2"), arrivals, output_tokens=1))
    assert [(one.conversation, one.turn) for one in timed] == [(0, 0), (0, 1), (1, 0)]


def test_requests_without_conversation_stay_an_open_loop() -> None:
    timed, _ = asyncio.run(play(Recorder(), [RequestArrival(0.0, "x"), RequestArrival(0.0, "y")], output_tokens=1))
    assert all(one.due_s == 0.0 for one in timed)


def test_your_own_log_is_replayed_turn_by_turn(tmp_path: Path) -> None:
    first = [{"role": "user", "content": "The code of the harbour is K7. Which code?"}]
    later = [*first, {"role": "assistant", "content": "K7"}, {"role": "user", "content": "Sure?"}]
    log = tmp_path / "own.jsonl"
    log.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in (first, later)))
    with LyingBackend().serving() as server:
        assert load(server.url, tmp_path, "--think-time", "0", work=("--log", str(log))) == 0
    (point,) = read_load_result(tmp_path / "load.json").points
    assert [(one.conversation, one.turn) for one in point.requests] == [(0, 0), (0, 1)]
