from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from semblend.confirm import tracing
from semblend.confirm.tracing import NOT_TRACED


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What a set-up application records. (The real provider can be set only once in a process.)"""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


def test_spans_carry_their_attributes_and_nest(exporter: InMemorySpanExporter) -> None:
    with (
        tracing.trace("semblend.lookup", prompt_tokens=100, donor=None) as outer,
        tracing.trace("semblend.align") as inner,
    ):
        inner.set(spans=2)
        outer.set(reason="planned", similarity=0.5)
    align, lookup = exporter.get_finished_spans()
    assert (lookup.name, dict(lookup.attributes or {})) == (
        "semblend.lookup",
        {"semblend.prompt_tokens": 100, "semblend.reason": "planned", "semblend.similarity": 0.5},
    )
    assert dict(align.attributes or {}) == {"semblend.spans": 2}
    assert align.parent is not None
    assert align.parent.span_id == lookup.context.span_id


def test_an_exception_passes_through_and_marks_the_span(exporter: InMemorySpanExporter) -> None:
    with pytest.raises(KeyError), tracing.trace("semblend.lookup"):
        raise KeyError("x")
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is trace.StatusCode.ERROR


@pytest.mark.parametrize("provider", [trace.NoOpTracerProvider(), trace.ProxyTracerProvider()])
def test_without_a_real_provider_nothing_is_traced(
    monkeypatch: pytest.MonkeyPatch, provider: trace.TracerProvider
) -> None:
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    assert tracing.trace("semblend.lookup") is NOT_TRACED


def test_without_the_package_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    with tracing.trace("semblend.lookup", tokens=1) as span:
        span.set(more=2)
    assert tracing.trace("semblend.lookup") is NOT_TRACED


def test_a_span_that_nobody_records_lets_exceptions_through() -> None:
    with pytest.raises(KeyError), NOT_TRACED:
        raise KeyError("x")


def test_a_provider_that_the_application_sets_is_used() -> None:
    code = """
import sys
from semblend.confirm import tracing
assert tracing.trace("a") is tracing.NOT_TRACED and "opentelemetry" not in sys.modules
from opentelemetry import trace
assert tracing.trace("a") is tracing.NOT_TRACED
from opentelemetry.sdk.trace import TracerProvider
trace.set_tracer_provider(TracerProvider())
assert tracing.trace("a") is not tracing.NOT_TRACED
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
