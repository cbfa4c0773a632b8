"""What all requests of a server share, and the checks that a request passes before it takes a place in line."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.requests import Request

from semblend.arrange import Arranger
from semblend.engine.server.config import ServeConfig
from semblend.engine.server.dashboard import LiveBoard
from semblend.engine.server.limits import Gate, compute_body_limit, refuse_foreign_page, refuse_long_texts
from semblend.engine.server.serving import ServingEngine
from semblend.engine.server.tenants import Identity, bearer
from semblend.engine.server.tokenizing import TokenizerPool
from semblend.wire.arranging import PromptArranger
from semblend.wire.caller_headers import find_repeated
from semblend.wire.chat import ChatRequest
from semblend.wire.completions import CompletionRequest
from semblend.wire.errors import ApiError
from semblend.wire.generate import GenerateRequest
from semblend.wire.json_limits import MOST_CONTAINERS, JsonLimits

TENANT = "semblend.tenant"
"""Where a request's scope says whose it is, once that is known."""
TEMPLATE_CHARS = 32  # <|im_start|>user and <|im_end|>, about
ParsedBody = ChatRequest | CompletionRequest | GenerateRequest


@dataclass(slots=True)
class Service:
    """What all requests share."""

    engine: ServingEngine
    config: ServeConfig
    gate: Gate
    arranging: PromptArranger = field(default_factory=lambda: PromptArranger(Arranger()))
    board: LiveBoard = field(default_factory=LiveBoard)
    tokenizing: TokenizerPool = field(init=False)

    def __post_init__(self) -> None:
        self.tokenizing = TokenizerPool(self.config.max_tokenizing_chars, retry_after_s=self.config.retry_after_s)

    @property
    def body_limit(self) -> int:
        """Most bytes of a body."""
        limit = self.config.max_body_bytes
        return compute_body_limit(self._context_chars, self.config.max_list_chars) if limit is None else limit

    @property
    def json_limits(self) -> JsonLimits:
        """Most values of a body: the token ids that one request may hold, and what stands beside them."""
        return JsonLimits(values=max(self.engine.max_context, self.config.max_list_tokens) + MOST_CONTAINERS)

    @property
    def _context_chars(self) -> int:
        return self.engine.max_context * self.engine.longest_token_chars

    def identify(self, request: Request) -> Identity:
        headers = request.headers
        if repeated := find_repeated(headers.raw):
            raise repeated
        refuse_foreign_page(headers.get("host", ""), headers.get("origin"), self.config)
        identity = self.config.tenants.identify(
            bearer(headers.get("authorization"), headers.get("x-api-key")),
            address=request.client.host if request.client else "",
            claimed=headers.get("x-tenant-id"),
        )
        request.scope[TENANT] = identity.tenant
        return identity

    def check_length(self, asked: ParsedBody) -> None:
        """Refuse text that is too long for the context, before it takes a place in line or reaches the tokenizer."""
        lengths, list_chars = self.count_chars(asked), self.config.max_list_chars
        refuse_long_texts(lengths, self._context_chars, list_chars, self.name_text(asked))
        self._check_id_counts(asked)

    def count_chars(self, asked: ParsedBody) -> list[int]:
        """The characters of each text in a request; messages are one text."""
        if isinstance(asked, ChatRequest):
            return [sum(len(message["content"]) for message in asked.messages)]
        prompts = asked.prompts if isinstance(asked, CompletionRequest) else (asked.prompt,)
        return [len(prompt) for prompt in prompts if isinstance(prompt, str)]

    def count_template_chars(self, asked: ParsedBody) -> int:
        """About how many characters a chat template adds: a thousand empty messages are work, too."""
        return TEMPLATE_CHARS * len(asked.messages) if isinstance(asked, ChatRequest) else 0

    def name_text(self, asked: ParsedBody) -> str:
        """The field that holds a request's text."""
        return {ChatRequest: "messages", CompletionRequest: "prompt"}.get(type(asked), "text")

    def _check_id_counts(self, asked: ParsedBody) -> None:
        prompts = asked.prompts if isinstance(asked, CompletionRequest) else (getattr(asked, "prompt", ""),)
        longest = max((len(prompt) for prompt in prompts if not isinstance(prompt, str)), default=0)
        if longest >= self.engine.max_context:
            raise ApiError(
                400,
                f"{longest} tokens of prompt are more than the context of {self.engine.max_context}",
                hint="send a shorter prompt",
                param="prompt" if isinstance(asked, CompletionRequest) else "input_ids",
                code="context_length_exceeded",
            )

    def check_token_ids(self, asked: ParsedBody) -> None:
        """Refuse token ids outside the vocabulary, before any prompt of the request takes a place in line."""
        if isinstance(asked, ChatRequest):
            return
        param, prompts = (
            ("prompt", asked.prompts) if isinstance(asked, CompletionRequest) else ("input_ids", (asked.prompt,))
        )
        vocab = self.engine.vocab
        highest = max((max(prompt) for prompt in prompts if not isinstance(prompt, str)), default=0)
        if highest >= vocab:
            raise ApiError(
                400, f"token id {highest} is not in the vocabulary", hint=f"ids are below {vocab}", param=param
            )

    def check_model(self, model: str) -> None:
        names = (self.engine.model, *self.config.aliases)
        if model and model not in names:
            raise ApiError(
                404,
                f"no model {model[:200]!r} here",
                hint="ask for " + " or ".join(repr(name) for name in names),
                param="model",
                code="model_not_found",
            )
