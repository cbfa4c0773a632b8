"""One OpenTelemetry span for each forwarded request, where the application set up tracing; nothing where it did not.

The client's W3C ``traceparent`` is the parent; the engine gets the span's own, so that its spans hang below it. Without
tracing the client's header passes as it is. A span holds counts, names and times, never text.
"""

from __future__ import annotations

import sys
from typing import Any

from semantickv.edge.headers import RawHeaders, find_header
from semantickv.telemetry.record import ExchangeRecord

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
