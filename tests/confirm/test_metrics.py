from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from semblend.confirm.metrics import METRICS, Metrics, PrometheusMetrics, make_metrics
from semblend.confirm.outcome import Outcome
from semblend.confirm.receipt import Receipt
from semblend.errors import MissingDependencyError, ReceiptError
from semblend.plan.reuse_plan import DeclineReason
from tools.reference.event_pages import metrics_markdown

MakeReceipt = Callable[..., Receipt]


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    found: float | None = registry.get_sample_value(name, labels)
    return found


def test_the_table_is_the_interface() -> None:
    assert {(spec.name, spec.kind, spec.labels) for spec in METRICS} == {
        ("semblend_requests_total", "counter", ("outcome", "engine")),
        ("semblend_declines_total", "counter", ("reason",)),
        ("semblend_tokens_total", "counter", ("kind",)),
        ("semblend_lookup_seconds", "histogram", ()),
        ("semblend_materialize_seconds", "histogram", ()),
        ("semblend_reuse_ratio", "histogram", ()),
        ("semblend_similarity", "histogram", ()),
        ("semblend_risk", "histogram", ()),
        ("semblend_reuse_time_ratio", "gauge", ("kind", "bound")),
        ("semblend_donors", "gauge", ()),
        ("semblend_donor_bytes", "gauge", ("tier",)),
    }
    for spec in METRICS:
        assert bool(spec.buckets) == (spec.kind == "histogram")
        assert list(spec.buckets) == sorted(set(spec.buckets))


def test_lookup_buckets_reach_from_50_microseconds_to_a_second() -> None:
    (buckets,) = (spec.buckets for spec in METRICS if spec.name == "semblend_lookup_seconds")
    assert (buckets[0], buckets[-1]) == (50e-6, 1.0)


def test_every_metric_shows_up_after_activity(registry: CollectorRegistry, make_receipt: MakeReceipt) -> None:
    metrics: Metrics = PrometheusMetrics(registry)
    metrics.lookup(0.0004)
    metrics.similarity(0.8)
    metrics.declined(DeclineReason.TOO_SHORT)
    metrics.outcome(Outcome.SEMANTIC_PLACEMENT, "router")
    metrics.confirmed(make_receipt())
    metrics.compared("documents", 0.5, 0.4, 0.6)
    metrics.donors(3, 4096, "memory")
    text = generate_latest(registry).decode()
    for spec in METRICS:
        sample = f"{spec.name}_count" if spec.kind == "histogram" else spec.name
        lines = [line for line in text.splitlines() if line.startswith(sample)]
        assert any(float(line.rsplit(" ", 1)[1]) > 0 for line in lines), spec.name
        assert f"# HELP {spec.name} {spec.help}" in text


def test_a_receipt_counts_its_request_tokens_reuse_load_and_risk(
    registry: CollectorRegistry, make_receipt: MakeReceipt
) -> None:
    metrics = PrometheusMetrics(registry)
    metrics.confirmed(make_receipt())
    assert value(registry, "semblend_requests_total", outcome="backend_materialized_reuse", engine="vllm") == 1
    counted = {kind: value(registry, "semblend_tokens_total", kind=kind) for kind in make_receipt().tokens}
    assert counted == {"exact": 10, "reused": 60, "recomputed": 4, "prefill": 26}
    assert value(registry, "semblend_reuse_ratio_sum") == pytest.approx(0.6)
    assert value(registry, "semblend_materialize_seconds_sum") == pytest.approx(0.0015)
    assert value(registry, "semblend_risk_sum") == pytest.approx(0.004)
    assert "semblend_declines_total{" not in generate_latest(registry).decode()


def test_a_cold_receipt_counts_as_a_ratio_of_zero(registry: CollectorRegistry, make_cold_receipt: MakeReceipt) -> None:
    PrometheusMetrics(registry).confirmed(make_cold_receipt(load_ms=1.0, reason=DeclineReason.NOTHING_SHARED))
    assert value(registry, "semblend_reuse_ratio_count") == 1
    assert value(registry, "semblend_reuse_ratio_bucket", le="0.0") == 1
    assert value(registry, "semblend_materialize_seconds_count") == 0
    assert value(registry, "semblend_risk_count") == 0
    assert value(registry, "semblend_declines_total", reason="nothing_shared") is None, "the planner counted it"


