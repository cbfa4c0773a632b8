"""Embedders that need model files: static word vectors, and all-MiniLM-L6-v2 through ONNX Runtime or torch.

Files and packages are checked when an embedder is made; the model itself loads at the first `embed`, which
`semblend.discover.evidence` calls on its own thread, so that nobody's request waits for it.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from semblend.config import decline_telemetry
from semblend.errors import MissingDependencyError
from semblend.fingerprint.bert_onnx import build_bert_onnx
from semblend.fingerprint.model_files import MiniLmFiles, StaticFiles, is_installed
from semblend.fingerprint.segments import cut_text_windows
from semblend.prompt import Prompt

Vector = npt.NDArray[np.float32]
Matrix = npt.NDArray[np.float32]

INSTALL_EMBEDDER = "pip install 'semblend-suite[embedder]'"
MINILM_DIMENSION = 384
MINILM_MAX_TOKENS = 256  # of word pieces; the model was trained no further, whatever its position table allows
BATCH_WINDOWS = 4  # measured on one core: 52 ms a window in batches of 4, 70 ms in batches of 8 (cache)


def normalize(vector: npt.NDArray[Any]) -> Vector | None:
    """Return ``vector`` at length 1 in float32; None for a zero vector, which has no direction."""
    length = float(np.linalg.norm(vector))
    return (vector / length).astype(np.float32) if length > 0 else None


class StaticEmbedder:
    """A sum of fixed word-piece vectors: no transformer, no order, a few milliseconds a prompt.

    A piece that occurs n times counts 1 + ln(n), not n: in long texts the function words would otherwise drown the
    subject, and every two documents of a language would look alike (docs/research/decisions/0011 has the figures).
    """

    name = "static"
    window_characters = 4096
    window_limit = 16  # all of a text up to 64 K characters, evenly spread samples beyond

    def __init__(self, files: StaticFiles) -> None:
        require("safetensors", "tokenizers")
        self._files = files
        self._lock = threading.Lock()
        self._loaded: tuple[Any, _StaticTable] | None = None
        self.dimension = _StaticTable.read_dimension(files.matrix)

    def embed(self, prompt: Prompt) -> Vector | None:
        """Return the weighted sum of the vectors of the text's word pieces, at length 1; None without text."""
        if not prompt.text:
            return None
        tokenizer, table = self._load()
        windows = cut_text_windows(prompt.text, size=self.window_characters, overlap=0, limit=self.window_limit)
        encoded = tokenizer.encode_batch(list(windows), add_special_tokens=False)
        ids = np.concatenate([np.asarray(piece.ids, dtype=np.int64) for piece in encoded] or [np.zeros(0, np.int64)])
        return normalize(table.sum(ids))

    def _load(self) -> tuple[Any, _StaticTable]:
        """Load tokenizer and vectors at the first use."""
        with self._lock:
            if self._loaded is None:
                from tokenizers import Tokenizer

                tokenizer = Tokenizer.from_file(str(self._files.tokenizer))
                tokenizer.no_truncation()
                tokenizer.no_padding()
                self._loaded = tokenizer, _StaticTable(self._files.matrix)
            return self._loaded


class _StaticTable:
    """A [rows, dimension] matrix, and what model2vec may add: a weight per token and a token-to-row mapping."""

    keys = ("embeddings", "embedding.weight")  # model2vec, wordllama

    def __init__(self, path: Path) -> None:
        from safetensors.numpy import load_file

        tensors = load_file(path)
        self.rows = tensors[self._find_key(path, set(tensors))]
        self.weights = tensors.get("weights")
        self.mapping = tensors.get("mapping")

    @classmethod
    def read_dimension(cls, path: Path) -> int:
        """Read the dimension from the file's header: the matrix stays on disk until it is needed."""
        from safetensors import safe_open

        with safe_open(str(path), "numpy") as tensors:
            return int(tensors.get_slice(cls._find_key(path, set(tensors.keys()))).get_shape()[1])

    def sum(self, ids: npt.NDArray[np.int64]) -> Vector:
        """Compute the weighted sum of the vectors of ``ids``; ids beyond the table are left out."""
        tokens, counts = np.unique(ids, return_counts=True)
        known = tokens < len(self.rows if self.mapping is None else self.mapping)
        tokens, share = tokens[known], (1.0 + np.log(counts[known])).astype(np.float32)
        if self.weights is not None:
            share = share * self.weights[tokens].astype(np.float32)
        rows = tokens if self.mapping is None else self.mapping[tokens]
        total: Vector = share @ self.rows[rows].astype(np.float32)
        return total

    @classmethod
    def _find_key(cls, path: Path, present: set[str]) -> str:
        """Find the name of the matrix among the tensors of the file."""
        for key in cls.keys:
            if key in present:
                return key
        raise MissingDependencyError(
            f"{path} has no tensor named {' or '.join(cls.keys)}", hint="use a model2vec folder or the wordllama wheel"
        )


class Encoder(Protocol):
    """The model behind a `MiniLmEmbedder`: texts in, one vector for each out."""

    def encode(self, texts: list[str]) -> Matrix: ...


class MiniLmEmbedder:
    """all-MiniLM-L6-v2 over windows of the whole text; each window counts the same."""

    dimension = MINILM_DIMENSION
    window_characters = 450  # about 110 word pieces: more places seen for the same cost than full windows
    window_overlap = 50
    window_limit = 8

    def __init__(self, encoder: Encoder, name: str = "minilm") -> None:
        self.name = name
        self._encoder = encoder

    def embed(self, prompt: Prompt) -> Vector | None:
        """Return the mean direction of the windows of the text; None without text."""
        if not prompt.text:
            return None
        windows = cut_text_windows(
            prompt.text, size=self.window_characters, overlap=self.window_overlap, limit=self.window_limit
        )
        return normalize(self._encoder.encode(list(windows)).sum(axis=0)) if windows else None


