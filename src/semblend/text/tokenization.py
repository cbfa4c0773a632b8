"""Text to token ids where no engine is at hand: for the explorer, the log estimate and the examples.

An engine's own tokenizer is the truth for an engine's own cache. Everything here serves people who
hold text: `StableTokenizer` needs no files and gives the same ids on every machine, and
`load_tokenizer` opens a real one that is already on this machine. Nothing here downloads.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from semblend.errors import InputError, MissingDependencyError
from semblend.models import find_in_hub_cache
from semblend.prompt import TokenArray

STABLE = "stable"
TOKENIZER_FILE = "tokenizer.json"

# Explicit code point ranges, not \w and \s: those follow the Unicode tables of the running Python, and the
# ids must not move when Python does. The widths (6 letters, 3 digits, 2 East Asian characters) land near the
# density of common BPE vocabularies: about four English characters a token.
_PIECE = re.compile(
    r" ?[A-Za-z\u0080-\u2E7F]{1,6}"
    r"|[\u2E80-\U0010FFFF]{1,2}"
    r"| ?[0-9]{1,3}"
    r"| ?[!-/:-@\[-`{-~]{1,3}"
    r"|[\x00-\x20\x7f]{1,16}(?![^\x00-\x20\x7f])"  # a run of blanks, less the one that belongs to the next word
    r"|[\x00-\x20\x7f]"
)
_MAX_CACHED_PIECES = 1 << 20


class Tokenizer(Protocol):
    """What the explorer and the estimate ask of a tokenizer."""

    @property
    def name(self) -> str:
        """How a person would ask for it again."""

    def encode(self, text: str) -> TokenArray:
        """One id per piece; no special tokens are added."""

    def pieces(self, text: str) -> list[str]:
        """The text cut at token borders: as many pieces as ids, and joined they are the text again."""


class _PieceIds(dict[str, int]):
    """Piece to id, hashed once per piece; emptied when it grows large, which changes no id."""

    def __missing__(self, piece: str) -> int:
        if len(self) >= _MAX_CACHED_PIECES:
            self.clear()
        digest = hashlib.blake2b(piece.encode("utf-8", "surrogatepass"), digest_size=4).digest()
        token_id = int.from_bytes(digest, "big") & 0x7FFF_FFFF
        self[piece] = token_id
        return token_id


class StableTokenizer:
    """Built in: the same text gives the same ids on every machine and in every version of Python.

    Words, numbers, punctuation and blanks are cut to short pieces and each piece is hashed to 31 bits.
    Two pieces can share an id (about one pair in two billion), so this is for exploring and estimating;
    an engine's cache must be asked with the engine's ids.

    >>> StableTokenizer().pieces("Reuse what was computed.")
    ['Reuse', ' what', ' was', ' comput', 'ed', '.']
    >>> StableTokenizer().encode("Reuse what").tolist()
    [310753779, 304824714]
    """

    name = STABLE
    longest_piece = 16
    """Most characters of one piece: a run of blanks."""

    def __init__(self) -> None:
        self._ids = _PieceIds()

    def encode(self, text: str) -> TokenArray:
        return np.fromiter(map(self._ids.__getitem__, _PIECE.findall(text)), dtype=np.int32)

    def pieces(self, text: str) -> list[str]:
        return _PIECE.findall(text)


class FileTokenizer:
    """A Hugging Face ``tokenizer.json``, read from disk."""

    def __init__(self, path: Path, name: str = "") -> None:
        self.name = name or str(path)
        self._tokenizer = open_tokenizer_file(path)

    def encode(self, text: str) -> TokenArray:
        return np.asarray(self._encoding(text).ids, dtype=np.int32)

    def pieces(self, text: str) -> list[str]:
        """Characters that a tokenizer drops stand with the next piece; bytes of one character with the first."""
        pieces, done = [], 0
        for _, end in self._encoding(text).offsets:
            pieces.append(text[done:end] if end > done else "")
            done = max(done, end)
        if pieces:
            pieces[-1] += text[done:]
        return pieces

    def _encoding(self, text: str) -> Any:
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except (UnicodeEncodeError, TypeError):  # which one depends on the version of the binding
            raise InputError(
                f"tokenizer {self.name} cannot take text with lone surrogates", hint="use the stable tokenizer"
            ) from None


def load_tokenizer(name: str = STABLE) -> Tokenizer:
    """``stable``, a tokenizer.json, a folder that holds one, or a model in the local Hugging Face cache.

    >>> load_tokenizer("stable").name
    'stable'
    """
    if name == STABLE:
        return StableTokenizer()
    if not name.strip():
        raise InputError("the tokenizer name is empty", hint="use 'stable', or the path of a tokenizer.json")
    path = Path(name).expanduser()
    if os.path.isdir(path):  # unlike Path.is_dir, no error for a name that no path can have
        return FileTokenizer(find_tokenizer_file(path), name)
    if os.path.isfile(path):
        return FileTokenizer(path, name)
    cached = find_in_hub_cache(name, TOKENIZER_FILE)
    if cached is not None:
        return FileTokenizer(cached, name)
    raise InputError(
        f"no tokenizer {name!r}: neither a file, nor a folder, nor a model in the local Hugging Face cache",
        hint="use 'stable', or the path of a tokenizer.json; nothing is downloaded here",
    )


def find_tokenizer_file(folder: Path) -> Path:
    """The tokenizer.json of a model's folder."""
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise InputError(f"{folder} holds no {TOKENIZER_FILE}", hint="point at the folder of a fast tokenizer")
    return path


def open_tokenizer_file(path: Path) -> Any:
    """The `tokenizers.Tokenizer` of a file; it cuts and pads nothing."""
    try:
        from tokenizers import Tokenizer as RustTokenizer
    except ImportError:
        raise MissingDependencyError(
            f"reading {path} needs the package tokenizers", hint="pip install 'semblend-suite[tokenizer]'"
        ) from None
    try:
        tokenizer = RustTokenizer.from_file(str(path))
    except Exception as error:  # the binding raises bare Exception for a bad file
        raise InputError(
            f"{path} is not a readable tokenizer.json: {error}", hint="use the file that the model ships"
        ) from None
    tokenizer.no_truncation()  # a cut or padded prompt would give wrong counts
    tokenizer.no_padding()
    return tokenizer
