"""Engine logs: what counts, what counts once, and what is only somebody's text."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sembench.cli import main
from sembench.witnesses.engine_events import ENGINES, make_parser, summarize_file, summarize_log
from sembench.witnesses.log_lines import EngineEventKind, Level, read_line
from semblend.confirm import events
from semblend.confirm.events import Event
from semblend.confirm.log_lines import format_line
from semblend.confirm.outcome import Outcome
from semblend.confirm.receipt import Receipt
from semblend.errors import InputError
from semblend.plan.reuse_plan import DeclineReason
from semblend.span import Span

FIXTURES = Path(__file__).parent.parent / "fixtures"
DIGEST = "0123456789abcdef" * 2
EXPECTED = json.loads((FIXTURES / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", EXPECTED)
def test_each_fixture_counts_as_its_label_says(name: str) -> None:
    wanted = dict(EXPECTED[name])
    found = summarize_file(wanted.pop("engine"), str(FIXTURES / name))
    assert {key: found[key] for key in wanted} == wanted


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_has_a_labelled_fixture(engine: str) -> None:
    assert any(wanted["engine"] == engine for wanted in EXPECTED.values())


@pytest.mark.data
@pytest.mark.parametrize("engine", ENGINES)
def test_real_logs_hold_no_semantic_event_and_no_error(engine: str, data_dir: Path) -> None:
    logs = sorted((data_dir / "backend_logs").glob("*.log"))
    assert logs, "the data folder has no backend logs"
    for path in logs:
        found = summarize_file(engine, str(path))
        assert found["lines"] > 10
        seen = {key: found[key] for key in ("events", "errors", "materialized_tokens", "repeated_events", "bad_lines")}
        assert seen == dict.fromkeys(seen, 0), path.name


# -- from the emitter to the summary -------------------------------------------------------------------------------


def receipt(request_id: str = "req-2", engine: str = "vllm") -> Receipt:
    return Receipt(
        request_id=request_id, engine=engine, namespace=DIGEST, outcome=Outcome.BACKEND_MATERIALIZED_REUSE,
        prompt_tokens=100, exact_tokens=10, reused_tokens=60, recomputed_tokens=4, prefill_tokens=26,
        spans=(Span("req-1", 0, 20, 64, 3),),
    )  # fmt: skip


def story(request_id: str = "req-2") -> list[Event]:
    """One donor, one hit, one plan, one confirmed reuse, one error."""
    return [
        events.donor_registered("req-1", DIGEST, 512, 3, blocks=32, request_id="req-1"),
        events.lookup(
            request_id, 100, 7, 2, 0.4, exact_tokens=10, reusable_tokens=64, donor_ids=("req-1",), similarity=0.967
        ),
        events.reuse_planned(request_id, (Span("req-1", 0, 20, 64, 3),), 64, prompt_tokens=100, exact_tokens=10),
        events.reuse_confirmed(receipt(request_id)),
        events.error("store", "disk full", request_id),
    ]


def written(told: list[Event], engine: str) -> list[str]:
    return [line for event in told if (line := format_line(event, engine)) is not None]  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ENGINES)
def test_what_the_emitter_writes_is_what_the_summary_counts(engine: str) -> None:
    found = summarize_log(engine, written(story(), engine))
    assert (found["donor_registrations"], found["materialization_events"], found["materialized_tokens"]) == (1, 1, 60)
    assert found["semantic_hits"] == 1
    assert found["materialized_semantic_kv_reuse"] is True
    assert found["errors"] == (0 if engine == "trtllm" else 1)  # that format has no error line
    assert found["repeated_events"] == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_plan_alone_is_never_reuse(engine: str) -> None:
    told = [event for event in story() if event.kind not in ("reuse_confirmed", "error")]
    found = summarize_log(engine, written(told, engine))
    assert (found["materialization_events"], found["materialized_tokens"]) == (0, 0)
    assert found["materialized_semantic_kv_reuse"] is False


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "lmcache"])
def test_the_same_lines_collected_twice_count_once(engine: str) -> None:
    lines = written([event for event in story() if event.kind != "error"], engine)
    once, twice = summarize_log(engine, lines), summarize_log(engine, lines + lines)
    changing = {"lines", "repeated_events"}
    assert {k: v for k, v in once.items() if k not in changing} == {k: v for k, v in twice.items() if k not in changing}
    assert twice["repeated_events"] == once["events"]


names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=30)


@given(st.lists(names, min_size=1, max_size=6, unique=True), st.sampled_from(["vllm", "sglang", "semblend", "trtllm"]))
def test_any_request_ids_survive_the_way_from_emitter_to_summary(ids: list[str], engine: str) -> None:
    lines = written([events.reuse_confirmed(receipt(name)) for name in ids], engine)
    parser = make_parser(engine, "log")
    found = [event for at, line in enumerate(lines) for event in parser.feed(read_line(at, line))]
    found += parser.finish()
    assert [event.request_id for event in found if event.kind is EngineEventKind.MATERIALIZED] == ids
    assert summarize_log(engine, lines)["materialized_tokens"] == 60 * len(ids)


def test_a_declined_lookup_is_a_hit_with_its_reason_and_no_reuse() -> None:
    event = events.lookup("r", 100, 1, 1, 0.1, reusable_tokens=40, donor_ids=("d",), reason=DeclineReason.TOO_SHORT)
    for engine in ("vllm", "trtllm", "semblend"):
        found = summarize_log(engine, written([event], engine))
        assert (found["semantic_hits"], found["rejection_reasons"]) == (1, {"too_short": 1})
        assert found["materialized_semantic_kv_reuse"] is False


def test_a_reason_that_several_events_repeat_counts_once_a_request() -> None:
    told = [
        events.reuse_declined("r", DeclineReason.STALE),
        events.fallback("r", DeclineReason.STALE),
        events.fallback("s", DeclineReason.STALE),
    ]
    assert summarize_log("semblend", written(told, "semblend"))["rejection_reasons"] == {"stale": 2}


# -- user text -----------------------------------------------------------------------------------------------------

CLAIMS = [
    "SemBlend materialized request_id=x donor_id=y tokens=999",
    "[FUZZY] Realized 999 fuzzy tokens",
    "Retrieved 999 out of 999 tokens",
    '{"event":"materialized","request_id":"x","materialized":1,"covered_token_count":999}',
    "ERROR the engine is dead",
    "ERROR 06-22 18:00:04 [core.py:700] not really",
    "Traceback (most recent call last):",
]
QUOTED = [
    "(APIServer pid=4) INFO 06-22 18:00:02 [logger.py:43] Received request r: prompt: '{}'",
    "[2026-06-22 18:00:05] Receive: obj=GenerateReqInput(text='{}')",
    "[2026-06-22 18:00:05,100] LMCache INFO: prompt was '{}' (x.py:1:lmcache)",
    "[06/22/2026-18:00:06] [TRT-LLM] [I] prompt: {}",
    "INFO:     prompt {}",
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("quote", QUOTED)
def test_user_text_inside_a_line_is_neither_event_nor_error(engine: str, quote: str) -> None:
    found = summarize_log(engine, [quote.replace("{}", claim) for claim in CLAIMS])
    assert (found["events"], found["errors"], found["runtime_warnings"]) == (0, 0, 0)


def test_a_word_at_the_start_of_a_continued_line_is_no_level() -> None:
    lines = [
        "(APIServer pid=4) INFO 06-22 18:00:02 [logger.py:43] the user wrote:",
        "ERROR is what my screen says",
        "(APIServer pid=4) ERROR is what my screen says",
        "Traceback (most recent call last):",
        "is what my screen says",
    ]
    assert summarize_log("vllm", lines)["errors"] == 0


@pytest.mark.parametrize(
    "line",
    [
        "(EngineCore pid=5) ERROR 08-21 10:29:13 [core.py:700] failed",
        "ERROR 08-21 10:29:13 [core.py:700] failed",
        "(APIServer pid=5) ERROR:    Exception in ASGI application",
        "ERROR:root:failed",
        "[2026-08-01 23:40:02,100] LMCache ERROR: failed",
        "[2026-08-01 23:40:02 TP0] ERROR: failed",
        "2026-08-01 23:40:02,100 - ERROR - engine - failed",
        "2026-08-01T23:40:02.123456789Z stderr F ERROR:    failed",
        "[06/22/2026-18:00:00] [TRT-LLM] [E] failed",
        "E0801 12:00:00.123456 77 file.cc:12] failed",
        "CRITICAL 08-21 10:29:13 [core.py:700] failed",
        'ERROR SemBlend store request_id=r message="disk full"',
        '{"level":"error","message":"failed"}',
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_level_at_its_place_is_an_error_in_every_log(engine: str, line: str) -> None:
    found = summarize_log(engine, [line])
    assert found["errors"] == 1
    assert found["error_examples"][0]["line"] == 1


def test_one_record_of_many_lines_is_one_error() -> None:
    head = "(EngineCore pid=5) ERROR 08-21 10:29:13 [core.py:700] "
    record = [head + "failed", head + "Traceback (most recent call last):", head + '  File "x.py", line 1', head + "E"]
    assert summarize_log("vllm", record)["errors"] == 1
    later = [line.replace("10:29:13", "10:29:14") for line in record]
    assert summarize_log("vllm", record + later)["errors"] == 2


def test_a_bare_traceback_is_one_error_chains_included() -> None:
    trace = ["Traceback (most recent call last):", '  File "x.py", line 1', "ValueError: no"]
    chained = [*trace, "", "During handling of the above exception, another exception occurred:", "", *trace]
    assert summarize_log("sglang", ["[2026-08-01 23:40:02] running", *chained])["errors"] == 1
    assert summarize_log("sglang", ["ERROR:    Exception in ASGI application", *chained])["errors"] == 1


@given(st.text(max_size=200))
def test_reading_a_line_never_fails_and_loses_nothing(text: str) -> None:
    line = read_line(1, text)
    assert line.header + line.message == line.text
    assert line.level in Level


# -- broken input --------------------------------------------------------------------------------------------------


def test_a_cut_audit_line_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text('{"event":"donor_registered","donor_id":"a","token_count":3}\n{"event":"materi')
    with pytest.raises(InputError, match=r"audit.jsonl, line 2: not a whole JSON object"):
        summarize_file("trtllm", str(path))
    found = summarize_file("trtllm", str(path), skip_bad=True)
    assert (found["bad_lines"], found["donor_registrations"]) == (1, 1)


@pytest.mark.parametrize("wrong", [-1, 1.5, "many", [3]])
def test_a_count_that_is_none_names_its_field(wrong: Any) -> None:
    line = json.dumps({"event": "materialized", "request_id": "r", "materialized": 1, "covered_token_count": wrong})
    with pytest.raises(InputError, match=r"line 1, field covered_token_count"):
        summarize_log("trtllm", [line])


def test_a_receipt_whose_parts_do_not_add_up_is_refused() -> None:
    record = json.loads(events.reuse_confirmed(receipt()).to_json_line())
    record["receipt"]["reused_tokens"] = 1000
    with pytest.raises(InputError, match=r"line 1, field receipt"):
        summarize_log("semblend", [json.dumps(record)])
    assert summarize_log("semblend", [json.dumps(record)], skip_bad=True)["materialized_tokens"] == 0


def test_a_pretty_printed_object_in_a_log_is_just_text() -> None:
    for engine in ENGINES:
        assert summarize_log(engine, ["config:", "{", '  "event": "materialized",', "}"])["events"] == 0


# -- the command ---------------------------------------------------------------------------------------------------


def test_the_command_writes_the_summary_and_tells_it_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = tmp_path / "engine.log.gz"
    packed.write_bytes(gzip.compress((FIXTURES / "sglang_semantic.log").read_bytes()))
    output = tmp_path / "new" / "summary.json"
    code = main(["summarize-engine-events", "--engine", "sglang", "--input", str(packed), "--output", str(output)])
    said = capsys.readouterr()
    assert code == 0
    assert json.loads(output.read_text())["materialized_tokens"] == 736
    assert json.loads(said.out)["output"] == str(output)
    assert "2 materializations with 736 tokens, 1 errors" in said.err


@pytest.mark.parametrize("text", [None, "\x1f\x8b broken"])
def test_a_file_that_cannot_be_read_is_a_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    path = tmp_path / "engine.log.gz"
    if text is not None:
        path.write_text(text)
    assert main(["summarize-engine-events", "--engine", "vllm", "--input", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: cannot read")
    assert "hint: " in said
