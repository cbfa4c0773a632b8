"""A real Dynamo on this machine: frontend, mocker workers, our router and our pin."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3] / "bench")]
collect_ignore = ["start_vllm.py"]  # runs in vLLM's environment alone


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("dynamo") is not None:
        return
    reason = "Dynamo is not installed here: .ci/engines/dynamo makes its environment and runs these tests"
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def dynamo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One deployment for a module: three workers, the frontend, our router and our pin."""
    from dynamo_deployment import DynamoDeployment

    with DynamoDeployment(tmp_path_factory.mktemp("dynamo"), pin=True) as deployment:
        yield deployment


@pytest.fixture
def documents(request: pytest.FixtureRequest) -> list[str]:
    """Three texts of 2,000 tokens that no other test has."""
    chance = random.Random(request.node.name)
    return [" ".join(f"{chance.getrandbits(28):07x}" for _ in range(250)) for _ in range(3)]
