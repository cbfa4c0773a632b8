"""Several models: chats as each model wants them, and what the table of one says about the prompts of another."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the tables are of the gate, which needs torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import carry_over
from _quality_cases import CHATML, ZEPHYR, choose_chat_form

from semblend.materialize.gate.plan_shape import PassageOrder
from semblend.materialize.gate.risk import RiskFeatures
from semblend.materialize.gate.thresholds import Thresholds
from semblend.materialize.measure_ways import Moved, PromptMeasure, WayMeasure

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


def test_thresholds_serve_the_first_repair_that_has_settled() -> None:
    table = Thresholds(0.01, 0.01, 0.01)
    served = carry_over.replay_steps(table, make_measure({10: 0.05, 20: 0.005, 40: 0.001}))
    assert (served.percent, served.work) == (20, pytest.approx(0.4))


def test_thresholds_prefill_what_never_settles_and_what_the_glance_forbids() -> None:
    table = Thresholds(0.01, 0.01, 0.01)
    assert carry_over.replay_steps(table, make_measure(dict.fromkeys((10, 20, 40), 0.5))).percent is None
    strict = Thresholds(0.01, 0.01, 0.01, begin_prefill=0.005)
    served = carry_over.replay_steps(strict, make_measure(dict.fromkeys((10, 20, 40), 0.001)))
    assert (served.percent, served.nats) == (None, 0.0)
    assert served.work > 1


def test_a_prefill_after_repairs_costs_the_repairs_too() -> None:
    table = Thresholds(0.01, 0.01, 0.01)
    lost = carry_over.replay_steps(table, make_measure({10: 0.5}))
    assert lost.work == pytest.approx(1.2)
