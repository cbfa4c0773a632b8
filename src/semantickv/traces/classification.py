"""The type of a block of text: a list of rules, the first match wins. Rules are data; users add rules and types.

A rule looks at what is known about a piece of a prompt: the role of its message, the label before it (``CONTEXT:``) or
the tag that opens it (``<output>``), and its text. A rule without conditions is refused. Nothing here is learned, and
nothing decides about reuse: a type only tells a policy how to weigh a block. A wrong type costs hits, never
correctness.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semblend.errors import InputError

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_FIELDS = {"name", "type", "roles", "labels", "pattern", "min_hits", "min_words"}
_HINT = "a rule has name, type and at least one of roles, labels, pattern, min_words"
LONGEST_SEEN = 20_000  # characters of a block that patterns look at: a rule must not cost more than the text


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
        return not self.pattern or self._matches_pattern(piece.text[:LONGEST_SEEN])

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
    """Rules in order; ``explicit`` types given by the sender win over all of them.

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
    if not isinstance(table, Mapping) or not {"type"} <= set(table) <= _FIELDS:
        unknown = sorted(set(table) - _FIELDS) if isinstance(table, Mapping) else []
        what = f"unknown field {unknown[0]}" if unknown else "no type"
        raise InputError(f"{where}: {what}", hint=f"{_HINT}; fields: {', '.join(sorted(_FIELDS))}")
    for name in ("name", "type", "pattern"):
        if not isinstance(table.get(name, ""), str):
            raise InputError(f"{where}, field {name}: not a string", hint=_HINT)
    for name in ("min_hits", "min_words"):
        if not isinstance(table.get(name, 1), int) or table.get(name, 1) < 0:
            raise InputError(f"{where}, field {name}: not a whole number from 0 on", hint=_HINT)
    lists = {}
    for name in ("roles", "labels"):
        value = table.get(name, [])
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise InputError(f"{where}, field {name}: not a list of strings", hint=_HINT)
        lists[name] = tuple(word.lower().rstrip(":") for word in value)
    return Rule(
        name=table.get("name", where),
        type=table["type"],
        roles=lists["roles"],
        labels=lists["labels"],
        pattern=table.get("pattern", ""),
        min_hits=table.get("min_hits", 1),
        min_words=table.get("min_words", 0),
    )
