"""Formats of logged prompts: each line becomes records in the shape of an OpenAI request, or is none of our business.

=========  =================================================================================================
format     a line holds
=========  =================================================================================================
openai     an OpenAI request or a prompt, as JSON; see `semblend.text.logs`
sharegpt   ``conversations`` of ``{from, value}`` or ``{role, content}``: one prompt for every turn of the user
vllm       a server's log at level DEBUG with ``--enable-log-requests``: "Request … details: prompt: …"; older
           versions: "Received request …: prompt: …"
sglang     a server's log with ``--log-requests --log-requests-level 3``, as text or as JSON: "Receive: obj=…"
trace      block ids instead of text: ours (``blocks``), Mooncake and Bailian (``hash_ids``)
=========  =================================================================================================

A server's log has many lines about other things; they are left out without a word.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

FORMATS: Final = ("openai", "sharegpt", "vllm", "sglang", "trace")
HINTS: Final = {
    "vllm": "start vLLM with VLLM_LOGGING_LEVEL=DEBUG and --enable-log-requests: without both it logs no prompts",
    "sglang": "start SGLang with --log-requests --log-requests-level 3: below that it cuts prompts",
}
_TRANSCRIPT = (
    "this form is not read: log the requests themselves (semantickv collect, or the gateway), one JSON object a line "
    "with messages"
)
Record = dict[str, Any]

_STRING = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|None)"""
_VLLM = re.compile(rf"(?:Received request|Request) (\S+?):? (?:details: )?prompt: {_STRING}(?=, |\.)", re.DOTALL)
_VLLM_TIME = re.compile(r" (\d\d-\d\d \d\d:\d\d:\d\d) ")
_VLLM_IDS = re.compile(r"prompt_token_ids: \[([\d, ]*)\]")
_LORA = re.compile(r"lora_name='([^']*)'")
_SGLANG = re.compile(rf"Receive: obj=\w+\((?:rid={_STRING}, )?(?:.{{0,200}}?\b)text={_STRING}( \.\.\. )?", re.DOTALL)
_SGLANG_IDS = re.compile(r"\binput_ids=\[([\d, ]*)\]( \.\.\. )?")
_SGLANG_KEY = re.compile(rf"\bextra_key={_STRING}")
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
_QUEUED_EVENTS = ("request.received",)


class UnusableLineError(ValueError):
    """A line that should hold a prompt and does not."""


