"""OpenTelemetry spans where the application set up tracing, and next to nothing where it did not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

Attribute = str | bool | int | float | None


class TraceSpan:
    """An open span; one that nobody records where there is no ``span`` of OpenTelemetry."""

    def __init__(self, span: Any = None) -> None:
        self._span = span

    def set(self, **attributes: Attribute) -> None:
        """Add attributes that were not known when the span began."""
        if self._span is not None:
            self._span.set_attributes(_add_prefix(attributes))


NOT_TRACED = nullcontext(TraceSpan())


def trace(name: str, **attributes: Attribute) -> AbstractContextManager[TraceSpan]:
    """A span for the body of a ``with`` statement. Attribute names get the prefix ``semblend.``; None is left out.

    It is recorded if the application imported OpenTelemetry and set a provider. Nothing is imported here: a process
    that never imported ``opentelemetry.trace`` cannot have set a provider, so looking among the loaded modules is both
    enough and cheap.

    >>> with trace("semblend.lookup", prompt_tokens=100) as span:
    ...     span.set(candidates=2)
    """
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None:
        return NOT_TRACED
    provider = api.get_tracer_provider()
    if isinstance(provider, (api.ProxyTracerProvider, api.NoOpTracerProvider)):
        return NOT_TRACED
    return _record(provider.get_tracer("semblend"), name, attributes)


@contextmanager
def _record(tracer: Any, name: str, attributes: dict[str, Attribute]) -> Iterator[TraceSpan]:
    with tracer.start_as_current_span(name, attributes=_add_prefix(attributes)) as span:
        yield TraceSpan(span)


def _add_prefix(attributes: dict[str, Attribute]) -> dict[str, str | bool | int | float]:
    return {f"semblend.{name}": value for name, value in attributes.items() if value is not None}
