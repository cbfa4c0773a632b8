"""Small random models for tests, and tokens to ask them about."""

from __future__ import annotations

import random
from typing import Any

from semblend.engine.core.stops import NoText
from semblend.engine.model.model import DecoderModel
from semblend.engine.model.spec import ModelSpec

VOCAB = 96


def make_small_model(seed: int = 0, **changes: Any) -> DecoderModel:
    """A Llama of two layers that never ends an answer; ``changes`` are fields of its configuration."""
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "eos_token_id": None,
    }
    return DecoderModel.random(ModelSpec.from_hf_config(config | changes), seed)


def draw_tokens(count: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCAB) for _ in range(count)]


class Characters(NoText):
    """A tokenizer whose tokens are ASCII; bytes beyond it lose their highest bit."""

    longest_token_chars = 1

    def add(self, token: int) -> str:
        return chr(token)

    def token_text(self, token: int) -> str:
        return chr(token)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [byte % 128 for byte in text.encode()]

    def encode_chat(self, messages: Any, **_: Any) -> list[int]:
        return self.encode("\n".join(message["content"] for message in messages))
