"""/v1/completions: the request as checked data, the answer as OpenAI writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from semblend.confirm.fields import JsonObject
from semblend.wire.answer import Answer, Chunk, Head, Logprob, Spent
from semblend.wire.chat import include_usage
from semblend.wire.fields import Fields
from semblend.wire.options import (
    MOST_TOKENS,
    MOST_TOP_LOGPROBS,
    ReuseOptions,
    parse_reuse,
    parse_sampling,
    refuse_absent_options,
)
from semblend.wire.sampling import Sampling

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for this endpoint."""
MOST_PROMPTS = 64
PromptInput = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Each of ``prompts`` is a text, or token ids; ``sampling.n`` answers are wanted to each."""

    model: str
    prompts: tuple[PromptInput, ...]
    sampling: Sampling
    reuse: ReuseOptions
    stream: bool = False
    include_usage: bool = False

    @property
    def prompt(self) -> PromptInput:
        """The only prompt, or the first."""
        return self.prompts[0]

    @classmethod
    def parse(cls, body: Any, *, most_n: int) -> CompletionRequest:
        """
        >>> CompletionRequest.parse({"prompt": [1, 2, 3]}, most_n=1).prompt
        (1, 2, 3)
        >>> CompletionRequest.parse({"prompt": ["a", "b"]}, most_n=1).prompts
        ('a', 'b')
        """
        fields = Fields(body)
        prompts = _prompts(fields)
        refuse_absent_options(fields)
        stream = fields.flag("stream")
        return cls(
            model=fields.text("model"),
            prompts=prompts,
            sampling=parse_sampling(
                fields,
                max_tokens=fields.integer("max_tokens", DEFAULT_MAX_TOKENS, 1, MOST_TOKENS),
                logprobs=fields.integer("logprobs", None, 0, MOST_TOP_LOGPROBS),
                most_n=most_n,
            ),
            reuse=parse_reuse(fields),
            stream=stream,
            include_usage=include_usage(fields, stream),
        )


def _prompts(fields: Fields) -> tuple[PromptInput, ...]:
    given = fields.raw("prompt")
    several = isinstance(given, list) and bool(given) and isinstance(given[0], (str, list))
    if several and len(given) > MOST_PROMPTS:
        fields.refuse("prompt", f"holds {len(given)} prompts, more than {MOST_PROMPTS}", "send several requests")
    return tuple(_prompt(fields, one) for one in (given if several else [given]))


def _prompt(fields: Fields, given: Any) -> PromptInput:
    if isinstance(given, str) and given:
        return fields.check_text("prompt", given)
    if not isinstance(given, list) or not given:
        fields.refuse("prompt", "is empty or not text", "send a non-empty string, a list of token ids, or several")
    return fields.token_ids("prompt", given)


@dataclass(frozen=True, slots=True)
class CompletionReply:
    """OpenAI's ``text_completion``."""

    head: Head
    logprobs: bool = False
    include_usage: bool = False

    def write_whole(self, answers: Sequence[Answer], spent: Spent) -> JsonObject:
        choices = [
            self._choice(answer.index, answer.text, self._logprobs(answer.logprobs, 0), answer.finish_reason)
            for answer in answers
        ]
        return self.head.write_body("text_completion", choices) | {"usage": spent.usage(), "semblend": spent.semblend()}

    def write_opening(self, n: int) -> list[JsonObject]:
        del n
        return []

    def write_piece(self, chunk: Chunk, answer: Answer) -> JsonObject:
        offset = len(answer.text) - len(chunk.text)
        return self._event(self._choice(chunk.index, chunk.text, self._logprobs(chunk.logprobs, offset), None))

    def write_closing(self, answers: Sequence[Answer], spent: Spent) -> list[JsonObject]:
        events = [self._event(self._choice(answer.index, "", None, answer.finish_reason)) for answer in answers]
        if self.include_usage:
            events.append(self.head.write_body("text_completion", []) | {"usage": spent.usage()})
        events[-1]["semblend"] = spent.semblend()
        return events

    def _event(self, choice: JsonObject) -> JsonObject:
        body = self.head.write_body("text_completion", [choice])
        return body | {"usage": None} if self.include_usage else body

    def _choice(self, index: int, text: str, logprobs: JsonObject | None, finish_reason: str | None) -> JsonObject:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, logprobs: Sequence[Logprob], offset: int) -> JsonObject | None:
        if not self.logprobs:
            return None
        offsets = []
        for one in logprobs:
            offsets.append(offset)
            offset += len(one.token)
        return {
            "tokens": [one.token for one in logprobs],
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": [{other.token: other.logprob for other in one.top} for one in logprobs],
            "text_offset": offsets,
        }
