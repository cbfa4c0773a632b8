from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from semblend import SemBlend, SemBlendConfig

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]  # helpers of tests, and tools/

# Engines of tests are tiny: what their requests take says nothing about reuse, and none is drawn to be compared.
os.environ.setdefault("SEMBLEND_LEARN_COSTS", "0")
os.environ.setdefault("SEMBLEND_CONTROL_SHARE", "0")

settings.register_profile("repo", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("repo")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="kills, faults and soaks as long as they are published: hours")


@pytest.fixture(scope="session")
def is_long(pytestconfig: pytest.Config) -> bool:
    """Whether kills, faults and soaks run at the length that docs/research/robustness.md reports."""
    return bool(pytestconfig.getoption("--long"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file whose name ends with _slow holds slow tests only, and is not even imported where they are left out."""
    return True if collection_path.stem.endswith("_slow") and config.option.markexpr == "not slow" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A name with an address in it is another one in every process, and workers would refuse to share the tests."""
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid}: give this parameter an id (hint: ids=[...], or a name to look up)")


@pytest.fixture
def data_dir() -> Path:
    """The folder of real prompts, traces and logs; tests that need it are skipped where it is absent."""
    folder = os.environ.get("SEMBLEND_TEST_DATA", "")
    if not folder or not Path(folder).is_dir():
        pytest.skip("SEMBLEND_TEST_DATA does not name the data folder")
    return Path(folder)


@pytest.fixture
def sb() -> Iterator[SemBlend]:
    with SemBlend(SemBlendConfig(embedder="none", max_bytes=1 << 24)) as made:
        yield made
