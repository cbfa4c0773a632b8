"""Rows that a second run goes on from hold one prompt for each case, or the run ends with a hint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmarks of real weights need torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from lib.quality_cases import Case, refuse_other_prompts

from semblend.span import Span


def make_case(tokens: int, *, donor: int = 7, start: int = 0) -> Case:
    spans = (Span("0", start, 0, 8),)
    return Case("code/one", "code", "lcc", "one", tuple(range(tokens)), ((donor,) * 64,), spans)


def make_row(case: Case, **more: Any) -> dict[str, Any]:
    return {"case": case.case_id, "tokens": len(case.tokens), "recipe": "cold", "prompt": case.digest, **more}


@pytest.mark.parametrize("other", [make_case(21), make_case(20, donor=8), make_case(20, start=3)])
def test_another_length_donor_or_span_under_the_same_name_is_refused_with_a_hint(
    other: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        refuse_other_prompts("kept.jsonl", [make_row(make_case(20))], [other])
    told = capsys.readouterr().err
    assert "kept.jsonl holds code/one with another prompt" in told
    assert "hint: name another file" in told


def test_older_rows_without_a_digest_are_compared_by_their_length() -> None:
    old = {name: value for name, value in make_row(make_case(20)).items() if name != "prompt"}
    refuse_other_prompts("rows", [old], [make_case(20)])
    with pytest.raises(SystemExit):
        refuse_other_prompts("rows", [old], [make_case(30)])
