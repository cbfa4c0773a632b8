"""Real SGLang objects that are not served, each refused with a line that says why."""

from __future__ import annotations

import pytest
import torch

from semblend.integration.sglang import start

SHAPE = {"size": 64, "page_size": 1, "device": "cpu", "enable_memory_saver": False}


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
