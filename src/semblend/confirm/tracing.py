"""OpenTelemetry spans where the application set up tracing, and next to nothing where it did not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

Attribute = str | bool | int | float | None


class TraceSpan(Protocol):
    """An open span."""

    def set(self, **attributes: Attribute) -> None:
        """Add attributes that were not known when the span began."""


class Tracer(Protocol):
    """Opens spans. Attribute names get the prefix ``semblend.``; None is left out."""

    def span(self, name: str, **attributes: Attribute) -> AbstractContextManager[TraceSpan]:
        """A span for the body of a ``with`` statement."""


def tracer() -> Tracer:
    """The tracer for now: a real one if the application imported OpenTelemetry and set a provider.

    Nothing is imported here. A process that never imported ``opentelemetry.trace`` cannot have set a
    provider, so looking it up among the loaded modules is both enough and cheap.

    >>> with tracer().span("semblend.lookup", prompt_tokens=100) as span:
    ...     span.set(candidates=2)
    """
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None:
        return NOOP
    provider = api.get_tracer_provider()
    if isinstance(provider, (api.ProxyTracerProvider, api.NoOpTracerProvider)):
        return NOOP
    return _OpenTelemetryTracer(provider.get_tracer("semblend"))


class _NoopSpan:
    __slots__ = ()

    def __enter__(self) -> _NoopSpan:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    def set(self, **attributes: Attribute) -> None:
        del attributes


class _NoopTracer:
    __slots__ = ()

    def span(self, name: str, **attributes: Attribute) -> _NoopSpan:
        del name, attributes
        return _NOOP_SPAN


_NOOP_SPAN = _NoopSpan()
NOOP = _NoopTracer()


class _OpenTelemetrySpan:
    def __init__(self, span: Any) -> None:
        self._span = span

    def set(self, **attributes: Attribute) -> None:
        self._span.set_attributes(_add_prefix(attributes))


class _OpenTelemetryTracer:
    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer

    @contextmanager
    def span(self, name: str, **attributes: Attribute) -> Iterator[_OpenTelemetrySpan]:
        with self._tracer.start_as_current_span(name, attributes=_add_prefix(attributes)) as span:
            yield _OpenTelemetrySpan(span)


def _add_prefix(attributes: dict[str, Attribute]) -> dict[str, str | bool | int | float]:
    return {f"semblend.{name}": value for name, value in attributes.items() if value is not None}
