"""Logged prompts: what people have on disk, turned into one shape.

`semblend.text.log_formats` tells which formats there are. A record may carry the prompt as text, as chat messages or as
token ids, at its top or inside ``body`` or ``request`` (where gateways and batch files put the OpenAI request). The
file is read as a stream; one line at a time is in memory, and a line beyond the limit is an error, not a surprise.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from semblend.arrange.marks import MARK, RequestMarks, read_request
from semblend.arrange.order_limits import FREE, OrderLimits
from semblend.errors import InputError, TokenError
from semblend.prompt import TokenArray, as_token_array
from semblend.text.block_traces import list_block_parts
from semblend.text.chat import list_chat_parts
from semblend.text.log_formats import (
    FORMATS,
    HINTS,
    UnusableLineError,
    name_foreign_format,
    read_records,
    read_text_list,
    recognise_line,
)
from semblend.text.log_lines import MAX_LINE_BYTES, STDIN, open_log, read_lines
from semblend.text.parts import Part, join_parts, mark_texts

TEXT_FIELDS = ("prompt", "text", "input")
TOKEN_FIELDS = ("token_ids", "prompt_token_ids")
TENANT_FIELDS = ("tenant", "tenant_id", "user")
SALT_FIELDS = ("cache_salt", "extra_key")
ADAPTER_FIELDS = ("adapter", "lora_name", "lora_path")
ANSWER_FIELDS = ("answer", "output", "completion")
ID_FIELDS = ("request_id", "custom_id", "id")
TIME_FIELDS = ("timestamp", "time_unix_s", "created")
NESTED_FIELDS = ("body", "request")
_EXAMPLES_KEPT = 5
_LINES_LOOKED_AT = 1_000
_FIELDS_HINT = (
    "a line needs one of: prompt, text, input, messages, token_ids, prompt_token_ids "
    "(at its top, or inside body or request)"
)


@dataclass(frozen=True, slots=True, eq=False)
class LoggedPrompt:
    """One prompt of a log: either ``text`` or ``token_ids`` is set, never both.

    ``parts`` are the prompt in pieces. ``answer`` is what an engine wrote behind it, where the log has that. ``keep``:
    how far its passages may move. ``reuse``: False where the caller wanted none of it. ``messages`` and ``tools``: the
    chat as it was logged, for who sends it again.
    """

    line: int
    text: str | None = None
    token_ids: TokenArray | None = None
    tenant: str = ""
    model: str = ""
    request_id: str = ""
    timestamp: float | str | None = None
    salt: str = ""
    adapter: str = ""
    parts: tuple[Part, ...] = ()
    answer: str = ""
    is_chat: bool = False
    keep: OrderLimits = FREE
    reuse: bool = True
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Any, ...] = ()

    @property
    def answer_parts(self) -> tuple[Part, ...]:
        """The answer as it would stand in the next turn's prompt."""
        return (Part("\n<|assistant|>\n" + self.answer),) if self.is_chat else (Part(self.answer),)


class _BadLineError(InputError):
    """A line that cannot be used; the message names file, line and field."""


