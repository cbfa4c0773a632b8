"""Result files and what is added up from them: null is not zero, and every rate says how sure it is."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verdict_samples import live_records

from sembench.result import RequestRecord, Result, compute_digest, dump_record, parse_record, read_result, write_result
from sembench.scoring.aggregate import BLOCK_RATES, LIFTS, MEANS, aggregate, aggregate_by_transform, summarize_pairs
from sembench.scoring.statistics import bootstrap_mean, bootstrap_ratio, compute_wilson_interval
from semblend.errors import InputError


def record(item="a", **facts):
    return RequestRecord(**({"item_id": item, "dataset": "d", "transform": "t", "negative_control": False} | facts))


def result(*records):
    return Result(
        created_at_utc="2026-11-07T00:00:00Z",
        config={},
        environment={},
        aggregate=aggregate(records),
        by_transform=aggregate_by_transform(records),
        requests=records,
    )


def test_a_result_comes_back_as_it_was_written(tmp_path):
    kept = result(record("a", donor_ids=("x",), ttft_ms=1.5, output_token_ids=(1, 2)), record("b"))
    write_result(tmp_path / "r.json", kept)
    assert read_result(tmp_path / "r.json") == replace(kept, digest=compute_digest(kept))


def test_unknown_fields_of_a_record_are_left_out_and_missing_ones_are_none():
    value = {"item_id": "a", "dataset": "d", "transform": "t", "negative_control": False, "of_another_version": 1}
    assert parse_record(value) == record("a")


@pytest.mark.parametrize(("field", "value"), [("ttft_ms", "fast"), ("prompt_tokens", 1.5), ("donor_ids", "x"),
                                              ("negative_control", None), ("quality_pass", 1)])  # fmt: skip
def test_a_field_of_the_wrong_type_is_named(field, value):
    with pytest.raises(InputError, match=f"field {field} is"):
        parse_record(dump_record(record()) | {field: value})


def test_a_result_that_was_cut_off_says_so(tmp_path):
    path = tmp_path / "r.json"
    write_result(path, result(record()))
    path.write_text(path.read_text(encoding="utf-8")[:-40], encoding="utf-8")
    with pytest.raises(InputError, match="not a whole JSON file"):
        read_result(path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": 1' + "0" * 400 + "}", '{"a": -1' + "0" * 5000 + "}"])
def test_a_result_that_no_run_writes_is_refused(tmp_path, text):
    (tmp_path / "r.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="not a whole JSON file"):
        read_result(tmp_path / "r.json")


def test_half_a_character_in_a_name_is_written_and_read_back(tmp_path):
    write_result(tmp_path / "r.json", result(record("\ud800 é")))
    assert read_result(tmp_path / "r.json").requests[0].item_id == "\ud800 é"


def test_a_result_of_a_later_version_is_refused_with_its_name(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"result_version": "sembench.result.v9"}), encoding="utf-8")
    with pytest.raises(InputError, match=r"sembench\.result\.v9"):
        read_result(path)


def test_a_number_that_json_does_not_have_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(InputError, match="not plain JSON"):
        write_result(tmp_path / "r.json", result(record(ttft_ms=float("nan"))))
    assert list(tmp_path.iterdir()) == []


def test_what_nobody_observed_is_none_and_never_zero():
    found = aggregate([record("a"), record("b")])
    for name in (*BLOCK_RATES, *LIFTS, *MEANS, "quality_pass_rate", "negative_control_backend_confirmed_rate"):
        assert found[name] is None, name
        assert found[f"{name}_n"] == 0, name
        assert found[f"{name}_ci"] is None, name
    assert found["backend_confirmed_tokens"] is None


def test_every_rate_has_its_count_and_interval():
    records = [
        record(str(at), source_id=str(at), prompt_tokens=160, total_blocks=10, exact_hit_blocks=2, quality_pass=at > 0,
               semantic_eligible_blocks=6, exact_hit_tokens=32, negative_control=at == 3, backend_confirmed_blocks=5,
               backend_confirmed_tokens=80)
        for at in range(6)
    ]  # fmt: skip
    found = aggregate(records)
    for name in [name for name in found if name.endswith("_rate") or "_rate_by_" in name or name.endswith("_lift")]:
        if name.endswith(("_n", "_ci", "token_rate")):
            continue
        assert f"{name}_n" in found, name
        assert f"{name}_ci" in found, name
    assert found["semantic_eligible_lift"] == pytest.approx(0.4)
    assert found["quality_pass_rate"] == pytest.approx(5 / 6)
    low, high = found["quality_pass_rate_ci"]
    assert 0 < low < 5 / 6 < high < 1


def test_cold_and_rerun_arms_do_not_dilute_the_rates():
    warm = record("a", arm="warm", total_blocks=10, backend_confirmed_blocks=8)
    cold = record("a", arm="cold", total_blocks=10, backend_confirmed_blocks=0)
    assert aggregate([cold, warm])["backend_confirmed_block_rate"] == pytest.approx(0.8)
    assert aggregate([cold])["backend_confirmed_block_rate"] == 0.0


def test_a_negative_control_with_less_than_a_block_confirmed_is_still_a_violation():
    few = record("a", negative_control=True, prompt_tokens=100, total_blocks=6, backend_confirmed_blocks=0,
                 backend_confirmed_tokens=7)  # fmt: skip
    found = aggregate([few])
    assert found["negative_control_backend_confirmed_rate"] == pytest.approx(0.07)
    assert found["negative_control_backend_confirmed_rate_by_request"] == 1.0


def test_pairs_across_tenants_count_neither_as_reuse_nor_as_quality():
    own = record("a", total_blocks=10, backend_confirmed_blocks=5, backend_confirmed_tokens=80, quality_pass=True)
    leak = record("b", total_blocks=10, backend_confirmed_blocks=10, backend_confirmed_tokens=160, quality_pass=False,
                  cross_tenant=True, contradictions=("served another tenant",))  # fmt: skip
    found = aggregate([own, leak])
    assert (found["request_count"], found["cross_tenant_count"]) == (1, 1)
    assert (found["backend_confirmed_tokens"], found["backend_confirmed_block_rate"]) == (80, 0.5)
    assert (found["quality_pass_rate"], found["quality_pass_rate_n"]) == (1.0, 1)
    assert (found["cross_tenant_backend_confirmed_tokens"], found["cross_tenant_backend_confirmed_rate"]) == (160, 1.0)
    assert found["contradiction_count"] == 1


def test_a_cold_arm_that_contradicts_itself_or_fails_is_counted():
    cold = record("a", arm="cold", contradictions=("cached right after the cache was emptied",), error="cut")
    found = aggregate([cold, record("a", arm="warm", confirmation_sources=("receipt",))])
    assert (found["contradiction_count"], found["error_count"], found["request_count"]) == (1, 1, 1)
    assert (found["contradiction_rate"], found["error_rate"]) == (0.5, 0.5)


def test_every_rate_and_mean_has_its_n_and_its_interval():
    records = live_records(3)
    for found in (aggregate(records), summarize_pairs(records) or {}):
        plain = {name for name in found if not name.endswith(("_n", "_ci", "_numerator", "_denominator"))}
        rates = {name for name in plain if "_rate" in name or name.startswith("mean_") or name.endswith("_lift")}
        rates |= {name for name in plain if "_vs_cold_" in name}
        assert len(rates) > 5
        assert sorted(name for name in rates if f"{name}_n" not in found or f"{name}_ci" not in found) == []


def test_of_a_record_without_observations_only_counts_are_known():
    found = aggregate([record("a")])
    counts = {"request_count", "source_count", "error_count", "contradiction_count", "error_rate",
              "negative_control_count", "cross_tenant_count", "connector_audit_present",
              "connector_audit_rows_joined"}  # fmt: skip
    told = {name for name, value in found.items() if value is not None and value not in ([], {}) and name not in counts}
    assert {name for name in told if not name.endswith(("_n", "_ci", "_numerator", "_denominator"))} == set()


def test_a_lift_is_taken_over_requests_that_observed_both():
    both = record("a", total_blocks=10, exact_hit_blocks=2, semantic_eligible_blocks=7)
    found = aggregate([both, record("b", total_blocks=10, exact_hit_blocks=10)])
    assert found["semantic_eligible_lift"] == pytest.approx(0.5)
    assert found["semantic_eligible_lift_n"] == 1


def test_transforms_are_added_up_apart():
    found = aggregate_by_transform([record("a", transform="x"), record("b", transform="y"), record("c", transform="x")])
    assert {name: own["request_count"] for name, own in found.items()} == {"x": 2, "y": 1}


@given(st.integers(0, 50), st.integers(1, 50))
def test_a_wilson_interval_holds_its_share_and_stays_within_one(hits, more):
    n = max(hits, more)
    low, high = compute_wilson_interval(hits, n)
    assert 0 <= low <= hits / n <= high <= 1


def test_intervals_are_clustered_by_document():
    values = [0.0] * 50 + [1.0] * 50
    by_case = bootstrap_mean(list(range(100)), values)
    by_document = bootstrap_mean(["a"] * 50 + ["b"] * 50, values)
    assert by_case is not None
    assert by_document == [0.0, 1.0]
    assert by_case[1] - by_case[0] < 0.25


def test_the_same_records_give_the_same_interval():
    first, again = (bootstrap_ratio("abcabc", [1, 2, 3, 1, 1, 2], [4, 4, 4, 4, 4, 4]) for _ in range(2))
    assert first == again


def test_one_document_has_no_interval():
    assert bootstrap_mean(["a", "a"], [0.0, 1.0]) is None