class BadFieldError(UnusableLineError):
    """A field of the current line cannot be used."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"field {field!r}: {problem}")
        self.field, self.problem = field, problem


def recognise_line(raw: bytes) -> str | None:
    """The format of a file from one of its lines; None where the line does not tell."""
    text = raw.lstrip(b"\xef\xbb\xbf \t")
    if text.startswith(b"{"):
        return _recognise_record(text)
    if b"Received request " in raw or (b" details: prompt: " in raw and b"Request " in raw):
        return "vllm"
    return "sglang" if b"Receive: obj=" in raw else None


def _recognise_record(text: bytes) -> str | None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(record.get("conversations"), list):
        return "sharegpt"
    if isinstance(record.get("blocks"), list) or isinstance(record.get("hash_ids"), list):
        return "trace"
    event = record.get("event")
    return "sglang" if isinstance(event, str) and event.startswith("request.") and "obj" in record else "openai"


def name_foreign_format(record: Record) -> tuple[str, str] | None:
    """What a record without a prompt looks like, and what to do about it; None where it looks like nothing known."""
    kinds, payload = record.get("type"), record.get("payload")
    if isinstance(kinds, str) and ("sessionId" in record or "parentUuid" in record):
        return "a transcript of Claude Code", _TRANSCRIPT
    if isinstance(kinds, str) and isinstance(payload, dict):
        return "a transcript of Codex", _TRANSCRIPT
    if kinds in ("session", "model_change", "summary", "message") and ("message" in record or "timestamp" in record):
        return "a transcript of a coding agent", _TRANSCRIPT
    if isinstance(record.get("trajectory"), list) or isinstance(record.get("traj"), list):
        return "a trajectory of an agent", _TRANSCRIPT
    response = record.get("response", record)
    body = response.get("body", response) if isinstance(response, dict) else None
    if isinstance(body, dict) and isinstance(body.get("choices", body.get("output")), list):
        named = "a batch output" if "custom_id" in record else "an answer of a server"
        return named, "it holds answers without their prompts: give the batch input, or the log of requests"
    if isinstance(record.get("resourceSpans"), list) or "attributes" in record:
        return "a trace of OpenTelemetry", _TRANSCRIPT
    return None


def read_text_list(value: str) -> Any:
    """A list that a gateway wrote as text, as JSON or as Python prints it (LiteLLM); the text itself where it is none.

    >>> read_text_list("[{'role': 'user', 'content': 'Hi'}]")[0]["content"]
    'Hi'
    """
    if value.lstrip().startswith("["):
        for read in (json.loads, ast.literal_eval):
            try:
                return read(value)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
    return value


def read_records(format: str, raw: bytes) -> Iterator[Record]:
    """The records of one line; none where it is about something else. Raises what `json.loads` raises.

    ``logged_at`` is the time of vLLM's log, which has no year: ``08-01 21:24:09``.
    """
    return _READERS[format](raw)


def _read_json(raw: bytes) -> Iterator[Record]:
    yield json.loads(raw)


def _read_sharegpt(raw: bytes) -> Iterator[Record]:
    """One record for each turn of the user, with all turns before it, and the answer that follows."""
    record = json.loads(raw)
    turns = record.get("conversations") if isinstance(record, dict) else None
    if not isinstance(turns, list):
        raise UnusableLineError("no list of conversations")
    messages = [_read_turn(number, turn) for number, turn in enumerate(turns)]
    labels = {name: record[name] for name in ("id", "model", "tenant", "tenant_id", "user") if name in record}
    for number, message in enumerate(messages):
        if message["role"] not in ("user", "tool"):
            continue
        following = messages[number + 1] if number + 1 < len(messages) else None
        if following is None or following["role"] == "assistant":
            answer = following["content"] if following else None
            yield {**labels, "messages": messages[: number + 1], "answer": answer}


def _read_turn(number: int, turn: Any) -> Record:
    if not isinstance(turn, dict):
        raise UnusableLineError(f"turn {number} is not an object")
    role, content = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    if not isinstance(role, str) or not isinstance(content, str):
        raise UnusableLineError(f"turn {number} has no role or no text")
    return {"role": _ROLES.get(role, role), "content": content}


def _read_vllm(raw: bytes) -> Iterator[Record]:
    text = raw.decode("utf-8", "replace")
    found = _VLLM.search(text)
    if found is None:
        return
    time = _VLLM_TIME.search(text, 0, found.start() + 1)
    record: Record = {"request_id": found.group(1), "logged_at": time and time.group(1)}
    ids = _VLLM_IDS.search(text, found.end())
    lora = _LORA.search(text, found.end())
    if lora:
        record["adapter"] = lora.group(1)
    if ids and ids.group(1):
        yield record | {"token_ids": _read_ids(ids.group(1))}
    elif found.group(2) != "None":
        yield record | {"prompt": ast.literal_eval(found.group(2))}


def _read_sglang(raw: bytes) -> Iterator[Record]:
    at = raw.find(b'{"timestamp"')
    if at >= 0 and b'"event"' in raw:
        yield from _read_sglang_json(raw[at:])
        return
    text = raw.decode("utf-8", "replace")
    found = _SGLANG.search(text)
    if found is None:
        return
    if found.group(3):
        raise UnusableLineError("the prompt was cut by the server: log with --log-requests-level 3")
    record: Record = {"request_id": _read_literal(found.group(1)) or ""}
    ids, key = _SGLANG_IDS.search(text, found.end()), _SGLANG_KEY.search(text, found.end())
    if key and key.group(1) != "None":
        record["extra_key"] = ast.literal_eval(key.group(1))
    if ids and ids.group(1) and not ids.group(2):
        yield record | {"token_ids": _read_ids(ids.group(1))}
    elif found.group(2) != "None":
        yield record | {"prompt": ast.literal_eval(found.group(2))}


def _read_sglang_json(raw: bytes) -> Iterator[Record]:
    record = json.loads(raw)
    obj = record.get("obj")
    if record.get("event") not in _QUEUED_EVENTS or not isinstance(obj, dict):
        return
    found: Record = {"request_id": str(record.get("rid") or ""), "timestamp": record.get("timestamp")}
    if isinstance(obj.get("extra_key"), str):
        found["extra_key"] = obj["extra_key"]
    ids, text = obj.get("input_ids"), obj.get("text")
    if isinstance(ids, list) and ids:
        if "..." in ids:
            raise UnusableLineError("the prompt was cut by the server: log with --log-requests-level 3")
        yield found | {"token_ids": ids}
    elif isinstance(text, str):
        yield found | {"prompt": text}


def _read_literal(text: str | None) -> Any:
    return ast.literal_eval(text) if text else None


def _read_ids(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


_READERS: Final[dict[str, Callable[[bytes], Iterator[Record]]]] = {
    "openai": _read_json,
    "sharegpt": _read_sharegpt,
    "vllm": _read_vllm,
    "sglang": _read_sglang,
    "trace": _read_json,
}
