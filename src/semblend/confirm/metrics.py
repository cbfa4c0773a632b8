"""Prometheus metrics from one table. Requests, tokens and reuse are counted from receipts, never from plans."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any, Literal

from semblend.confirm.outcome import Outcome
from semblend.confirm.receipt import Receipt
from semblend.errors import MissingDependencyError, ReceiptError
from semblend.plan.reuse_plan import DeclineReason


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One row of docs/reference/metrics.md and one collector."""

    name: str
    kind: Literal["counter", "histogram", "gauge"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


LOOKUP_BUCKETS = (50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0)
MATERIALIZE_BUCKETS = (500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SHARE_BUCKETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
# The quality gate works between 0.01 and 0.1 nats, so most edges lie there.
RISK_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)

METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("semblend_requests_total", "counter", "Requests by what became of them.", ("outcome", "engine")),
    MetricSpec("semblend_declines_total", "counter", "Requests that reused nothing, by reason.", ("reason",)),
    MetricSpec(
        "semblend_tokens_total",
        "counter",
        "Prompt tokens by what a receipt says of them: exact, reused, recomputed or prefill.",
        ("kind",),
    ),
    MetricSpec("semblend_lookup_seconds", "histogram", "Time to find donors and plan.", buckets=LOOKUP_BUCKETS),
    MetricSpec(
        "semblend_materialize_seconds",
        "histogram",
        "Time to load and relocate donor KV, from receipts with reuse.",
        buckets=MATERIALIZE_BUCKETS,
    ),
    MetricSpec(
        "semblend_reuse_ratio",
        "histogram",
        "Share of a prompt that ran on donor KV, over all receipts, those without reuse included.",
        buckets=SHARE_BUCKETS,
    ),
    MetricSpec(
        "semblend_similarity",
        "histogram",
        "Best similarity a lookup saw: evidence, never permission.",
        buckets=SHARE_BUCKETS,
    ),
    MetricSpec("semblend_risk", "histogram", "Quality risk seen by the probe, from receipts.", buckets=RISK_BUCKETS),
    MetricSpec(
        "semblend_reuse_time_ratio",
        "gauge",
        "Time to the first token with reuse over without, by kind of prompt: its mean and the ends of its interval "
        "(bound: mean, low, high). Below 1 it pays.",
        ("kind", "bound"),
    ),
    MetricSpec("semblend_donors", "gauge", "Donors that can be found."),
    MetricSpec("semblend_donor_bytes", "gauge", "Memory that donors take, by tier.", ("tier",)),
)


class Metrics:
    """What the facade reports; this one counts nothing. A method is cheap and does not raise for a valid argument."""

    def lookup(self, seconds: float) -> None:
        """A lookup took this long."""

    def similarity(self, value: float) -> None:
        """The best similarity of a lookup."""

    def declined(self, reason: DeclineReason) -> None:
        """The planner declined. (A backend's decline is counted by `confirmed`, from its receipt.)"""

    def outcome(self, outcome: Outcome, engine: str) -> None:  # noqa: ARG002  (counted by those that count)
        """A request ended without a receipt: routed, discovered only, or cold. Reuse is refused here."""
        if outcome is Outcome.BACKEND_MATERIALIZED_REUSE:
            raise ReceiptError("reuse was reported without a receipt", hint="call confirmed(receipt) instead")

    def confirmed(self, receipt: Receipt) -> None:
        """A receipt arrived: counts the request, its tokens, its reuse, its risk and its decline."""

    def compared(self, kind: str, mean: float, low: float, high: float) -> None:
        """What requests with reuse took over those without, for prompts of a kind."""

    def donors(self, count: int, bytes_: int, tier: str) -> None:
        """The store now holds this much."""

    def close(self) -> None:
        """The store is gone, and so are its donors."""


