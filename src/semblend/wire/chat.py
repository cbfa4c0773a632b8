"""/v1/chat/completions: the request as checked data, the answer as OpenAI writes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from semblend.arrange import OrderLimits, PassageGroup
from semblend.arrange.marks import find_groups, find_listed_place, mark_listed
from semblend.confirm.receipt import JsonObject
from semblend.wire.answer import Answer, Chunk, Logprob, OpenAiReply
from semblend.wire.body import InOrder, Name, StrictBody, refuse, show
from semblend.wire.options import (
    Count,
    Lacking,
    OpenAiBody,
    PartMark,
    PromptInput,
    ReuseOptions,
    SemblendBody,
    TopLogprobs,
    refused_as,
)
from semblend.wire.sampling import Sampling

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_NESTING = 64
"""Of a call's arguments; what is nested more deeply reaches the template as text."""


class TextPart(StrictBody):
    """A part of a message; this model takes text only."""

    type: Annotated[str | None, Field(json_schema_extra={"enum": ["text", None]})] = None
    text: str
    semblend: PartMark | None = None

    @field_validator("type")
    @classmethod
    def _check_type(cls, kind: str | None) -> str | None:
        if kind not in (None, "text"):
            raise refuse(f"is {show(kind)}: this model takes text only", "send parts of type text")
        return kind


Parts = Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class CalledFunction(StrictBody):
    """The function that a model called, and its arguments as JSON text."""

    name: Name
    arguments: str = "{}"


class ToolCall(StrictBody):
    """A call of an earlier answer."""

    id: Name = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    def to_template(self) -> JsonObject:
        """The call as chat templates take it: with the arguments as an object, where they are one."""
        try:
            arguments = json.loads(self.function.arguments)
        except (ValueError, RecursionError):  # whatever a client nests
            arguments = None
        if not isinstance(arguments, dict) or not _is_flatter(arguments, MAX_NESTING):
            arguments = self.function.arguments
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


def _is_flatter(value: Any, depth: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_is_flatter(one, depth - 1) for one in inner)


