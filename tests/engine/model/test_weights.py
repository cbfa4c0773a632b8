"""Weights come from safetensors folders and GGUF files alike, and damage is named, never computed with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")

import numpy as np  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from semblend.engine.model.model import DecoderModel  # noqa: E402
from semblend.engine.model.spec import ModelSpec  # noqa: E402
from semblend.engine.model.weights import (  # noqa: E402
    SafetensorsFolder,
    gguf_name,
    half_split,
    read_header,
    unpack_q4_k,
)
from semblend.engine.server.config import ServeConfig  # noqa: E402
from semblend.engine.server.launch import Launch  # noqa: E402
from semblend.errors import InputError  # noqa: E402
from semblend.materialize.contract import Rows  # noqa: E402

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "eos_token_id": 3,
    "torch_dtype": "float16",
}


def tensors_of(config: dict[str, Any]) -> dict[str, Any]:
    """Random weights under the names of transformers."""
    torch.manual_seed(1)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    found = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings"):
        found["lm_head.weight"] = (vocab, hidden)
    for at in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{at}"
        for name, shape in {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}.items():
            found[f"{prefix}.self_attn.{name}_proj.weight"] = shape
            if config["model_type"] == "qwen2" and name != "o":
                found[f"{prefix}.self_attn.{name}_proj.bias"] = shape[:1]
            if config["model_type"] == "qwen3" and name in "qk":
                found[f"{prefix}.self_attn.{name}_norm.weight"] = (head_dim,)
        for name, shape in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
            found[f"{prefix}.mlp.{name}_proj.weight"] = shape
        found[f"{prefix}.input_layernorm.weight"] = (hidden,)
        found[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    return {name: torch.randn(shape) * 0.3 for name, shape in found.items()}


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, Any], shards: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = {f"model-{n}.safetensors": sorted(tensors)[n::shards] for n in range(shards)}
    for file, held in names.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    index = {"weight_map": {name: file for file, held in names.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_gguf(path: Path, config: dict[str, Any], tensors: dict[str, Any], kind: Any = None, **extra: Any) -> Path:
    """As the converters of GGUF write it: llama's q and k rows in rotary pairs."""
    architecture = config["model_type"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    writer.add_token_list([f"t{n}" for n in range(config["vocab_size"] - 1)] + ["<|im_end|>"])
    writer.add_token_types([1] * (config["vocab_size"] - 1) + [3])
    writer.add_eos_token_id(config["eos_token_id"])
    for name, tensor in tensors.items():
        if architecture == "llama" and (".q_proj" in name or ".k_proj" in name):
            heads = config["num_attention_heads" if ".q_proj" in name else "num_key_value_heads"]
            tensor = tensor.reshape(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        values = tensor.contiguous().numpy()
        if kind is not None and values.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), values)
    for name, value in extra.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits_of(model: DecoderModel) -> Any:
    pool = model.new_pool(64)
    context = pool.slots_of(pool.allocate(3), 0, 40)
    return model.logits(model.forward(Rows.of(torch.arange(40) % 60, range(40), context), pool))


def test_shards_give_the_same_model_as_one_file(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    one = DecoderModel.load(write_folder(tmp_path / "one", CONFIG, tensors))
    three = DecoderModel.load(write_folder(tmp_path / "three", CONFIG, tensors, shards=3))
    assert torch.equal(logits_of(one), logits_of(three))


@pytest.mark.parametrize("named", ["torch_dtype", "dtype"])
def test_a_bfloat16_model_is_computed_in_float32_on_a_cpu_unless_bfloat16_is_asked_for(tmp_path, named):
    config = {key: value for key, value in CONFIG.items() if key != "torch_dtype"} | {named: "bfloat16"}
    tensors = {name: tensor.bfloat16() for name, tensor in tensors_of(config).items()}
    folder = write_folder(tmp_path / "model", config, tensors)
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a")).save(str(folder / "tokenizer.json"))
    assert DecoderModel.load(folder).dtype == torch.float32
    for asked, got in {"": torch.float32, "bfloat16": torch.bfloat16}.items():
        model, _ = Launch(
            ServeConfig(model=str(folder), device="cpu", dtype=asked)
        ).load()  # what serve, demo and calibrate start
        assert model.dtype == model.weights.layers[1].qkv.dtype == got


def test_generation_config_adds_tokens_that_end_a_turn(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", CONFIG, tensors_of(CONFIG))
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 9]}')
    assert DecoderModel.load(folder).spec.eos_ids == (3, 9)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "head_dim": 12, "tie_word_embeddings": True},
    ],
    ids=["llama", "llama tied", "qwen2", "qwen3"],
)
def test_a_gguf_file_gives_the_same_logits_as_the_folder_it_was_made_from(tmp_path: Path, changes: Any) -> None:
    config = CONFIG | changes
    tensors = tensors_of(config)
    folder = DecoderModel.load(write_folder(tmp_path / "folder", config, tensors))
    file = DecoderModel.load(write_gguf(tmp_path / "model.gguf", config, tensors))
    assert (logits_of(folder) - logits_of(file)).abs().max() <= 1e-5
    assert file.spec.tied_embeddings == folder.spec.tied_embeddings
    assert file.spec.eos_ids == (3, 63)


