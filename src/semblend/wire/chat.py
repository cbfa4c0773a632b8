"""/v1/chat/completions: the request as checked data, the answer as OpenAI writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from semblend.confirm.fields import JsonObject
from semblend.wire.answer import Answer, Chunk, Head, Logprob, Spent
from semblend.wire.fields import Fields, show
from semblend.wire.options import (
    MOST_TOKENS,
    MOST_TOP_LOGPROBS,
    ReuseOptions,
    parse_reuse,
    parse_sampling,
    refuse_absent_options,
)
from semblend.wire.sampling import Sampling

ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE_HINT = 'each message is an object such as {"role": "user", "content": "..."}'
MOST_MESSAGES = 4096


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """``messages`` hold a role and one string each: what a chat template takes."""

    model: str
    messages: tuple[dict[str, str], ...]
    sampling: Sampling
    reuse: ReuseOptions
    stream: bool = False
    include_usage: bool = False

    @classmethod
    def parse(cls, body: Any, *, most_n: int) -> ChatRequest:
        """
        >>> ChatRequest.parse({"messages": [{"role": "user", "content": "Hi"}]}, most_n=1).messages
        ({'role': 'user', 'content': 'Hi'},)
        """
        fields = Fields(body)
        messages = _messages(fields)
        refuse_absent_options(fields)
        stream = fields.flag("stream")
        limit = "max_completion_tokens" if fields.has("max_completion_tokens") else "max_tokens"
        return cls(
            model=fields.text("model"),
            messages=messages,
            sampling=parse_sampling(
                fields,
                max_tokens=fields.integer(limit, None, 1, MOST_TOKENS),
                logprobs=_logprobs(fields),
                most_n=most_n,
            ),
            reuse=parse_reuse(fields),
            stream=stream,
            include_usage=include_usage(fields, stream),
        )


def include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.child("stream_options")
    if options is None:
        return False
    if not stream:
        fields.refuse("stream_options", "is set, but stream is not", "send stream: true, or leave it out")
    return options.flag("include_usage")


def _logprobs(fields: Fields) -> int | None:
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs", None, 0, MOST_TOP_LOGPROBS)
    if top is not None and not wanted:
        fields.refuse("top_logprobs", "is set, but logprobs is not", "send logprobs: true, or leave it out")
    return (top or 0) if wanted else None


def _messages(fields: Fields) -> tuple[dict[str, str], ...]:
    given = fields.raw("messages")
    if not isinstance(given, list) or not given:
        fields.refuse("messages", "is not a list with at least one message", _MESSAGE_HINT)
    if len(given) > MOST_MESSAGES:
        fields.refuse("messages", f"has {len(given)} entries, more than {MOST_MESSAGES}", "send fewer turns")
    return tuple(_message(number, message) for number, message in enumerate(given))


def _message(number: int, given: Any) -> dict[str, str]:
    message = Fields(given, f"messages[{number}].")
    role = message.text("role")
    if role not in ROLES:
        message.refuse("role", f"is {show(role)}", "one of " + ", ".join(ROLES))
    for name in ("tool_calls", "function_call"):
        if message.raw(name):
            message.refuse(name, "is not supported", "send the call as text in content")
    if not message.has("content"):
        message.refuse("content", "is missing", _MESSAGE_HINT)
    content = _content(message)
    # templates of the models that we serve know the older word only
    return {"role": "system" if role == "developer" else role, "content": content}


def _content(message: Fields) -> str:
    content = message.raw("content")
    if not isinstance(content, list):
        return message.text("content")
    parts = []
    for number, given in enumerate(content):
        part = Fields(given, message.path(f"content[{number}]."))
        kind = part.text("type", "text")
        if kind != "text":
            part.refuse("type", f"is {show(kind)}: this model takes text only", "send parts of type text")
        if not part.has("text"):
            part.refuse("text", "is missing", 'a part is {"type": "text", "text": "..."}')
        parts.append(part.text("text"))
    return "\n".join(parts)


@dataclass(frozen=True, slots=True)
class ChatReply:
    """OpenAI's ``chat.completion`` and ``chat.completion.chunk``."""

    head: Head
    logprobs: bool = False
    include_usage: bool = False

    def write_whole(self, answers: Sequence[Answer], spent: Spent) -> JsonObject:
        choices = [
            {
                "index": answer.index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": self._logprobs(answer.logprobs),
                "finish_reason": answer.finish_reason,
            }
            for answer in answers
        ]
        body = self.head.write_body("chat.completion", choices)
        return body | {"usage": spent.usage(), "semblend": spent.semblend()}

    def write_opening(self, n: int) -> list[JsonObject]:
        return [self._event(index, {"role": "assistant", "content": ""}) for index in range(n)]

    def write_piece(self, chunk: Chunk, answer: Answer) -> JsonObject:
        del answer
        return self._event(chunk.index, {"content": chunk.text}, logprobs=self._logprobs(chunk.logprobs))

    def write_closing(self, answers: Sequence[Answer], spent: Spent) -> list[JsonObject]:
        events = [self._event(answer.index, {}, finish_reason=answer.finish_reason) for answer in answers]
        if self.include_usage:
            events.append(self.head.write_body("chat.completion.chunk", []) | {"usage": spent.usage()})
        events[-1]["semblend"] = spent.semblend()
        return events

    def _event(
        self, index: int, delta: JsonObject, *, logprobs: JsonObject | None = None, finish_reason: str | None = None
    ) -> JsonObject:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        body = self.head.write_body("chat.completion.chunk", [choice])
        return body | {"usage": None} if self.include_usage else body

    def _logprobs(self, logprobs: Sequence[Logprob]) -> JsonObject | None:
        return {"content": [_token(one) for one in logprobs], "refusal": None} if self.logprobs else None


def _token(one: Logprob) -> JsonObject:
    return _bare(one) | {"top_logprobs": [_bare(other) for other in one.top]}


def _bare(one: Logprob) -> JsonObject:
    return {"token": one.token, "logprob": one.logprob, "bytes": list(one.token.encode("utf-8", "replace"))}
