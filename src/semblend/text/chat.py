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
from semblend.text.parts import MIN_PASSAGE_CHARS, TURN, Part, join_parts

_TEXT_PARTS = ("text", "input_text", "output_text")
_CALL_BLOCKS = ("tool_use", "server_tool_use", "mcp_tool_use", "function_call", "tool_call")
_CALL_FIELDS = ("name", "input", "arguments", "function")
_EMPTY_BLOCKS = ("tool_result", "function_call_output", "thinking", "redacted_thinking")
_OMITTED = {
    "image": "image", "image_url": "image", "input_image": "image", "input_audio": "sound", "audio": "sound",
    "video_url": "video", "file": "file", "input_file": "file", "document": "file", "container_upload": "file",
}  # fmt: skip
"""What people call the blocks whose tokens are not counted."""
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
    if sum(part.kind == "text" for part in found) < 3:
        return found
    last = max(at for at, part in enumerate(found) if part.kind == "text")
    return [
        Part(part.text, "passage", where)
        if part.kind == "text" and at != last and len(part.text) >= MIN_PASSAGE_CHARS
        else part
        for at, part in enumerate(found)
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
        else:
            yield from _read_block(part)


def _read_block(block: dict[str, Any]) -> Iterable[Part]:
    """The text of a block that is no plain text, and for what has none a part that says so.

    Texts: results and calls of tools, documents, search results, thoughts, refusals. An image, a sound or a file has
    tokens that are unknown here; equal ones stay equal, and the estimate names what was left out.
    """
    kind = str(block.get("type"))[:40]
    if kind in _CALL_BLOCKS:
        yield Part(_json({key: block[key] for key in _CALL_FIELDS if block.get(key) is not None}))
        return
    for name in ("title", "context"):
        if kind in ("document", "search_result") and isinstance(block.get(name), str):
            yield Part(block[name])
    source: Any = block.get("source")
    if isinstance(source, dict):
        source = source.get("data") if source.get("type") == "text" else source.get("content")
    else:
        source = None  # of a search result: its address
    texts = (block.get(name) for name in ("content", "text", "thinking", "refusal", "output", "arguments"))
    content: Any = next((one for one in (source, *texts) if isinstance(one, str | list)), None)
    if isinstance(content, str):
        yield Part(content, "result" if kind.endswith("tool_result") else "text")
    elif content is not None:
        found = list(_read_parts(content, kind))
        is_result = kind.endswith("tool_result") and len(found) == 1 and found[0].kind == "text"
        yield from [Part(found[0].text, "result")] if is_result else found
    elif kind not in _EMPTY_BLOCKS:
        digest = hashlib.sha256(_json(block).encode("utf-8", "surrogatepass")).hexdigest()[:16]
        yield Part(f"<|{kind}:{digest}|>", "omitted", _OMITTED.get(kind, kind))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
