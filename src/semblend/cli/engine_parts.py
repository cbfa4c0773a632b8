"""The embedded engine for commands: imported late, and missed with a hint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from semblend.errors import MissingDependencyError


@contextmanager
def engine_imports() -> Iterator[None]:
    """Around the imports of a command that computes: a missing package becomes one line and a hint."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"the engine needs the package {error.name}", hint="pip install 'semblend-suite[local]'"
        ) from None
