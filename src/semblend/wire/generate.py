"""/generate: SGLang's native shape, so that what speaks to an SGLang server speaks to ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from semblend.confirm.receipt import JsonObject
from semblend.wire.answer import Answer, Chunk, Head, Spent
from semblend.wire.body import Name, TokenId, refuse
from semblend.wire.options import MAX_TOKENS, Count, EndpointBody, PromptInput, ReuseOptions, SamplingBody, TopLogprobs
from semblend.wire.sampling import Sampling

DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's."""


class SamplingParams(SamplingBody):
    """SGLang's ``sampling_params``."""

    max_new_tokens: Count | None = None


class GenerateBody(EndpointBody):
    """The body of /generate: exactly one of ``text`` and ``input_ids``."""

    text: Annotated[str, Field(min_length=1)] | None = None
    input_ids: Annotated[tuple[TokenId, ...], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)] | None = None
    sampling_params: SamplingParams | None = None
    return_logprob: bool | None = None
    top_logprobs_num: TopLogprobs | None = None
    rid: Name | None = None

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            raise refuse("and input_ids: exactly one of the two is needed", "send text, or input_ids", name="text")
        return self


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """``prompt`` is a text, or token ids. ``rid`` is the caller's name for the request; it is only handed back."""

    text_field: ClassVar[str] = "text"
    ids_field: ClassVar[str] = "input_ids"
    prompt: PromptInput
    sampling: Sampling
    reuse: ReuseOptions
    stream: bool = False
    rid: str = ""
    model: str = ""

    @property
    def prompts(self) -> tuple[PromptInput, ...]:
        return (self.prompt,)

    @classmethod
    def parse(cls, body: str | bytes | bytearray, *, most_n: int) -> GenerateRequest:
        """
        >>> body = '{"text": "Hi", "sampling_params": {"max_new_tokens": 4}}'
        >>> GenerateRequest.parse(body, most_n=1).sampling.max_tokens
        4
        """
        read = GenerateBody.read(body, most_n=most_n)
        read.refuse_passages()
        params = read.sampling_params or SamplingParams()
        logprobs = (read.top_logprobs_num or 0) if read.return_logprob else None
        return cls(
            prompt=read.text or read.input_ids or "",
            sampling=params.make_sampling(params.max_new_tokens or DEFAULT_MAX_NEW_TOKENS, logprobs),
            reuse=read.reuse,
            stream=bool(read.stream),
            rid=read.rid or "",
        )


@dataclass(frozen=True, slots=True)
class GenerateReply:
    """SGLang's answer: in a stream, each event repeats the whole text so far.

    ``operator`` says that whoever asked may see donors and places.
    """

    head: Head
    prompt_tokens: int
    logprobs: bool = False
    operator: bool = False

    def write_whole(self, answers: Sequence[Answer], spent: Spent) -> Any:
        bodies = [self._body(answer, spent) for answer in answers]
        return bodies[0] if len(bodies) == 1 else bodies

    def write_opening(self, n: int) -> list[JsonObject]:
        del n
        return []

    def write_piece(self, chunk: Chunk, answer: Answer) -> JsonObject:
        spent = Spent(self.prompt_tokens, len(answer.token_ids), answer.receipt, operator=self.operator)
        return self._body(answer, spent, chunk.index)

    def write_closing(self, answers: Sequence[Answer], spent: Spent) -> list[JsonObject]:
        return [self._body(answer, spent, answer.index) for answer in answers]

    def _body(self, answer: Answer, spent: Spent, index: int | None = None) -> JsonObject:
        receipt = spent.receipt
        meta: JsonObject = {
            "id": self.head.id,
            "finish_reason": _finish(answer),
            "prompt_tokens": spent.prompt_tokens,
            "completion_tokens": len(answer.token_ids),
            "cached_tokens": spent.cached_tokens,
            "cached_tokens_details": {
                "exact": receipt.exact_tokens if receipt else 0,
                "fuzzy": receipt.reused_tokens if receipt else 0,
            },
            "e2e_latency": spent.seconds,
        }
        if self.logprobs:
            meta["output_token_logprobs"] = [[one.logprob, one.token_id, one.token] for one in answer.logprobs]
            meta["output_top_logprobs"] = [
                [[other.logprob, other.token_id, other.token] for other in one.top] for one in answer.logprobs
            ]
        body: JsonObject = {"text": answer.text, "output_ids": list(answer.token_ids), "meta_info": meta}
        if receipt is not None:
            body["semblend"] = spent.semblend()
        return body if index is None else body | {"index": index}


def _finish(answer: Answer) -> JsonObject | None:
    if answer.finish_reason is None:
        return None
    if answer.finish_reason == "length":
        return {"type": "length", "length": len(answer.token_ids)}
    return {"type": answer.finish_reason, "matched": answer.matched}
