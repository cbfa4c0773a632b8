"""Relocation against the models themselves: what transformers computes at the target position is the truth."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="relocation needs torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from semblend.errors import InputError  # noqa: E402
from semblend.materialize.donors.store import pack_rope, unpack_rope  # noqa: E402
from semblend.materialize.kv.rope import (  # noqa: E402
    FAMILIES,
    LATENT_FAMILIES,
    LONGEST,
    RopeSpec,
    read_for_text,
    refusal,
)

TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPTJ = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 2048, "rotary_dim": 8, "vocab_size": 61}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
LOCAL = {"num_local_experts": 2, "num_experts_per_tok": 1}
ROUTED = {
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def axes(sections: list[int], **more: Any) -> dict[str, Any]:
    """What a model says that rotates by several axes."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections} | more}


FIELDS: dict[str, dict[str, Any]] = {
    "codegen": GPTJ,
    "dots1": TINY | ROUTED | {"n_shared_experts": 1, "layer_types": ["full_attention"] * 4},
    "ernie4_5": TINY | {"head_dim": 16},
    "ernie4_5_moe": TINY | {"moe_num_experts": 2, "moe_k": 1, "moe_intermediate_size": 16, "moe_layer_start_index": 1},
    "exaone4": TINY | {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    "falcon": TINY | {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    "flex_olmo": TINY | EXPERTS,
    "gemma": TINY | {"head_dim": 32},
    "glm": TINY | {"head_dim": 16},
    "glm4": TINY | {"head_dim": 16},
    "glm4_moe": TINY | ROUTED | {"head_dim": 32, "n_shared_experts": 1, "use_qk_norm": True},
    "glm4v_moe_text": TINY
    | ROUTED
    | {"head_dim": 32, "n_shared_experts": 1}
    | axes([2, 3, 3], partial_rotary_factor=0.5),
    "glm4v_text": TINY | axes([1, 1, 2], partial_rotary_factor=0.5),
    "granitemoe": TINY | LOCAL,
    "granitemoeshared": TINY | LOCAL | {"shared_intermediate_size": 16},
    "gptj": GPTJ,
    "helium": TINY | {"head_dim": 16},
    "minimax_m2": TINY | LOCAL | {"head_dim": 32, "rotary_dim": 16},
    "ministral3": TINY | {"head_dim": 32},
    "mistral": TINY | {"sliding_window": None, "head_dim": 32},
    "mixtral": TINY | LOCAL,
    "olmoe": TINY | EXPERTS,
    "phimoe": TINY | LOCAL,
    "qwen2_5_vl_text": TINY | axes([2, 3, 3]),
    "qwen2_moe": TINY | EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen2_vl_text": TINY | axes([2, 3, 3]),
    "qwen3": TINY | {"head_dim": 32},
    "qwen3_moe": TINY | EXPERTS | {"head_dim": 16},
    "qwen3_vl_moe_text": TINY | EXPERTS | {"head_dim": 16} | axes([2, 3, 3], mrope_interleaved=True),
    "qwen3_vl_text": TINY | {"head_dim": 16} | axes([2, 3, 3], mrope_interleaved=True),
    "seed_oss": TINY | {"head_dim": 16},
    "solar_open": TINY | ROUTED | {"head_dim": 16, "n_shared_experts": 1},
    "starcoder2": TINY | {"sliding_window": None},
}
OWN_DEFAULTS = {"gptj", "codegen", "falcon", "ministral3", "apertus", "gpt_oss", "laguna"}
OWN_DEFAULTS |= {"gemma4_text", "gemma4_unified_text"}
"""No rotary fields mean more there than base and dimensions."""
FOUR = TINY | {"num_hidden_layers": 4, "head_dim": 16}
BOTH = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4096}
BY_TYPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
CHUNKED = {"layer_types": ["chunked_attention", "full_attention"] * 2, "attention_chunk_size": 4096}
FIELDS |= {
    "cohere2": FOUR | BOTH,
    "exaone4": FOUR | BOTH,
    "gemma2": FOUR | BOTH,
    "gemma3_text": FOUR | BOTH,
    **dict.fromkeys(
        ("gemma4_text", "gemma4_unified_text"),
        FOUR
        | BOTH
        | {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
        | {"hidden_size_per_layer_input": 0},
    ),
    "gpt_oss": FOUR | BOTH | {"num_local_experts": 2, "num_experts_per_tok": 1},
    "llama4_text": FOUR
    | CHUNKED
    | {"no_rope_layers": [1, 0] * 2, "num_local_experts": 2, "intermediate_size_mlp": 48, "moe_layers": []},
    "afmoe": FOUR | BOTH | EXPERTS | {"num_shared_experts": 1, "num_dense_layers": 1, "global_attn_every_n_layers": 2},
    "hy_v3": FOUR | EXPERTS | {"num_shared_experts": 1},
    "laguna": FOUR
    | BOTH
    | EXPERTS
    | {"shared_expert_intermediate_size": 16, "rope_parameters": copy.deepcopy(BY_TYPE)},
    "mellum": FOUR | BOTH | EXPERTS,
    "olmo3": FOUR | BOTH,
    "smollm3": FOUR | {"no_rope_layers": [1, 0, 1, 1]},
    "step3p5": FOUR
    | BOTH
    | {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "share_expert_dim": 16}
    | {"rope_parameters": copy.deepcopy(BY_TYPE)},
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "base 1e6": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3"} | LLAMA3,
    "llama3, all blended": {"rope_type": "llama3"} | LLAMA3 | {"high_freq_factor": 256.0},
    "yarn": {"rope_type": "yarn"} | YARN,
    "yarn, mscale": {"rope_type": "yarn"} | YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn, attention factor": {"rope_type": "yarn"} | YARN | {"attention_factor": 1.3},
    "yarn, betas": {"rope_type": "yarn"} | YARN | {"beta_fast": 20.0, "beta_slow": 2.0},
    "yarn, not truncated": {"rope_type": "yarn"} | YARN | {"truncate": False},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
}
SCALED = ["llama", "qwen2", "qwen3", "phi", "mistral", "cohere"]  # these read rope_parameters of every kind


def model_and_config(family: str, scaling: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
    transformers = pytest.importorskip("transformers", reason="the models to compare with")
    fields = copy.deepcopy(FIELDS.get(family, TINY))
    if scaling is not None:
        fields["rope_parameters"] = {"rope_theta": 10_000.0} | scaling
        if family == "phi":
            fields["rope_parameters"]["partial_rotary_factor"] = 0.5
    config = transformers.AutoConfig.for_model(family, **fields)
    model = draw_model(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # a norm of ones would hide a norm that is applied after the rotation
            parameter.data.uniform_(0.3, 2.0)
    return model, dict(read_for_text(config.to_dict()))


def draw_model(config: Any) -> Any:
    """The model of transformers, with random weights."""
    transformers = pytest.importorskip("transformers", reason="the models to compare with")
    torch.manual_seed(7)
    if config.model_type == "step3p5":  # a part of a model that reads images; alone it has no door
        from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

        return Step3p7TextModel(config).eval().float()
    text = config.model_type.endswith("_text")
    kind = transformers.AutoModel if text else transformers.AutoModelForCausalLM
    return kind.from_config(config).eval().float()


def keys_at(model: Any, tokens: Any, start: int) -> list[Any]:
    """Keys [n, kv_heads, d] of every layer as the model caches them with its first token at ``start``."""
    positions = torch.arange(start, start + tokens.shape[1])[None]
    with torch.no_grad():
        cache = model(tokens, position_ids=positions, use_cache=True).past_key_values
    return [layer.keys[0].transpose(0, 1) for layer in cache.layers]


def assert_relocates(model: Any, config: dict[str, Any], donor: int, target: int) -> None:
    """In all layers: without text in front, nothing but the rotation tells where a prompt stands."""
    tokens = torch.randint(3, 60, (1, 24), generator=torch.Generator().manual_seed(3))
    rope = RopeSpec.from_hf_config(config, seq_len=max(donor, target) + tokens.shape[1])
    before, after = keys_at(model, tokens, donor), keys_at(model, tokens, target)
    for number, (mine, theirs) in enumerate(zip(before, after, strict=True)):
        moved = rope.of_layer(number).relocate(mine, target - donor)
        error = (moved - theirs).abs().max().item() / max(1.0, theirs.abs().max().item())
        assert error <= 1e-4, f"relocated keys of layer {number} are off by {error:.2e}"
    assert (before[0] - after[0]).abs().max() > 1e-2, "the positions made no difference: this test could not fail"


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.filterwarnings("ignore")  # constructors of old families warn about their own defaults
def test_every_family_in_the_table_relocates_as_its_own_model_computes(family):
    model, config = model_and_config(family)
    chunked = "Some layers are not full attention (chunked_attention)." if family == "llama4_text" else None
    assert refusal(config, by_layer=True) == chunked
    assert_relocates(model, config, donor=90, target=11)
    assert_relocates(model, config, donor=3, target=640)


LAYERED = sorted(name for name, family in FAMILIES.items() if family.layers != "alike")


@pytest.mark.parametrize("family", [*LAYERED, "gemma2", "gpt_oss"])
def test_where_layers_differ_only_who_asks_by_layer_may_move_them(family):
    transformers = pytest.importorskip("transformers", reason="the configs")
    config = transformers.AutoConfig.for_model(family, **copy.deepcopy(FIELDS[family])).to_dict()
    assert refusal(config) is not None
    rope = RopeSpec.from_hf_config(config)
    if family in LAYERED and family != "olmo3":  # which differs by its scaling, where it has one
        assert len(rope.kinds) == 2
        with pytest.raises(InputError, match="rotate differently"):
            rope.relocate(torch.zeros(1, 1, 16), 3)
    assert unpack_rope(json.loads(json.dumps(pack_rope(rope)))) == rope


@pytest.mark.parametrize("family", ["laguna", "step3p5"])
@pytest.mark.filterwarnings("ignore")
def test_layers_that_rotate_different_parts_of_a_head_are_each_moved_by_theirs(family):
    transformers = pytest.importorskip("transformers", reason="the model to compare with")
    parts = copy.deepcopy(BY_TYPE)
    parts["sliding_attention"]["partial_rotary_factor"] = 1.0
    config = transformers.AutoConfig.for_model(family, **copy.deepcopy(FIELDS[family]) | {"rope_parameters": parts})
    model = draw_model(config)
    assert refusal(config.to_dict(), by_layer=True) is None
    assert [len(kind) for kind in RopeSpec.from_hf_config(config.to_dict()).kinds] == [8, 4]
    assert_relocates(model, config.to_dict(), donor=90, target=11)
    assert_relocates(model, config.to_dict(), donor=3, target=640)


def test_lists_with_an_entry_for_each_layer_mean_what_their_model_reads_in_them():
    transformers = pytest.importorskip("transformers", reason="the config that reads them")
    fields = FIELDS["step3p5"] | {"model_type": "step3p5"}
    del fields["rope_parameters"]
    lists = {
        "rope_theta": [1e4, 5e6] * 2 + [1e4],  # the last is of a layer that drafts
        "partial_rotary_factors": [1.0, 0.5] * 2 + [1.0],
        "yarn_only_types": ["full_attention"],
        "rope_scaling": {"rope_type": "llama3"} | LLAMA3,
    }
    read = transformers.AutoConfig.for_model(**copy.deepcopy(fields | lists)).to_dict()
    assert "full_attention" in read["rope_parameters"]
    assert RopeSpec.from_hf_config(fields | lists) == RopeSpec.from_hf_config(read)
    assert refusal(fields | lists, by_layer=True) is None
    still = RopeSpec.from_hf_config(fields | lists | {"use_rope_layers": [True, True, False, True]})
    assert [any(still.of_layer(layer).inv_freq) for layer in range(4)] == [True, True, False, True]


@pytest.mark.parametrize("longest", [4096, 131_072])
def test_longrope_has_the_factors_of_an_engine_that_chose_once(longest):
    transformers = pytest.importorskip("transformers", reason="the function to compare with")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factors = {"short_factor": [1.0 + n / 8 for n in range(8)], "long_factor": [2.0 + n for n in range(8)]}
    scaling = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096} | factors
    config = transformers.Phi3Config(**TINY | {"max_position_embeddings": 131_072, "rope_parameters": scaling})
    expected, magnitude = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=longest)
    said = config.to_dict()
    assert "longrope" in (refusal(said) or ""), "elsewhere they change with the prompt"
    assert refusal(said | {LONGEST: longest}) is None
    rope = RopeSpec.from_hf_config(said | {LONGEST: longest})
    torch.testing.assert_close(torch.tensor(rope.inv_freq).float(), expected, rtol=2e-6, atol=1e-12)
    assert rope.attention_factor == pytest.approx(magnitude, rel=1e-9)
    said["rope_parameters"]["long_factor"] = [1.0]
    assert "long_factor" in (refusal(said | {LONGEST: 131_072}) or "")


GLOBAL = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
YARN_FULL = {
    "full_attention": {
        "rope_type": "yarn",
        "factor": 8.0,
        "rope_theta": 5e5,
        "original_max_position_embeddings": 256,
    }
}
LOCAL = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}


@pytest.mark.parametrize(
    ("family", "parameters"),
    [
        ("gemma3_text", LOCAL | GLOBAL),
        ("olmo3", LOCAL | YARN_FULL),
        ("gpt_oss", {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "truncate": False,
                     "beta_fast": 32.0, "beta_slow": 1.0, "rope_theta": 150_000.0}),
        ("exaone4", {"rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0, "low_freq_factor": 1.0,
                     "high_freq_factor": 4.0, "original_max_position_embeddings": 256}),
    ],
)  # fmt: skip
def test_scaling_holds_for_the_layers_that_it_is_said_of(family, parameters):
    transformers = pytest.importorskip("transformers", reason="the models to compare with")
    given = copy.deepcopy(FIELDS[family]) | {"rope_parameters": copy.deepcopy(parameters)}
    config = transformers.AutoConfig.for_model(family, **given)
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    assert refusal(config.to_dict(), by_layer=True) is None
    assert_relocates(model, config.to_dict(), donor=90, target=11)
    assert_relocates(model, config.to_dict(), donor=3, target=640)


def test_gemma_4_has_heads_of_two_sizes_and_says_how_each_kind_of_layer_rotates():
    transformers = pytest.importorskip("transformers", reason="the config")
    config = transformers.AutoConfig.for_model("gemma4_text", **copy.deepcopy(FIELDS["gemma4_text"])).to_dict()
    rope = RopeSpec.from_hf_config(config)
    assert (rope.head_dim, rope.sizes) == (32, (16, 32) * 2)
    own = {name: value for name, value in config.items() if name != "per_layer_config"} | {"global_head_dim": 32}
    assert RopeSpec.from_hf_config(own) == rope, "as checkpoints say it"
    silent = {name: value for name, value in config.items() if name != "rope_parameters"}
    assert "rope_theta" in (refusal(silent, by_layer=True) or "")
    assert rope.cannot_follow(RopeSpec.from_hf_config(own | {"global_head_dim": 64})) is not None
    plain = {"rope_type": "default", "rope_theta": 1e4}
    alike = {"full_attention": plain | {"partial_rotary_factor": 0.5}, "sliding_attention": plain}
    rope = RopeSpec.from_hf_config(config | {"rope_parameters": alike})
    assert [rope.of_layer(layer).head_dim for layer in range(4)] == [16, 32, 16, 32], "also where they turn alike"


def test_an_old_gemma_config_scales_its_full_layers_only():
    old = FIELDS["gemma3_text"] | {"model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    old["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    new = FIELDS["gemma3_text"] | {"model_type": "gemma3_text", "rope_parameters": LOCAL | GLOBAL}
    assert RopeSpec.from_hf_config(old) == RopeSpec.from_hf_config(new)
    assert refusal(old, by_layer=True) is None


@pytest.mark.parametrize("family", SCALED)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.filterwarnings("ignore")
def test_every_scaling_gives_the_frequencies_and_keys_of_the_model(family, scaling):
    model, config = model_and_config(family, SCALINGS[scaling])
    assert refusal(config) is None
    assert_relocates(model, config, donor=300, target=17)
    rotary = next(module for name, module in model.named_modules() if name.endswith("rotary_emb"))
    rope = RopeSpec.from_hf_config(config)
    torch.testing.assert_close(torch.tensor(rope.inv_freq).float(), rotary.inv_freq, rtol=2e-6, atol=1e-12)
    assert rope.attention_factor == pytest.approx(rotary.attention_scaling, rel=1e-9)
    assert rope.style == ("interleaved" if family == "cohere" else "half")


@pytest.mark.parametrize("scaling", [name for name in SCALINGS if "default" not in name and "base" not in name])
@pytest.mark.parametrize("seq_len", [None, 100, 5000])
def test_frequencies_are_those_of_the_transformers_init_functions(scaling, seq_len):
    transformers = pytest.importorskip("transformers", reason="the functions to compare with")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_theta": 500_000.0} | SCALINGS[scaling]
    config = transformers.LlamaConfig(**(TINY | {"head_dim": 128, "rope_parameters": dict(parameters)}))
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=seq_len)
    rope = RopeSpec.from_hf_config(config.to_dict(), seq_len)
    torch.testing.assert_close(torch.tensor(rope.inv_freq).float(), expected, rtol=2e-6, atol=1e-12)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-9)
    assert rope.dynamic == (scaling == "dynamic")


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - OWN_DEFAULTS))
def test_a_config_without_rotary_fields_means_what_its_family_means_by_that(family):
    transformers = pytest.importorskip("transformers", reason="the defaults to compare with")
    fields = FIELDS.get(family, TINY)
    fields = {key: value for key, value in fields.items() if key not in ("rope_parameters", "rotary_dim")}
    full = transformers.AutoConfig.for_model(family, **copy.deepcopy(fields)).to_dict()
    bare = {key: value for key, value in full.items() if not key.startswith(("rope", "rotary", "partial_rotary"))}
    assert RopeSpec.from_hf_config(bare) == RopeSpec.from_hf_config(full)


