"""Small random models of transformers, and prompts for them."""

from __future__ import annotations

import random
from typing import Any

import torch
import transformers

VOCABULARY = 997


def make_model(kind: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A model of three layers that never ends an answer."""
    torch.manual_seed(seed)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        "sliding_window": None,
    }
    config = transformers.AutoConfig.for_model(kind, **(shape | changes))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    return model


def draw(count: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, VOCABULARY) for _ in range(count)]


def ids(*parts: list[int]) -> torch.Tensor:
    return torch.tensor([[token for part in parts for token in part]])


def answer_cold(model: Any, prompt: torch.Tensor, tokens: int = 12) -> torch.Tensor:
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False)