def test_a_quantised_gguf_file_gives_nearly_the_same_logits(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    whole = logits_of(DecoderModel.load(write_gguf(tmp_path / "whole.gguf", CONFIG, tensors)))
    kind = gguf.GGMLQuantizationType.Q8_0
    packed = logits_of(DecoderModel.load(write_gguf(tmp_path / "packed.gguf", CONFIG, tensors, kind)))
    assert 0 < (whole - packed).norm() / whole.norm() < 0.05


def test_frequency_factors_of_a_gguf_file_divide_the_frequencies(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    factors = {"rope_freqs.weight": np.array([1, 1, 2, 4], dtype=np.float32)}
    plain = DecoderModel.load(write_gguf(tmp_path / "plain.gguf", CONFIG, tensors)).spec.rope
    scaled = DecoderModel.load(write_gguf(tmp_path / "scaled.gguf", CONFIG, tensors, **factors)).spec.rope
    ratios = [a / b for a, b in zip(plain.inv_freq, scaled.inv_freq, strict=True)]
    assert ratios == pytest.approx([1, 1, 2, 4])


def test_our_unpacking_of_q4_k_is_that_of_the_package() -> None:
    rng = np.random.default_rng(5)
    packed = rng.integers(0, 256, (300, 144), dtype=np.uint8)
    packed[:, :4] = rng.normal(size=(300, 2)).astype(np.float16).view(np.uint8)
    want = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_K)
    got = unpack_q4_k(torch.from_numpy(packed)).numpy().reshape(want.shape)
    np.testing.assert_array_equal(got, want)


def test_half_split_undoes_the_rotary_pairs() -> None:
    weight = torch.arange(16).reshape(8, 2)
    paired = weight.reshape(2, 2, 2, 2).transpose(1, 2).reshape(8, 2)
    assert torch.equal(half_split(paired, 2), weight)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    tensors = tensors_of(CONFIG)
    del tensors[name]
    with pytest.raises(InputError, match=name):
        DecoderModel.load(write_folder(tmp_path / "m", CONFIG, tensors))
    if name != "lm_head.weight":  # in GGUF its absence means tied embeddings
        with pytest.raises(InputError, match=name):
            DecoderModel.load(write_gguf(tmp_path / "m.gguf", CONFIG, tensors))


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(8, 32)
    with pytest.raises(InputError, match=r"k_proj.weight is \(8, 32\), not \(16, 32\)"):
        DecoderModel.load(write_folder(tmp_path / "m", CONFIG, tensors))


def test_more_layers_than_the_config_says_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="more than the 1 layers"):
        DecoderModel.load(write_folder(tmp_path / "m", CONFIG | {"num_hidden_layers": 1}, tensors_of(CONFIG)))


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_truncated_safetensors_file_is_refused(tmp_path: Path, kept: int) -> None:
    folder = write_folder(tmp_path / "m", CONFIG, tensors_of(CONFIG))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(InputError, match="not a whole safetensors file"):
        DecoderModel.load(folder)


def test_a_missing_shard_and_an_empty_folder_are_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", CONFIG, tensors_of(CONFIG), shards=2)
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(InputError, match=r"model-1.safetensors is missing"):
        DecoderModel.load(folder)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(InputError, match="holds no safetensors"):
        DecoderModel.load(bare)
    (bare / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(InputError, match="no weight_map"), SafetensorsFolder(bare):
        pass


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"model_type": "llama"}'])
def test_a_damaged_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError):
        DecoderModel.load(tmp_path)


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("gguf")
    return folder, write_gguf(folder / "whole.gguf", CONFIG, tensors_of(CONFIG)).read_bytes()


@settings(max_examples=150)
@given(data=st.data())
def test_a_truncated_gguf_file_is_always_refused(gguf_bytes: tuple[Path, bytes], data: st.DataObject) -> None:
    folder, whole = gguf_bytes
    length = data.draw(st.one_of(st.integers(0, len(whole) - 32), st.integers(0, 4000)))
    path = folder / "cut.gguf"
    path.write_bytes(whole[:length])
    with pytest.raises(InputError):
        DecoderModel.load(path)


@settings(max_examples=150)
@given(at=st.integers(0, 2500), value=st.integers(0, 255))
def test_a_damaged_gguf_header_never_breaks_the_reader(gguf_bytes: tuple[Path, bytes], at: int, value: int) -> None:
    folder, whole = gguf_bytes
    path = folder / "damaged.gguf"
    path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
    try:
        read_header(path)
    except InputError as error:
        assert error.hint  # noqa: PT017 - some damage, in a name say, is no error


def test_what_is_not_gguf_is_said_so(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(InputError, match="is not a GGUF file"):
        DecoderModel.load(path)
    path.write_bytes(b"GGUF\x01\x00\x00\x00" + bytes(64))
    with pytest.raises(InputError, match="version 1"):
        DecoderModel.load(path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "mamba"}, "no architecture 'mamba'"),
        ({"hidden_act": "gelu"}, "activation"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"attention_bias": True}, "bias"),
        ({"mlp_bias": True}, "bias"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"num_hidden_layers": 0}, "layers is 0"),
        ({"vocab_size": "many"}, "not a whole number"),
    ],
)
def test_a_model_that_would_compute_something_else_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        ModelSpec.from_hf_config(CONFIG | changes)


def test_the_type_of_the_weights_is_the_configs() -> None:
    assert ModelSpec.from_hf_config(CONFIG).dtype == "float16"
