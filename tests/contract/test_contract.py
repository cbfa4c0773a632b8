"""The rules of the engine contract on the naive engine, whole and with fewer capabilities, and on the embedded engine.

vLLM is held to the same rules in tests/engines/vllm/test_contract.py.
"""

from __future__ import annotations

import pytest
from behaviours import *  # noqa: F403  (the rules)
from behaviours import World
from naive_engine import NaiveEngine

from semblend.engine.model.model import DecoderModel, PooledModel
from semblend.engine.model.spec import ModelSpec
from semblend.materialize.contract import Capabilities

BLOCK = 16
SHAPE = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}


def make_naive(**capabilities: object) -> World:
    given = Capabilities(**capabilities)  # type: ignore[arg-type]
    return World(NaiveEngine.make(slots=64 * BLOCK, vocabulary=97, capabilities=given), BLOCK, 97)


def make_embedded() -> World:
    model = DecoderModel.random(ModelSpec.from_hf_config(SHAPE), seed=3)
    return World(PooledModel(model, model.new_pool(64 * BLOCK)), BLOCK, 97)


ENGINES = {
    "naive": make_naive,
    "naive, run by run": lambda: make_naive(scattered_rows=False),
    "naive, nobody looks on": lambda: make_naive(observers=False),
    "embedded": make_embedded,
}


@pytest.fixture(params=ENGINES)
def world(request: pytest.FixtureRequest) -> World:
    return ENGINES[request.param]()
