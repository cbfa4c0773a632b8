"""/metrics: for an operator the server's gauges and counters and the library's collectors; for a tenant its own.

Written by prometheus_client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from semblend.confirm.metrics import METRICS
from semblend.confirm.receipt import TOKEN_KINDS
from semblend.engine.server.admission import AdmissionQueue, TenantPlaces, TokenizerPool
from semblend.engine.server.dashboard import ReceiptTotals
from semblend.errors import MissingDependencyError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Responses = Mapping[tuple[str, int], int]


def write_metrics(queue: AdmissionQueue, tokenizing: TokenizerPool, responses: Responses) -> str:
    """Prometheus text of the server (the queue, the tokenizer; responses by path and status) and of the library."""
    client = _import_client()
    places = TenantPlaces(queue.running, queue.waiting, queue.refused)
    own = _write(client, *_describe_server(places, responses), *_describe_tokenizing(tokenizing))
    return own + str(client.generate_latest(client.REGISTRY).decode())


def write_tenant_metrics(places: TenantPlaces, responses: Responses, totals: ReceiptTotals) -> str:
    """Prometheus text of one tenant: its places, its responses, and what its receipts add up to."""
    return _write(_import_client(), *_describe_server(places, responses), *_describe_receipts(totals))


def _import_client() -> Any:
    try:
        import prometheus_client
    except ImportError:
        raise MissingDependencyError(
            "/metrics needs prometheus_client", hint="pip install 'semblend-suite[local]'"
        ) from None
    return prometheus_client


class _Collected:
    """Families of numbers as they are at this moment, in the form that a registry takes."""

    def __init__(self, families: tuple[Any, ...]) -> None:
        self._families = families

    def collect(self) -> tuple[Any, ...]:
        return self._families


def _write(client: Any, *families: Any) -> str:
    registry = client.CollectorRegistry(auto_describe=False)
    registry.register(_Collected(families))
    return str(client.generate_latest(registry).decode())


def _describe_server(places: TenantPlaces, responses: Responses) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    yield GaugeMetricFamily("semblend_server_running", "Requests that hold a place.", value=places.running)
    yield GaugeMetricFamily("semblend_server_waiting", "Requests in line.", value=places.waiting)
    yield CounterMetricFamily("semblend_server_refused", "Requests turned away with 429.", value=places.refused)
    text = "Responses by path and status; 499 means that the client left."
    counted = CounterMetricFamily("semblend_server_responses", text, labels=("path", "status"))
    for (path, status), count in sorted(responses.items()):
        counted.add_metric((path, str(status)), count)
    yield counted


def _describe_tokenizing(pool: TokenizerPool) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    name = "semblend_server_tokenizing"
    yield GaugeMetricFamily(f"{name}_waiting", "Texts in line for the tokenizer.", value=pool.waiting)
    yield GaugeMetricFamily(f"{name}_chars", "Characters in line for the tokenizer and in work.", value=pool.chars)
    yield CounterMetricFamily(f"{name}_refused", "Texts refused because too much waits.", value=pool.refused)
    yield CounterMetricFamily(f"{name}_abandoned", "Texts whose client left before the end.", value=pool.abandoned)


def _describe_receipts(totals: ReceiptTotals) -> Iterator[Any]:
    """The library's counters, of one tenant's receipts; they have no label for the engine."""
    from prometheus_client.core import CounterMetricFamily

    helps = {spec.name: spec.help for spec in METRICS}
    tokens = {kind: totals.tokens[kind] for kind in TOKEN_KINDS}
    for name, label, counts in (
        ("semblend_requests", "outcome", totals.outcomes),
        ("semblend_declines", "reason", totals.declines),
        ("semblend_tokens", "kind", tokens),
    ):
        family = CounterMetricFamily(name, helps[f"{name}_total"], labels=(label,))
        for value, count in sorted(counts.items()):
            family.add_metric((value,), count)
        yield family
