"""What is counted of requests: Prometheus metrics from one table, and OpenTelemetry spans.

Each application has a registry of its own. A forwarded request has one span where the application set up tracing, and
none where it did not: the client's W3C ``traceparent`` is its parent, and the engine gets the span's own, so that its
spans hang below it. Without tracing the client's header passes as it is. A span holds counts, names and times.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from semantickv.edge.headers import RawHeaders, find_header
from semantickv.telemetry.record import ExchangeRecord
from semblend.confirm.metrics import MetricSpec
from semblend.errors import MissingDependencyError

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

EDGE_METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("semantickv_requests_total", "counter", "Requests by path and status.", ("path", "status")),
    MetricSpec("semantickv_faults_total", "counter", "Requests that ended with a fault, by kind.", ("kind",)),
    MetricSpec("semantickv_retries_total", "counter", "Requests sent to another replica before their first byte."),
    MetricSpec("semantickv_routes_total", "counter", "Placements by outcome and reason.", ("outcome", "reason")),
    MetricSpec("semantickv_replica_requests_total", "counter", "Requests by the replica that served.", ("replica",)),
    MetricSpec("semantickv_first_byte_seconds", "histogram", "Time to the answer's first byte.", buckets=SECONDS),
    MetricSpec("semantickv_ttft_seconds", "histogram", "Time to the first token, of streams.", buckets=SECONDS),
    MetricSpec("semantickv_request_seconds", "histogram", "Time to the end of the answer.", buckets=SECONDS),
    MetricSpec(
        "semantickv_tokens_total",
        "counter",
        "Prompt tokens by what engines reported: prompt, exact, external or relocated.",
        ("kind",),
    ),
    MetricSpec("semantickv_running", "gauge", "Requests that hold a place."),
    MetricSpec("semantickv_refused_total", "counter", "Requests refused because too many were running."),
    MetricSpec("semantickv_traces_total", "counter", "Trace lines by what became of them.", ("result",)),
    MetricSpec("semantickv_replica_up", "gauge", "1 where a replica answers and gets requests.", ("replica",)),
    MetricSpec("semantickv_replica_running", "gauge", "Requests on a replica.", ("replica",)),
    MetricSpec("semantickv_event_batches_total", "counter", "Batches of KV events that a replica sent.", ("replica",)),
    MetricSpec(
        "semantickv_event_losses_total", "counter", "Gaps in a replica's KV events that no replay filled.", ("replica",)
    ),
    MetricSpec(
        "semantickv_evicted_pieces_total", "counter", "Pieces forgotten because a replica evicted them.", ("replica",)
    ),
    MetricSpec("semantickv_redis_up", "gauge", "1 while the link to other routers stands."),
    MetricSpec("semantickv_replica_tracked_tokens", "gauge", "Tokens remembered of a replica.", ("replica",)),
)
KNOWN_STATUS = frozenset({200, 400, 401, 403, 404, 408, 413, 422, 429, 499, 500, 502, 503, 504})


Gauges = Callable[[], dict[str, dict[tuple[str, ...], float]]]
"""Gives the numbers of this moment: by name of the metric, then by labels."""


class EdgeMetrics:
    """Counts records. `write` gives the text for a scrape."""

    def __init__(self, gauges: Gauges) -> None:
        client = _import_client()
        self._client = client
        self._registry = client.CollectorRegistry(auto_describe=False)
        self._gauges = gauges
        self._of: dict[str, Any] = {}
        for spec in EDGE_METRICS:
            options = {"buckets": spec.buckets} if spec.kind == "histogram" else {}
            kind = {"counter": client.Counter, "histogram": client.Histogram, "gauge": client.Gauge}[spec.kind]
            self._of[spec.name] = kind(spec.name, spec.help, spec.labels, registry=self._registry, **options)
        self._seen: dict[tuple[str, tuple[str, ...]], float] = {}
        self._labelled: dict[tuple[str, ...], Any] = {}

    def count(self, record: ExchangeRecord) -> None:
        """Count one record."""
        of = self._of
        status = str(record.status) if record.status in KNOWN_STATUS else f"{record.status // 100}xx"
        self._find("semantickv_requests_total", record.path, status).inc()
        if record.fault is not None:
            of["semantickv_faults_total"].labels(record.fault).inc()
        if record.attempts > 1:
            of["semantickv_retries_total"].inc(record.attempts - 1)
        if record.route is not None and record.replica is not None:
            self._find("semantickv_routes_total", record.route, record.route_reason or "").inc()
            self._find("semantickv_replica_requests_total", record.replica).inc()
        if record.first_byte_ms is not None:
            of["semantickv_first_byte_seconds"].observe(record.first_byte_ms / 1000)
        if record.ttft_ms is not None:
            of["semantickv_ttft_seconds"].observe(record.ttft_ms / 1000)
        of["semantickv_request_seconds"].observe(record.total_ms / 1000)
        receipt = record.receipt
        for kind in ("prompt", "exact", "external", "relocated"):
            tokens = getattr(receipt, f"{kind}_tokens")
            if tokens:
                self._find("semantickv_tokens_total", kind).inc(tokens)

    def _find(self, name: str, *labels: str) -> Any:
        """Find a counter by its labels. Kept here: prometheus_client takes five times as long to find it."""
        found = self._labelled.get((name, *labels))
        if found is None:
            found = self._labelled[name, *labels] = self._of[name].labels(*labels)
        return found

    def count_refusal(self, path: str, status: int) -> None:
        """Count a request that was not forwarded."""
        self._of["semantickv_requests_total"].labels(path, str(status)).inc()

    def write(self) -> bytes:
        """Write everything in Prometheus' text format."""
        for name, values in self._gauges().items():
            metric = self._of[name]
            for labels, value in values.items():
                one = metric.labels(*labels) if labels else metric
                if name.endswith("_total"):  # kept by its owner: add what is new
                    one.inc(value - self._seen.get((name, labels), 0.0))
                    self._seen[name, labels] = value
                else:
                    one.set(value)
        text: bytes = self._client.generate_latest(self._registry)
        return text


