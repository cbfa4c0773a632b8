"""Engines that are not served, each with its reason; without SGLang installed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from semblend.integration.sglang import start
from tools.reference.support_tables import SGLANG, SupportLevel

REPOSITORY = Path(__file__).parents[3]


class RadixAttention(torch.nn.Module):
    """What SGLang calls an attention layer, as far as a refusal looks at it."""

    def __init__(self, **unusual) -> None:
        super().__init__()
        usual = {"sliding_window_size": -1, "logit_cap": 0.0, "is_cross_attention": False, "k_scale": None}
        self.__dict__.update(usual | {"qk_head_dim": 64, "v_head_dim": 64} | unusual)


class LlamaForCausalLM(torch.nn.Module):
    def __init__(self, attention: RadixAttention, **logits) -> None:
        super().__init__()
        self.attention, self.logits_processor = attention, SimpleNamespace(**logits)


class DeepseekV3ForCausalLM(LlamaForCausalLM):
    pass


def make_pool(name: str, dtype: torch.dtype = torch.bfloat16):
    pool = type(name, (), {"start_layer": 0, "get_key_buffer": lambda self, layer: torch.zeros(1, dtype=dtype)})
    return pool()


def make_runner(model, **more):
    return SimpleNamespace(model=model, model_config=SimpleNamespace(is_multimodal=False), **more)


def make_context(**set_flags):
    flags = {"disable_radix_cache": False, "is_hybrid_swa": False, "is_hybrid_ssm": False, "is_dsa": False}
    return SimpleNamespace(**(flags | {"enable_hierarchical_cache": False} | set_flags))


def test_plain_keys_and_values_are_served():
    assert start._refuse_pool(make_pool("MHATokenToKVPool")) is None
    assert start._refuse_model(make_runner(LlamaForCausalLM(RadixAttention()))) is None
    assert start._refuse_cache(make_context(), SimpleNamespace()) is None
    assert start._refuse_features(SimpleNamespace(disable_overlap_schedule=False)) is None, "the overlap schedule"


@pytest.mark.parametrize(
    "name", ["MLATokenToKVPool", "SWAKVPool", "MHATokenToKVPoolFP4", "HybridLinearKVPool", "DSATokenToKVPool"]
)
def test_pools_without_one_key_and_value_a_token_are_refused(name):
    assert name in (start._refuse_pool(make_pool(name)) or "")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8])
def test_quantised_kv_is_refused(dtype):
    assert str(dtype) in (start._refuse_pool(make_pool("MHATokenToKVPool", dtype)) or "")


@pytest.mark.parametrize(
    ("unusual", "says"),
    [
        ({"sliding_window_size": 4096}, "full attention"),
        ({"logit_cap": 30.0}, "full attention"),
        ({"is_cross_attention": True}, "full attention"),
        ({"v_head_dim": 128}, "differ in size"),
        ({"k_scale": torch.ones(1)}, "scaled"),
    ],
)
def test_attention_that_our_passes_would_compute_otherwise_is_refused(unusual, says):
    why = start._refuse_model(make_runner(LlamaForCausalLM(RadixAttention(**unusual))))
    assert says in (why or "")


def test_a_model_that_nobody_looked_at_is_refused_by_name():
    why = start._refuse_model(make_runner(DeepseekV3ForCausalLM(RadixAttention())))
    assert "DeepseekV3ForCausalLM" in (why or "")
    scaled = LlamaForCausalLM(RadixAttention(), logit_scale=2.0)
    assert "scaled" in (start._refuse_model(make_runner(scaled)) or "")


@pytest.mark.parametrize("flag", ["is_hybrid_swa", "is_hybrid_ssm", "is_dsa", "disable_radix_cache"])
def test_trees_of_another_kind_are_refused(flag):
    assert start._refuse_cache(make_context(**{flag: True}), SimpleNamespace())


def test_hicache_is_served_with_pages_in_host_memory_and_refused_without():
    context = make_context(enable_hierarchical_cache=True)
    assert start._refuse_cache(context, SimpleNamespace(hicache_host_memory_mode="cache")) is None
    why = start._refuse_cache(context, SimpleNamespace(hicache_host_memory_mode="buffer_only"))
    assert "buffer_only" in (why or "")


@pytest.mark.parametrize("flag", ["enable_unified_cache_external_linker", "enable_lmcache", "enable_flexkv"])
def test_external_caches_are_refused(flag):
    assert flag in (start._refuse_cache(make_context(), SimpleNamespace(**{flag: True})) or "")


@pytest.mark.parametrize("name", ["tp_size", "pp_size", "dp_size", "attn_cp_size", "dcp_size"])
def test_several_ranks_are_refused(name):
    assert name in (start._refuse_ranks(SimpleNamespace(**{name: 2})) or "")


def test_every_feature_names_a_test_that_is_there():
    for row in SGLANG:
        assert (REPOSITORY / row.test).is_file(), row.what
        assert row.note
    assert {row.served for row in SGLANG} == set(SupportLevel)