@dataclass(slots=True)
class PromptLog:
    """The prompts of one file (plain or .gz) or of standard input (``-``), in order.

    ``tenant_field`` names the field that holds the tenant, with dots for depth; empty looks for the usual
    names, None reads no tenants. With ``skip_bad`` a malformed line is counted in ``skipped`` and reading
    goes on; the first few messages are kept in ``skipped_examples``. ``format`` is one of
    `semblend.text.log_formats.FORMATS`, or auto: what the first telling line looks like; afterwards ``found_format``
    says which one it was.
    """

    source: str
    tenant_field: str | None = ""
    skip_bad: bool = False
    max_line_bytes: int = MAX_LINE_BYTES
    format: str = "auto"
    skipped: int = field(default=0, init=False)
    skipped_examples: list[str] = field(default_factory=list, init=False)
    found_format: str = field(default="", init=False)

    def __post_init__(self) -> None:
        if self.format not in ("auto", *FORMATS):
            raise InputError(f"unknown log format {self.format!r}", hint="auto, " + ", ".join(FORMATS))

    def __iter__(self) -> Iterator[LoggedPrompt]:
        with open_log(self.source) as stream:
            lines = read_lines(stream, self.max_line_bytes)
            if self.format == "auto":
                lines = self._recognise(lines)
            else:
                self.found_format = self.format
            for number, raw in lines:
                try:
                    yield from self._parse(number, raw)
                except _BadLineError as error:
                    if not self.skip_bad:
                        raise
                    self.skipped += 1
                    if len(self.skipped_examples) < _EXAMPLES_KEPT:
                        self.skipped_examples.append(error.message)

    @property
    def label(self) -> str:
        return "standard input" if self.source == STDIN else self.source

    @property
    def hint(self) -> str:
        """What to do about a log without prompts."""
        return HINTS.get(self.found_format, "see docs/guides/estimate.md for the formats that a log may have")

    def _recognise(self, lines: Iterator[tuple[int, bytes | None]]) -> Iterator[tuple[int, bytes | None]]:
        """The same lines, once one of the first thousand has told the format; ours where none does."""
        looked_at: list[tuple[int, bytes | None]] = []
        found = None
        for number, raw in lines:
            looked_at.append((number, raw))
            found = None if raw is None else recognise_line(raw)
            if found is not None or len(looked_at) == _LINES_LOOKED_AT:
                break
        self.found_format = found or "openai"
        return chain(looked_at, lines)

    def _parse(self, number: int, raw: bytes | None) -> Iterator[LoggedPrompt]:
        where = f"{self.label}, line {number}"
        if raw is None:
            raise _BadLineError(
                f"{where}: the line is longer than {self.max_line_bytes} bytes",
                hint="one prompt a line; skip with --skip-bad",
            )
        try:
            yield from self._parse_line(number, raw, where)
        except _BadLineError as error:
            other = recognise_line(raw) if self.format == "auto" else None
            if other in (None, self.found_format):
                raise
            hint = f"this line looks like {other}: give each format a file of its own, or --skip-bad"
            raise _BadLineError(f"{error.message}; the log began as {self.found_format}", hint=hint) from None

    def _parse_line(self, number: int, raw: bytes, where: str) -> Iterator[LoggedPrompt]:
        try:
            for record in read_records(self.found_format, raw):
                if not isinstance(record, dict):
                    raise _BadLineError(f"{where}: {_kind(record)}, not an object", hint=_FIELDS_HINT)
                yield _LineReader(where, record, self.tenant_field).prompt(number)
        except UnusableLineError as error:
            raise _BadLineError(f"{where}: {error}", hint=self.hint) from None
        except (ValueError, RecursionError, SyntaxError, MemoryError) as error:
            if isinstance(error, _BadLineError):
                raise
            what = error.msg if isinstance(error, json.JSONDecodeError) else "unreadable text"
            hint = "one JSON object a line; skip with --skip-bad"
            if isinstance(error, UnicodeDecodeError):
                what, hint = "the text is not UTF-8", "write the log anew with iconv -t UTF-8; skip with --skip-bad"
            raise _BadLineError(f"{where}: not JSON ({what})", hint=hint) from None


