"""`semblend estimate`: one log in; a table, data or a page out."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from estimate_logs import ask

from semblend.cli.main import main
from semblend.estimate import Replay
from semblend.text.logs import LoggedPrompt


def write_log(path: Path, count: int = 12) -> str:
    lines = [
        {"body": ask(at, [at % 3, 3, 4], [at % 2, 2], f"Why {at}?"), "custom_id": f"r{at}", "user": "ab"[at % 2]}
        for at in range(count)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return str(path)


def run_json(*words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["estimate", *words, "--json", "--quiet"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_the_table_names_each_step_the_rates_and_that_nothing_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", write_log(tmp_path / "l.jsonl"), "--prefill-tokens-per-s", "1000"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "12 prompts, ",
        "1. exact prefix cache, as it is",
        "2. move to the end: date",
        "3. sort the tools",
        "4. drop repeats",
        "5. arrange the passages",
        "6. reuse at any offset, balanced",
        "7. reuse at any offset, fast",
        "8. 2 times the memory",
        "all of it",
        "prefill: 1,000 tokens/s (given)",
        "3.00 USD a GPU hour, an assumption",
        "tokenizer stable (an approximation)",
        "not a measurement",
        "by tenant",
    ):
        assert words in shown


def test_data_goes_to_a_file_whole_or_to_standard_output_alone_and_the_page_to_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, target, page = write_log(tmp_path / "l.jsonl.gz"), tmp_path / "out.json", tmp_path / "out.html"
    assert main(["estimate", "--prompts", log, "--json", str(target), "--html", str(page)]) == 0
    capsys.readouterr()
    printed = run_json(log, capsys=capsys)
    written = json.loads(target.read_text())
    assert printed["total"] == written["total"]
    assert printed["rows"] == written["rows"]
    assert written["rates"]["prefill_source"].startswith("measured")
    assert page.read_text().startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


def test_seconds_and_money_follow_from_tokens_and_the_given_rates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write_log(tmp_path / "l.jsonl")
    answer = run_json(log, "--prefill-tokens-per-s", "500", "--gpu-hour", "1.8", capsys=capsys)
    for row in answer["rows"]:
        assert row["saved_s"] == pytest.approx(row["saved_tokens"] / 500)
        assert row["saved_price"] == pytest.approx(row["saved_s"] / 3600 * 1.8)
    priced = run_json(log, "--price-per-million", "5", capsys=capsys)
    assert priced["total"]["price"] == pytest.approx(priced["total"]["prompt_tokens"] * 5e-6)


def test_memory_is_given_in_tokens_or_in_bytes_of_a_models_kv(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write_log(tmp_path / "l.jsonl")
    assert run_json(log, "--cache-tokens", "320", capsys=capsys)["options"]["cache_tokens"] == 320
    by_bytes = run_json(log, "--memory", "1G", "--model", "llama-3.1-8b", "--more-memory", "none", capsys=capsys)
    assert by_bytes["options"]["cache_tokens"] == 10**9 // 131_072
    assert [row["name"] for row in by_bytes["rows"]][-1] == "fast"


def test_the_tenant_field_the_limit_and_the_sample_are_obeyed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write_log(tmp_path / "l.jsonl")
    limited = run_json(log, "--tenant-field", "user", "--limit", "1", capsys=capsys)
    assert (limited["total"]["prompts"], list(limited["by_tenant"])) == (1, ["a"])
    assert list(run_json(log, "--no-tenants", capsys=capsys)["by_tenant"]) == [""]
    many = tmp_path / "many.jsonl"
    many.write_text("".join(f'{{"prompt": "question number {at}"}}\n' for at in range(3000)))
    sampled = run_json(str(many), "--sample", "0.5", "--more-memory", "none", capsys=capsys)
    assert (sampled["total"]["prompts"], sampled["sample"]) == (2000, 0.5)


def test_a_bad_line_is_named_and_stops_the_run_unless_bad_lines_are_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "l.jsonl"
    write_log(path)
    path.write_text(path.read_text() + '{"messages": 4}\nnot json\n')
    assert main(["estimate", str(path), "--skip-bad", "--json", "-"]) == 0
    told = capsys.readouterr()
    answer = json.loads(told.out)
    assert (answer["lines_skipped"], answer["total"]["prompts"]) == (2, 12)
    assert "l.jsonl, line 13, field messages" in told.err
    assert "l.jsonl, line 14: not JSON" in told.err
    assert main(["estimate", str(path), "--json", str(tmp_path / "o.json")]) == 2
    assert "line 13, field messages" in capsys.readouterr().err
    assert not (tmp_path / "o.json").exists()


def test_a_log_of_bad_lines_only_is_an_error_that_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "l.jsonl").write_text('{"x": 1}\n[]\nnot json\n')
    assert main(["estimate", str(tmp_path / "l.jsonl"), "--skip-bad"]) == 2
    told = capsys.readouterr().err
    assert "line 1: no prompt in it" in told
    assert "holds no prompt" in told
    assert "hint: " in told


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--limit", "0"], "'0' is not above 0"),
        (["--block-size", "x"], "'x' is not a whole number"),
        (["--prefill-tokens-per-s", "nan"], "'nan' is not a number above 0"),
        (["--cache-tokens", "5"], "a cache of 5 tokens in blocks of 16 holds nothing"),
        (["--cache-tokens", "5k", "--memory", "1G"], "say the same"),
        (["--json", "/no/such/folder/o.json"], "cannot write /no/such/folder/o.json: No such file or directory"),
        (["--html", "-"], "--html needs the name of a file"),
        (["--html", "/no/such/folder/o.html"], "cannot write /no/such/folder/o.html: No such file or directory"),
        (["--more-memory", "4,2"], "do not grow"),
        (["--more-memory", "many"], "'many' is not a list"),
        (["--sample", "2"], "'2' is not a share"),
        (["--prompts", "x"], "give one log"),
    ],
)
def test_mistakes_are_one_line_and_a_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["estimate", write_log(tmp_path / "l.jsonl"), *flags]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "hint: " in told
    assert "Traceback" not in told


def test_an_empty_log_is_a_mistake_and_a_servers_log_without_prompts_says_what_to_switch_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "e.jsonl").write_text("\n")
    assert main(["estimate", str(tmp_path / "e.jsonl")]) == 2
    assert "holds no prompt" in capsys.readouterr().err
    (tmp_path / "v.log").write_text("INFO Received request a: params: SamplingParams(n=1), lora_request: None.\n")
    assert main(["estimate", str(tmp_path / "v.log")]) == 2
    assert "VLLM_LOGGING_LEVEL=DEBUG" in capsys.readouterr().err


def test_standard_input_is_read_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = Path(write_log(tmp_path / "l.jsonl")).read_bytes()
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    assert run_json("-", capsys=capsys)["total"]["prompts"] == 12


def test_interrupted_it_prints_what_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Replay.add

    def add_five(replay: Replay, logged: LoggedPrompt) -> None:
        if replay.prompts == 5:
            raise KeyboardInterrupt
        add(replay, logged)

    monkeypatch.setattr(Replay, "add", add_five)
    assert main(["estimate", write_log(tmp_path / "l.jsonl"), "--json", "-"]) == 130
    told = capsys.readouterr()
    answer = json.loads(told.out)
    assert (answer["complete"], answer["total"]["prompts"]) == (False, 5)
    assert "stopped after 5 prompts" in told.err


def test_a_packed_log_that_ends_too_early_is_replayed_up_to_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = Path(write_log(tmp_path / "l.jsonl.gz", 400))
    log.write_bytes(log.read_bytes()[:-3000])
    assert main(["estimate", str(log), "--skip-bad", "--json", "-", "--more-memory", "none"]) == 0
    told = capsys.readouterr()
    answer = json.loads(told.out)
    assert (answer["complete"], answer["stopped"]) == (False, "damaged")
    assert 0 < answer["total"]["prompts"] < 400
    assert "could not be read to its end" in told.err
    assert main(["estimate", str(log)]) == 2


def test_text_with_half_a_character_is_written_to_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "l.jsonl").write_text('{"prompt": "\\ud800 half \\u0000", "user": "\\udfff"}\n' * 3)
    page = tmp_path / "p.html"
    assert main(["estimate", str(tmp_path / "l.jsonl"), "--html", str(page)]) == 0
    assert "half" in page.read_text("utf-8")
    capsys.readouterr()


@pytest.mark.data
def test_agents_that_repeat_themselves_gain_over_the_prefix_cache(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = data_dir / "agent_traces" / "magagent.jsonl.gz"
    answer = run_json(str(log), "--skip-bad", "--more-memory", "none", capsys=capsys)
    rows = {row["name"]: row for row in answer["rows"]}
    assert rows["prefix"]["saved_share"] > 0.5
    assert rows["balanced"]["saved_tokens"] > 0


def test_a_field_inside_a_tool_is_not_named_because_it_cannot_be_moved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tools in another order look like a name that changes in front of long equal text."""
    tools = [{"name": name, "description": "Carries cars over the strait at noon. " * 20} for name in "abc"]
    bodies = [
        {
            "tools": [tools[(at + turn) % 3] for turn in range(3)],
            "messages": [{"role": "user", "content": f"Why {at}?"}],
        }
        for at in range(12)
    ]
    log = tmp_path / "tools.jsonl"
    log.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    answer = run_json(str(log), "--more-memory", "none", capsys=capsys)
    assert answer["fields"] == []
    assert {row["name"]: row["saved_tokens"] for row in answer["rows"]}["tools"] > 0


