"""One real SGLang scheduler on a CPU for all tests here, stepped by the tests, with our radix cache in it."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

collect_ignore = ["cpu_shim"]  # installed into SGLang's environment; imported here it would change the tests' own

MODEL = os.environ.get("SEMBLEND_TEST_SGLANG_MODEL", "")
FLAGS = json.loads(os.environ.get("SEMBLEND_TEST_SGLANG_FLAGS", "{}"))
"""More flags of the scheduler: a process has one, so other flags need another process."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None
    if importlib.util.find_spec("sglang") is None:
        reason = "SGLang is not installed here: .ci/engines/sglang-cpu makes its environment and runs these tests"
    elif not MODEL or not Path(MODEL, "config.json").exists():
        reason = "SEMBLEND_TEST_SGLANG_MODEL names no model folder: .ci/engines/sglang-cpu writes one"
    for item in items:
        if reason and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def engine() -> object:
    """SGLang's scheduler with the cache backend ``semblend``; see `scheduler_world`."""
    from scheduler_world import SchedulerWorld

    return SchedulerWorld(MODEL, **FLAGS)
