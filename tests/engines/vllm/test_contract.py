"""The rules of the engine contract on vLLM's own model and cache, in a real engine; see tests/contract."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "contract"))

from behaviours import *  # noqa: F403  (the rules)
from behaviours import World


@pytest.fixture(params=["engine", "latent_engine"])
def world(request):
    """Nobody asks vLLM anything meanwhile, so every block of its pool but the first is free to write to."""
    engine = request.getfixturevalue(request.param)
    engine.start()
    model = engine.worker._model
    engine.worker.load, engine.worker.capture = engine._real["load"], engine._real["capture"]
    made = World(model, model.block_tokens, vocabulary=40_000, tolerance=5e-3)
    if model.keeps_latents:  # with weights drawn at random
        made.deep_tolerance = 100.0
    yield made
    engine.half.reset()
    engine.forget_prefixes()
