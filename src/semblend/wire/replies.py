"""The shapes of answers, as models for /openapi.json. The answers themselves are written by the reply classes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from semblend.confirm.outcome import Outcome
from semblend.plan.reuse_plan import DeclineReason

Count = Annotated[int, Field(ge=0)]
Milliseconds = Annotated[float, Field(ge=0)]
FinishWord = Literal["stop", "length"]


class Shape(BaseModel):
    """An answer's object: all fields are there, and no other."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Shape):
    """A mistake; ``message`` holds the hint too."""

    message: Annotated[str, Field(min_length=1)]
    type: str
    param: str | None
    code: str | None
    hint: str


class ErrorBody(Shape):
    """What every answer with a status from 400 on has."""

    error: ErrorDetail


class ArrangedShape(Shape):
    """The order of the passages of one group: ``order[i]`` is the number, in the request, of the one at place i."""

    message: Count
    group: str
    order: list[Count]


class ReceiptShape(Shape):
    """What was reused; ``recomputed`` and ``donors`` are shown to an admin only.

    ``arranged`` is there where passages were marked.
    """

    outcome: Outcome
    mode: str | None
    exact_tokens: Count
    reused_tokens: Count
    recomputed_tokens: Count
    prefill_tokens: Count
    risk: float | None
    escalations: Count | None
    ttft_ms: Milliseconds | None
    reason: DeclineReason | None
    detail: str
    recomputed: list[tuple[Count, Count]] | None = None
    donors: list[str] = Field(default=[])
    arranged: list[ArrangedShape] = Field(default=[])


class CachedTokens(Shape):
    cached_tokens: Count


class Usage(Shape):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens


class BareToken(Shape):
    token: str
    logprob: Annotated[float, Field(le=1e-3)]
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


class ChatToken(BareToken):
    top_logprobs: list[BareToken]


class ChatLogprobs(Shape):
    content: list[ChatToken]
    refusal: None


class AssistantMessage(Shape):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Shape):
    index: Count
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord


class ChatCompletion(Shape):
    """OpenAI's ``chat.completion``."""

    id: str
    object: Literal["chat.completion"]
    created: Count
    model: str
    system_fingerprint: None
    choices: Annotated[list[ChatChoice], Field(min_length=1)]
    usage: Usage
    semblend: ReceiptShape | None


class TextLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[Count]


class TextChoice(Shape):
    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishWord


class TextCompletion(Shape):
    """OpenAI's ``text_completion``; ``semblend`` is a list where several prompts were sent."""

    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    system_fingerprint: None
    choices: Annotated[list[TextChoice], Field(min_length=1)]
    usage: Usage
    semblend: ReceiptShape | list[ReceiptShape | None] | None


class CacheDetails(Shape):
    exact: Count
    fuzzy: Count


class FinishedByLength(Shape):
    type: Literal["length"]
    length: Count


class FinishedByStop(Shape):
    type: Literal["stop"]
    matched: str | int | None


class MetaInfo(Shape):
    id: str
    finish_reason: FinishedByLength | FinishedByStop
    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count
    cached_tokens_details: CacheDetails
    e2e_latency: Annotated[float, Field(ge=0)]
    output_token_logprobs: list[tuple[float, int, str]] | None = None
    output_top_logprobs: list[list[tuple[float, int, str]]] | None = None


class Generated(Shape):
    """SGLang's answer."""

    text: str
    output_ids: list[Count]
    meta_info: MetaInfo
    semblend: ReceiptShape | None = None
