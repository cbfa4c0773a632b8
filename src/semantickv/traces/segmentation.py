"""Cuts a prompt into typed blocks where its author divided it, each with a type, a length and a stable hash.

Pieces begin at messages, at labels at the start of a line (``CONTEXT:``), at chat markers (``<|user|>``), at code
fences and at blank lines. Joined in order they are the prompt again, character for character. The hash covers the exact
text and nothing else: texts that differ in one blank are different blocks, because their tokens differ.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from semantickv.traces.classification import Classifier, TextPiece
from semblend.errors import InputError
from semblend.text.tokenization import StableTokenizer

MIN_BLOCK_TOKENS = 16
_MARKER = r"<\|(?:start_header_id\|>)?(?P<marker>[a-z_]{2,24})(?:\|>|<\|end_header_id\|>)"
_FENCE = re.compile(r"(?m)^[ \t]{0,3}(```|~~~)")
_PARAGRAPH = re.compile(r"\n[ \t]*\n\s*")
_SPOKEN = frozenset({"tool", "function", "tool_result", "observation", "ipython", "assistant", "model", "ai", "agent"})
_TYPE_KEYS = ("semantic_type", "block_type")


@dataclass(frozen=True, slots=True)
class TextBlock:
    """A piece of a prompt with its type, its length in tokens and the hash of its text (63 bits)."""

    type: str
    text: str
    tokens: int
    content_id: int

    @property
    def content_hash(self) -> str:
        return f"{self.content_id:016x}"


def hash_content(text: str, key: str = "") -> int:
    """Hash the exact text to 63 bits, the same on every machine; with a ``key`` nobody without it can guess the text.

    >>> hash_content("You are a clerk.") == hash_content("You are a clerk."), hash_content("a") == hash_content("a ")
    (True, False)
    """
    digest = hashlib.blake2b(
        text.encode("utf-8", "surrogatepass"), digest_size=8, key=key.encode()[:64], person=b"semantickv"
    ).digest()
    return int.from_bytes(digest, "big") >> 1


def _build_counter() -> Callable[[str], int]:
    """Build the default counter of tokens."""
    tokenizer = StableTokenizer()
    return lambda text: len(tokenizer.pieces(text))


@dataclass(frozen=True)
class Segmenter:
    """Cuts prompts into blocks.

    ``count`` gives the tokens of a text (default: `StableTokenizer`, near common BPE vocabularies). Paragraphs of one
    section are joined until they hold ``min_block_tokens``; a piece beyond ``max_block_tokens`` is cut (0: never).

    >>> prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "CONTEXT: Open 9-5.\\n\\nUSER: When?"}]
    >>> [(block.type, block.text) for block in Segmenter().cut_messages(prompt)]
    [('system', 'Be brief.'), ('retrieved_context', 'CONTEXT: Open 9-5.\\n\\n'), ('user', 'USER: When?')]
    """  # noqa: E501

    classifier: Classifier = field(default_factory=Classifier)
    count: Callable[[str], int] = field(default_factory=_build_counter)
    min_block_tokens: int = MIN_BLOCK_TOKENS
    max_block_tokens: int = 0
    key: str = ""

    @cached_property
    def _boundaries(self) -> re.Pattern[str]:
        """The pattern of labels, tags and chat markers at which a text is cut."""
        longest_first = sorted(self.classifier.labels, key=len, reverse=True)
        words = "|".join(re.escape(label) for label in longest_first if not label.startswith("<"))
        tags = "|".join(re.escape(label) for label in longest_first if label.startswith("<")) or "(?!)"
        heading = rf"[ \t]*(?:#{{1,4}} ?|\*\*|\[)?(?P<label>{words})(?: ?\[?\d{{1,3}}\]?)?(?:\*\*|\])?[ \t]*:"
        return re.compile(rf"(?im)^(?:{heading}|[ \t]*(?P<tag>{tags})|{_MARKER})")

    def cut_messages(self, messages: Any) -> tuple[TextBlock, ...]:
        """Cut chat messages (OpenAI shape) into blocks, in order."""
        if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
            raise InputError("messages are not a non-empty list", hint='[{"role": "user", "content": "..."}]')
        blocks: list[TextBlock] = []
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise InputError(f"message {number} has no role", hint='{"role": "user", "content": "..."}')
            blocks.extend(self._cut_message(message))
        return tuple(blocks)

    def cut_text(self, text: str, role: str = "") -> tuple[TextBlock, ...]:
        """Cut one text into blocks at the labels and chat markers in it."""
        return tuple(self._build_blocks(self._cut_sections(text, role.lower())))

    def _cut_message(self, message: Mapping[str, Any]) -> Iterator[TextBlock]:
        """Cut one message; a type that its sender gave wins over the rules."""
        text, role = extract_text(message), message["role"].lower()
        metadata = message.get("metadata")
        scopes = [message, metadata] if isinstance(metadata, Mapping) else [message]
        given = next((s[key] for s in scopes for key in _TYPE_KEYS if isinstance(s.get(key), str)), None)
        if not text:
            return
        if given:
            yield from self._split_long(given, text)
        else:
            yield from self._build_blocks(self._cut_sections(text, role))

    def _cut_sections(self, text: str, role: str) -> Iterator[TextPiece]:
        """Cut a text at labels and markers; what a tool or the assistant said stays one section."""
        if role in _SPOKEN:
            yield TextPiece(text, role)
            return
        found = list(self._boundaries.finditer(text))
        ends = [*(match.start() for match in found), len(text)]
        if ends[0] > 0:
            yield TextPiece(text[: ends[0]], role)
        for match, end in zip(found, ends[1:], strict=True):
            marker, label = match["marker"], match["label"] or match["tag"]
            yield TextPiece(
                text[match.start() : end], (marker or role).lower(), " ".join((label or "").lower().split())
            )

    def _build_blocks(self, pieces: Iterable[TextPiece]) -> Iterator[TextBlock]:
        """Give each part its type and size; blanks that stand alone go to the block before them."""
        held: tuple[str, str] | None = None
        for piece in pieces:
            for part in _split_parts(piece.text):
                kind = self.classifier.classify(TextPiece(part, piece.role, piece.label))
                if held is None:
                    held = (kind, part)
                elif not part.strip() or not held[1].strip():
                    held = (held[0] if held[1].strip() else kind, held[1] + part)
                elif kind == held[0] and part is not piece.text and self.count(held[1]) < self.min_block_tokens:
                    held = (kind, held[1] + part)
                else:
                    yield from self._split_long(*held)
                    held = (kind, part)
        if held is not None and held[1]:
            yield from self._split_long(*held)

    def _split_long(self, kind: str, text: str) -> Iterator[TextBlock]:
        """Yield the text as one block, or as several if it is longer than ``max_block_tokens``."""
        tokens = max(1, self.count(text))
        if not self.max_block_tokens or tokens <= self.max_block_tokens:
            yield TextBlock(kind, text, tokens, hash_content(text, self.key))
            return
        # Cut at equal shares of the characters counted from the block's start, so that equal beginnings cut alike.
        width = max(1, len(text) * self.max_block_tokens // tokens)
        width = max(8, width - width % 8)
        for start in range(0, len(text), width):
            part = text[start : start + width]
            yield TextBlock(kind, part, max(1, self.count(part)), hash_content(part, self.key))


def _split_parts(text: str) -> Iterator[str]:
    """Split a text into paragraphs with the blanks that follow them; fenced code stays whole."""
    fences = [match.start() for match in _FENCE.finditer(text)]
    position = 0
    for opening, closing in zip(fences[::2], fences[1::2], strict=False):
        yield from _split_paragraphs(text[position:opening])
        end = text.find("\n", closing)
        position = len(text) if end < 0 else end + 1
        yield text[opening:position]
    yield from _split_paragraphs(text[position:])


def _split_paragraphs(text: str) -> Iterator[str]:
    """Split a text after its blank lines."""
    position = 0
    for match in _PARAGRAPH.finditer(text):
        yield text[position : match.end()]
        position = match.end()
    if position < len(text):
        yield text[position:]


def extract_text(message: Mapping[str, Any]) -> str:
    """Return the text of a chat message: a string, the text parts of a list, and its tool calls."""
    content = message.get("content")
    parts = [content] if isinstance(content, str) else []
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list | tuple) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            parts.append(f"{function.get('name', '')}({function.get('arguments', '')})")
    return "\n".join(parts)
