"""The gate's tables are what was fitted on published rows, and a model is asked in its own chat form."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the tables are of the gate, which needs torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).parents[2] / "research/quality"))

from default_dial import fit_default_dial, read_measures
from lib.quality_cases import CHATML, ZEPHYR, choose_chat_form
from lib.reporting import find_result

from semblend.materialize.calibrate import fit_dial
from semblend.materialize.gate.thresholds import DEFAULT, STEPS, PassageOrder, RiskModel, choose_table


def test_a_model_gets_chatml_only_where_its_mark_is_one_token() -> None:
    assert choose_chat_form(lambda text: [1]) is CHATML
    assert choose_chat_form(lambda text: list(range(len(text)))) is ZEPHYR


def test_the_table_of_unknown_models_is_the_fit_of_the_published_rows() -> None:
    dial, _, false_safes = fit_default_dial(read_measures())
    assert not false_safes
    assert [*DEFAULT.dial.means] == [*PassageOrder]
    for order, row in DEFAULT.dial.means.items():
        assert row == pytest.approx(dial.means[order], abs=1e-5)
    for percent, weights in DEFAULT.dial.repair.items():
        assert weights == pytest.approx(dial.repair[percent], abs=1e-3)


@pytest.mark.parametrize("known", ["qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b", "tinyllama-1.1b"])
def test_the_dial_of_a_known_model_is_the_fit_of_the_published_rows(known: str) -> None:
    measures = read_measures()
    fitted = fit_dial(next(rows for model, rows in measures.items() if model.split()[0] in known))
    dial = choose_table(known).thresholds.dial
    for order in PassageOrder:
        assert dial.means[order] == pytest.approx(fitted.means[order], rel=1e-3)
    for percent, weights in dial.repair.items():
        assert weights == pytest.approx(fitted.repair[percent], abs=1e-3)


def test_the_thresholds_of_tinyllama_are_those_of_the_published_rows() -> None:
    results = json.loads(find_result("carry_over").read_text("utf-8"))
    fitted, table = results["thresholds"]["tinyllama bfloat16"], choose_table("TinyLlama-1.1B").thresholds
    assert [fitted[f"kl_{step}"] for step in STEPS] == [table.after(step) for step in STEPS]
    assert table.risk == RiskModel({int(step): tuple(row) for step, row in fitted["risk"].items()})