def test_a_log_of_tokens_is_not_called_an_approximation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ids.jsonl").write_text(json.dumps({"token_ids": list(range(200))}) + "\n")
    answer = run_json(str(tmp_path / "ids.jsonl"), capsys=capsys)
    assert (answer["tokens_are_approximate"], answer["tokenizer"]) == (False, "none, tokens as logged")


def test_a_log_in_another_encoding_is_named_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "l.jsonl").write_bytes('{"prompt": "café"}\n'.encode("latin-1"))
    assert main(["estimate", str(tmp_path / "l.jsonl")]) == 2
    told = capsys.readouterr().err
    assert "not UTF-8" in told
    assert "iconv" in told


def test_lookups_that_fail_are_told_because_they_count_reuse_too_low(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from semblend.pipeline import Pipeline

    log = str(Path(__file__).parents[2] / "examples" / "data" / "handbook_desk.jsonl")
    assert run_json(log, capsys=capsys)["failed_lookups"] == 0

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(Pipeline, "run", fail)
    assert main(["estimate", log, "--html", str(tmp_path / "page.html")]) == 0
    assert "lookups failed, so reuse is counted too low: MemoryError: no room" in capsys.readouterr().out
    assert "lookups failed" in (tmp_path / "page.html").read_text("utf-8")
