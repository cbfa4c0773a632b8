"""Experiments: the configurations that ship, the files that are promised, and numbers that follow from the workload."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from semantickv.analysis.experiments import (
    CONFIG_FOLDER,
    EXPERIMENT_MODES,
    SHIPPED_CONFIGS,
    SIX,
    Experiment,
    list_configs,
    load_experiment,
    parse_experiment,
    run_experiment,
)
from semantickv.analysis.latency import LatencyModel, compute_gain
from semantickv.output import files, plots
from semantickv.output.files import make_folder
from semblend.errors import InputError
from tools.reference import lab_page

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "configs" / "experiments").glob("*.yaml"))
FILES = {
    "results.json", "metrics.csv", "summary.md", "policy_comparison_avg_ttft.png", "policy_comparison_hit_rate.png",
    "tokens_saved_by_policy.png", "evictions_by_semantic_type.png", "adaptive_weights_over_time.png",
    "memory_utilization_over_time.png",
}  # fmt: skip
CSV_COLUMNS = [
    "experiment_id", "mode", "policy", "hit_rate", "block_hit_rate", "token_hit_rate", "tokens_saved", "evictions",
    "avg_ttft_ms", "p50_ttft_ms", "p95_ttft_ms", "ttft_gain_vs_lru", "utilization", "regret", "simulated",
]  # fmt: skip
SMALL = Experiment("small", ("low_memory_rag_stress",), sessions=6, requests=5, capacity_tokens=2700, seed=1)
TABLE = {
    "experiment_id": "x",
    "workload_families": ["repeated_system"],
    "num_sessions": 2,
    "requests_per_session": 2,
    "cache_capacity_tokens": 500,
}


def test_the_five_families_ship_with_their_seeds_and_sizes() -> None:
    found = {
        one.experiment_id: (one.seed, one.sessions, one.requests, one.capacity_tokens)
        for one in map(load_experiment, CONFIGS)
    }
    assert found == {
        "low_memory_rag_stress": (101, 36, 7, 2700),
        "shared_system_prompt_high_reuse": (202, 48, 6, 220),
        "tool_agent_session_reuse": (303, 34, 8, 360),
        "legal_review_long_context": (404, 28, 6, 1900),
        "workload_shift_static_vs_adaptive": (505, 44, 6, 2700),
    }
    assert all(
        one.policies == (*SIX, "belady_bypass") and one.modes == EXPERIMENT_MODES
        for one in map(load_experiment, CONFIGS)
    )


def test_lru_in_block_mode_lands_where_the_source_text_has_it() -> None:
    """The workloads were given the dimensions that the published figures imply; LRU needs no tuning."""
    for path in CONFIGS:
        experiment = replace(load_experiment(path), policies=("lru",), modes=("block",))
        record = run_experiment(experiment, over_time=False).records["block"][0]
        published = files.PUBLISHED[experiment.experiment_id]
        assert record["avg_ttft_ms"] == pytest.approx(published["lru"], rel=0.03)
        assert record["block_hit_rate"] == pytest.approx(published["lru_hits"], abs=0.04)


def test_an_experiment_gives_the_same_numbers_every_time() -> None:
    assert run_experiment(SMALL).as_json() == run_experiment(SMALL).as_json()


def test_prefix_mode_never_hits_more_than_block_mode_where_everything_fits() -> None:
    roomy = replace(SMALL, capacity_tokens=10**6, policies=("lru",))
    records = run_experiment(roomy, over_time=False).records
    assert records["prefix"][0]["token_hit_rate"] <= records["block"][0]["token_hit_rate"]


def test_all_files_are_written_and_say_that_they_are_simulated(tmp_path: Path) -> None:
    outcome = run_experiment(SMALL)
    files.write_experiment(outcome, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["simulated"] is True
    assert set(results["modes"]) == {"block", "prefix"}
    assert "simulated" in (tmp_path / "summary.md").read_text().splitlines()[0]
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert len(rows) == 2 * len(SIX)
    assert {row["simulated"] for row in rows} == {"True"}
    assert list(rows[0]) == CSV_COLUMNS


def test_time_saved_follows_from_tokens_saved() -> None:
    record = run_experiment(replace(SMALL, policies=("lru",)), over_time=False).records["block"][0]
    trace, latency = SMALL.build_trace(), SMALL.latency
    computed = int(trace.request_tokens.sum()) - record["tokens_saved"]
    expected = latency.base_ttft_ms + latency.token_latency_ms * computed / len(trace)
    assert record["avg_ttft_ms"] == pytest.approx(expected)


def test_the_aggregate_holds_every_experiment_and_the_published_gain(tmp_path: Path) -> None:
    outcomes = [run_experiment(replace(load_experiment(path), sessions=4), over_time=False) for path in CONFIGS]
    files.write_aggregate(outcomes, tmp_path)
    text = (tmp_path / "aggregate_summary.md").read_text()
    assert "+35.66%" in text
    assert "+19.86%" in text
    rows = list(csv.DictReader((tmp_path / "aggregate_summary.csv").read_text().splitlines()))
    assert len(rows) == len(CONFIGS) * 2 * (len(SIX) + 1)


def test_two_results_of_one_second_get_two_folders(tmp_path: Path) -> None:
    assert len({make_folder(tmp_path, "x") for _ in range(3)}) == 3


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_sessions": 0}, "num_sessions"),
        ({"num_sessions": "many"}, "num_sessions"),
        ({"seed": -1}, "seed"),
        ({"cache_capacity_tokens": None}, "cache_capacity_tokens"),
        ({"workload_families": ["nothing"]}, "workload_families"),
        ({"workload_families": "repeated_system"}, "workload_families"),
        ({"modes": ["sideways"]}, "modes"),
        ({"colour": "red"}, "colour"),
        ({"arrivals": {"process": "weekly"}}, "arrivals"),
        ({"arrivals": {"speed": 3}}, "arrivals"),
        ({"policy_options": {"lru": 3}}, "policy_options"),
        ({"policy_options": {"lru": {"x": "y"}}}, "policy_options.lru.x"),
        ({"base_ttft_ms": -3}, "base_ttft_ms"),
        ({"token_latency_ms": "fast"}, "token_latency_ms"),
        ({"experiment_id": "../x"}, "experiment_id"),
    ],
)
def test_a_bad_field_of_a_configuration_is_named(change: dict[str, object], field: str) -> None:
    assert parse_experiment(TABLE).sessions == 2
    with pytest.raises(InputError, match=field):
        parse_experiment(TABLE | change)


def test_a_file_that_is_not_there_or_no_yaml_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        load_experiment(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1")
    with pytest.raises(InputError, match="not YAML"):
        load_experiment(tmp_path / "bad.yaml")


def test_a_negative_latency_is_refused_and_a_missing_baseline_gives_no_gain() -> None:
    with pytest.raises(InputError):
        LatencyModel(-1.0, 0.1)
    assert compute_gain([{"policy": "fifo", "avg_ttft_ms": 3.0}], "fifo") is None


def test_the_page_of_results_holds_what_the_code_gives_now() -> None:
    page = (ROOT / "docs" / "research" / "lab.md").read_text(encoding="utf-8")
    made = lab_page.build_tables(ROOT / "configs" / "experiments")
    assert made in page, "stale: run python -m tools.reference.lab_page docs/research/lab.md, and read the page again"
    assert lab_page.replace_tables(page, made) == page


def test_a_page_without_a_place_for_the_tables_is_refused() -> None:
    with pytest.raises(InputError, match="no place"):
        lab_page.replace_tables("# nothing here", "")


def test_the_configurations_that_ship_with_the_package_are_those_of_the_checkout() -> None:
    shipped = {path.name: path.read_bytes() for path in SHIPPED_CONFIGS.glob("*.yaml")}
    assert shipped == {path.name: path.read_bytes() for path in CONFIGS}


def test_away_from_the_checkout_the_shipped_configurations_are_found(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("low_memory_rag_stress", "configs/experiments/low_memory_rag_stress.yaml"):
        assert load_experiment(name).seed == 101
    assert len(list_configs(CONFIG_FOLDER)) == 5
    assert list_configs(tmp_path) == []
    with pytest.raises(InputError, match=r"elsewhere/low_memory_rag_stress\.yaml"):
        load_experiment("elsewhere/low_memory_rag_stress.yaml")


@pytest.mark.parametrize("mode", ["block", "prefix"])
def test_adaptive_learns_within_a_few_hundred_accesses_and_without_options_of_its_own(mode) -> None:
    """Seeds that no constant was chosen on; knowing the future gives 35 % or so."""
    config = load_experiment(ROOT / "configs/experiments/low_memory_rag_stress.yaml")
    assert not config.policy_options
    runs = [run_experiment(replace(config, seed=seed, modes=(mode,)), over_time=False) for seed in range(7000, 7006)]
    gains = [compute_gain(done.records[mode], "adaptive_semantic") for done in runs]
    assert min(gains) > 0.15
    assert sum(gains) / len(gains) > 0.25  # above .27 before decisions/eviction.md, which says what was lost


def test_bars_of_one_length_mean_the_same_in_every_panel(tmp_path, monkeypatch) -> None:
    drawn = []
    monkeypatch.setattr(plots, "write_picture", lambda drawing, path, instead: drawn.append(drawing))

    def find_widths(colour: str) -> list[float]:
        found = (re.search(r'width="([\d.]+)".*fill:' + colour, part) for part in drawn.pop().parts)
        return [float(match[1]) for match in found if match]

    panels = {"block mode": [("lru", 10.0)], "prefix mode": [("lru", 40.0)]}
    plots.draw_bars(tmp_path / "a.png", "title", panels, unit="ms")
    short, long = find_widths(plots.choose_colour("lru"))
    assert long == pytest.approx(4 * short)
    plots.draw_bars(tmp_path / "b.png", "title", panels, unit="ms", one_scale=False)
    assert len(set(find_widths(plots.choose_colour("lru")))) == 1
    plots.draw_stacked_bars(tmp_path / "c.png", "title", {"a": {"lru": {"user": 3}}, "b": {"lru": {"user": 9}}})
    _, short, long = find_widths(plots.choose_colour("user"))  # the first one is the legend's
    assert long == pytest.approx(3 * short, rel=0.01)