def _import_client() -> Any:
    try:
        import prometheus_client
    except ImportError:
        raise MissingDependencyError(
            "/metrics needs prometheus_client", hint="pip install 'semblend-suite[edge]'"
        ) from None
    return prometheus_client


_CONTEXT = (b"traceparent", b"tracestate")


class RequestSpan:
    """An open span. `end` it with the request's record."""

    def __init__(self, span: Any, api: Any) -> None:
        self._span = span
        self._api = api

    def replace_context(self, headers: RawHeaders) -> list[tuple[bytes, bytes]]:
        """The headers with this span in place of the client's: the engine is called by us."""
        carrier: dict[str, str] = {}
        _propagator().inject(carrier, context=self._api.set_span_in_context(self._span))
        kept = [(name, value) for name, value in headers if name not in _CONTEXT]
        return kept + [(name.encode(), value.encode("latin-1")) for name, value in carrier.items()]

    def end(self, record: ExchangeRecord) -> None:
        """Close the span with what became of the request."""
        span, receipt = self._span, record.receipt
        attributes = {
            "http.response.status_code": record.status,
            "gen_ai.request.model": record.model,
            "gen_ai.usage.input_tokens": receipt.prompt_tokens,
            "gen_ai.usage.output_tokens": receipt.output_tokens,
            "semantickv.request_id": record.request_id,
            "semantickv.replica": record.replica,
            "semantickv.route": record.route,
            "semantickv.route_reason": record.route_reason,
            "semantickv.route_score": record.route_score,
            "semantickv.attempts": record.attempts,
            "semantickv.arranged": bool(record.arranged),
            "semantickv.reuse": None if receipt.kind is None else receipt.kind.value,
            "semantickv.exact_tokens": receipt.exact_tokens,
            "semantickv.external_tokens": receipt.external_tokens,
            "semantickv.relocated_tokens": receipt.relocated_tokens,
            "semantickv.rejected": receipt.rejected,
            "semantickv.first_byte_ms": record.first_byte_ms,
            "semantickv.ttft_ms": record.ttft_ms,
            "error.type": record.fault,
        }
        span.set_attributes({name: value for name, value in attributes.items() if value is not None})
        if record.status >= 500 or record.fault not in (None, "client_left"):
            span.set_status(self._api.Status(self._api.StatusCode.ERROR, record.fault or f"status {record.status}"))
        span.end()


def start_span(method: str, path: str, headers: RawHeaders) -> RequestSpan | None:
    """Begin the span of a request; None where nobody set up tracing.

    A process that never imported ``opentelemetry.trace`` cannot have set a provider: nothing is imported to find out.

    >>> start_span("POST", "/v1/completions", []) is None
    True
    """
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    provider = api.get_tracer_provider()
    if isinstance(provider, (api.ProxyTracerProvider, api.NoOpTracerProvider)):
        return None
    carrier = {name.decode(): find_header(headers, name) for name in _CONTEXT if find_header(headers, name)}
    span = provider.get_tracer("semantickv").start_span(
        f"{method} {path}",
        context=_propagator().extract(carrier),
        kind=api.SpanKind.SERVER,
        attributes={"http.request.method": method, "http.route": path},
    )
    return RequestSpan(span, api)


def _propagator() -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()