def test_a_backends_decline_is_counted_from_its_receipt(
    registry: CollectorRegistry, make_cold_receipt: MakeReceipt
) -> None:
    receipt = make_cold_receipt(outcome=Outcome.BACKEND_DECLINED_REUSE, reason=DeclineReason.STALE)
    PrometheusMetrics(registry).confirmed(receipt)
    assert value(registry, "semblend_declines_total", reason="stale") == 1


@pytest.mark.parametrize("name", ["null", "prometheus"])
def test_reuse_is_not_counted_without_a_receipt(registry: CollectorRegistry, name: str) -> None:
    metrics: Metrics = Metrics() if name == "null" else PrometheusMetrics(registry)
    with pytest.raises(ReceiptError, match="without a receipt"):
        metrics.outcome(Outcome.BACKEND_MATERIALIZED_REUSE, "vllm")
    metrics.outcome(Outcome.COLD_FALLBACK, "vllm")


def test_two_instances_share_a_registry(registry: CollectorRegistry) -> None:
    first, second = PrometheusMetrics(registry), PrometheusMetrics(registry)
    first.lookup(0.001)
    second.lookup(0.001)
    assert value(registry, "semblend_lookup_seconds_count") == 2


def test_gauges_add_up_over_instances_and_a_closed_one_takes_its_part_back(registry: CollectorRegistry) -> None:
    first, second = PrometheusMetrics(registry), PrometheusMetrics(registry)
    first.donors(10, 1000, "memory")
    second.donors(5, 500, "memory")
    first.donors(8, 800, "memory")
    second.donors(5, 70, "disk")
    assert value(registry, "semblend_donors") == 13
    assert value(registry, "semblend_donor_bytes", tier="memory") == 1300
    assert value(registry, "semblend_donor_bytes", tier="disk") == 70
    first.close()
    first.close()
    assert value(registry, "semblend_donors") == 5
    assert value(registry, "semblend_donor_bytes", tier="memory") == 500


def test_two_instances_on_the_default_registry_do_not_clash() -> None:
    assert isinstance(make_metrics(True), PrometheusMetrics)
    assert isinstance(make_metrics(True), PrometheusMetrics)


def test_metrics_are_off_when_disabled_or_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(make_metrics(False)) is Metrics
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert type(make_metrics(True)) is Metrics
    with pytest.raises(MissingDependencyError, match="prometheus_client") as refusal:
        PrometheusMetrics()
    assert "semblend-suite[telemetry]" in refusal.value.hint


def test_no_metrics_take_every_call(make_receipt: MakeReceipt) -> None:
    metrics: Metrics = Metrics()
    calls = (
        metrics.lookup(0.1),
        metrics.similarity(0.1),
        metrics.declined(DeclineReason.ERROR),
        metrics.confirmed(make_receipt()),
        metrics.donors(1, 1, "memory"),
        metrics.close(),
    )
    assert calls == (None,) * 6


def test_the_page_names_every_metric_label_and_bucket() -> None:
    page = metrics_markdown()
    for spec in METRICS:
        assert f"| `{spec.name}` | {spec.kind} |" in page
        assert spec.help in page
        assert all(f"`{label}`" in page for label in spec.labels)
    assert "5e-05, 0.0001" in page


def test_what_reuse_takes_over_a_prefill_is_a_gauge_with_its_interval() -> None:
    registry = CollectorRegistry()
    PrometheusMetrics(registry).compared("documents", 0.5, 0.4, 0.6)
    found = {
        bound: registry.get_sample_value("semblend_reuse_time_ratio", {"kind": "documents", "bound": bound})
        for bound in ("mean", "low", "high")
    }
    assert found == {"mean": 0.5, "low": 0.4, "high": 0.6}
    assert Metrics().compared("documents", 0.5, 0.4, 0.6) is None
