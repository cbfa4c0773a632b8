"""Logged prompts, one JSON object a line: what people have on disk, turned into one shape.

A line may carry the prompt as text, as chat messages or as token ids, at its top or inside ``body`` or
``request`` (where gateways and batch files put the OpenAI request). The file is read as a stream; one
line at a time is in memory, and a line beyond the limit is an error, not a surprise.
"""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from semblend.errors import InputError, TokenError
from semblend.prompt import TokenArray, as_token_array
from semblend.text.chat import render_chat

STDIN = "-"
MAX_LINE_BYTES = 64 * 1024 * 1024
TEXT_FIELDS = ("prompt", "text", "input")
TOKEN_FIELDS = ("token_ids", "prompt_token_ids")
TENANT_FIELDS = ("tenant", "tenant_id", "user")
ID_FIELDS = ("request_id", "custom_id", "id")
TIME_FIELDS = ("timestamp", "time_unix_s", "created")
NESTED_FIELDS = ("body", "request")
_EXAMPLES_KEPT = 5
_FIELDS_HINT = (
    "a line needs one of: prompt, text, input, messages, token_ids, prompt_token_ids "
    "(at its top, or inside body or request)"
)


@dataclass(frozen=True, slots=True, eq=False)
class LoggedPrompt:
    """One line of a log: either ``text`` or ``token_ids`` is set, never both."""

    line: int
    text: str | None = None
    token_ids: TokenArray | None = None
    tenant: str = ""
    model: str = ""
    request_id: str = ""
    timestamp: float | str | None = None


class _BadLineError(InputError):
    """A line that cannot be used; the message names file, line and field."""


@dataclass(slots=True)
class PromptLog:
    """The prompts of one JSONL file (plain or .gz) or of standard input (``-``), in order.

    ``tenant_field`` names the field that holds the tenant, with dots for depth; empty looks for the usual
    names, None reads no tenants. With ``skip_bad`` a malformed line is counted in ``skipped`` and reading
    goes on; the first few messages are kept in ``skipped_examples``.
    """

    source: str
    tenant_field: str | None = ""
    skip_bad: bool = False
    max_line_bytes: int = MAX_LINE_BYTES
    skipped: int = field(default=0, init=False)
    skipped_examples: list[str] = field(default_factory=list, init=False)

    def __iter__(self) -> Iterator[LoggedPrompt]:
        for number, raw in self._lines():
            try:
                yield self._parse(number, raw)
            except _BadLineError as error:
                if not self.skip_bad:
                    raise
                self.skipped += 1
                if len(self.skipped_examples) < _EXAMPLES_KEPT:
                    self.skipped_examples.append(error.message)

    @property
    def label(self) -> str:
        return "standard input" if self.source == STDIN else self.source

    def _lines(self) -> Iterator[tuple[int, bytes | None]]:
        """Line numbers with their bytes; None stands for a line beyond the limit."""
        with _opened(self.source) as stream:
            number = 0
            while raw := stream.readline(self.max_line_bytes + 1):
                number += 1
                if len(raw) > self.max_line_bytes:
                    while raw and not raw.endswith(b"\n"):
                        raw = stream.readline(self.max_line_bytes)
                    yield number, None
                elif raw.strip():
                    yield number, raw

    def _parse(self, number: int, raw: bytes | None) -> LoggedPrompt:
        where = f"{self.label}, line {number}"
        if raw is None:
            raise _BadLineError(
                f"{where}: the line is longer than {self.max_line_bytes} bytes",
                hint="one prompt a line; skip with --skip-bad",
            )
        try:
            record = json.loads(raw)
        except (ValueError, RecursionError) as error:
            what = error.msg if isinstance(error, json.JSONDecodeError) else "unreadable text"
            raise _BadLineError(
                f"{where}: not JSON ({what})", hint="one JSON object a line; skip with --skip-bad"
            ) from None
        if not isinstance(record, dict):
            raise _BadLineError(f"{where}: {_kind(record)}, not an object", hint=_FIELDS_HINT)
        return _LineReader(where, record, self.tenant_field).prompt(number)


class _LineReader:
    """Reads one record; every complaint names the place and the field."""

    def __init__(self, where: str, record: dict[str, Any], tenant_field: str | None) -> None:
        self.where = where
        self.record = record
        nested = next((record[name] for name in NESTED_FIELDS if isinstance(record.get(name), dict)), None)
        self.scopes: list[dict[str, Any]] = [record] if nested is None else [record, nested]
        self.tenant_field = tenant_field

    def prompt(self, number: int) -> LoggedPrompt:
        text, token_ids = self._content()
        return LoggedPrompt(
            line=number,
            text=text,
            token_ids=token_ids,
            tenant=self._tenant(),
            model=self._label(("model",)),
            request_id=self._label(ID_FIELDS),
            timestamp=self._timestamp(),
        )

    def _content(self) -> tuple[str | None, TokenArray | None]:
        for scope in self.scopes:
            for name in TOKEN_FIELDS:
                if scope.get(name) is not None:
                    return None, self._tokens(name, scope[name])
            if scope.get("messages") is not None:
                return self._chat("messages", scope, scope["messages"]), None
            for name in TEXT_FIELDS:
                if scope.get(name) is not None:
                    return self._text_field(name, scope)
        raise _BadLineError(f"{self.where}: no prompt in it (fields: {_names(self.record)})", hint=_FIELDS_HINT)

    def _text_field(self, name: str, scope: dict[str, Any]) -> tuple[str | None, TokenArray | None]:
        value = scope[name]
        if isinstance(value, list):
            if all(isinstance(part, dict) for part in value) and value:
                return self._chat(name, scope, value), None
            if len(value) == 1 and isinstance(value[0], str):
                value = value[0]
            elif not any(isinstance(part, str | list) for part in value):
                return None, self._tokens(name, value)
            else:
                raise self._bad(name, "holds several prompts", "write one prompt a line")
        if not isinstance(value, str):
            raise self._bad(name, f"is {_kind(value)}, not a string", "text, chat messages or token ids")
        if not value:
            raise self._bad(name, "is empty", "a prompt needs at least one character")
        return value, None

    def _tokens(self, name: str, value: Any) -> TokenArray:
        try:
            return as_token_array(value)
        except TokenError as error:
            raise self._bad(name, error.message, error.hint) from None

    def _chat(self, name: str, scope: dict[str, Any], messages: Any) -> str:
        try:
            return render_chat(
                messages, system=scope.get("system", scope.get("instructions")), tools=scope.get("tools")
            )
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


@contextmanager
def _opened(source: str) -> Iterator[BinaryIO]:
    """The file as bytes, unpacked where its name ends in .gz."""
    if source == STDIN:
        yield sys.stdin.buffer
        return
    path = Path(source)
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            yield stream  # type: ignore[misc]  # GzipFile reads like any binary file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(
            f"{source} is a damaged gzip file: {error}", hint="copy it again, or unpack it first"
        ) from None
    except OSError as error:
        raise InputError(f"cannot read {source}: {error.strerror}", hint="check the path and the permissions") from None


def _names(record: dict[str, Any]) -> str:
    shown = ", ".join(sorted(record)[:8])
    return (shown + ", …" if len(record) > 8 else shown) or "none"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
