"""The rules of the engine contract on SGLang's own model and KV pool, in a real scheduler; see tests/contract."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "contract"))

from behaviours import *  # noqa: F403  (the rules)
from behaviours import World


@pytest.fixture
def world(engine):
    """Nobody asks SGLang anything meanwhile, so every slot of its pool but the first is free to write to."""
    engine.flush()
    return World(engine.model, 1, vocabulary=40_000, tolerance=5e-3)
