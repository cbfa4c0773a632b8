"""A judged run: which answers the judge gets, the controls beside them, and what the table makes of its points."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("httpx", reason="live runs need httpx")
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import judged

from sembench.result import RequestRecord

QUESTIONS = {"one": ("How fast?", ("34 knots",)), "two": ("Who?", ("Ann",)), "none": ("Why?", ())}


def make_record(item: str, arm: str, text: str = "said", **more: object) -> RequestRecord:
    plain = RequestRecord(item_id=item, dataset="fixture", transform="instruction_variant", negative_control=False)
    return replace(plain, source_id="doc", pair_id=item, arm=arm, output_text=text, **more)


def make_run() -> list[RequestRecord]:
    whole = [make_record(item, arm) for item in ("one", "two", "none") for arm in judged.ARMS]
    return [*whole, make_record("half", "cold"), make_record("one", "warm", cross_tenant=True)]


def test_the_judge_gets_all_arms_of_cases_with_a_gold_answer_and_the_controls() -> None:
    chosen = judged.choose_records(make_run(), QUESTIONS, 10)
    assert [(record.item_id, record.arm) for record in chosen] == [
        (item, arm) for item in ("one", "two") for arm in (*judged.ARMS, *judged.CONTROLS)
    ]
    controls = {(record.item_id, record.arm): record.output_text for record in chosen if record.arm in judged.CONTROLS}
    assert controls["one", "gold answer"] == "34 knots"
    assert controls["one", "another case's gold answer"] == "Ann"
    assert controls["one", "gold answer in a sentence"] == "The material says that it is 34 knots."
    assert controls["two", "another case's gold answer"] == "34 knots"


def test_an_interval_holds_the_mean_and_no_points_are_no_zero() -> None:
    mean, low, high = judged.summarize([0.0, 1.0, 1.0, 0.0, 1.0, 0.0], seed=1)
    assert low < mean < high
    assert mean == 0.5
    assert judged.summarize([], seed=1) == [None, None, None]


def test_the_score_is_the_share_of_yes_in_any_spelling_and_a_reply_of_other_words_has_none() -> None:
    logs = {"Yes": 0.3, " yes": 0.3, "No": 0.2, "Maybe": 0.2}
    assert judged.read_yes({word: math.log(p) for word, p in logs.items()}) == pytest.approx(0.75)
    assert judged.read_yes({"The": math.log(0.9), "Yes": math.log(0.1)}) is None
    assert judged.read_yes({}) is None
