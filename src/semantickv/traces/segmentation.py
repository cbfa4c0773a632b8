"""Cuts a prompt into typed blocks where its author divided it, each with a type, a length and a stable hash.

Pieces begin at messages, at labels at the start of a line (``CONTEXT:``), at chat markers (``<|user|>``), at code
fences and at blank lines. Joined in order they are the prompt again, character for character. The hash covers the exact
text and nothing else: texts that differ in one blank are different blocks, because their tokens differ.

The type of a block comes from a list of rules, the first match wins. Rules are data; users add rules and types. A rule
looks at the role of a message, the label or tag before a piece, and its text. Nothing here is learned, and nothing
decides about reuse: a type only tells a policy how to weigh a block. A wrong type costs hits, never correctness.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from semblend.errors import InputError
from semblend.text.tokenization import StableTokenizer

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_HINT = "a rule has name, type and at least one of roles, labels, pattern, min_words"
MAX_SEEN_CHARS = 20_000  # characters of a block that patterns look at: a rule must not cost more than the text


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What is known about a piece of a prompt before it has a type. ``label`` is in lower case, without its colon."""

    text: str
    role: str = ""
    label: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """All conditions given must hold. ``pattern`` is a regular expression that must be found ``min_hits`` times.

    >>> Rule("receipts", "receipt", pattern=r"(?i)receipt no").matches(TextPiece("Receipt no 12"))
    True
    """

    name: str
    type: str
    roles: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    pattern: str = ""
    min_hits: int = 1
    min_words: int = 0

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.type):
            raise InputError(
                f"rule {self.name!r}: type {self.type!r} is no name", hint="lower case letters, digits and _"
            )
        if not (self.roles or self.labels or self.pattern or self.min_words):
            raise InputError(f"rule {self.name!r} has no condition", hint=_HINT)
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise InputError(
                f"rule {self.name!r}: pattern is no regular expression: {error}", hint="see Python's re"
            ) from None

    def matches(self, piece: TextPiece) -> bool:
        """Whether all conditions of the rule hold for a piece."""
        if self.roles and piece.role not in self.roles:
            return False
        if self.labels and piece.label not in self.labels:
            return False
        if self.min_words and len(piece.text.split(None, self.min_words)) < self.min_words:
            return False
        return not self.pattern or self._matches_pattern(piece.text[:MAX_SEEN_CHARS])

    def _matches_pattern(self, text: str) -> bool:
        """Whether the pattern is found often enough."""
        return any(hit >= self.min_hits for hit, _ in enumerate(re.finditer(self.pattern, text), start=1))


# Sure things first: who spoke (a tool, the assistant), then what the prompt's author wrote before the text, then what
# the text looks like. A label inside a tool's or the assistant's message is content, not structure: see segmentation.
DEFAULT_RULES: tuple[Rule, ...] = (
    Rule("tool role", "tool_output", roles=("tool", "function", "tool_result", "observation", "ipython")),
    Rule("assistant role", "assistant", roles=("assistant", "model", "ai", "agent")),
    Rule("tool definitions", "template", roles=("tools",)),
    Rule("system label", "system", labels=("system", "instructions", "instruction", "policy", "rules", "guidelines",
         "<instructions>", "<system>")),
    Rule("user label", "user", labels=("user", "human", "question", "query", "request", "task", "<task>")),
    Rule("assistant label", "assistant", labels=("assistant", "ai", "answer", "response", "thought", "action")),
    Rule("tool label", "tool_output", labels=("tool", "tool output", "tool result", "observation", "output", "result",
         "<output>", "<returncode>", "<tool_response>", "<tool_result>", "<stdout>")),
    Rule("template label", "template", labels=("template", "example", "examples", "format", "output format", "schema")),
    Rule("code label", "code", labels=("code", "diff", "patch", "traceback", "stack trace", "snippet")),
    Rule("legal label", "legal_evidence",
         labels=("evidence", "exhibit", "clause", "contract", "deposition", "statute")),
    Rule("context label", "retrieved_context",
         labels=("context", "document", "documents", "passage", "passages", "source", "sources", "search result",
                 "search results", "reference", "references", "chunk", "retrieved", "knowledge", "<context>",
                 "<document>", "<documents>")),
    Rule("system role", "system", roles=("system", "developer")),
    Rule("fenced code", "code", pattern=r"\A\s*(```|~~~)"),
    Rule("traceback", "code", pattern=r"(?m)^Traceback \(most recent call last\)|^[ \t]+at [\w.$<>]+\([\w.]+:\d+\)"),
    Rule("diff", "code", pattern=r"(?m)^(diff --git |@@ -\d+(,\d+)? \+\d+|--- a/|\+\+\+ b/)"),
    Rule("source lines", "code", min_hits=3,
         pattern=r"(?m)^[ \t]*(def \w+\(|class \w+[(:]|import \w+|from \w[\w.]* import |#include\b|(public|private) \w"
         r"|(const|let|var) \w+ ?=|func \w+\(|fn \w+\(|return\b.*;|if \(.*\) ?\{|\}\s*$)"),
    Rule("legal words", "legal_evidence", min_hits=2,
         pattern=r"(?i)\b(exhibit [a-z0-9]{1,3}\b|plaintiff|defendant|deposition|affidavit|hereinafter|indemnif\w+"
         r"|section \d+(\.\d+)+|pursuant to|whereas\b|the parties|governing law|§ ?\d+)"),
    Rule("placeholders", "template", pattern=r"\{\{\s*\w+[^{}]*\}\}|<\|?(placeholder|slot)\b|\{%\s*\w+"),
    Rule("bare JSON", "tool_output", pattern=r"\A\s*[\[{]\s*(\"[^\"]+\"\s*:|\{\s*\")"),
    Rule("numbered document", "retrieved_context",
         pattern=r"(?i)\A\s*(\[?(doc(ument)?|passage|source|chunk) ?\[?\d+|\[\d+\])"),
    Rule("long text", "retrieved_context", min_words=180),
    Rule("user role", "user", roles=("user", "human")),
)  # fmt: skip
OTHER = "other"


