"""Chat messages as one text, the same text every time.

A model's own template decides what an engine sees; without it, this neutral one keeps what matters for
reuse: the order of the turns, the role of each, and every character of their content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from semblend.arrange.marks import (
    MARK,
    NO_MARKS,
    PassageMark,
    RequestMarks,
    find_groups,
    find_listed_place,
    read_mark,
)
from semblend.errors import InputError
from semblend.text.parts import LEAST_PASSAGE_CHARS, TURN, Part, PartKind, join_parts

_TEXT_PARTS = ("text", "input_text", "output_text")
_NEW_LINE = Part("\n")
_RESULT_ROLES = ("tool", "function", "function_call_output")
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
    return join_parts(list_chat_parts(messages, system=system, tools=tools))


def list_chat_parts(
    messages: Any, *, system: Any = None, tools: Any = None, marks: RequestMarks = NO_MARKS
) -> list[Part]:
    """The same text in parts: every tool by itself, every content part by itself, and what stands between them.

    ``marks`` are the request's own: passages that it lists stand in front of the last user message, as in a server.
    """
    if not isinstance(messages, list) or not messages:
        raise InputError("messages are not a non-empty list", hint=_HINT)
    if marks.passages:
        messages = _put_listed(messages, marks)
    sections = []
    if tools:
        sections.append([Part("<|tools|>\n"), *_list_tools(tools)])
    if system is not None:
        sections.append([Part("<|system|>\n"), *_list_content(system, "system", marks)])
    sections.extend(_list_message(number, message, marks) for number, message in enumerate(messages))
    return _join(sections, Part("\n", group=TURN))


def _put_listed(messages: list[Any], marks: RequestMarks) -> list[Any]:
    place = find_listed_place([message.get("role") if isinstance(message, dict) else None for message in messages])
    content = messages[place].get("content")
    rest = content if isinstance(content, list) else [content]
    listed = [
        {"text": text, MARK: {"commutes": mark.group, "score": mark.score}}
        for text, mark in zip(marks.passages, marks.listed, strict=True)
    ]
    return [*messages[:place], messages[place] | {"content": [*listed, *rest]}, *messages[place + 1 :]]


def _join(sections: Iterable[list[Part]], between: Part = _NEW_LINE) -> list[Part]:
    joined: list[Part] = []
    for section in sections:
        joined += [between, *section] if joined else section
    return joined


def _list_tools(tools: Any) -> list[Part]:
    if not isinstance(tools, list):
        return [Part(_json(tools))]
    return [Part("["), *_join([[Part(_json(tool), "tool", "tools")] for tool in tools], Part(", ")), Part("]")]


def _list_message(number: int, message: Any, marks: RequestMarks) -> list[Part]:
    where = f"message {number}"
    if not isinstance(message, dict):
        raise InputError(f"{where} is not an object", hint=_HINT)
    role = message.get("role", message.get("type"))  # items such as function_call carry a type instead
    if not isinstance(role, str) or not role:
        raise InputError(f"{where} has no role", hint=_HINT)
    sections = [[Part(f"<|{role}|>")]]
    if isinstance(message.get("name"), str):
        sections.append([Part(f"name: {message['name']}")])
    if message.get("content") is not None:
        content = _list_content(message["content"], where, marks, number)
        if role in _RESULT_ROLES and len(content) == 1 and content[0].kind == "text":
            content = [Part(content[0].text, "result")]
        sections.append(content)
    extras = [key for key in ("tool_calls", "function_call", "arguments", "output") if message.get(key) is not None]
    sections.extend([Part(f"{key}: {_json(message[key])}")] for key in extras)
    if isinstance(message.get("tool_call_id"), str):
        sections.append([Part(f"tool_call_id: {message['tool_call_id']}")])
    return _join(sections)


def _list_content(content: Any, where: str, marks: RequestMarks, number: int = 0) -> list[Part]:
    if isinstance(content, str):
        return [Part(content)]
    if isinstance(content, list):
        found = list(_read_parts(content, where))
        if not any(part.marked for part in found):
            found = _assume_passages(found, where)
        _check_groups(found, marks, number)
        return _join([part] for part in found)
    raise InputError(f"content of {where} is neither a string nor a list of parts", hint=_HINT)


def _check_groups(found: list[Part], marks: RequestMarks, number: int) -> None:
    """Raise where marks do not fit together: a server refuses such a request."""
    find_groups(number, [PassageMark(part.group, part.score) if part.marked else None for part in found], marks.keep)


def _assume_passages(found: list[Part], where: str) -> list[Part]:
    """Of three or more texts in one message, all but the last: the last one is the question."""
    if len(found) < 3:
        return found
    kinds: list[PartKind] = ["passage" if len(part.text) >= LEAST_PASSAGE_CHARS else "text" for part in found[:-1]]
    return [
        *(Part(part.text, kind, where if kind == "passage" else "") for part, kind in zip(found, kinds, strict=False)),
        found[-1],
    ]


def _read_parts(content: Iterable[Any], where: str) -> Iterable[Part]:
    for number, part in enumerate(content):
        if isinstance(part, str):
            yield Part(part)
        elif not isinstance(part, dict):
            raise InputError(f"content part {number} of {where} is not an object", hint=_HINT)
        elif part.get("type", "text") in _TEXT_PARTS:
            if not isinstance(part.get("text"), str):
                raise InputError(f"content part {number} of {where} has no text", hint=_HINT)
            mark = read_mark(part.get(MARK))
            if mark is None:
                yield Part(part["text"])
            else:  # a group belongs to its message
                yield Part(part["text"], "passage", f"{where}, {mark.group}", marked=True, score=mark.score)
        else:  # an image or a file: its tokens are unknown here, but equal parts must stay equal
            digest = hashlib.sha256(_json(part).encode("utf-8", "surrogatepass")).hexdigest()[:16]
            yield Part(f"<|{part.get('type')}:{digest}|>")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
