"""The gate's tables are what was fitted on published rows, and a model is asked in its own chat form."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the tables are of the gate, which needs torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from lib.quality_cases import CHATML, ZEPHYR, choose_chat_form
from lib.reporting import find_result

from semblend.materialize.gate.thresholds import DEFAULT, DialTable, Thresholds, choose_table


def test_a_model_gets_chatml_only_where_its_mark_is_one_token() -> None:
    assert choose_chat_form(lambda text: [1]) is CHATML
    assert choose_chat_form(lambda text: list(range(len(text)))) is ZEPHYR


def test_the_table_of_unknown_models_is_the_fit_of_the_published_rows() -> None:
    results = json.loads(find_result("carry_over").read_text("utf-8"))
    assert DEFAULT.dial == DialTable.from_record(results["dial of moved passages, all models"])
    fitted = Thresholds.from_json(json.dumps(results["thresholds"]["tinyllama bfloat16"]))
    assert choose_table("TinyLlama/TinyLlama-1.1B-Chat-v1.0").thresholds == fitted