class _LineReader:
    """Reads one record; every complaint names the place and the field."""

    def __init__(self, where: str, record: dict[str, Any], tenant_field: str | None) -> None:
        self.where = where
        self.record = record
        nested = next((record[name] for name in NESTED_FIELDS if isinstance(record.get(name), dict)), None)
        self.scopes: list[dict[str, Any]] = [record] if nested is None else [record, nested]
        self.tenant_field = tenant_field
        self.marks = self._read_marks()
        self._is_chat = False
        self._messages: tuple[Mapping[str, Any], ...] = ()
        self._tools: tuple[Any, ...] = ()

    def prompt(self, number: int) -> LoggedPrompt:
        parts = self._parts()
        whole = parts[0].token_ids if len(parts) == 1 else _join_tokens(parts)
        return LoggedPrompt(
            line=number,
            text=join_parts(parts) if whole is None else None,
            token_ids=whole,
            tenant=self._tenant(),
            model=self._label(("model",)),
            request_id=self._label(ID_FIELDS),
            timestamp=self._timestamp(),
            salt=self._label(SALT_FIELDS),
            adapter=self._label(ADAPTER_FIELDS),
            parts=tuple(parts),
            answer=self._answer(),
            is_chat=self._is_chat,
            keep=self.marks.keep,
            reuse=self.marks.reuse,
            messages=self._messages,
            tools=self._tools,
        )

    def _read_marks(self) -> RequestMarks:
        """What the request says about its passages, as a server reads it."""
        given = next((scope[MARK] for scope in self.scopes if scope.get(MARK) is not None), None)
        try:
            return read_request(given)
        except InputError as error:
            raise self._bad(MARK, error.message, error.hint or "") from None

    def _parts(self) -> Sequence[Part]:
        parts = self._content()
        return parts if self._is_chat or not self.marks.passages else mark_texts(parts, self.marks.passages)

    def _content(self) -> list[Part]:
        for scope in self.scopes:
            for name in TOKEN_FIELDS:
                if scope.get(name) is not None:
                    return [self._tokens(name, scope[name])]
            blocks = list_block_parts(scope)
            if blocks is not None:
                return blocks
            if scope.get("messages") is not None:
                messages = scope["messages"]
                if isinstance(messages, str):
                    messages = read_text_list(messages)
                return self._chat("messages", scope, messages)
            for name in TEXT_FIELDS:
                if scope.get(name) is not None:
                    return self._text_field(name, scope)
        foreign = name_foreign_format(self.record)
        if foreign is not None:
            raise _BadLineError(f"{self.where}: no prompt in it: it looks like {foreign[0]}", hint=foreign[1])
        raise _BadLineError(f"{self.where}: no prompt in it (fields: {_names(self.record)})", hint=_FIELDS_HINT)

    def _text_field(self, name: str, scope: dict[str, Any]) -> list[Part]:
        value = scope[name]
        if isinstance(value, list):
            if all(isinstance(part, dict) for part in value) and value:
                return self._chat(name, scope, value)
            if len(value) == 1 and isinstance(value[0], str):
                value = value[0]
            elif not any(isinstance(part, str | list) for part in value):
                return [self._tokens(name, value)]
            else:
                raise self._bad(name, "holds several prompts", "write one prompt a line")
        if not isinstance(value, str):
            raise self._bad(name, f"is {_kind(value)}, not a string", "text, chat messages or token ids")
        if not value:
            raise self._bad(name, "is empty", "a prompt needs at least one character")
        return [Part(value)]

    def _tokens(self, name: str, value: Any) -> Part:
        try:
            return Part("", token_ids=as_token_array(value))
        except TokenError as error:
            raise self._bad(name, error.message, error.hint) from None

    def _answer(self) -> str:
        """What an engine wrote behind the prompt, where the log has it: next to the request, or in its response."""
        response: Any = self.record.get("response")
        if isinstance(response, dict):
            response = response.get("body", response)
            choices = response.get("choices") if isinstance(response, dict) else None
            first = choices[0] if isinstance(choices, list) and choices else None
            message = first.get("message", first) if isinstance(first, dict) else None
            response = message.get("content", message.get("text")) if isinstance(message, dict) else None
        found = [response, *(self.record.get(name) for name in ANSWER_FIELDS)]
        return next((one for one in found if isinstance(one, str)), "")

    def _chat(self, name: str, scope: dict[str, Any], messages: Any) -> list[Part]:
        self._is_chat = True
        try:
            system, tools = scope.get("system", scope.get("instructions")), scope.get("tools")
            parts = list_chat_parts(messages, system=system, tools=tools, marks=self.marks)
            head = [{"role": "system", "content": system}] if system else []
            self._messages, self._tools = (*head, *messages), tuple(tools or ())
            return parts
        except InputError as error:
            raise self._bad(name, error.message, error.hint) from None

    def _tenant(self) -> str:
        if self.tenant_field is None:
            return ""
        if not self.tenant_field:
            return self._label(TENANT_FIELDS)
        value: Any = self.record
        for key in self.tenant_field.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return self._as_label(self.tenant_field, value)

    def _label(self, names: tuple[str, ...]) -> str:
        for scope in self.scopes:
            for name in names:
                if scope.get(name) is not None:
                    return self._as_label(name, scope[name])
        return ""

    def _as_label(self, name: str, value: Any) -> str:
        if value is None:
            return ""
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise self._bad(name, f"is {_kind(value)}, not a string", "a short name or number")
        return str(value)

    def _timestamp(self) -> float | str | None:
        """As it was logged; nothing here depends on it, so an odd one is no reason to refuse the line."""
        for scope in self.scopes:
            for name in TIME_FIELDS:
                if isinstance(scope.get(name), int | float | str):
                    value: float | str = scope[name]
                    return value
        return None

    def _bad(self, name: str, what: str, hint: str) -> _BadLineError:
        return _BadLineError(f"{self.where}, field {name}: {what}", hint=hint)


def _join_tokens(parts: Sequence[Part]) -> TokenArray | None:
    """The token ids of parts that have no text; None where they have."""
    known = [part.token_ids for part in parts if part.token_ids is not None]
    return np.concatenate(known) if known else None


def _names(record: dict[str, Any]) -> str:
    shown = ", ".join(sorted(record)[:8])
    return (shown + ", …" if len(record) > 8 else shown) or "none"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
