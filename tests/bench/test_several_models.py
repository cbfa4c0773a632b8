"""Several models: chats as each model wants them, and what the table of one says about the prompts of another."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the tables are of the gate, which needs torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import carry_over
from _quality_cases import CHATML, ZEPHYR, choose_chat_form

from semblend.materialize.gate.thresholds import (
    DEFAULT,
    DialTable,
    PassageOrder,
    RiskFeatures,
    Thresholds,
    choose_table,
)
from semblend.materialize.measure_ways import Moved, PromptMeasure, WayMeasure

RESULT = Path(__file__).parents[2] / "bench" / "results" / "carry_over.json"
WORK = {0: 0.1, 10: 0.2, 20: 0.3, 40: 0.5}


def make_measure(settled: dict[int, float], nats: float = 0.004, glance: float = 0.01) -> PromptMeasure:
    """A prompt whose repairs move the distribution by ``settled`` nats each."""
    ways = [WayMeasure(0, Moved(0.1, True), 0.1, WORK[0], glance)]
    for percent, still in settled.items():
        seen = RiskFeatures(moved=still, settled=still, deviation=0.1, entropy=1.0)
        ways.append(WayMeasure(percent, Moved(nats, False), nats, WORK[percent], glance, seen))
    return PromptMeasure(PassageOrder.IN_ORDER, tuple(ways))


def test_a_model_gets_chatml_only_where_its_mark_is_one_token() -> None:
    assert choose_chat_form(lambda text: [1]) is CHATML
    assert choose_chat_form(lambda text: list(range(len(text)))) is ZEPHYR


def make_table(of_moved: float) -> DialTable:
    """A dial that takes what a repair moved for the divergence; by plan, passages that moved lose ``of_moved`` nats."""
    means = {order: dict.fromkeys(WORK, of_moved) for order in PassageOrder}
    means[PassageOrder.IN_ORDER] = dict.fromkeys(WORK, 0.01)
    return DialTable(means, dict.fromkeys(WORK, (0.0,) * 4), dict.fromkeys((10, 20, 40), (1.0, *(0.0,) * 5)))


def test_the_first_repair_that_is_expected_to_be_enough_serves_the_prompt() -> None:
    served = carry_over.replay_without_glance(make_table(0.5), make_measure({10: 0.05, 20: 0.005, 40: 0.001}))
    assert (served.percent, served.work) == (20, pytest.approx(0.4))  # both repairs are paid for


def test_repairs_that_are_never_enough_end_in_a_prefill_that_pays_for_them() -> None:
    lost = carry_over.replay_without_glance(make_table(0.5), make_measure({10: 0.5}))
    assert (lost.percent, lost.nats, lost.work) == (None, 0.0, pytest.approx(1.2))


def test_moved_passages_are_prefilled_at_once_where_the_plan_says_so() -> None:
    moved = replace(make_measure({10: 0.001}), order=PassageOrder.SEVERAL)
    assert carry_over.replay_without_glance(make_table(0.5), moved).work == 1.0
    assert carry_over.replay_without_glance(make_table(0.01), moved).percent == 10


def test_the_table_of_unknown_models_is_the_fit_of_the_published_rows() -> None:
    results = json.loads(RESULT.read_text("utf-8"))
    assert DEFAULT.dial == DialTable.from_record(results["dial of moved passages, all models"])
    fitted = Thresholds.from_json(json.dumps(results["thresholds"]["tinyllama bfloat16"]))
    assert choose_table("TinyLlama/TinyLlama-1.1B-Chat-v1.0").thresholds == fitted


def test_classes_of_summaries_are_two_because_some_passages_moved() -> None:
    names = [carry_over.name_class({"scenario": "summarization", "dataset": name}) for name in ("xsum", "samsum")]
    assert names == ["summaries", "summaries, passages moved"]
