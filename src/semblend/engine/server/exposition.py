"""/metrics: for an operator the server's gauges and counters and the library's collectors; for a tenant its own.

Written by prometheus_client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from semblend.confirm.metrics import METRICS
from semblend.confirm.receipt import TOKEN_KINDS
from semblend.engine.server.dashboard import ReceiptTotals
from semblend.engine.server.limits import Gate, TenantPlaces
from semblend.engine.server.tokenizing import TokenizerPool
from semblend.errors import MissingDependencyError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Responses = Mapping[tuple[str, int], int]


def write_metrics(gate: Gate, tokenizing: TokenizerPool, responses: Responses) -> str:
    """Prometheus text of the server (the gate, the tokenizer; responses by path and status) and of the library."""
    client = _import_client()
    places = TenantPlaces(gate.running, gate.waiting, gate.refused)
    own = client.CollectorRegistry(auto_describe=False)
    own.register(_ServerMetrics(places, responses, tokenizing))
    texts = (client.generate_latest(registry) for registry in (own, client.REGISTRY))
    return "".join(text.decode() for text in texts)


def write_tenant_metrics(places: TenantPlaces, responses: Responses, totals: ReceiptTotals) -> str:
    """Prometheus text of one tenant: its places, its responses, and what its receipts add up to."""
    client = _import_client()
    own = client.CollectorRegistry(auto_describe=False)
    own.register(_ServerMetrics(places, responses))
    own.register(_ReceiptMetrics(totals))
    text: bytes = client.generate_latest(own)
    return text.decode()


def _import_client() -> Any:
    try:
        import prometheus_client
    except ImportError:
        raise MissingDependencyError(
            "/metrics needs prometheus_client", hint="pip install 'semblend-suite[local]'"
        ) from None
    return prometheus_client


class _ServerMetrics:
    """What a registry of prometheus_client collects; of the numbers as they are at that moment."""

    def __init__(self, places: TenantPlaces, responses: Responses, tokenizing: TokenizerPool | None = None) -> None:
        self._places = places
        self._tokenizing = tokenizing
        self._responses = responses

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        places = self._places
        yield GaugeMetricFamily("semblend_server_running", "Requests that hold a place.", value=places.running)
        yield GaugeMetricFamily("semblend_server_waiting", "Requests in line.", value=places.waiting)
        yield CounterMetricFamily("semblend_server_refused", "Requests turned away with 429.", value=places.refused)
        if self._tokenizing is not None:
            yield from _describe_tokenizing(self._tokenizing)
        text = "Responses by path and status; 499 means that the client left."
        responses = CounterMetricFamily("semblend_server_responses", text, labels=("path", "status"))
        for (path, status), count in sorted(self._responses.items()):
            responses.add_metric((path, str(status)), count)
        yield responses


def _describe_tokenizing(pool: TokenizerPool) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    name = "semblend_server_tokenizing"
    yield GaugeMetricFamily(f"{name}_waiting", "Texts in line for the tokenizer.", value=pool.waiting)
    yield GaugeMetricFamily(f"{name}_chars", "Characters in line for the tokenizer and in work.", value=pool.chars)
    yield CounterMetricFamily(f"{name}_refused", "Texts refused because too much waits.", value=pool.refused)
    yield CounterMetricFamily(f"{name}_abandoned", "Texts whose client left before the end.", value=pool.abandoned)


class _ReceiptMetrics:
    """The library's counters, of one tenant's receipts; they have no label for the engine."""

    def __init__(self, totals: ReceiptTotals) -> None:
        self._totals = totals

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        helps = {spec.name: spec.help for spec in METRICS}
        tokens = {kind: self._totals.tokens[kind] for kind in TOKEN_KINDS}
        for name, label, counts in (
            ("semblend_requests", "outcome", self._totals.outcomes),
            ("semblend_declines", "reason", self._totals.declines),
            ("semblend_tokens", "kind", tokens),
        ):
            family = CounterMetricFamily(name, helps[f"{name}_total"], labels=(label,))
            for value, count in sorted(counts.items()):
                family.add_metric((value,), count)
            yield family
