"""The rules of the engine contract on models of transformers; see tests/contract."""

from __future__ import annotations

import pytest
from behaviours import *  # noqa: F403  (the rules)
from behaviours import World
from tiny_models import VOCABULARY, make_model

from semblend.integration.transformers.model_access import TransformersModel

BLOCK = 16


@pytest.fixture(params=("llama", "qwen2"))
def world(request: pytest.FixtureRequest) -> World:
    model = TransformersModel(make_model(request.param))
    model.lay_out(model.make_layout(64 * BLOCK))
    return World(model, BLOCK, VOCABULARY)
