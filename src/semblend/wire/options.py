"""The options that all endpoints share, as fields of a body: how to draw the answer and how to reuse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import (
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from semblend.arrange import OrderLimits
from semblend.arrange.marks import LARGEST_SCORE, LONGEST_GROUP, MAX_MARKED, PassageMark
from semblend.arrange.order_limits import FREE
from semblend.errors import InputError
from semblend.quality import QUALITY_HINT, QUALITY_MODES, parse_quality, read_base
from semblend.wire.body import ClosedBody, InOrder, Name, StrictBody, TokenId, Within, refuse, show
from semblend.wire.errors import ApiError
from semblend.wire.sampling import MIN_PENALTY, Sampling

MAX_STOPS = 16
LONGEST_STOP = 256
MAX_STOP_TOKENS = 1024
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
MAX_EDIT_FIELDS = 16
MAX_TOKENS = 1 << 20
_SEEDS = 2**63 - 1

PromptInput = str | tuple[int, ...]
"""A prompt as its text, or as its token ids."""
Count = Annotated[int, Within(1, MAX_TOKENS)]
TopLogprobs = Annotated[int, Within(0, MAX_TOP_LOGPROBS)]
StopText = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
StopTexts = Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)]


class Lacking:
    """An option that this engine does not have: only values that ask for nothing are taken.

    An option that is silently dropped would make an answer look like something that it is not.
    """

    def __init__(self, *neutral: Any) -> None:
        self._neutral = neutral

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        del schema, handler
        return {"enum": [None, *self._neutral], "description": "Not supported: only values that ask for nothing."}

    def check(self, value: Any, info: ValidationInfo) -> Any:
        if not self.asks_nothing(value):
            raise refuse(f"is not supported (got {show(value)})", f"leave {info.field_name} out")
        return value

    def asks_nothing(self, value: Any) -> bool:
        return value is None or any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in self._neutral
        )


class OptionsWeLack(StrictBody):
    """Options of other servers that this engine does not have."""

    tools: Annotated[Any, Lacking([])] = None
    functions: Annotated[Any, Lacking([])] = None
    tool_choice: Any = None
    function_call: Any = None
    response_format: Annotated[Any, Lacking({"type": "text"})] = None
    modalities: Annotated[Any, Lacking(["text"])] = None
    audio: Annotated[Any, Lacking()] = None
    prediction: Annotated[Any, Lacking()] = None
    web_search_options: Annotated[Any, Lacking()] = None
    reasoning_effort: Annotated[Any, Lacking("none")] = None
    min_tokens: Annotated[Any, Lacking(0)] = None
    min_new_tokens: Annotated[Any, Lacking(0)] = None
    suffix: Annotated[Any, Lacking("")] = None
    echo: Annotated[Any, Lacking(False)] = None
    chat_template: Annotated[Any, Lacking()] = None
    guided_json: Annotated[Any, Lacking()] = None
    guided_regex: Annotated[Any, Lacking()] = None
    guided_choice: Annotated[Any, Lacking()] = None
    guided_grammar: Annotated[Any, Lacking()] = None
    structured_outputs: Annotated[Any, Lacking()] = None
    regex: Annotated[Any, Lacking()] = None
    json_schema: Annotated[Any, Lacking()] = None
    ebnf: Annotated[Any, Lacking()] = None
    lora_path: Annotated[Any, Lacking()] = None
    image_data: Annotated[Any, Lacking()] = None
    input_embeds: Annotated[Any, Lacking()] = None
    prompt_embeds: Annotated[Any, Lacking()] = None

    @model_validator(mode="after")
    def _check_choice(self) -> Self:
        for name in ("tool_choice", "function_call"):
            value = getattr(self, name)
            # without tools there is nothing to choose
            if (self.tools is not None or self.functions is not None) and not Lacking("none", "auto").asks_nothing(
                value
            ):
                raise refuse(f"is not supported (got {show(value)})", f"leave {name} out", name=name)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseOptions:
    """What one request asks of reuse: a quality mode of its own, or none at all. ``salt`` narrows its namespace.

    ``keep`` bounds how far marked passages may move. ``base``: the request that it was edited from.
    """

    quality: str | None = None
    reuse: bool = True
    salt: str = ""
    keep: OrderLimits = FREE
    base: str = ""


# -- passages that commute: nothing moves without a mark, and nothing moves out of its message

Score = Annotated[float, Within(0, LARGEST_SCORE)]
Places = Annotated[int, Within(0, MAX_MARKED)]


class PartMark(ClosedBody):
    """The mark of a part: it may change places with the other parts of its group in the same message."""

    commutes: Annotated[str, Field(min_length=1, max_length=LONGEST_GROUP)]
    score: Score | None = None

    def to_mark(self) -> PassageMark:
        return PassageMark(self.commutes, self.score)


class KeepBody(ClosedBody):
    """How far passages may move; see `semblend.arrange.OrderLimits`."""

    first: Places | None = None
    last: Places | None = None
    within: Places | None = None
    displaced: Annotated[float, Within(0, 1)] | None = None

    def to_keep(self) -> OrderLimits:
        return OrderLimits(self.first or 0, self.last or 0, self.within, self.displaced)


@contextmanager
def refused_as(param: str) -> Iterator[None]:
    """A mistake in marks, as an `ApiError` 400 that names the field."""
    try:
        yield
    except InputError as error:
        raise ApiError(400, error.message, hint=error.hint or "", param=param) from None


class SemblendBody(ClosedBody):
    """Our own options of a request. ``passages`` commute and stand in front of the last user message.

    ``edit`` names the request that this one was edited from; a declaration that is wrong costs nothing.
    """

    quality: float | str | None = Field(
        default=None,
        json_schema_extra={"anyOf": [{"enum": [*QUALITY_MODES, "", None]}, {"type": "number", "minimum": 0}]},
    )
    reuse: bool | None = None
    forget: bool | None = None
    edit: dict[str, Any] | None = Field(default=None, max_length=MAX_EDIT_FIELDS)
    keep: KeepBody | None = None
    passages: Annotated[list[str], Field(max_length=MAX_MARKED, fail_fast=True)] | None = None
    scores: Annotated[list[Score], Field(max_length=MAX_MARKED, fail_fast=True)] | None = None

    @field_validator("quality", mode="before")
    @classmethod
    def _check_quality(cls, quality: Any) -> str | None:
        if quality is None or quality == "":
            return None
        try:
            return parse_quality(quality)
        except InputError as error:
            raise refuse(f"is {show(quality)}", error.hint or QUALITY_HINT) from None

    @property
    def own_quality(self) -> str | None:
        """As `semblend.quality` spells it; exact where KV that was computed with other text in view has to stay out."""
        if self.forget:
            return "exact"
        return None if self.quality is None else str(self.quality)


class EndpointBody(OptionsWeLack):
    """What every endpoint takes."""

    stream: bool | None = None
    semblend: SemblendBody | None = None
    cache_salt: Name | None = None
    user: Name | None = None

    @property
    def reuse(self) -> ReuseOptions:
        ours = self.semblend or SemblendBody()
        return ReuseOptions(
            quality=ours.own_quality,
            reuse=ours.reuse is not False,
            salt=self.cache_salt or "",
            keep=(ours.keep or KeepBody()).to_keep(),
            base=read_base(ours.edit),
        )

    def refuse_passages(self) -> None:
        """Raise `ApiError` 400 where passages are listed: without messages there is no place for them."""
        for name in ("passages", "scores", "keep"):
            if self.semblend is not None and getattr(self.semblend, name) is not None:
                hint = "ask /v1/chat/completions, or arrange the prompt with semblend.arrange"
                raise ApiError(400, f"semblend.{name} is for chats only", hint=hint, param=f"semblend.{name}")


class SamplingBody(OptionsWeLack):
    """The sampling fields that all endpoints name alike; the context of the validation holds ``most_n``."""

    n: int | None = Field(default=None, json_schema_extra={"minimum": 1})
    best_of: int | None = Field(default=None, json_schema_extra={"minimum": 1})
    temperature: Annotated[float, Within(0, 2)] | None = None
    top_p: Annotated[float, Within(0, 1)] | None = Field(default=None, json_schema_extra={"exclusiveMinimum": 0})
    top_k: Annotated[int, Within(-1, MAX_TOKENS)] | None = None
    min_p: Annotated[float, Within(0, 1)] | None = None
    repetition_penalty: Annotated[float, Within(MIN_PENALTY, 2)] | None = None
    frequency_penalty: Annotated[float, Within(-2, 2)] | None = None
    presence_penalty: Annotated[float, Within(-2, 2)] | None = None
    logit_bias: dict[str, Annotated[float, Within(-100, 100)]] | None = Field(
        default=None, max_length=MAX_BIASES, json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,10}$"}}
    )
    seed: Annotated[int, Within(-_SEEDS - 1, _SEEDS)] | None = None
    stop: Annotated[StopText | StopTexts, InOrder()] | None = None
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=MAX_STOP_TOKENS, fail_fast=True)
    ignore_eos: bool | None = None

    @field_validator("n", "best_of")
    @classmethod
    def _check_n(cls, n: int | None, info: ValidationInfo) -> int | None:
        most: int = info.context["most_n"] if info.context else 1
        if n is not None and not 1 <= n <= most:
            raise refuse(f"is {show(n)}, outside [1, {most}]", "send several requests")
        return n

    @field_validator("top_p")
    @classmethod
    def _check_top_p(cls, top_p: float | None) -> float | None:
        if top_p == 0:
            problem = "is 0, which leaves no token to draw: temperature 0 takes the likeliest token"
            raise refuse(problem, "leave it out for 1.0")
        return top_p

    @field_validator("logit_bias")
    @classmethod
    def _check_biases(cls, biases: dict[str, float] | None) -> dict[str, float] | None:
        for name in biases or ():  # isdecimal knows digits of every script; a token id has ours
            if not (name.isascii() and name.isdecimal() and len(name) <= 10 and int(name) < 2**31):
                raise refuse(f"names the token {show(name)}", "keys are token ids in decimal digits")
        return biases

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of not in (None, self.n or 1):
            problem = f"is {self.best_of} while n is {self.n or 1}"
            raise refuse(problem, "leave best_of out", name="best_of")
        return self

    def make_sampling(self, max_tokens: int | None, logprobs: int | None) -> Sampling:
        """How the tokens are drawn; what the body leaves out has OpenAI's defaults."""
        biases = tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items())
        return Sampling(
            max_tokens=max_tokens,
            logprobs=logprobs,
            top_k=max(self.top_k or 0, 0),
            logit_bias=biases,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            **{"temperature": 1.0} | dict(self._list_given()),
        )

    def _list_given(self) -> Iterator[tuple[str, Any]]:
        for name in _SAME_NAMES:
            if (value := getattr(self, name)) is not None:
                yield name, value


_SAME_NAMES = (
    "temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed",
    "ignore_eos", "n",
)  # fmt: skip


class StreamOptions(StrictBody):
    """OpenAI's ``stream_options``."""

    include_usage: bool | None = None


class OpenAiBody(EndpointBody, SamplingBody):
    """What chat and completions have in common."""

    model: Name | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refuse("is set, but stream is not", "send stream: true, or leave it out", name="stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)