class OnnxEncoder:
    """MiniLM in ONNX Runtime, from an .onnx file or from safetensors turned into a graph in memory."""

    def __init__(self, files: MiniLmFiles, *, provider: str = "CPUExecutionProvider", threads: int = 1) -> None:
        require("onnxruntime", "tokenizers")
        if files.onnx is None:
            require("safetensors")
        if provider != "CPUExecutionProvider":
            _require_provider(provider)
        self._files = files
        self._provider = provider
        self._threads = threads
        self._lock = threading.Lock()
        self._loaded: tuple[Any, Any] | None = None

    def encode(self, texts: list[str]) -> Matrix:
        """Encode texts in batches; return one vector of length 1 for each."""
        tokenizer, session = self._load()
        wanted = {node.name for node in session.get_inputs()}  # some exports leave token_type_ids out
        batches = [texts[start : start + BATCH_WINDOWS] for start in range(0, len(texts), BATCH_WINDOWS)]
        return np.concatenate([_encode_batch(tokenizer, session, wanted, batch) for batch in batches])

    def _load(self) -> tuple[Any, Any]:
        """Load tokenizer and model at the first use."""
        with self._lock:
            if self._loaded is None:
                self._loaded = _load_tokenizer(self._files.tokenizer), self._open_session()
            return self._loaded

    def _open_session(self) -> Any:
        """Open the model in ONNX Runtime; raise `MissingDependencyError` if the provider did not start."""
        onnxruntime = _import_onnxruntime()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        model = str(self._files.onnx) if self._files.onnx else build_bert_onnx(self._files.folder)
        if self._provider == "CUDAExecutionProvider" and hasattr(onnxruntime, "preload_dlls"):
            onnxruntime.preload_dlls()  # CUDA and cuDNN from pip's packages, which no search path names
        session = onnxruntime.InferenceSession(model, options, providers=[self._provider])
        if self._provider not in session.get_providers():  # ONNX Runtime falls back to the CPU without an error
            raise MissingDependencyError(
                f"ONNX Runtime could not start {self._provider}", hint="check the CUDA and cuDNN libraries it needs"
            )
        return session


class SentenceTransformersEncoder:
    """MiniLM in sentence-transformers, where ONNX Runtime is not installed.

    torch's thread pool belongs to the whole process, and an engine may live in it, so its size is left alone.
    """

    def __init__(self, files: MiniLmFiles, device: str = "cpu") -> None:
        require("sentence_transformers")
        self._files = files
        self._device = device
        self._lock = threading.Lock()  # fast tokenizers refuse a second caller ("Already borrowed")
        self._model: Any = None

    def encode(self, texts: list[str]) -> Matrix:
        """Encode texts; return one vector of length 1 for each."""
        with self._lock:
            if self._model is None:
                from sentence_transformers import SentenceTransformer

                self._model = SentenceTransformer(str(self._files.folder), device=self._device, local_files_only=True)
                self._model.max_seq_length = MINILM_MAX_TOKENS
            vectors = self._model.encode(
                texts, batch_size=BATCH_WINDOWS, normalize_embeddings=True, show_progress_bar=False
            )
        return np.asarray(vectors, dtype=np.float32)


def require(*packages: str, hint: str = INSTALL_EMBEDDER) -> None:
    """Raise `MissingDependencyError` for the first of ``packages`` that is not installed; import none of them."""
    for package in packages:
        if not is_installed(package):
            raise MissingDependencyError(f"{package} is not installed", hint=hint)


def _import_onnxruntime() -> Any:
    """Import ONNX Runtime, which asks at its import whether it may report home."""
    decline_telemetry()
    import onnxruntime

    return onnxruntime


def _require_provider(provider: str) -> None:
    """Raise `MissingDependencyError` if this ONNX Runtime does not have the provider."""
    onnxruntime = _import_onnxruntime()
    if provider not in onnxruntime.get_available_providers():
        raise MissingDependencyError(
            f"this ONNX Runtime has no {provider}",
            hint="pip uninstall onnxruntime, then pip install 'semblend-suite[onnx-gpu]'",
        )


def _load_tokenizer(path: Path) -> Any:
    """Load MiniLM's tokenizer with our limit of length."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(MINILM_MAX_TOKENS)  # the file says 128, and pads everything to 128
    tokenizer.enable_padding()
    return tokenizer


def _encode_batch(tokenizer: Any, session: Any, wanted: set[str], texts: list[str]) -> Matrix:
    """Encode one batch of texts; return one vector of length 1 for each."""
    encoded = tokenizer.encode_batch(texts)
    ids = np.array([piece.ids for piece in encoded], dtype=np.int64)
    mask = np.array([piece.attention_mask for piece in encoded], dtype=np.int64)
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    hidden = session.run(None, {name: array for name, array in inputs.items() if name in wanted})[0]
    return mean_pool(np.asarray(hidden, dtype=np.float32), mask)


def mean_pool(hidden: npt.NDArray[np.float32], mask: npt.NDArray[np.int64]) -> Matrix:
    """Average the hidden states of real tokens (padding left out); return one vector of length 1 for each text."""
    weights = mask[:, :, None].astype(np.float32)
    mean = (hidden * weights).sum(axis=1) / np.maximum(weights.sum(axis=1), 1.0)
    pooled: Matrix = mean / np.maximum(np.linalg.norm(mean, axis=1, keepdims=True), 1e-12)
    return pooled