@dataclass(frozen=True, slots=True)
class Classifier:
    """Rules in order: the first that matches gives the type.

    >>> Classifier().classify(TextPiece("How do I renew it?", role="user"))
    'user'
    >>> receipts = Rule("receipts", "receipt", pattern="Receipt")
    >>> Classifier().with_rules([receipts]).classify(TextPiece("Receipt 1", "user"))
    'receipt'
    """

    rules: tuple[Rule, ...] = DEFAULT_RULES

    def classify(self, piece: TextPiece) -> str:
        """Return the type of the first rule that matches, or ``other``."""
        return next((rule.type for rule in self.rules if rule.matches(piece)), OTHER)

    def with_rules(self, rules: Iterable[Rule]) -> Classifier:
        """Return a classifier that tries these rules before the present ones."""
        return Classifier((*rules, *self.rules))

    @property
    def types(self) -> tuple[str, ...]:
        """Every type that some rule gives, and ``other``."""
        return tuple(dict.fromkeys([*(rule.type for rule in self.rules), OTHER]))

    @property
    def labels(self) -> tuple[str, ...]:
        """Every label that some rule knows: these cut a prompt into pieces."""
        return tuple(dict.fromkeys(label for rule in self.rules for label in rule.labels))


def load_rules(path: str | Path) -> tuple[Rule, ...]:
    """Load the rules of a TOML file: ``[[rule]]`` tables with the fields of `Rule`."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", hint="check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML: {error}", hint="one [[rule]] table a rule") from None
    rules = table.get("rule")
    if not isinstance(rules, list) or set(table) != {"rule"}:
        raise InputError(f"{path} holds no [[rule]] tables, or more than those", hint=_HINT)
    return tuple(_parse_rule(f"{path}, rule {number}", rule) for number, rule in enumerate(rules, start=1))


def _parse_rule(where: str, table: Any) -> Rule:
    """Check one ``[[rule]]`` table and build the rule; an error names file, rule and field."""
    known = {one.name for one in fields(Rule)}
    if not isinstance(table, Mapping) or not {"type"} <= set(table) <= known:
        unknown = sorted(set(table) - known) if isinstance(table, Mapping) else []
        what = f"unknown field {unknown[0]}" if unknown else "no type"
        raise InputError(f"{where}: {what}", hint=f"{_HINT}; fields: {', '.join(sorted(known))}")
    for name, value in table.items():
        if name in ("name", "type", "pattern"):
            holds, what = isinstance(value, str), "not a string"
        elif name in ("roles", "labels"):
            holds = isinstance(value, list) and all(isinstance(word, str) for word in value)
            what = "not a list of strings"
        else:
            holds, what = isinstance(value, int) and value >= 0, "not a whole number from 0 on"
        if not holds:
            raise InputError(f"{where}, field {name}: {what}", hint=_HINT)
    words = {name: tuple(word.lower().rstrip(":") for word in table.get(name, ())) for name in ("roles", "labels")}
    return Rule(**{"name": where, **table, **words})


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
        kind = text = ""
        for piece in pieces:
            is_first = True  # of its section
            for part in _split_parts(piece.text):
                found = self.classifier.classify(TextPiece(part, piece.role, piece.label))
                if not text.strip():
                    kind, text = found, text + part
                elif not part.strip() or (found == kind and not is_first and self.count(text) < self.min_block_tokens):
                    text += part
                else:
                    yield from self._split_long(kind, text)
                    kind, text = found, part
                is_first = is_first and not part.strip()
        if text:
            yield from self._split_long(kind, text)

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
