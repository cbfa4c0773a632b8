"""Comparison: an item with itself, noise called noise, a change called by its name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verdict_samples import changed, live_records, result_of, written

from sembench.cli import main
from sembench.result import RequestRecord, Result
from sembench.scoring.compare import Metric, compare_metric, compare_results
from semblend.errors import InputError

LOWER = Metric("ttft_ms", lambda record: record.ttft_ms, "lower", "ratio")
HIGHER = Metric("quality_f1", lambda record: record.quality_f1, "higher")


def lean(records: list[RequestRecord], **changes: Any) -> Result:
    return result_of(records, by_transform={}, paired=None, aggregate={}, **changes)


def row(found: dict[str, Any], name: str, part: str = "metrics") -> dict[str, Any]:
    return next(row for row in found[part] if row["metric"] == name)


def warm(record: RequestRecord) -> bool:
    return record.arm == "warm"


def test_a_result_is_identical_to_itself() -> None:
    base = lean(live_records())
    found = compare_results(base, base)
    assert {row["verdict"] for row in found["metrics"]} == {"identical"}
    assert (found["items_shared"], found["sources"], found["setup_differences"]) == (48, 6, [])


def test_other_luck_is_within_noise() -> None:
    found = compare_results(lean(live_records(8, seed=1)), lean(live_records(8, seed=2)))
    assert row(found, "quality_f1")["verdict"] == "within noise"
    assert row(found, "cold_f1")["verdict"] == "within noise"


def test_lost_reuse_shows_as_slower_and_less_confirmed() -> None:
    found = compare_results(lean(live_records()), lean(live_records(reuse=0.2)))
    assert row(found, "ttft_ms")["verdict"] == "worse"
    assert row(found, "ttft_ms")["change"] > 1.2
    assert row(found, "backend_confirmed_block_rate")["verdict"] == "worse"
    assert row(found, "ttft_speedup")["verdict"] == "worse"
    assert row(found, "exact_block_hit_rate")["verdict"] == "identical"
    assert found["by_transform"]["rag_reorder"]


def test_reuse_on_negatives_is_harm() -> None:
    bad = changed(
        live_records(),
        lambda r: warm(r) and r.negative_control,
        backend_confirmed_tokens=64,
        backend_confirmed_blocks=4,
    )
    found = compare_results(lean(live_records()), lean(bad))
    assert row(found, "backend_confirmed_block_rate", "negative_controls")["verdict"] == "worse"
    assert row(found, "backend_confirmed_block_rate")["verdict"] == "identical"


def test_unpaired_items_are_counted_and_left_out() -> None:
    records = live_records()
    found = compare_results(lean(records), lean([r for r in records if r.source_id != "doc-0"]))
    assert (found["items_shared"], found["items_only_in_base"], found["items_only_in_new"]) == (40, 8, 0)


def test_another_setup_is_told() -> None:
    base = lean(live_records(2))
    other = lean(live_records(2), config={**base.config, "block_size": 32})
    assert compare_results(base, other)["setup_differences"] == ["config.block_size: 16 → 32"]


def test_results_without_a_common_item_are_refused() -> None:
    strangers = [replace(r, item_id=f"x-{r.item_id}", pair_id=None) for r in live_records(2)]
    with pytest.raises(InputError, match="share no item"):
        compare_results(lean(live_records(2)), lean(strangers))


def test_one_document_is_too_few() -> None:
    found = compare_results(lean(live_records(1, seed=1)), lean(live_records(1, seed=2)))
    assert row(found, "ttft_ms")["verdict"] == "too few sources"
    assert row(found, "ttft_ms")["change_ci"] is None


def test_what_one_side_did_not_observe_is_not_compared() -> None:
    found = compare_results(lean(live_records(2)), lean(changed(live_records(2), warm, quality_f1=None)))
    assert "quality_f1" not in {row["metric"] for row in found["metrics"]}


def test_the_interval_draws_documents_not_cases() -> None:
    """Twenty copies of two documents hold the evidence of two documents."""
    pairs = [(1.0, 1.3), (1.0, 0.9)] * 20
    by_document = compare_metric(HIGHER, pairs, ["a", "b"] * 20)
    as_if_independent = compare_metric(HIGHER, pairs, [str(at) for at in range(40)])
    assert by_document["verdict"] == "within noise"
    assert as_if_independent["verdict"] == "better"


values = st.floats(0.01, 1e4)


@given(st.lists(st.tuples(values, values), min_size=2, max_size=20))
def test_swapping_the_results_turns_the_change_around(pairs: list[tuple[float, float]]) -> None:
    clusters = [str(at) for at in range(len(pairs))]
    one = compare_metric(LOWER, pairs, clusters)
    other = compare_metric(LOWER, [(b, a) for a, b in pairs], clusters)
    assert one["change"] * other["change"] == pytest.approx(1.0)
    opposite = {"better": "worse", "worse": "better"}
    assert other["verdict"] == opposite.get(one["verdict"], one["verdict"])


def test_the_command_prints_json_and_a_table_and_can_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = written(tmp_path / "base.json", live_records(3), paired=None, by_transform={})
    new = written(tmp_path / "new.json", live_records(3, reuse=0.1), paired=None, by_transform={})
    output = tmp_path / "out" / "compare.json"
    assert main(["compare", base, new, "--output", str(output)]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == json.loads(output.read_text())
    assert "24 items of 3 sources in both results" in said.err
    assert any(line.startswith("ttft_ms") and line.endswith("worse") for line in said.err.splitlines())
    assert main(["compare", base, new, "--fail-on-worse"]) == 1
    assert "gate failed: worse beyond noise: " in capsys.readouterr().err