def test_a_part_of_a_head_is_named_in_dimensions_or_as_a_factor_which_counts():
    config = TINY | {"model_type": "minimax_m2", "head_dim": 32, "rotary_dim": 16}
    assert RopeSpec.from_hf_config(config).rotary_dim == 16
    assert RopeSpec.from_hf_config(config | {"rope_parameters": {"partial_rotary_factor": 0.25}}).rotary_dim == 8


LATENTS = TINY | {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 8, "v_head_dim": 16}
LATENTS |= {"q_lora_rank": 24, "num_key_value_heads": 4, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1}
LATENTS |= {"topk_group": 1, "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1}
DEEPSEEK_YARN = {"rope_type": "yarn", "rope_theta": 1e4} | YARN | {"beta_fast": 32, "beta_slow": 1}
LATENT_SCALINGS = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "V2-Lite": DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "V3": DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "unlike": DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
}


def vectors_at(layer: Any, hidden: Any, start: int, rotary: Any, style: str) -> Any:
    """What an engine caches of a layer's input, by the layer's own weights: latents, and behind them rotated keys."""
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

    positions = torch.arange(start, start + hidden.shape[1])[None]
    latent, key = layer.kv_a_proj_with_mqa(hidden).split([32, 16], dim=-1)
    key = key[:, None]
    if style == "v2":  # it rotates neighbours as complex numbers
        _, turned = v2.apply_rotary_emb(key, key, rotary(hidden, positions))
    else:  # it puts the first of all pairs in front, and rotates halves
        _, halves = v3.apply_rotary_pos_emb_interleave(key, key, *rotary(hidden, positions))
        turned = torch.stack(halves.chunk(2, dim=-1), dim=-1).flatten(-2)
    return torch.cat((layer.kv_a_layernorm(latent), turned[:, 0]), dim=-1)[0, :, None]


