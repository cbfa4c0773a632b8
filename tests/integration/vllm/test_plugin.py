"""The entry point: vLLM knows the connector by its name, and nobody who does not use it notices."""

from __future__ import annotations

import logging
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from typing import ClassVar

import pytest

from semblend.integration.vllm import plugin

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"
FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


@pytest.fixture
def factory(monkeypatch):
    """vLLM's table of connectors as 0.27 and 0.32 have it: a name that is entered twice is an error there."""

    class KVConnectorFactory:
        _registry: ClassVar = {}

        @classmethod
        def register_connector(cls, name, module_path, class_name):
            if name in cls._registry:
                raise ValueError(f"Connector '{name}' is already registered.")
            cls._registry[name] = (module_path, class_name)

    parts = FACTORY.split(".")
    for size in range(1, len(parts) + 1):
        name = ".".join(parts[:size])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[FACTORY].KVConnectorFactory = KVConnectorFactory
    return KVConnectorFactory


def test_the_entry_point_names_a_function_that_is_there():
    group = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"]["vllm.general_plugins"]
    module, _, name = group["semblend"].partition(":")
    assert getattr(sys.modules[module], name) is plugin.register


def test_it_enters_the_connector_once_however_often_it_is_called(factory):
    for _ in range(3):
        plugin.register()
    assert factory._registry == {
        "SemBlendConnectorV1": ("semblend.integration.vllm.connector_v1", "SemBlendConnectorV1")
    }


def test_a_vllm_that_differs_is_a_line_in_the_log_with_the_next_step(factory, caplog):
    del factory.register_connector
    with caplog.at_level(logging.WARNING, "vllm.semblend"):
        plugin.register()
    assert "kv_connector_module_path" in caplog.text


def test_without_vllm_it_does_not_raise_and_imports_nothing_heavy():
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "from semblend.integration.vllm.plugin import register; register()\n"
        "print(sorted({'torch', 'numba', 'transformers', 'semblend.integration.vllm.connector_v1'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"
