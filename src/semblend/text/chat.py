"""Chat messages as one text, the same text every time.

A model's own template decides what an engine sees; without it, this neutral one keeps what matters for
reuse: the order of the turns, the role of each, and every character of their content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from semblend.errors import InputError

_TEXT_PARTS = ("text", "input_text", "output_text")
_HINT = 'each message is an object such as {"role": "user", "content": "..."}'


def render_chat(messages: Any, *, system: Any = None, tools: Any = None) -> str:
    """Tools first, then the system text, then the turns.

    >>> turns = [{"role": "user", "content": "Hi"}, {"role": "tool", "content": [{"type": "text", "text": "Yes?"}]}]
    >>> print(render_chat(turns))
    <|user|>
    Hi
    <|tool|>
    Yes?
    """
    if not isinstance(messages, list) or not messages:
        raise InputError("messages are not a non-empty list", hint=_HINT)
    parts = []
    if tools:
        parts.append(f"<|tools|>\n{_json(tools)}")
    if system is not None:
        parts.append(f"<|system|>\n{_content(system, 'system')}")
    parts.extend(_message(number, message) for number, message in enumerate(messages))
    return "\n".join(parts)


def _message(number: int, message: Any) -> str:
    where = f"message {number}"
    if not isinstance(message, dict):
        raise InputError(f"{where} is not an object", hint=_HINT)
    role = message.get("role", message.get("type"))  # items such as function_call carry a type instead
    if not isinstance(role, str) or not role:
        raise InputError(f"{where} has no role", hint=_HINT)
    lines = [f"<|{role}|>"]
    if isinstance(message.get("name"), str):
        lines.append(f"name: {message['name']}")
    if message.get("content") is not None:
        lines.append(_content(message["content"], where))
    extras = [key for key in ("tool_calls", "function_call", "arguments", "output") if message.get(key) is not None]
    lines.extend(f"{key}: {_json(message[key])}" for key in extras)
    if isinstance(message.get("tool_call_id"), str):
        lines.append(f"tool_call_id: {message['tool_call_id']}")
    return "\n".join(lines)


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_parts(content, where))
    raise InputError(f"content of {where} is neither a string nor a list of parts", hint=_HINT)


def _parts(content: Iterable[Any], where: str) -> Iterable[str]:
    for number, part in enumerate(content):
        if isinstance(part, str):
            yield part
        elif not isinstance(part, dict):
            raise InputError(f"content part {number} of {where} is not an object", hint=_HINT)
        elif part.get("type", "text") in _TEXT_PARTS:
            if not isinstance(part.get("text"), str):
                raise InputError(f"content part {number} of {where} has no text", hint=_HINT)
            yield part["text"]
        else:  # an image or a file: its tokens are unknown here, but equal parts must stay equal
            digest = hashlib.sha256(_json(part).encode("utf-8", "surrogatepass")).hexdigest()[:16]
            yield f"<|{part.get('type')}:{digest}|>"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
