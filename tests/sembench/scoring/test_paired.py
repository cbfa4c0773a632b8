"""Pairs: what counts, what is left out, what is unknown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sembench.commands.live import describe_engine_flags, require_fair_flags
from sembench.result import RequestRecord
from sembench.scoring.aggregate import pair_records, summarize_pairs
from semblend.errors import InputError


def arm(name, item="a", ttft=100.0, **more):
    values = {"dataset": "d", "transform": "t", "negative_control": False, "source_id": item, "exact_tokens": 0}
    return RequestRecord(item_id=item, pair_id=item, arm=name, ttft_ms=ttft, **{**values, **more})


def pair(item="a", cold=100.0, warm=50.0, rerun=100.0, confirmed=200, **more):
    told = {"confirmation_sources": ("receipt",), "backend_confirmed_tokens": confirmed, **more}
    return [arm("cold", item, cold), arm("warm", item, warm, **told), arm("rerun", item, rerun)]


def test_nothing_paired_is_none():
    assert summarize_pairs([]) is None
    assert summarize_pairs([arm("single")]) is None
    assert pair_records([arm("cold"), arm("warm", "b")]) == []


def test_a_pair_counts_once_and_its_speedup_is_cold_over_warm():
    found = summarize_pairs([*pair("a"), *pair("b", warm=25.0)])
    assert (found["pairs_total"], found["pairs_used"], found["rerun_pairs"]) == (2, 2, 2)
    assert found["blended_ttft_speedup_median"] == 3.0
    assert found["ttft_speedup_mean"] == pytest.approx(200 / 75)
    assert found["hit_rate"] == 1.0
    assert found["reuse_mechanisms"]["scatter"] == 2


def test_less_than_64_tokens_are_no_hit_and_silence_is_unknown():
    assert summarize_pairs(pair(confirmed=63))["hit_rate"] == 0.0
    silent = summarize_pairs(pair(confirmed=None))
    assert (silent["hit_rate"], silent["hit_rate_n"], silent["hit_only_ttft_speedup_median"]) == (None, 0, None)


def test_contaminated_and_failed_pairs_are_counted_and_left_out():
    dirty = [replace(record, flush_contaminated=True) if record.arm == "cold" else record for record in pair("b")]
    failed = [replace(record, error="no") if record.arm == "warm" else record for record in pair("c")]
    found = summarize_pairs([*pair("a"), *dirty, *failed])
    assert (found["pairs_total"], found["pairs_used"], found["pairs_contaminated"], found["pairs_errored"]) == (
        3,
        1,
        1,
        1,
    )


def test_negative_controls_stand_apart():
    cold = [replace(record, negative_control=True) for record in pair("n", warm=100.0, confirmed=0)]
    found = summarize_pairs([*pair("a"), *cold])
    assert found["negative_control_pairs"] == 1
    assert found["negative_control_ttft_speedup_median"] == 1.0
    assert found["blended_ttft_speedup_median"] == 2.0


def test_an_exact_prefix_is_no_semantic_hit_and_no_mystery():
    found = summarize_pairs(pair(confirmed=0, exact_tokens=480))
    assert found["reuse_mechanisms"]["exact"] == 1
    assert found["faster_without_reuse"] == 0


def test_reuse_that_saves_nothing_and_savings_without_reuse_are_doubted():
    found = summarize_pairs([*pair("a", warm=100.0), *pair("b", warm=10.0, confirmed=0)])
    assert found["hits_without_saving"] == 1
    assert found["faster_without_reuse"] == 1
    without = [record for record in pair() if record.arm != "rerun"]
    assert summarize_pairs(without)["hits_without_saving"] is None  # no rerun, no noise to compare with


def test_an_unfair_start_of_the_engine_is_named():
    flags = describe_engine_flags("vllm serve m --no-enable-prefix-caching --port=1 --seed 3", ["A=1"])
    assert flags["flags"] == {"--no-enable-prefix-caching": True, "--port": "1", "--seed": "3"}
    assert flags["env"] == {"A": "1"}
    assert flags["phase0_flags_ok"] is False
    with pytest.raises(InputError, match="exact prefix cache is off"):
        require_fair_flags(flags)
    with pytest.raises(InputError, match="not known"):
        require_fair_flags(describe_engine_flags("", []))
    with pytest.raises(InputError, match="NAME=VALUE"):
        describe_engine_flags("", ["A"])
    require_fair_flags(describe_engine_flags("vllm serve m", []))


def test_faster_without_reuse_leaves_exact_hits_out():
    fast = {"warm": 20.0, "confirmed": 0}
    steady = [record for at in range(4) for record in pair(f"s{at}")]
    assert summarize_pairs([*steady, *pair("a", **fast)])["faster_without_reuse"] == 1
    assert summarize_pairs([*steady, *pair("a", **fast, exact_tokens=300)])["faster_without_reuse"] == 0
    assert summarize_pairs([*steady, *pair("a", **fast)])["hit_rate"] == 0.8  # a fast answer is no hit


def test_keys_of_the_engines_command_do_not_get_into_a_result():
    found = describe_engine_flags(
        "HF_TOKEN=s3cret semblend serve --api-key acme=s3cret --port 1", ["OPENAI_API_KEY=s3cret", "A=1"]
    )
    assert "s3cret" not in str(found)
    assert found["flags"] == {"--api-key": "***", "--port": "1"}
    assert found["env"] == {"OPENAI_API_KEY": "***", "A": "1"}
