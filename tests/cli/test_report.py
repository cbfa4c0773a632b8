"""`semblend report` tells from the audit stream what reuse did to the first token."""

from __future__ import annotations

import json
import random

import pytest

from semblend.cli.main import main
from semblend.confirm import events
from semblend.confirm.outcome import Outcome
from semblend.confirm.receipt import Receipt
from semblend.plan.reuse_plan import DeclineReason
from semblend.prompt import Namespace
from semblend.span import Span

KIND = "one donor in order, 8192+ tokens, 1+ spans"


def make_receipt(number: int, *, control: bool, ms: float) -> Receipt:
    tokens = {"prefill_tokens": 1000} if control else {"reused_tokens": 900, "prefill_tokens": 100}
    return Receipt(
        request_id=f"r{number}",
        engine="vllm",
        namespace=Namespace().digest,
        outcome=Outcome.COLD_FALLBACK if control else Outcome.BACKEND_MATERIALIZED_REUSE,
        prompt_tokens=1000,
        spans=() if control else (Span("d", 0, 50, 900),),
        load_ms=None if control else 2.0,
        service_ms=ms,
        kind=KIND,
        expected_ms=40.0,
        expected_cold_ms=80.0,
        reason=DeclineReason.CONTROL if control else None,
        **tokens,
    )


@pytest.fixture
def stream(tmp_path):
    rng, path = random.Random(1), tmp_path / "events.jsonl"
    lines = []
    for number in range(400):
        control = number % 10 == 0
        ms = (80 if control else 44) * rng.lognormvariate(0, 0.1)
        lines.append(events.from_receipt(make_receipt(number, control=control, ms=ms)).to_json_line())
    path.write_text("\n".join([*lines, '{"event": "lookup"}', '{"half a li']))
    return path


def test_both_arms_are_compared_with_an_interval_and_forecasts_are_judged(stream, capsys):
    assert main(["report", str(stream), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["reused"], found["control"]) == (400, 360, 40)
    (kind,) = found["kinds"]
    assert (kind["kind"], kind["with"], kind["without"]) == (KIND, 360, 40)
    assert kind["low"] < 0.55 < kind["high"]
    assert kind["high"] - kind["low"] < 0.1
    assert found["median_forecast_error"] == pytest.approx(0.1, abs=0.05)
    assert main(["report", str(stream)]) == 0
    assert f"{KIND}   360       40" in capsys.readouterr().out


def test_too_few_to_compare_is_said(stream, capsys):
    lines = stream.read_text().splitlines()
    stream.write_text("\n".join(lines[:5]))
    assert main(["report", str(stream)]) == 0
    said = capsys.readouterr()
    assert "5 requests, 4 reused something" in said.out
    assert "too few of a kind" in said.err


def test_a_stream_without_receipts_is_refused_with_a_hint(tmp_path, capsys):
    (tmp_path / "e.jsonl").write_text('{"event": "lookup"}\n')
    assert main(["report", str(tmp_path / "e.jsonl")]) == 2
    assert "hint: set SEMBLEND_EVENTS" in capsys.readouterr().err
