"""Writes a model with random weights that answers in milliseconds, as a folder that vLLM loads."""

from __future__ import annotations

import shutil
from pathlib import Path


def write_small_model(folder: Path, vocabulary: int = 1000, tokenizer_of: str | Path | None = None) -> None:
    """Three layers, and heads that two ranks can share; with the tokenizer of another model where one is named."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=vocabulary, max_position_embeddings=4096, initializer_range=0.2,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    for file in Path(tokenizer_of).glob("*token*") if tokenizer_of is not None else ():
        shutil.copy(file, folder)
