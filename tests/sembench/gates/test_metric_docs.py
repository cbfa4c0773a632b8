"""docs/METRICS.md is whole and true."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from verdict_samples import live_records

from sembench.gates import GATES, observe
from sembench.result import RequestRecord
from sembench.scoring.aggregate import aggregate, summarize_pairs
from sembench.trust import examine
from sembench.witnesses.engine_events import summarize_log
from tools.reference.metric_pages import build_tables, fill_page, main
from tools.reference.metric_words import AGGREGATE, ENGINE_SUMMARY, PAIRED, RECORD

PAGE = Path(__file__).parents[3] / "docs" / "METRICS.md"


def plain(names: object) -> set[str]:
    """Names without those that go with another: X_n and X_ci."""
    return {name for name in names if not name.endswith(("_n", "_ci"))}  # type: ignore[attr-defined]


def test_the_page_is_what_the_code_would_write_now(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert fill_page(text) == text, "run python -m tools.reference.metric_pages docs/METRICS.md"
    copy = tmp_path / "METRICS.md"
    copy.write_text(text)
    assert main([str(copy)]) == 0
    assert copy.read_text() == text


def test_every_table_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"<!-- generated: {name} -->\n{table}\n" in text for name, table in build_tables().items())


def test_every_field_metric_and_key_is_explained_and_no_other() -> None:
    records = live_records(2)
    assert set(RECORD) == {field.name for field in fields(RequestRecord)}
    assert set(AGGREGATE) == plain(aggregate(records))
    found = summarize_pairs(records) or {}
    assert set(PAIRED) >= plain(found)
    assert all(f"{name}_ci" in found for name in set(PAIRED) - plain(found))
    assert set(ENGINE_SUMMARY) == set(summarize_log("vllm", []))
    assert all(words.endswith(".") for table in (RECORD, AGGREGATE, PAIRED, ENGINE_SUMMARY) for words in table.values())


def test_every_gate_reads_a_metric_that_something_observes() -> None:
    from verdict_samples import result_of

    sample = result_of(live_records(2), aggregate={}, by_transform={}, paired=None)
    seen = observe(sample, examine(sample))
    known = set(AGGREGATE) | set(PAIRED) | set(ENGINE_SUMMARY)
    derived = {
        "negative_control_speedup_deviation", "contaminated_pair_rate", "contamination_checked",
        "warm_vs_cold_rouge_drop", "confirmed_cold_kl_mean", "confirmed_cold_f1_mean", "engine_errors",
    }  # fmt: skip
    for gate in GATES:
        assert gate.metric in seen.values
        assert gate.metric in known | derived


def test_every_rate_of_an_aggregate_has_n_and_an_interval() -> None:
    found = aggregate(live_records(2))
    rates = [name for name in plain(found) if name.endswith("_rate") and not name.endswith("_token_rate")]
    assert rates
    assert all(f"{name}_n" in found and f"{name}_ci" in found for name in rates)
