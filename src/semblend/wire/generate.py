"""/generate: SGLang's native shape, so that what speaks to an SGLang server speaks to ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from semblend.confirm.fields import JsonObject
from semblend.wire.answer import Answer, Chunk, Head, Spent
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

DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """``prompt`` is a text, or token ids. ``rid`` is the caller's name for the request; it is only handed back."""

    prompt: str | tuple[int, ...]
    sampling: Sampling
    reuse: ReuseOptions
    stream: bool = False
    rid: str = ""
    model: str = ""
    include_usage: bool = False

    @classmethod
    def parse(cls, body: Any, *, most_n: int) -> GenerateRequest:
        """
        >>> body = {"text": "Hi", "sampling_params": {"max_new_tokens": 4}}
        >>> GenerateRequest.parse(body, most_n=1).sampling.max_tokens
        4
        """
        fields = Fields(body)
        prompt = _prompt(fields)
        refuse_absent_options(fields)
        params = fields.child("sampling_params") or Fields({}, "sampling_params.")
        refuse_absent_options(params)
        logprobs = None
        if fields.flag("return_logprob"):
            logprobs = fields.integer("top_logprobs_num", 0, 0, MOST_TOP_LOGPROBS)
        return cls(
            prompt=prompt,
            sampling=parse_sampling(
                params,
                max_tokens=params.integer("max_new_tokens", DEFAULT_MAX_NEW_TOKENS, 1, MOST_TOKENS),
                logprobs=logprobs,
                most_n=most_n,
            ),
            reuse=parse_reuse(fields),
            stream=fields.flag("stream"),
            rid=fields.text("rid", longest=256),
        )


def _prompt(fields: Fields) -> str | tuple[int, ...]:
    if fields.has("text") == fields.has("input_ids"):
        fields.refuse("text", "and input_ids: exactly one of the two is needed", "send text, or input_ids")
    name = "text" if fields.has("text") else "input_ids"
    given = fields.raw(name)
    if isinstance(given, list) and given and isinstance(given[0], (str, list)):
        fields.refuse(name, f"holds a batch of {len(given)}", "send one prompt a request; they are batched here")
    if not given:
        fields.refuse(name, "is empty", "a prompt needs at least one token")
    return fields.text("text") if name == "text" else fields.token_ids("input_ids")


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
