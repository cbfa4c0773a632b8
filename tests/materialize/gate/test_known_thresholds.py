"""The tables that come with the package, and which of them a model gets."""

from __future__ import annotations

import dataclasses

import pytest

from semblend.materialize.gate.gate import Gate, prefill_at_once
from semblend.materialize.gate.thresholds import (
    DEFAULT,
    NUMBERS,
    RECOMPUTE_LEVELS,
    STEPS,
    DialTable,
    PassageOrder,
    TableSource,
    Thresholds,
    borrow_dial,
    choose_table,
    find_known,
    read_known,
)
from semblend.plan.reuse_plan import ReusePlan
from semblend.span import Span

MOVED = (PassageOrder.REORDERED, PassageOrder.SEVERAL)
WHOLE_PLAN = ReusePlan((Span("d", 0, 20, 100), Span("d", 104, 124, 100)), 240)
IN_ORDER_PLAN = ReusePlan((Span("d", 0, 20, 100), Span("d", 200, 130, 100)), 240)
REORDERED_PLAN = ReusePlan((Span("d", 200, 20, 100), Span("d", 0, 130, 100)), 240)
SEVERAL_PLAN = ReusePlan((Span("d", 0, 20, 100), Span("e", 0, 130, 100)), 240)


@pytest.mark.parametrize("name", sorted(read_known()))
def test_every_table_says_who_measured_it_and_reads_back_as_it_was_written(name):
    table = read_known()[name]
    assert table.provenance
    assert Thresholds.from_json(table.to_json()) == table
    chosen = choose_table(f"Someone/{name.upper()}-Instruct")
    assert (chosen.source, chosen.name) == (TableSource.KNOWN, name)
    assert chosen.thresholds == borrow_dial(table)


@pytest.mark.parametrize("name", ["qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b", "tinyllama-1.1b"])
def test_a_measured_dial_expects_less_of_a_larger_repair_of_passages_in_order(name):
    means = choose_table(name).thresholds.dial.means[PassageOrder.IN_ORDER]
    assert [means[way] for way in RECOMPUTE_LEVELS] == sorted(means.values(), reverse=True)


@pytest.mark.parametrize("name", [*sorted(read_known()), "unheard-of"])
def test_at_balanced_no_model_serves_passages_in_another_order_by_plan(name):
    thresholds = choose_table(name).thresholds
    for order, plan in zip(MOVED, (REORDERED_PLAN, SEVERAL_PLAN), strict=True):
        assert min(thresholds.find_dial(order).means[order].values()) > NUMBERS[2]
        assert prefill_at_once(thresholds, plan, NUMBERS[2]).percent is None


def test_an_unknown_model_goes_by_the_dial_of_other_models_and_by_strict_thresholds_for_parts_of_a_donor():
    chosen = choose_table("someone/unheard-of")
    assert (chosen.source, chosen.thresholds) == (TableSource.DEFAULT, DEFAULT)
    assert all(map(chosen.thresholds.dial.knows, PassageOrder))
    assert chosen.thresholds.dial.begin(PassageOrder.IN_ORDER, 0.02).percent == 10
    assert Gate.of(chosen.thresholds, IN_ORDER_PLAN, 0.02).dial is None
    assert [chosen.thresholds.after(step) for step in STEPS] == [0.01] * 3


def test_a_model_with_thresholds_but_no_dial_keeps_them_for_passages_in_order_only():
    chosen = choose_table("smollm2-135m")
    assert not find_known("smollm2-135m")[1].dial.means, "it has a dial of its own now: take another example"
    assert chosen.borrows
    assert Gate.of(chosen.thresholds, IN_ORDER_PLAN, 0.02) == Gate(chosen.thresholds, 0.02)
    for plan in (REORDERED_PLAN, SEVERAL_PLAN):
        gate = Gate.of(chosen.thresholds, plan, 0.3)
        assert gate.dial.repair == DEFAULT.dial.repair


def test_a_dial_that_knows_one_order_of_moved_passages_borrows_for_the_other_alone():
    own = dataclasses.replace(find_known("qwen2.5-coder-1.5b")[1].dial, means={PassageOrder.REORDERED: {0: 0.001}})
    table = borrow_dial(Thresholds(0.01, 0.01, 0.01, dial=own))
    assert table.find_dial(PassageOrder.REORDERED) is own
    assert table.find_dial(PassageOrder.SEVERAL).means[PassageOrder.SEVERAL] == DEFAULT.dial.means[PassageOrder.SEVERAL]
    assert table.find_dial(PassageOrder.IN_ORDER) is None


def test_a_file_of_few_prompts_borrows_too_and_what_it_borrows_is_not_written(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(Thresholds(1e9, 1e9, 1e9, provenance={"prompts": 2, "model": "tiny"}).to_json())
    chosen = choose_table("qwen2.5-coder-1.5b", file=path)
    assert (chosen.source, chosen.borrows) == (TableSource.FILE, True)
    assert prefill_at_once(chosen.thresholds, SEVERAL_PLAN, 0.02).percent is None
    assert Thresholds.from_json(chosen.thresholds.to_json()) == Thresholds.read(path)


@pytest.mark.parametrize(("name", "said"), [
    ("smollm2-135m", "thresholds of known model smollm2-135m (measured on 60 prompts); passages that moved go by"),
    ("Qwen2.5-Coder-1.5B", "thresholds of known model qwen2.5-coder-1.5b (measured on 258 prompts)"),
    ("unheard-of", "default thresholds: no table is known of 'unheard-of' (hint: semblend calibrate"),
])  # fmt: skip
def test_a_choice_says_in_one_line_whose_table_it_is(name, said):
    line = choose_table(name).describe()
    assert line.startswith(said)
    assert "\n" not in line


def test_a_file_says_which_model_it_was_measured_on(tmp_path):
    path = tmp_path / "t.json"
    whole = find_known("qwen2.5-coder-1.5b")[1]
    path.write_text(dataclasses.replace(whole, provenance={"prompts": 60, "model": "other"}).to_json())
    said = choose_table("mine", file=path).describe()
    assert said == f"thresholds of calibration file {path} (measured on 60 prompts of other)"


def test_an_empty_dial_knows_nothing():
    assert not any(DialTable().knows(order) for order in PassageOrder)


def test_a_part_of_a_donors_passages_goes_by_thresholds_where_its_whole_goes_by_the_dial():
    table = choose_table("qwen2.5-coder-1.5b").thresholds
    assert Gate.of(table, WHOLE_PLAN, 0.02).dial is not None
    assert Gate.of(table, IN_ORDER_PLAN, 0.02) == Gate(table, 0.02)
    assert prefill_at_once(table, IN_ORDER_PLAN, 0.003) is None
    assert prefill_at_once(table, WHOLE_PLAN, 1e-9) is not None
