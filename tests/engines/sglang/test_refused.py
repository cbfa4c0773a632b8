"""Real SGLang objects that are not served, each refused with a line that says why; and a real start that is refused."""

from __future__ import annotations

import pytest
import torch
from http_server import Server

from semblend.integration.sglang import start

SHAPE = {"size": 64, "page_size": 1, "device": "cpu", "enable_memory_saver": False}
PROMPT = "The capital of France is"


def make_mha(dtype: torch.dtype):
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool(**SHAPE, dtype=dtype, head_num=1, head_dim=8, layer_num=2, enable_alt_stream=False)


def make_mla():
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return MLATokenToKVPool(**SHAPE, dtype=torch.float32, kv_lora_rank=8, qk_rope_head_dim=4, layer_num=2)


def make_windows():
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    layers = {"swa_attention_layer_ids": [0], "full_attention_layer_ids": [1]}
    return SWAKVPool(
        **SHAPE, size_swa=32, dtype=torch.float32, head_num=1, head_dim=8, enable_alt_stream=False, **layers
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_pool_of_plain_keys_and_values_is_served(engine, dtype):
    assert start._refuse_pool(make_mha(dtype)) is None


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (make_mla, "MLATokenToKVPool is not one key and one value"),
        (make_windows, "SWAKVPool is not one key and one value"),
        (lambda: make_mha(torch.float8_e5m2), "cannot be moved"),
        (lambda: make_mha(torch.float8_e4m3fn), "cannot be moved"),
    ],
    ids=["MLA", "sliding windows", "e5m2", "e4m3"],
)
def test_pools_of_sglang_that_a_move_would_get_wrong_are_refused(engine, make, says):
    assert says in (start._refuse_pool(make()) or "")


def test_an_engine_with_several_ranks_starts_says_why_it_reuses_nothing_and_answers(tmp_path):
    """SmolLM2 has three heads of keys: three ranks, each with a scheduler process of its own."""
    ranks = {"SGLANG_CPU_OMP_THREADS_BIND": "0|0|0"}  # SGLang wants to know where each rank runs on a CPU
    server = Server(tmp_path / "server.log", "--tp", "3", "--semblend", "quality=fast", **ranks)
    try:
        first, again = (server.generate(PROMPT + " the city of lights, which is called") for _ in range(2))
    finally:
        server.stop()
    log = server.log.read_text()
    assert again["text"] == first["text"]
    assert "semblend" not in first["meta_info"]
    said = [line for line in log.splitlines() if "SemBlend reuses nothing in this engine" in line]
    assert said
    assert all("tp_size" in line for line in said)
    assert "SemBlend could not be started" not in log
