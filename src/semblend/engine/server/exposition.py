"""/metrics: the server's own gauges and counters, and the library's collectors, written by prometheus_client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from semblend.engine.server.limits import Gate
from semblend.engine.server.tokenizing import TokenizerPool
from semblend.errors import MissingDependencyError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def write_metrics(gate: Gate, tokenizing: TokenizerPool, responses: Mapping[tuple[str, int], int]) -> str:
    """Prometheus text of the server (the gate, the tokenizer; responses by path and status) and of the library."""
    try:
        import prometheus_client
    except ImportError:
        raise MissingDependencyError(
            "/metrics needs prometheus_client", hint="pip install 'semblend-suite[local]'"
        ) from None
    own = prometheus_client.CollectorRegistry(auto_describe=False)
    own.register(_ServerMetrics(gate, tokenizing, responses))
    texts = (prometheus_client.generate_latest(registry) for registry in (own, prometheus_client.REGISTRY))
    return "".join(text.decode() for text in texts)


class _ServerMetrics:
    """What a registry of prometheus_client collects; of the numbers as they are at that moment."""

    def __init__(self, gate: Gate, tokenizing: TokenizerPool, responses: Mapping[tuple[str, int], int]) -> None:
        self._gate = gate
        self._tokenizing = tokenizing
        self._responses = responses

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        gate = self._gate
        yield GaugeMetricFamily("semblend_server_running", "Requests that hold a place.", value=gate.running)
        yield GaugeMetricFamily("semblend_server_waiting", "Requests in line.", value=gate.waiting)
        yield CounterMetricFamily("semblend_server_refused", "Requests turned away with 429.", value=gate.refused)
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