class ChatMessage(StrictBody):
    """One turn: a role, and a text or a list of texts; an assistant's may hold calls of tools beside it or instead."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | Parts, InOrder()] | None = None
    tool_calls: Annotated[list[ToolCall] | None, Field(max_length=MAX_PARTS, fail_fast=True)] = None
    function_call: Annotated[Any, Lacking()] = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise refuse(f"are in a message of role {self.role}", "only an assistant calls tools", name="tool_calls")
        if self.content is None and not self.tool_calls:
            raise refuse("is missing", "send a string, or parts; tool_calls can stand alone", name="content")
        return self

    @property
    def parts(self) -> list[TextPart]:
        """The content as parts."""
        return [TextPart(text=self.content or "")] if not isinstance(self.content, list) else self.content

    def to_template(self, content: str | None = None) -> JsonObject:
        """The turn as a chat template takes it; templates of the models that we serve know the older role only."""
        if content is None:
            content = join_parts([part.text for part in self.parts])
        turn: JsonObject = {"role": "system" if self.role == "developer" else self.role, "content": content}
        return turn | {"tool_calls": [call.to_template() for call in self.tool_calls]} if self.tool_calls else turn


def join_parts(texts: Sequence[str]) -> str:
    """The parts of a message as one text."""
    return "\n".join(texts)


class ChatBody(OpenAiBody):
    """The body of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise refuse("is set, but logprobs is not", "send logprobs: true, or leave it out", name="top_logprobs")
        return self

    def list_parts(self) -> dict[int, list[TextPart]]:
        """The parts of messages that hold passages, by message; listed passages stand in front of the last user's."""
        found = {
            at: message.parts
            for at, message in enumerate(self.messages)
            if any(part.semblend is not None for part in message.parts)
        }
        ours = self.semblend or SemblendBody()
        with refused_as("semblend.scores"):
            marks = mark_listed(ours.passages, ours.scores)
        if ours.passages is None:
            return found
        with refused_as("semblend.passages"):
            last = find_listed_place([message.role for message in self.messages])
        listed = [
            TextPart(text=text, semblend=PartMark(commutes=mark.group, score=mark.score))
            for text, mark in zip(ours.passages, marks, strict=True)
        ]
        return dict(sorted((found | {last: [*listed, *self.messages[last].parts]}).items()))


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """``messages`` hold a role and one string each, and calls of tools: what a chat template takes.

    ``parts`` are the texts of messages that hold passages, by message, and ``groups`` say which of them commute.
    """

    text_field: ClassVar[str] = "messages"
    ids_field: ClassVar[str] = "messages"
    prompts: ClassVar[tuple[PromptInput, ...]] = ()
    model: str
    messages: tuple[JsonObject, ...]
    sampling: Sampling
    reuse: ReuseOptions
    stream: bool = False
    include_usage: bool = False
    parts: tuple[tuple[int, tuple[str, ...]], ...] = ()
    groups: tuple[PassageGroup, ...] = ()

    @classmethod
    def parse(cls, body: str | bytes | bytearray, *, most_n: int) -> ChatRequest:
        """
        >>> ChatRequest.parse('{"messages": [{"role": "user", "content": "Hi"}]}', most_n=1).messages
        ({'role': 'user', 'content': 'Hi'},)
        """
        read = ChatBody.read(body, most_n=most_n)
        logprobs = (read.top_logprobs or 0) if read.logprobs else None
        marked = read.list_parts()
        texts = {at: tuple(part.text for part in parts) for at, parts in marked.items()}
        messages = (
            message.to_template(join_parts(texts[at]) if at in texts else None)
            for at, message in enumerate(read.messages)
        )
        groups = (_find_groups(at, parts, read.reuse.keep) for at, parts in marked.items())
        return cls(
            model=read.model or "",
            messages=tuple(messages),
            sampling=read.make_sampling(read.max_completion_tokens or read.max_tokens, logprobs),
            reuse=read.reuse,
            stream=bool(read.stream),
            include_usage=read.include_usage,
            parts=tuple(texts.items()),
            groups=tuple(group for found in groups for group in found),
        )


def _find_groups(message: int, parts: Sequence[TextPart], keep: OrderLimits) -> list[PassageGroup]:
    """The groups of one message, by the marks of its parts; `ApiError` 400 for marks that do not fit together."""
    marks = [None if part.semblend is None else part.semblend.to_mark() for part in parts]
    with refused_as(f"messages[{message}].content"):
        return find_groups(message, marks, keep)


class ChatReply(OpenAiReply):
    """OpenAI's ``chat.completion`` and ``chat.completion.chunk``."""

    whole_kind, event_kind = "chat.completion", "chat.completion.chunk"

    def write_choice(self, answer: Answer) -> JsonObject:
        return {
            "index": answer.index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._describe_tokens(answer.logprobs),
            "finish_reason": answer.finish_reason,
        }

    def write_opening(self, n: int) -> list[JsonObject]:
        opening = {"role": "assistant", "content": ""}
        return [self.write_event(_make_piece(index, opening)) for index in range(n)]

    def write_piece(self, chunk: Chunk, answer: Answer) -> JsonObject:
        del answer
        tokens = self._describe_tokens(chunk.logprobs)
        return self.write_event(_make_piece(chunk.index, {"content": chunk.text}, logprobs=tokens))

    def write_end(self, answer: Answer) -> JsonObject:
        return _make_piece(answer.index, {}, finish_reason=answer.finish_reason)

    def _describe_tokens(self, logprobs: Sequence[Logprob]) -> JsonObject | None:
        return {"content": [_token(one) for one in logprobs], "refusal": None} if self.logprobs else None


def _make_piece(
    index: int, delta: JsonObject, *, logprobs: JsonObject | None = None, finish_reason: str | None = None
) -> JsonObject:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _token(one: Logprob) -> JsonObject:
    return _bare(one) | {"top_logprobs": [_bare(other) for other in one.top]}


def _bare(one: Logprob) -> JsonObject:
    return {"token": one.token, "logprob": one.logprob, "bytes": list(one.token.encode("utf-8", "replace"))}
