"""What a router reads of an OpenAI request: its model, and the parts of the prompt with their types.

A body that cannot be read is no error here. The engine will say what is wrong with it; until then it is routed by load.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from semblend.wire.errors import ApiError
from semblend.wire.json_limits import JsonLimits, JsonMeter

MOST_BYTES = 4 << 20
"""Longer bodies are not parsed: that would hold up everyone else for 25 ms and more."""
PROMPT_PATHS = ("/v1/chat/completions", "/v1/completions")
LONG_TEXT = 1024
"""Characters from which a user's text counts as material rather than as a question."""
PLAIN_BYTES = 64 << 10
"""Bodies up to which nothing is counted: whatever they hold is parsed in 1.3 ms."""
PLAIN_MARKS = 4096
"""Commas and brackets up to which a body is parsed unmetered, in strings or not: less than 3 ms, however they nest."""
_LIMITS = JsonLimits()
_TYPES = {
    "system": "system", "developer": "system", "assistant": "assistant", "tool": "tool_output",
    "function": "tool_output",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A piece of a prompt: its semantic type, and its text or token ids as bytes."""

    type: str
    data: bytes


class PromptView:
    """A request as far as a router cares. Its body is parsed when somebody asks for the first time.

    >>> read_prompt(b'{"model": "m", "messages": [{"role": "user", "content": "Hi"}]}').list_parts()
    (PromptPart(type='user', data=b'user\\nHi\\n'),)
    """

    __slots__ = ("_body", "_fields")

    def __init__(self, fields: Mapping[str, Any] | None = None, *, body: bytes = b"") -> None:
        self._fields = fields
        self._body = body

    @property
    def fields(self) -> Mapping[str, Any]:
        """The parsed body; empty where it is not a JSON object that can be read in good time."""
        if self._fields is None:
            self._fields = _read_fields(self._body)
        return self._fields

    def list_parts(self) -> tuple[PromptPart, ...]:
        """The parts of the prompt in order."""
        return tuple(_list_parts(self.fields))

    @property
    def model(self) -> str:
        model = self.fields.get("model")
        return model if isinstance(model, str) else ""


UNREAD = PromptView({})


def read_prompt(body: bytes) -> PromptView:
    """Return the view of a request's body."""
    return PromptView(body=body)


def _read_fields(body: bytes) -> Mapping[str, Any]:
    if not body or len(body) > MOST_BYTES:
        return {}
    try:
        if len(body) > PLAIN_BYTES and _count_marks(body) > PLAIN_MARKS:
            JsonMeter(_LIMITS).feed(body)
        fields = load_json(body)
    except (ApiError, ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _count_marks(body: bytes) -> int:
    """Count commas and opening brackets, in strings or not; numpy takes a third of the time of ``bytes.count``."""
    array = np.frombuffer(body, np.uint8)
    return sum(int(np.count_nonzero(array == mark)) for mark in b",[{")


def _list_parts(fields: Mapping[str, Any]) -> Iterator[PromptPart]:
    """The parts of a prompt in order: tools, then messages; or the one text or list of ids."""
    if isinstance(fields.get("messages"), list):
        if fields.get("tools"):
            yield PromptPart("template", json.dumps(fields["tools"]).encode())
        for message in fields["messages"]:
            if isinstance(message, dict):
                yield _read_message(message)
        return
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        yield PromptPart("retrieved_context" if len(prompt) >= LONG_TEXT else "user", _encode(prompt))
    elif isinstance(prompt, list):
        try:
            yield PromptPart("other", array("I", prompt).tobytes())
        except (TypeError, OverflowError):
            return  # not token ids: the engine will say so


def _read_message(message: Mapping[str, Any]) -> PromptPart:
    role, content = str(message.get("role", "")), message.get("content")
    if isinstance(content, list):
        texts = [one.get("text") for one in content if isinstance(one, dict)]
        content = "\n".join(text for text in texts if isinstance(text, str))
    text = content if isinstance(content, str) else ""
    if message.get("tool_calls"):
        text += json.dumps(message["tool_calls"])
    kind = _TYPES.get(role) or ("retrieved_context" if len(text) >= LONG_TEXT else "user")
    return PromptPart(kind, _encode(f"{role}\n{text}\n"))


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def load_json(data: bytes) -> Any:
    """Parse JSON; `ValueError` or `RecursionError` where it is none.

    orjson takes a third of Python's time and has no slow case: 64 KiB of anything take 1.3 ms at most. (msgspec is as
    fast on prompts, and takes 300 ms for 64 KiB of ``1.5e300,``.) Where orjson is stricter, Python decides: NaN, half
    of a surrogate pair. Integers beyond 64 bits come back as floats.

    >>> load_json(b'{"a": NaN}')
    {'a': nan}
    """
    try:
        return orjson.loads(data)
    except ValueError:
        return json.loads(data)
