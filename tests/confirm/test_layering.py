"""The layer needs numpy at most, and the heavy packages only where they are asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import semblend.confirm

MODULES = sorted(path.stem for path in Path(semblend.confirm.__file__).parent.glob("*.py") if path.stem != "__init__")


def test_no_module_needs_an_optional_package() -> None:
    heavy = ("prometheus_client", "opentelemetry", "nats", "jsonschema", "numba", "torch")
    code = f"""
import importlib, sys
for name in {heavy!r}:
    sys.modules[name] = None
for name in {MODULES!r}:
    importlib.import_module("semblend.confirm." + name)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_the_event_path_does_not_load_asyncio() -> None:
    code = """
import sys
import semblend.confirm.sinks, semblend.confirm.ledger, semblend.confirm.metrics, semblend.confirm.tracing
assert "asyncio" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
