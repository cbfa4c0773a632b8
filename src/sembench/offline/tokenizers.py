"""Loads tokenizers: ``stable``, a Hugging Face tokenizer (file, folder or name), or ``tiktoken:ENCODING``.

A name such as ``Qwen/Qwen2.5-7B-Instruct`` is looked for in the local cache; ``hub:NAME`` fetches it. Where the cache
does not have it, a stand-in takes its place, and that is said twice: on standard error and in the result. No code of a
model is ever run.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from semblend.errors import InputError, MissingDependencyError, SemBlendError
from semblend.prompt import TokenArray
from semblend.text.tokenization import STABLE, TOKENIZER_FILE, FileTokenizer, StableTokenizer, load_tokenizer

TIKTOKEN = "tiktoken"
_HUB = "hub:"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# Pulled models whose tokenizer may stand in, the most similar first. All Qwen2.5 models share one vocabulary and one
# list of merges, so the coder's gives the same ids for plain text; SmolLM2 has another vocabulary of the same kind.
_KIN = (
    (re.compile(r"qwen", re.IGNORECASE), ("qwen2.5-coder-1.5b", "smollm2-135m")),
    (re.compile(r""), ("smollm2-135m", "qwen2.5-coder-1.5b")),
)


class TextEncoder(Protocol):
    def encode(self, text: str) -> TokenArray:
        """Return the token ids of a text, without special tokens."""


@dataclass(frozen=True, slots=True)
class ChosenTokenizer:
    """A tokenizer, the name that was asked for, and the name of what is used."""

    encoder: TextEncoder
    asked: str
    used: str
    stand_in: bool = False
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return what a result file keeps about the tokenizer."""
        return {"asked": self.asked, "used": self.used, "stand_in": self.stand_in, "note": self.note}


def choose_tokenizer(name: str | None, *, allow_stand_in: bool = True) -> ChosenTokenizer:
    """Return the tokenizer of that name, or a stand-in where that is allowed.

    >>> choose_tokenizer(None).used
    'stable'
    """
    asked = STABLE if name is None else name
    if asked == STABLE:
        return ChosenTokenizer(StableTokenizer(), asked, STABLE)
    if asked == TIKTOKEN or asked.startswith(f"{TIKTOKEN}:"):
        return _load_tiktoken(asked)
    if asked.startswith(_HUB):
        return ChosenTokenizer(_fetch_tokenizer(asked.removeprefix(_HUB)), asked, asked)
    try:
        return ChosenTokenizer(load_tokenizer(asked), asked, asked)
    except InputError:
        if not _HUB_NAME.fullmatch(asked):
            raise
    if not allow_stand_in:
        raise InputError(
            f"tokenizer {asked} is not in the local Hugging Face cache",
            hint=f"pass the path of its tokenizer.json, or hub:{asked} to fetch it",
        )
    return _choose_stand_in(asked)


def _choose_stand_in(asked: str) -> ChosenTokenizer:
    for pattern, models in _KIN:
        if pattern.search(asked):
            for model in models:
                encoder = _load_pulled_model(model)
                if encoder is not None:
                    note = f"{asked} is not on this machine; the tokenizer of the pulled model {model} stands in"
                    return ChosenTokenizer(encoder, asked, f"model:{model}", stand_in=True, note=note)
    note = f"{asked} is not on this machine, nor is any pulled model; the built-in tokenizer stands in"
    return ChosenTokenizer(StableTokenizer(), asked, STABLE, stand_in=True, note=note)


class _FunctionEncoder:
    """Makes an `TextEncoder` of any function from text to a list of ids."""

    def __init__(self, encode: Callable[[str], Any]) -> None:
        self._encode = encode

    def encode(self, text: str) -> TokenArray:
        return np.asarray(self._encode(text), dtype=np.int32)


def _load_pulled_model(name: str) -> TextEncoder | None:
    from semblend.models import find_model, find_pulled_path, is_pulled

    try:
        model = find_model(name)
        if not is_pulled(model):
            return None
        from semblend.engine.model.tokenizer import ModelTokenizer

        loaded = ModelTokenizer.load(find_pulled_path(model))
    except (SemBlendError, ImportError):
        return None  # a pulled file whose reader is not installed is no stand-in; the next one is tried
    return _FunctionEncoder(lambda text: loaded.encode(text, add_special=False))


def _fetch_tokenizer(name: str) -> FileTokenizer:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise MissingDependencyError(
            "a tokenizer from the hub needs the package huggingface_hub", hint="pip install huggingface_hub"
        ) from None
    try:
        path = hf_hub_download(name, TOKENIZER_FILE)
    except Exception as error:  # no network, no such model, not allowed: the http client's errors share no base
        why = str(error).partition("\n")[0]
        raise InputError(f"cannot fetch the tokenizer of {name}: {why}", hint="pass a tokenizer.json") from None
    return FileTokenizer(Path(path), name)


def _load_tiktoken(asked: str) -> ChosenTokenizer:
    encoding = asked.partition(":")[2] or "cl100k_base"
    try:
        tiktoken = importlib.import_module("tiktoken")
    except ImportError:
        raise MissingDependencyError(
            "tokenizer tiktoken needs the package tiktoken", hint="pip install tiktoken"
        ) from None
    try:
        loaded = tiktoken.get_encoding(encoding)
    except Exception as error:  # an unknown name is a ValueError, a failed download whatever its http client raises
        raise InputError(
            f"tiktoken cannot give {encoding}: {error}", hint="name an encoding whose file is cached, or use stable"
        ) from None
    return ChosenTokenizer(
        _FunctionEncoder(lambda text: loaded.encode(text, disallowed_special=())), asked, f"{TIKTOKEN}:{encoding}"
    )