@pytest.mark.parametrize("family", sorted(LATENT_FAMILIES))
@pytest.mark.parametrize("scaling", LATENT_SCALINGS)
@pytest.mark.filterwarnings("ignore")
def test_half_a_vector_of_latent_attention_relocates_as_its_model_computes(family, scaling):
    transformers = pytest.importorskip("transformers", reason="the models to compare with")
    fields = copy.deepcopy(LATENTS) | {"rope_parameters": dict(LATENT_SCALINGS[scaling])}
    same_classes = {"kimi_k2": "deepseek_v3"}.get(family, family)
    config = transformers.AutoConfig.for_model(same_classes, **fields)
    config.model_type, style = family, "v2" if family == "deepseek_v2" else "v3"
    torch.manual_seed(7)
    kind = transformers.AutoConfig.for_model(same_classes).__class__
    model = transformers.AutoModelForCausalLM._model_mapping[kind](config).eval().float()
    layer, rotary = model.model.layers[0].self_attn, model.model.rotary_emb
    layer.kv_a_layernorm.weight.data.uniform_(0.3, 2.0)
    assert refusal(config.to_dict(), latents=True) is None
    rope = RopeSpec.from_hf_config(config.to_dict())
    assert (rope.head_dim, rope.rotary_start, rope.rotary_dim, rope.style) == (24, 8, 16, "interleaved")
    assert rope.attention_factor == pytest.approx(rotary.attention_scaling, rel=1e-9)
    hidden = torch.randn(1, 24, 64, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        before, after = (vectors_at(layer, hidden, start, rotary, style) for start in (300, 17))
    (v, k), (v_there, k_there) = (whole.chunk(2, dim=-1) for whole in (before, after))
    assert torch.equal(v, v_there), "the first half knows no position"
    moved = rope.relocate(k, -283)
    assert torch.equal(moved[..., :8], k_there[..., :8]), "nor does what is latent in the second"
    assert (moved - k_there).abs().max() < 1e-4
    assert (k - k_there).abs().max() > 1e-2, "the positions made no difference: this test could not fail"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"index_topk": 2048}, "index_topk"),
        ({"qk_rope_head_dim": 0}, "cannot be cut in two"),
        ({"kv_lora_rank": 8}, "cannot be cut in two"),
        ({"kv_lora_rank": 34}, "cannot be cut in two"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear' is not known for latent"),
        ({"rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"model_type": "longcat_flash"}, "'longcat_flash'"),
        ({"model_type": "llama"}, "'llama'"),
    ],
)
def test_latent_attention_that_is_not_known_is_refused(changes, words):
    config = LATENTS | {"model_type": "deepseek_v3"}
    assert refusal(config, latents=True) is None
    assert words in (refusal(config | changes, latents=True) or "")


def test_old_and_new_ways_to_write_a_config_mean_the_same():
    old = TINY | {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = TINY | {"model_type": "llama"}
    new["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    assert RopeSpec.from_hf_config(old) == RopeSpec.from_hf_config(new)
    assert hash(RopeSpec.from_hf_config(old)) == hash(RopeSpec.from_hf_config(new))


def test_dynamic_keys_move_only_between_prompts_of_equal_frequencies():
    config = TINY | {"model_type": "llama", "rope_parameters": SCALINGS["dynamic"] | {"rope_theta": 1e4}}
    short, trained = RopeSpec.from_hf_config(config, 100), RopeSpec.from_hf_config(config, 2048)
    long = RopeSpec.from_hf_config(config, 4096)
    assert trained.cannot_follow(short) is None
    assert "different rotary frequencies" in (long.cannot_follow(short) or "")
    assert "donor's own" in (long.cannot_follow(None) or "")


def specs() -> st.SearchStrategy[RopeSpec]:
    @st.composite
    def build(draw: Any) -> RopeSpec:
        pairs, start = draw(st.integers(1, 24)), draw(st.sampled_from([0, 2, 5]))
        theta = draw(st.floats(100.0, 5e6))
        return RopeSpec(
            head_dim=start + 2 * pairs + draw(st.sampled_from([0, 2, 7, 16])),
            rotary_dim=2 * pairs,
            style=draw(st.sampled_from(["half", "interleaved"])),
            inv_freq=tuple(theta ** (-i / pairs) for i in range(pairs)),
            attention_factor=draw(st.sampled_from([1.0, 1.3])),
            rotary_start=start,
        )

    return build()


SHIFTS = st.integers(-200_000, 200_000)


def random_keys(rope: RopeSpec, seed: int, dtype: Any = None) -> Any:
    made = torch.randn(5, 2, rope.head_dim, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype or torch.float32)


@settings(max_examples=60)
@given(specs(), SHIFTS, SHIFTS, st.integers(0, 99))
def test_two_moves_are_one_move_by_their_sum(rope, a, b, seed):
    k = random_keys(rope, seed)
    torch.testing.assert_close(rope.relocate(rope.relocate(k, a), b), rope.relocate(k, a + b), rtol=0, atol=3e-6)


@settings(max_examples=40)
@given(specs(), SHIFTS, st.integers(0, 99))
def test_a_move_keeps_the_norm_and_the_dimensions_that_are_not_rotated(rope, shift, seed):
    k = random_keys(rope, seed)
    moved = rope.relocate(k, shift)
    torch.testing.assert_close(moved.norm(dim=-1), k.norm(dim=-1), rtol=1e-6, atol=1e-6)
    for rest in (slice(rope.rotated.start), slice(rope.rotated.stop, None)):
        assert torch.equal(moved[..., rest], k[..., rest])


@settings(max_examples=30)
@given(specs(), st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), st.integers(0, 99))
def test_a_shift_of_zero_changes_no_bit(rope, dtype, seed):
    k = random_keys(rope, seed, dtype)
    k[0, 0, : rope.rotary_dim] = -0.0
    k[0, 1, 0] = math.inf
    bits = k.view(torch.int32 if dtype == torch.float32 else torch.int16)
    for shift in (0, torch.zeros(5, 1, dtype=torch.int64)):
        moved = rope.relocate(k, shift)
        assert torch.equal(moved.view(bits.dtype), bits)
        assert moved.data_ptr() != k.data_ptr()


@settings(max_examples=40)
@given(specs(), SHIFTS, st.sampled_from([torch.float16, torch.bfloat16]), st.integers(0, 99))
def test_far_moves_of_half_precision_keys_are_rounded_once_and_not_more(rope, shift, dtype, seed):
    k = random_keys(rope, seed, dtype)
    exact = rope.relocate(k.double(), shift)
    worst = (rope.relocate(k, shift).double() - exact).abs().max().item()
    assert worst <= torch.finfo(dtype).eps * exact.abs().max().item() * 0.51 + 1e-6


@settings(max_examples=30)
@given(specs(), st.integers(0, 150_000), SHIFTS, st.integers(0, 99))
def test_rotate_at_p_then_relocate_is_rotate_at_the_target(rope, position, shift, seed):
    k = random_keys(rope, seed).double()
    positions = position + torch.arange(5)
    at_donor = rope.rotate(k, *rope.cos_sin(positions, torch.float64))
    at_target = rope.rotate(k, *rope.cos_sin(positions + shift, torch.float64))
    torch.testing.assert_close(rope.relocate(at_donor, shift), at_target, rtol=0, atol=1e-8)


def test_every_token_may_have_its_own_shift():
    rope = RopeSpec.plain(8)
    k = random_keys(rope, 1)
    shifts = torch.tensor([0, 5, -5, 1000, 0])
    moved = rope.relocate(k, shifts[:, None])
    for row, shift in enumerate(shifts.tolist()):
        torch.testing.assert_close(moved[row], rope.relocate(k[row], shift), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (lambda rope: rope.relocate(torch.zeros(3, 6), 1), "6 dimensions, not 8"),
        (lambda rope: rope.relocate(torch.zeros(3, 8, dtype=torch.int32), 1), "cannot be rotated"),
        (lambda rope: rope.relocate(torch.zeros(3, 8).to(torch.float8_e4m3fn), 1), "cannot be rotated"),
        (lambda rope: rope.relocate(torch.zeros(3, 8), torch.tensor(1.5)), "must be an integer"),
        (lambda rope: RopeSpec(8, 6, "half", (1.0, 0.1)), "do not fit together"),
        (lambda rope: RopeSpec(4, 4, "spiral", (1.0, 0.1)), "style"),
        (lambda rope: RopeSpec.from_hf_config({"model_type": "llama"}), "no head size"),
        (lambda rope: RopeSpec.from_hf_config(TINY | {"rope_scaling": {"type": "linear"}}), "factor is missing"),
        (lambda rope: RopeSpec.from_hf_config(TINY | {"rope_scaling": {"type": "spiral"}}), "not known"),
        (lambda rope: RopeSpec.from_hf_config(TINY | {"partial_rotary_factor": 0.2}), "cannot be paired"),
    ],
)
def test_what_cannot_be_rotated_is_refused_with_a_hint(bad, words):
    with pytest.raises(InputError, match=words) as caught:
        bad(RopeSpec.plain(8))
    assert caught.value.hint


LLAMA = TINY | {"model_type": "llama"}
QWEN2 = TINY | {"model_type": "qwen2", "sliding_window": 1024}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (TINY | {"model_type": "deepseek_v3", "kv_lora_rank": 512}, "MLA"),
        (TINY | {"model_type": "bloom"}, "ALiBi"),
        (TINY | {"model_type": "falcon", "alibi": True}, "ALiBi"),
        (TINY | {"model_type": "mpt", "attn_config": {"alibi": True}}, "ALiBi"),
        (TINY | {"model_type": "gpt2"}, "learned absolute"),
        (LLAMA | {"position_embedding_type": "learned_absolute"}, "learned absolute"),
        (LLAMA | {"position_embedding_type": "nope"}, "no rotary"),
        (TINY | {"model_type": "mamba"}, "no rotary"),
        (TINY | {"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 1}, "sliding window"),
        (TINY | {"model_type": "mistral", "sliding_window": 1024}, "sliding window"),
        (LLAMA | {"layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
        (LLAMA | {"layer_types": ["full_attention", "linear_attention"]}, "not full attention"),
        (LLAMA | {"attention_chunk_size": 512}, "chunks"),
        (LLAMA | {"use_bidirectional_attention": True}, "behind them"),
        (LLAMA | {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        (FIELDS["exaone4"] | {"model_type": "exaone4"}, "sliding window"),
        (FIELDS["smollm3"] | {"model_type": "smollm3"}, "no_rope_layers"),
        (LLAMA | {"rope_local_base_freq": 1e4}, "different frequencies"),
        (LLAMA | {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "different frequencies"),
        (QWEN2 | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, "M-RoPE"),
        (LLAMA | {"vision_config": {"depth": 2}}, "images"),
        (LLAMA | {"rope_scaling": {"type": "su", "long_factor": [1.0]}}, "longrope"),
        (LLAMA | {"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        (LLAMA | {"rope_scaling": {"rope_type": "spiral"}}, "'spiral' is not known"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}}, "'alpha' is not known"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "cannot be read"),
        (LLAMA | {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, "quantised"),
        (LLAMA | {"quantization": {"kv_cache_quant_algo": "FP8"}}, "quantised"),
        (LLAMA | {"kv_cache_dtype": "fp8_e4m3"}, "quantised"),
        (LLAMA | {"cache_implementation": "quantized"}, "quantised"),
        (TINY | {"model_type": "from_tomorrow"}, "'from_tomorrow'"),
    ],
)
def test_a_model_whose_keys_cannot_be_moved_is_refused_with_one_sentence(config, words):
    reason = refusal(config)
    assert reason is not None
    assert words in reason
    assert reason.endswith(".")
    assert "\n" not in reason


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LLAMA | {"layer_types": ["full_attention", "linear_attention"]}, "not full attention"),
        (LLAMA | {"attention_chunk_size": 512}, "chunks"),
        (LLAMA | {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        (LLAMA | {"rope_local_base_freq": 1e4}, "different frequencies"),
        (TINY | {"model_type": "gemma3_text"}, "of which type"),
        (FOUR | BOTH | {"model_type": "gemma3_text", "rope_parameters": GLOBAL}, "sliding_attention layers"),
        (
            FOUR | BOTH | {"model_type": "olmo3", "rope_parameters": LOCAL | {"full_attention": {"rope_type": "su"}}},
            "longrope",
        ),
    ],
)
def test_by_layer_too_what_is_not_known_is_refused(config, words):
    assert words in (refusal(config, by_layer=True) or "")


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        QWEN2 | {"use_sliding_window": False},
        QWEN2 | {"use_sliding_window": True, "max_window_layers": 28},
        TINY | {"model_type": "mistral", "sliding_window": None},
        TINY | {"model_type": "mistral", "sliding_window": 4096},
        LLAMA | {"layer_types": ["full_attention", "full_attention"]},
        LLAMA | {"kv_cache_dtype": "auto", "quantization_config": {"quant_method": "awq", "kv_cache_scheme": None}},
        LLAMA | {"no_rope_layers": [1, 1]},
    ],
)
def test_a_field_that_is_named_but_not_in_use_refuses_nothing(config):
    assert refusal(config) is None
