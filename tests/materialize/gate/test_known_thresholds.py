"""The tables that come with the package."""

from __future__ import annotations

import pytest

from semblend.materialize.gate.dial import NUMBERS, WAYS
from semblend.materialize.gate.plan_shape import PassageOrder
from semblend.materialize.gate.thresholds import DEFAULT, STEPS, Thresholds, read_known, thresholds_for


@pytest.mark.parametrize("name", sorted(read_known()))
def test_every_table_says_who_measured_it_and_reads_back_as_it_was_written(name):
    table = read_known()[name]
    assert table.provenance
    assert Thresholds.from_json(table.to_json()) == table
    assert thresholds_for(f"Someone/{name.upper()}-Instruct") is table


@pytest.mark.parametrize("name", ["qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b", "tinyllama-1.1b"])
def test_a_measured_dial_expects_less_of_a_larger_repair_of_passages_in_order(name):
    means = thresholds_for(name).dial.means[PassageOrder.IN_ORDER]
    assert [means[way] for way in WAYS] == sorted(means.values(), reverse=True)


@pytest.mark.parametrize("name", ["qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b", "tinyllama-1.1b", "unheard-of"])
def test_at_balanced_passages_in_another_order_are_not_expected_to_pass(name):
    means = thresholds_for(name).dial.means
    for order in (PassageOrder.REORDERED, PassageOrder.SEVERAL):
        assert min(means[order].values()) > NUMBERS[2]


def test_an_unknown_model_goes_by_strict_thresholds_for_passages_in_order_and_by_a_dial_for_those_that_moved():
    table = thresholds_for("someone/unheard-of")
    assert table is DEFAULT
    assert not table.dial.knows(PassageOrder.IN_ORDER)
    assert [table.after(step) for step in STEPS] == [0.01] * 3
    assert all(table.dial.knows(order) for order in PassageOrder if order is not PassageOrder.IN_ORDER)