class PrometheusMetrics(Metrics):
    """Counts into a Prometheus registry (the default one where none is given).

    Instances on one registry share its collectors: counters add up, and so do the gauges, because each
    instance moves them only by its own change and takes its part back in `close`. (Not in a finalizer: the
    garbage collector may run one while the same thread holds the gauge's lock.)
    """

    def __init__(self, registry: Any = None) -> None:
        self._collectors = _collectors_of(registry)
        self._lock = threading.Lock()
        self._donor_count = _Share(self._collectors["semblend_donors"])
        self._donor_bytes: dict[str, _Share] = {}

    def lookup(self, seconds: float) -> None:
        self._collectors["semblend_lookup_seconds"].observe(seconds)

    def similarity(self, value: float) -> None:
        self._collectors["semblend_similarity"].observe(value)

    def declined(self, reason: DeclineReason) -> None:
        self._collectors["semblend_declines_total"].labels(str(reason)).inc()

    def outcome(self, outcome: Outcome, engine: str) -> None:
        super().outcome(outcome, engine)
        self._collectors["semblend_requests_total"].labels(str(outcome), engine).inc()

    def confirmed(self, receipt: Receipt) -> None:
        self._collectors["semblend_requests_total"].labels(str(receipt.outcome), receipt.engine).inc()
        for kind, count in receipt.tokens.items():
            self._collectors["semblend_tokens_total"].labels(kind).inc(count)
        self._collectors["semblend_reuse_ratio"].observe(receipt.reuse_ratio)
        if receipt.reused_tokens and receipt.load_ms is not None:
            self._collectors["semblend_materialize_seconds"].observe(receipt.load_ms / 1000)
        if receipt.risk is not None:
            self._collectors["semblend_risk"].observe(receipt.risk)
        # A planner's decline was counted when it was made; the backend's is known only from here.
        if receipt.outcome is Outcome.BACKEND_DECLINED_REUSE and receipt.reason is not None:
            self.declined(receipt.reason)

    def compared(self, kind: str, mean: float, low: float, high: float) -> None:
        for bound, ratio in (("mean", mean), ("low", low), ("high", high)):
            self._collectors["semblend_reuse_time_ratio"].labels(kind, bound).set(ratio)

    def donors(self, count: int, bytes_: int, tier: str) -> None:
        with self._lock:
            self._donor_count.move_to(count)
            if tier not in self._donor_bytes:
                self._donor_bytes[tier] = _Share(self._collectors["semblend_donor_bytes"].labels(tier))
            self._donor_bytes[tier].move_to(bytes_)

    def close(self) -> None:
        with self._lock:
            for share in (self._donor_count, *self._donor_bytes.values()):
                share.move_to(0)


def make_metrics(enabled: bool) -> Metrics:
    """Prometheus metrics on the default registry, or none where they are off or not installed."""
    if not enabled:
        return Metrics()
    try:
        return PrometheusMetrics()
    except MissingDependencyError:
        return Metrics()


class _Share:
    """One instance's part of a gauge that others move too."""

    def __init__(self, gauge: Any) -> None:
        self._gauge = gauge
        self._value = 0

    def move_to(self, value: int) -> None:
        self._gauge.inc(value - self._value)
        self._value = value


_SHARED: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
_SHARED_LOCK = threading.Lock()


def _collectors_of(registry: Any) -> dict[str, Any]:
    """The registry's collectors by name, made once: a second collector of a name would be refused by it."""
    try:
        import prometheus_client
    except ImportError:
        raise MissingDependencyError(
            "metrics need prometheus_client", hint="pip install 'semblend-suite[telemetry]'"
        ) from None
    registry = prometheus_client.REGISTRY if registry is None else registry
    classes = {
        "counter": prometheus_client.Counter,
        "histogram": prometheus_client.Histogram,
        "gauge": prometheus_client.Gauge,
    }
    with _SHARED_LOCK:
        if registry not in _SHARED:
            made: dict[str, Any] = {}
            for spec in METRICS:
                options = {"buckets": spec.buckets} if spec.buckets else {}
                made[spec.name] = classes[spec.kind](spec.name, spec.help, spec.labels, registry=registry, **options)
            _SHARED[registry] = made
        return _SHARED[registry]
