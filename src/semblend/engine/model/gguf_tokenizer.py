"""A tokenizer from a GGUF file: byte-level BPE (GPT-2, Qwen, Llama 3) or SentencePiece BPE (Llama 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semblend.engine.model.gguf_weights import special_tokens
from semblend.errors import InputError, MissingDependencyError

BLANK = "\N{LOWER ONE EIGHTH BLOCK}"  # what SentencePiece writes for a blank
# How byte-level BPE families cut text before merging, by the name that GGUF gives them. None: cut as GPT-2 does.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class _Cutting:
    """One family's rules before the merges."""

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


_CUTTINGS = {
    "gpt-2": _Cutting(),
    "default": _Cutting(),
    "smollm": _Cutting(single_digits=True),
    "qwen2": _Cutting(pattern=_WORDS % r"\p{N}", nfc=True),
    "llama-bpe": _Cutting(pattern=_WORDS % r"\p{N}{1,3}", ignore_merges=True, adds_bos=True),
}


def tokenizer_of_gguf(metadata: Mapping[str, Any], path: Path) -> Any:
    """A `tokenizers.Tokenizer` of the file's vocabulary."""
    kind, cutting = metadata.get("tokenizer.ggml.model"), str(metadata.get("tokenizer.ggml.pre", "default"))
    if kind == "llama":
        return _build_sentence_piece(metadata, path)
    if kind == "gpt2" and cutting in _CUTTINGS:
        return _build_byte_level(metadata, _CUTTINGS[cutting], path)
    raise InputError(
        f"{path}: tokenizer {kind!r} with pre-tokenizer {cutting!r} is not known",
        hint="use the model's safetensors folder, which carries a tokenizer.json",
    )


def _build_byte_level(metadata: Mapping[str, Any], cutting: _Cutting, path: Path) -> Any:
    """Bytes are letters; the file has the merges."""
    pieces, merges = _read(metadata, "tokens", path), _read(metadata, "merges", path)
    library = import_tokenizers(path)
    tokenizer = library.Tokenizer(
        library.models.BPE(
            {piece: at for at, piece in enumerate(pieces)},
            [tuple(merge.split(" ", 1)) for merge in merges],
            ignore_merges=cutting.ignore_merges,
        )
    )
    if cutting.nfc:
        tokenizer.normalizer = library.normalizers.NFC()
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence(_cutters(library, cutting))
    tokenizer.decoder = library.decoders.ByteLevel()
    _add_special(library, tokenizer, metadata)
    _add_first_token(library, tokenizer, metadata, default=cutting.adds_bos)
    return tokenizer


def _build_sentence_piece(metadata: Mapping[str, Any], path: Path) -> Any:
    """Blanks are letters, and what no piece spells is written in bytes; merges follow from the scores of the pieces."""
    pieces, scores = _read(metadata, "tokens", path), _read(metadata, "scores", path)
    if len(scores) != len(pieces):
        raise InputError(f"{path} has {len(pieces)} tokens and {len(scores)} scores", hint="pull the model again")
    library = import_tokenizers(path)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = library.Tokenizer(
        library.models.BPE(
            {piece: at for at, piece in enumerate(pieces)},
            find_merges(pieces, scores),
            unk_token=pieces[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    in_front = metadata.get("tokenizer.ggml.add_space_prefix", True)
    normalizers = [library.normalizers.Prepend(BLANK)] if in_front else []
    tokenizer.normalizer = library.normalizers.Sequence([*normalizers, library.normalizers.Replace(" ", BLANK)])
    decoders = [library.decoders.Replace(BLANK, " "), library.decoders.ByteFallback(), library.decoders.Fuse()]
    tokenizer.decoder = library.decoders.Sequence(
        [*decoders, library.decoders.Strip(" ", 1, 0)] if in_front else decoders
    )
    _add_special(library, tokenizer, metadata)
    _add_first_token(library, tokenizer, metadata, default=True)
    return tokenizer


def find_merges(pieces: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The pairs of pieces that make a piece, best score first: SentencePiece merges the best pair that it sees.

    Of two ways to make one piece, that of the better halves comes first; it decides nothing but must not change.
    """
    known = {piece: at for at, piece in enumerate(pieces)}
    found: list[tuple[float, int, int, int]] = []
    for made, piece in enumerate(pieces):
        for cut in range(1, len(piece)):
            left, right = known.get(piece[:cut]), known.get(piece[cut:])
            if left is not None and right is not None:
                found.append((-scores[made], made, left, right))
    return [(pieces[left], pieces[right]) for _, _, left, right in sorted(found)]


def _read(metadata: Mapping[str, Any], name: str, path: Path) -> Sequence[Any]:
    found: Sequence[Any] | None = metadata.get(f"tokenizer.ggml.{name}")
    if found is None or (name == "tokens" and not found):
        raise InputError(f"{path} holds no {name} of a tokenizer", hint="the file was made without a tokenizer")
    return found


def _cutters(library: Any, cutting: _Cutting) -> list[Any]:
    cutters = []
    if cutting.single_digits:
        cutters.append(library.pre_tokenizers.Digits(individual_digits=True))
    if cutting.pattern is not None:
        cutters.append(library.pre_tokenizers.Split(library.Regex(cutting.pattern), "isolated"))
    by_gpt2 = cutting.pattern is None
    return [*cutters, library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_gpt2)]


def _add_special(library: Any, tokenizer: Any, metadata: Mapping[str, Any]) -> None:
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    control: list[Any] = []
    defined: list[Any] = []
    for at, text in special_tokens(metadata):
        token = library.AddedToken(text, normalized=False, special=kinds[at] == 3)
        (control if kinds[at] == 3 else defined).append(token)
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(defined)


def _add_first_token(library: Any, tokenizer: Any, metadata: Mapping[str, Any], *, default: bool) -> None:
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is None or not metadata.get("tokenizer.ggml.add_bos_token", default):
        return
    text = metadata["tokenizer.ggml.tokens"][bos]
    tokenizer.post_processor = library.processors.TemplateProcessing(
        single=[text, "$A"], pair=[text, "$A", text, "$B"], special_tokens=[(text, bos)]
    )


def import_tokenizers(path: Path) -> Any:
    """The library, or what to install."""
    try:
        import tokenizers
    except ImportError:
        raise MissingDependencyError(
            f"the tokenizer of {path} needs the package tokenizers", hint="pip install 'semblend-suite[local]'"
        ) from None
    return tokenizers
