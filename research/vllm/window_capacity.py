"""What a model with sliding windows costs in KV memory without vLLM's hybrid manager, by vLLM's own planning.

``.ci/engines/vllm-cpu python research/vllm/window_capacity.py`` plans the caches of some published models (their layers,
windows, KV heads and head sizes; no weights) in 80 GiB of memory, 16 bits, with the manager and without, and prints for
how many tokens of requests of a length there is room: while all are prefilled in steps of 8,192 tokens, which is what
vLLM's log states, and once they are computed, which is what steps of 16 tokens come to.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

MEMORY = 80 << 30
LENGTHS = (2_048, 8_192, 32_768, 131_072)
MODELS = {  # layers, every how many one is full, window, KV heads, head size
    "gpt-oss-20b": (24, 2, 128, 8, 64),
    "gpt-oss-120b": (36, 2, 128, 8, 64),
    "Gemma 3 27B": (62, 6, 1024, 16, 128),
    "Gemma 2 27B (to 8,192)": (46, 2, 4096, 16, 128),
    "Command A, EXAONE 4 32B, Olmo 3 32B": (64, 4, 4096, 8, 128),
}


def count_tokens(folder: Path, length: int, model: tuple[int, ...], step: int, *, hybrid: bool) -> float:
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs, get_max_concurrency_for_kv_cache_config
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    layers, every, window, heads, size = model
    flags = {"max_model_len": length, "max_num_batched_tokens": step, "disable_hybrid_kv_cache_manager": not hybrid}
    flags |= {"max_num_seqs": 16}
    config = EngineArgs(model=str(folder), skip_tokenizer_init=True, **flags).create_engine_config()
    common = {"block_size": 16, "num_kv_heads": heads, "head_size": size, "dtype": torch.bfloat16}
    specs = {}
    for number in range(layers):
        is_full = number % every == every - 1
        specs[f"layers.{number}"] = (
            FullAttentionSpec(**common) if is_full else SlidingWindowSpec(**common, sliding_window=window)
        )
    config.cache_config.kv_cache_layout = "LBNHC"
    (planned,) = get_kv_cache_configs(config, [specs], [MEMORY])
    assert hybrid == (len(planned.kv_cache_groups) > 1)
    return get_max_concurrency_for_kv_cache_config(config, planned) * length


def main() -> None:
    from transformers import LlamaConfig

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = LlamaConfig(
            max_position_embeddings=max(LENGTHS), num_hidden_layers=1, architectures=["LlamaForCausalLM"]
        )
        config.save_pretrained(folder)
        print("| model | tokens a request | hybrid, prefilling | hybrid, computed | without | of it |")
        print("|---|--:|--:|--:|--:|--:|")
        for model, shape in MODELS.items():
            for length in LENGTHS:
                prefilling, computed = (count_tokens(folder, length, shape, step, hybrid=True) for step in (8192, 16))
                without = count_tokens(folder, length, shape, 8192, hybrid=False)
                numbers = f"{prefilling:,.0f} | {computed:,.0f} | {without:,.0f} | {without / computed:.0%}"
                print(f"| {model} | {length:,} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
