"""Whether an engine can be served, as far as no vLLM is needed to ask."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from semblend.errors import SemBlendError
from semblend.integration.versions import VLLM, VersionEvidence
from semblend.integration.vllm import refusals, source_check
from semblend.integration.vllm.refusals import find_multi_connector, is_of_vllm, refusal
from semblend.integration.vllm.settings import ConnectorSettings
from semblend.integration.vllm.startup_checks import choose_gate
from semblend.integration.vllm.worker.model_access import (
    check_caches,
    check_rotation,
    keep_rotation_tables,
    list_kinds,
    read_layer_spec,
)
from semblend.integration.vllm.worker.quantised import NARROW_LOSS
from semblend.materialize.contract import StopPass
from semblend.materialize.gate.thresholds import PassageOrder, RiskFeatures
from semblend.materialize.kv.rope import RopeSpec


def made_by(module, name="MultiConnector", ask=find_multi_connector, **settings):
    """What a part learns when an object of this class makes it, two calls up."""

    def make(self):
        self._kv_transfer_config = SimpleNamespace(**settings)
        return (lambda: ask())()

    return type(name, (), {"__module__": module, "make": make})().make()


@pytest.mark.parametrize(
    ("module", "of_vllm"),
    [
        ("vllm.distributed.kv_transfer.kv_connector.v1.multi_connector", True),
        ("semblend.integration.vllm.multi_connector", False),
    ],
)
def test_a_multi_connector_is_found_among_the_callers(module, of_vllm):
    assert is_of_vllm(made_by(module)) is of_vllm


def test_another_owner_among_the_callers_is_no_multi_connector():
    assert made_by("vllm.v1.core.sched.scheduler", "Scheduler") is None
    assert made_by("vllm_of_somebody_else") is None
    assert find_multi_connector() is None


def test_every_known_version_says_how_it_is_known():
    versions = [row.version for row in VLLM.rows]
    assert versions == sorted(versions, key=lambda version: int(version.split(".")[1]))
    assert all(row.evidence is VersionEvidence.RUN and row.note for row in VLLM.rows)
    assert VLLM.find("0.19.0").evidence is VersionEvidence.NONE
    assert "never looked at" in VLLM.find("0.19.0").note


class FullAttentionSpec(SimpleNamespace):
    """Known by its name."""


class SlidingWindowSpec(SimpleNamespace):
    """Of layers that free what is behind their window."""


class MLAAttentionSpec(SimpleNamespace):
    """Latents."""


class MambaSpec(SimpleNamespace):
    """A recurrent state."""


class OneByOne(SimpleNamespace):
    """Layers of one group that vLLM tells apart."""

    def __init__(self, first, *others):
        specs = {f"layer {number}": spec for number, spec in enumerate((first, *others))}
        super().__init__(kv_cache_specs=specs, block_size=16)


class OfTwoSizes(OneByOne):
    """Layers of two sizes in one group."""

    def __init__(self, other):
        other.page_size_bytes = 512
        super().__init__(FullAttentionSpec(page_size_bytes=1024), other)


DRAFT = SimpleNamespace(method="eagle3", parallel_drafting=False, use_multi_module_mtp=lambda: False)


def engine(attention=None, **changes):
    """A plain engine, as far as it is asked; ``changes`` by dotted names with __ for the dot."""
    config = {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 4, "rope_theta": 1e4}
    made = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        kv_transfer_config=SimpleNamespace(kv_role="kv_both"),
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace(fuse_attn_quant=False)),
        lora_config=None,
        speculative_config=None,
        cache_config=SimpleNamespace(cache_dtype="auto", kv_sharing_fast_prefill=False),
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(to_dict=lambda: config, num_kv_shared_layers=0),
            is_multimodal_model=False,
            architecture="Gemma3nForConditionalGeneration",
            max_model_len=4096,
            enable_sleep_mode=False,
            enable_cumem_allocator=False,
        ),
    )
    for name, value in changes.items():
        *way, last = name.split("__")
        owner = made
        for step in way:
            owner = getattr(owner, step)
        setattr(owner, last, value)
    group = SimpleNamespace(kv_cache_spec=attention or FullAttentionSpec())
    return made, SimpleNamespace(kv_cache_groups=[group])


def why_not(*made, version="0.32.0"):
    return refusal(*made, version, Path("vllm"))


@pytest.fixture
def known_sources(monkeypatch):
    monkeypatch.setattr(refusals, "missing", lambda package: ())
    monkeypatch.setattr(refusals, "missing_for_offloading", lambda package: None)


@pytest.mark.usefixtures("known_sources")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plain_engine_is_served(ranks):
    assert why_not(*engine(parallel_config__tensor_parallel_size=ranks)) is None


@pytest.mark.usefixtures("known_sources")
@pytest.mark.parametrize("kind", ["fp8", "fp8_e4m3"])
def test_an_engine_with_8_bit_floats_in_its_cache_is_served(kind):
    assert why_not(*engine(cache_config__cache_dtype=kind)) is None


def test_over_8_bit_floats_the_gate_expects_twice_as_much_of_every_prompt():
    model = {"model_config__model": "qwen2.5-coder-1.5b"}
    wide, narrow = (
        choose_gate(ConnectorSettings(), engine(cache_config__cache_dtype=kind, **model)[0]).thresholds
        for kind in ("auto", "fp8")
    )
    order, seen = PassageOrder.IN_ORDER, RiskFeatures(0.01, 0.01, 0.05, 1.0)
    assert narrow.after(20) == wide.after(20) / NARROW_LOSS
    for one, other in ((narrow.dial, wide.dial), (narrow.edit_dial, wide.edit_dial)):
        assert one.begin(order, 1e-9).expected == pytest.approx(NARROW_LOSS * other.begin(order, 1e-9).expected)
        by_repair = NARROW_LOSS * other.expect_by_repair(order, 10, seen)
        assert one.expect_by_repair(order, 10, seen) == pytest.approx(by_repair)


DEEPSEEK = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "max_position_embeddings": 4096}


def latent_engine(attention=None, cache_dtype="auto", **config):
    made, caches = engine(attention=attention or MLAAttentionSpec(), cache_config__cache_dtype=cache_dtype)
    made.model_config.hf_text_config.to_dict = lambda: DEEPSEEK | config
    return made, caches


@pytest.mark.usefixtures("known_sources")
@pytest.mark.parametrize("scaling", ["yarn", "deepseek_yarn", "deepseek_llama_scaling"])
def test_an_engine_with_latent_attention_is_served_whatever_vllm_calls_its_scaling(scaling):
    yarn = {"rope_type": scaling, "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096}
    assert why_not(*latent_engine(rope_parameters=yarn)) is None


@pytest.mark.usefixtures("known_sources")
@pytest.mark.parametrize(
    ("made", "words"),
    [
        (latent_engine(attention=FullAttentionSpec()), "does not keep as such"),  # multiplied out (MLA is off)
        (latent_engine(model_type="minicpm3"), "'minicpm3'"),
        (latent_engine(cache_dtype="fp8_ds_mla"), "fp8_ds_mla"),
        (latent_engine(cache_dtype="fp8"), "latents in 8 bits (fp8)"),
    ],
)
def test_of_latent_attention_only_plain_latents_of_known_models_are_served(made, words):
    assert words in why_not(*made)


@pytest.mark.usefixtures("known_sources")
@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix", "medusa", "draft_model", "eagle", "eagle3", "mtp"])
@pytest.mark.parametrize("spec", [FullAttentionSpec(), OfTwoSizes(FullAttentionSpec())])
def test_an_engine_that_speculates_is_served(method, spec):
    assert why_not(*engine(spec, speculative_config=SimpleNamespace(**vars(DRAFT) | {"method": method}))) is None


@pytest.mark.usefixtures("known_sources")
def test_a_class_for_images_is_served_where_we_know_how_it_computes_text():
    axes = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = {"model_type": "qwen2_5_vl_text", "hidden_size": 64, "num_attention_heads": 4, "rope_parameters": axes}
    made = engine(
        model_config__is_multimodal_model=True,
        model_config__architecture="Qwen2_5_VLForConditionalGeneration",
        model_config__hf_text_config=SimpleNamespace(to_dict=lambda: config, num_kv_shared_layers=0),
    )
    assert why_not(*made) is None


@pytest.mark.usefixtures("known_sources")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline"),
        ({"parallel_config__data_parallel_size": 2}, "data parallel"),
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallel"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "prefill_context_parallel_size"),
        ({"kv_transfer_config__kv_role": "kv_producer"}, "kv_producer"),
        ({"kv_transfer_config__kv_role": "kv_consumer"}, "kv_consumer"),
        ({"compilation_config__pass_config__fuse_attn_quant": True}, "fuse_attn_quant"),
        ({"model_config__is_multimodal_model": True}, "images"),
        ({"model_config__enable_sleep_mode": True}, "sleep mode"),
        ({"model_config__enable_cumem_allocator": True}, "sleep mode"),
        ({"model_config__hf_text_config__num_kv_shared_layers": 4}, "share the KV"),
        ({"cache_config__kv_sharing_fast_prefill": True}, "kv_sharing_fast_prefill"),
        ({"lora_config": object()}, "LoRA"),
        ({"speculative_config": SimpleNamespace(method="dflash", parallel_drafting=True)}, "parallel drafting"),
        ({"speculative_config": SimpleNamespace(method="extract_hidden_states")}, "extract_hidden_states"),
        ({"speculative_config": SimpleNamespace(method="custom_class")}, "custom_class"),
        ({"speculative_config": SimpleNamespace(method="mtp", use_multi_module_mtp=lambda: True)}, "chain of MTP"),
        ({"speculative_config": DRAFT, "attention": OfTwoSizes(SlidingWindowSpec(sliding_window=512))}, "its draft"),
        ({"attention": OfTwoSizes(FullAttentionSpec(block_size=32))}, "full attention"),
        ({"attention": MambaSpec()}, "never served"),
        ({"attention": OfTwoSizes(MambaSpec())}, "never served"),
        ({"cache_config__cache_dtype": "fp8_per_token_head"}, "each head of each token"),
        ({"cache_config__cache_dtype": "int8_per_token_head"}, "each head of each token"),
        ({"cache_config__cache_dtype": "fp8_e5m2"}, "two bits of a number"),
        ({"cache_config__cache_dtype": "nvfp4"}, "packs two numbers"),
        ({"cache_config__cache_dtype": "turboquant_k8v4"}, "rotates and packs"),
        ({"cache_config__cache_dtype": "fp8_inc"}, "none that our passes read"),
        (
            {"cache_config__cache_dtype": "fp8", "cache_config__kv_cache_dtype_skip_layers": ["sliding_window"]},
            "kv_cache_dtype_skip_layers",
        ),
        ({"cache_config__cache_dtype": "fp8", "cache_config__calculate_kv_scales": True}, "calculate_kv_scales"),
        ({"attention": MLAAttentionSpec()}, "does not say of what size"),
        ({"attention": MLAAttentionSpec(state_content_bytes=656)}, "full attention"),
        ({"attention": MLAAttentionSpec(sliding_window=512)}, "full attention"),
        ({"model_config__hf_text_config__index_topk": 2048}, "index_topk"),
        ({"attention": FullAttentionSpec(attention_chunk_size=512)}, "within chunks"),
        ({"attention": SlidingWindowSpec(sliding_window=512)}, "no layer has full attention"),
    ],
)
def test_an_engine_that_we_cannot_serve_is_told_why(changes, words):
    assert words in why_not(*engine(**changes))


@pytest.mark.usefixtures("known_sources")
def test_layers_with_a_window_are_served_where_vllm_keeps_their_kv_and_else_the_flag_and_its_price_are_named():
    assert why_not(*engine(attention=FullAttentionSpec(sliding_window=512))) is None
    config, caches = engine(model_config__max_model_len=4096)
    sizes = {"block_size": 16, "page_size_bytes": 1000}
    full, windowed = FullAttentionSpec(**sizes, sliding_window=None), SlidingWindowSpec(**sizes, sliding_window=1024)
    caches.kv_cache_groups = [SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=spec) for spec in (full, windowed)]
    why = why_not(config, caches)
    assert "--disable-hybrid-kv-cache-manager" in why
    assert "a prompt of 4,096 tokens then holds 1.6 times the memory" in why


ALIKE = {"block_size": 16, "page_size_bytes": 32768, "num_kv_heads": 8, "head_size": 64, "dtype": torch.bfloat16}


@pytest.mark.usefixtures("known_sources")
def test_layers_that_vllm_tells_apart_by_their_window_are_served_and_each_kind_is_described_by_itself():
    """vLLM 0.26 on a GPU: what a promoted layer says of its memory is not what a full one does, so both stay apart."""
    windowed, full = (FullAttentionSpec(**ALIKE, sliding_window=size) for size in (128, None))
    spec = OneByOne(windowed, full, windowed, full)
    assert why_not(*engine(spec)) is None
    names, group = list(spec.kv_cache_specs), SimpleNamespace(kv_cache_spec=spec)
    assert read_layer_spec(group, names) is windowed
    layers = [SimpleNamespace(num_heads=8, num_kv_heads=8, head_size=64)] * 4
    assert list_kinds(group, names, layers) == [(windowed, names[::2]), (full, names[1::2])]
    assert list_kinds(SimpleNamespace(kv_cache_spec=full), names, layers) == [(full, names)]
    layers[3] = SimpleNamespace(num_heads=16, num_kv_heads=8, head_size=64)
    assert list_kinds(SimpleNamespace(kv_cache_spec=full), names, layers) == [(full, names[:3]), (full, names[3:])]


@pytest.mark.usefixtures("known_sources")
def test_layers_may_have_heads_of_unlike_number_and_size_but_not_blocks_of_unlike_length():
    full = FullAttentionSpec(**ALIKE)

    def why_not_beside_it(**other):
        return why_not(*engine(OneByOne(full, FullAttentionSpec(**ALIKE | other))))

    assert why_not_beside_it(num_kv_heads=4, page_size_bytes=16384) is None
    assert why_not_beside_it(head_size=96, page_size_bytes=49152) is None
    assert "full attention" in why_not_beside_it(block_size=32)
    assert "full attention" in why_not_beside_it(dtype=torch.half)
    narrow = {"dtype": torch.uint8}
    pair = FullAttentionSpec(**ALIKE | narrow), FullAttentionSpec(**ALIKE | narrow | {"head_size": 96})
    assert "full attention" in why_not(*engine(OneByOne(*pair))), "in 8 bits they are all read alike"
    spec = OneByOne(full, FullAttentionSpec(**ALIKE | {"block_size": 32}))
    with pytest.raises(SemBlendError, match="different lengths"):
        read_layer_spec(SimpleNamespace(kv_cache_spec=spec), list(spec.kv_cache_specs))


@pytest.mark.usefixtures("known_sources")
def test_a_model_with_two_kinds_of_layers_or_none_is_told_why():
    config, caches = engine()
    caches.kv_cache_groups *= 2
    assert "full attention" in why_not(config, caches)
    caches.kv_cache_groups = []
    assert "full attention" in why_not(config, caches)


OURS = {"kv_connector": "SemBlendConnectorV1", "kv_role": "kv_both"}


def why_not_beside(*parts, policy="fail", role="kv_both", made=None):
    """Why we reuse nothing beside these parts, in a MultiConnector of ours."""
    extra = {"connectors": [OURS, *({"kv_role": "kv_both"} | part for part in parts)]}
    return made_by(
        "semblend.integration.vllm.multi_connector",
        ask=lambda: why_not(*(made or engine())),
        kv_role=role,
        kv_connector_extra_config=extra,
        kv_load_failure_policy=policy,
    )


def nest(part):
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [part]}}


@pytest.mark.usefixtures("known_sources")
@pytest.mark.parametrize("name", ["OffloadingConnector", "NixlConnector", "SimpleCPUOffloadConnector"])
def test_beside_a_connector_that_loads_before_a_request_is_scheduled_we_serve(name):
    assert why_not_beside({"kv_connector": name}) is None


@pytest.mark.usefixtures("known_sources")
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
@pytest.mark.parametrize("wrap", [dict, nest], ids=["a part", "a part of a part"])
def test_beside_a_connector_that_sends_or_receives_kv_we_reuse_nothing(role, wrap):
    part = wrap({"kv_connector": "NixlConnector", "kv_role": role})
    assert f"NixlConnector has kv_role {role}" in why_not_beside(part)
    assert f"MultiConnector has kv_role {role}" in why_not_beside(role=role)


LMCACHE = {"kv_connector": "LMCacheConnectorV1"}


@pytest.mark.usefixtures("known_sources")
@pytest.mark.parametrize(
    ("part", "words"),
    [
        (LMCACHE, "LMCacheConnectorV1 may load KV in the step"),
        (nest(LMCACHE), "LMCacheConnectorV1 may load KV in the step"),
        ({"kv_connector": "OffloadingConnector", "kv_connector_module_path": "mine"}, "OffloadingConnector may load"),
        ({"kv_connector": "OffloadingConnector", "kv_load_failure_policy": "fail"}, "OffloadingConnector asks for"),
    ],
)
def test_a_load_failure_policy_that_is_not_ours_to_change_declines_the_engine(part, words):
    why = why_not_beside(part)
    assert words in why
    assert "kv_load_failure_policy" in why
    assert why_not_beside(part, policy="recompute") is None, "it is what we need, and somebody else has set it"


def test_an_offloading_connector_that_cannot_be_told_of_our_blocks_declines_the_engine(monkeypatch):
    lacking = {False: (), True: ("the set is gone (beside OffloadingConnector)",)}
    monkeypatch.setattr(refusals, "missing", lambda package: ())
    monkeypatch.setattr(source_check, "missing", lambda package, optional=False: lacking[optional])
    part = {"kv_connector": "OffloadingConnector"}
    for wrapped in (part, nest(part)):
        assert "the set is gone" in why_not_beside(wrapped, policy="recompute")
    assert why_not_beside({"kv_connector": "NixlConnector"}) is None


def test_caches_that_a_donor_could_not_hold_are_refused_where_they_are_seen():
    plain, names = torch.zeros(2, 2), ["layer"]
    check_caches(names, [plain], [SimpleNamespace(kv_sharing_target_layer_name=None)])
    with pytest.raises(SemBlendError, match="shares the KV"):
        check_caches(names, [plain], [SimpleNamespace(kv_sharing_target_layer_name="another")])
    with pytest.raises(SemBlendError, match=r"torch\.uint8"):
        check_caches(names, [plain.to(torch.uint8)], [SimpleNamespace()])
    with pytest.raises(SemBlendError, match="list"):
        check_caches(names, [[plain, plain]], [SimpleNamespace()])


LAYER = SimpleNamespace(num_heads=4, num_kv_heads=2, head_size=16)
WIDE, NARROW = RopeSpec.plain(16, theta=1e4), RopeSpec.plain(16, theta=5e5)


def rotate_as(rope):
    """A layer of vLLM's that rotates so."""

    def rotate(at, query, key):
        turned = rope.rotate(key.view(len(at), 2, 16), *rope.cos_sin(at, key.dtype))
        return query, turned.flatten(1)

    return rotate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_that_rotates_keys_otherwise_than_we_do_is_found_at_its_start(dtype):
    like = torch.empty(0, dtype=dtype)
    ours = replace(WIDE, others=(NARROW.inv_freq, NARROW.inv_freq[:4], (0.0,) * 8), layer_kinds=(0, 1, 2, 3))
    theirs = [rotate_as(ours.of_layer(layer)) for layer in range(4)]
    check_rotation(theirs, [LAYER] * 4, ours, 40_000, like)
    check_rotation([*theirs[:3], theirs[0]], [LAYER] * 4, ours, 40_000, like)  # a module that the layer does not use
    check_rotation([None] * 4, [LAYER] * 4, ours, 40_000, like)
    slower = replace(WIDE, inv_freq=(*WIDE.inv_freq[:-1], WIDE.inv_freq[-1] * 0.9))
    for other in (NARROW, slower, replace(WIDE, style="interleaved"), ours.of_layer(2)):
        with pytest.raises(SemBlendError, match="layer 0 are rotated otherwise"):
            check_rotation([rotate_as(other), *theirs[1:]], [LAYER] * 4, ours, 40_000, like)
    with pytest.raises(SemBlendError, match="layer 2 are rotated otherwise"):
        check_rotation([*theirs[:2], theirs[1], theirs[3]], [LAYER] * 4, ours, 40_000, like)


def test_a_table_that_a_rotation_replaces_is_put_back_whatever_happens():
    module = torch.nn.Module()
    module.register_buffer("cos_sin_cache", torch.ones(4), persistent=False)
    table = module.cos_sin_cache

    def look():
        with keep_rotation_tables([module]):
            module.cos_sin_cache = table.bfloat16()
            raise StopPass

    with pytest.raises(StopPass):
        look()
    assert module.cos_sin_cache is table


def test_a_layer_whose_rotation_cannot_be_tried_is_left_to_the_canary():
    def of_another_kind(at):
        raise AssertionError("not reached")

    check_rotation([of_another_kind], [LAYER], WIDE, 4096, torch.empty(0))


def test_an_unknown_version_and_changed_sources_are_refused(monkeypatch):
    assert "never looked at" in why_not(*engine(), version="0.99.0")
    monkeypatch.setattr(refusals, "missing", lambda package: ("Request.update_block_hashes is not in v1/request.py",))
    assert "update_block_hashes" in why_not(*engine())
