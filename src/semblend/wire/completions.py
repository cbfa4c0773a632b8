"""/v1/completions: the request as checked data, the answer as OpenAI writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from semblend.confirm.receipt import JsonObject
from semblend.wire.answer import Answer, Chunk, Logprob, OpenAiReply
from semblend.wire.body import InOrder, TokenId
from semblend.wire.options import MAX_TOKENS, Count, OpenAiBody, PromptInput, ReuseOptions, TopLogprobs
from semblend.wire.sampling import Sampling

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for this endpoint."""
MAX_PROMPTS = 64

PromptText = Annotated[str, Field(min_length=1)]
PromptIds = Annotated[tuple[TokenId, ...], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)]
OnePrompt = Annotated[PromptText | PromptIds, InOrder()]
SeveralPrompts = Annotated[list[OnePrompt], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


class CompletionBody(OpenAiBody):
    """The body of /v1/completions."""

    prompt: Annotated[PromptText | PromptIds | SeveralPrompts, InOrder()]
    max_tokens: Count | None = None
    logprobs: TopLogprobs | None = None


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Each of ``prompts`` is a text, or token ids; ``sampling.n`` answers are wanted to each."""

    text_field: ClassVar[str] = "prompt"
    ids_field: ClassVar[str] = "prompt"
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
    def parse(cls, body: str | bytes | bytearray, *, most_n: int) -> CompletionRequest:
        """
        >>> CompletionRequest.parse('{"prompt": [1, 2, 3]}', most_n=1).prompt
        (1, 2, 3)
        >>> CompletionRequest.parse('{"prompt": ["a", "b"]}', most_n=1).prompts
        ('a', 'b')
        """
        read = CompletionBody.read(body, most_n=most_n)
        read.refuse_passages()
        return cls(
            model=read.model or "",
            prompts=tuple(read.prompt) if isinstance(read.prompt, list) else (read.prompt,),
            sampling=read.make_sampling(read.max_tokens or DEFAULT_MAX_TOKENS, read.logprobs),
            reuse=read.reuse,
            stream=bool(read.stream),
            include_usage=read.include_usage,
        )


class CompletionReply(OpenAiReply):
    """OpenAI's ``text_completion``."""

    whole_kind = event_kind = "text_completion"

    def write_choice(self, answer: Answer) -> JsonObject:
        return _make_choice(answer.index, answer.text, self._describe_tokens(answer.logprobs, 0), answer.finish_reason)

    def write_piece(self, chunk: Chunk, answer: Answer) -> JsonObject:
        tokens = self._describe_tokens(chunk.logprobs, len(answer.text) - len(chunk.text))
        return self.write_event(_make_choice(chunk.index, chunk.text, tokens, None))

    def write_end(self, answer: Answer) -> JsonObject:
        return _make_choice(answer.index, "", None, answer.finish_reason)

    def _describe_tokens(self, logprobs: Sequence[Logprob], offset: int) -> JsonObject | None:
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


def _make_choice(index: int, text: str, logprobs: JsonObject | None, finish_reason: str | None) -> JsonObject:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
