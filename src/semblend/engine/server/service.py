"""What all requests of a server share, and what it refuses before a request takes a place in line: texts that cannot
fit, pages that are not ours, models and tokens that are not here."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from starlette.requests import Request

from semblend.arrange import ArrangedGroup, Arrangement, Arranger, arrange_parts
from semblend.engine.server.admission import AdmissionQueue, TokenizerPool
from semblend.engine.server.config import ServeConfig
from semblend.engine.server.dashboard import LiveBoard
from semblend.engine.server.serving import ServingEngine
from semblend.engine.server.tenants import Identity, bearer
from semblend.prompt import Namespace
from semblend.wire.callers import find_repeated, is_loopback
from semblend.wire.chat import ChatRequest, join_parts
from semblend.wire.completions import CompletionRequest
from semblend.wire.errors import ApiError
from semblend.wire.generate import GenerateRequest
from semblend.wire.json_limits import MAX_CONTAINERS, JsonLimits

TENANT = "semblend.tenant"
"""Where a request's scope says whose it is, once that is known."""
ESCAPED_BYTES = 6
"""A character of text takes this much JSON at most (``\\u00e9``); those beyond the BMP, which take 12, are never alone
in the longest token."""
ROOM_BESIDE_TEXT = 64 * 1024
MAX_BODY_BYTES = 4 * 1024**2
"""However long the context: parsing so much takes up to 25 ms (ARM Neoverse-N1), in which nobody else is served."""
MAX_FOLLOWED = 200_000
"""Passages of requests whose donors are followed; older ones are forgotten by the arranger's own bound."""
ParsedBody = ChatRequest | CompletionRequest | GenerateRequest


# -- passages that commute: put in an order that earlier requests had, before they are tokenized


@dataclass(frozen=True, slots=True)
class ArrangedChat:
    """A chat in its new order. ``sent`` goes to `PromptArranger.record` once the engine has the request."""

    asked: ChatRequest
    groups: tuple[ArrangedGroup, ...] = ()
    sent: tuple[Arrangement, ...] = ()


@dataclass(slots=True)
class PromptArranger:
    """The arranger of a server, and which donor came from which order. Safe for threads."""

    arranger: Arranger
    _donors: OrderedDict[str, tuple[Arrangement, ...]] = field(default_factory=OrderedDict)
    _followed: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def arrange(self, asked: ChatRequest, namespace: Namespace) -> ArrangedChat:
        """The chat with its marked passages in place; as it is where it has no marks or wants no reuse."""
        if not asked.groups or not asked.reuse.reuse:
            return ArrangedChat(asked)
        known = dict(asked.parts)
        texts = [
            (message["role"], known.get(number, (message["content"],))) for number, message in enumerate(asked.messages)
        ]
        found = arrange_parts(self.arranger, texts, asked.groups, namespace=namespace, keep=asked.reuse.keep)
        messages = list(asked.messages)
        for number, parts in found.parts.items():
            messages[number] = messages[number] | {"content": join_parts(parts)}
        arranged = replace(asked, messages=tuple(messages), parts=tuple(found.parts.items()))
        return ArrangedChat(arranged, found.groups, found.sent)

    def record(self, request_id: str, sent: Sequence[Arrangement]) -> None:
        """The engine has the request in this order."""
        for arrangement in sent:
            self.arranger.record(arrangement)
        if sent:
            with self._lock:
                self._donors[request_id] = tuple(sent)
                self._followed += _count_passages(sent)
                while self._followed > MAX_FOLLOWED:
                    self._followed -= _count_passages(self._donors.popitem(last=False)[1])

    def forget(self, donor_id: str) -> None:
        """The engine has evicted a donor: the order in which it was sent is no longer worth meeting."""
        with self._lock:
            sent = self._donors.pop(donor_id.removesuffix("-0"), ())  # the first of several answers
            self._followed -= _count_passages(sent)
        for arrangement in sent:
            self.arranger.forget_sent(arrangement)

    def clear(self) -> None:
        """The engine has forgotten everything."""
        with self._lock:
            self._donors.clear()
            self._followed = 0
        self.arranger.clear()


def _count_passages(sent: Sequence[Arrangement]) -> int:
    return sum(len(arrangement.keys) for arrangement in sent)


@dataclass(slots=True)
class Service:
    """What all requests share."""

    engine: ServingEngine
    config: ServeConfig
    admission: AdmissionQueue
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
        return JsonLimits(values=max(self.engine.max_context, self.config.max_list_tokens) + MAX_CONTAINERS)

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

    def check(self, asked: ParsedBody) -> None:
        """Refuse another's model, text and ids that cannot fit, and ids outside the vocabulary.

        Before any prompt of the request takes a place in line or reaches the tokenizer.
        """
        self.check_model(asked.model)
        refuse_long_texts(self.count_chars(asked), self._context_chars, self.config.max_list_chars, asked.text_field)
        ids = [prompt for prompt in asked.prompts if not isinstance(prompt, str)]
        longest, highest = max(map(len, ids), default=0), max(map(max, ids), default=0)
        if longest >= self.engine.max_context:
            raise ApiError(
                400,
                f"{longest} tokens of prompt are more than the context of {self.engine.max_context}",
                hint="send a shorter prompt",
                param=asked.ids_field,
                code="context_length_exceeded",
            )
        if highest >= self.engine.vocab:
            hint = f"ids are below {self.engine.vocab}"
            raise ApiError(400, f"token id {highest} is not in the vocabulary", hint=hint, param=asked.ids_field)

    def count_chars(self, asked: ParsedBody) -> list[int]:
        """The characters of each text in a request; messages are one text."""
        if isinstance(asked, ChatRequest):
            texts = ((message["content"], str(message.get("tool_calls", ""))) for message in asked.messages)
            return [sum(len(content) + len(calls) for content, calls in texts)]
        return [len(prompt) for prompt in asked.prompts if isinstance(prompt, str)]

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


def refuse_long_texts(lengths: Sequence[int], context_chars: int, list_chars: int, param: str) -> None:
    """400 for texts, by their ``lengths`` in characters, that cannot fit the context however they are tokenized.

    ``context_chars`` is the context in tokens times the characters of the longest token; ``list_chars`` bounds several
    texts together. A tokenizer takes seconds and gigabytes for a text of 16 MB: it must not see one in vain.

    >>> refuse_long_texts([2001], 2000, 10_000, "text")
    Traceback (most recent call last):
    semblend.wire.errors.ApiError: text has 2001 characters, the context holds at most 2000 (hint: send a shorter text)
    """
    longest, total, most = max(lengths, default=0), sum(lengths), max(context_chars, list_chars)
    if longest > context_chars:
        problem, hint = f"has {longest} characters, the context holds at most {context_chars}", "send a shorter text"
    elif len(lengths) > 1 and total > most:
        problem, hint = f"has {total} characters in {len(lengths)} texts, more than {most}", "send several requests"
    else:
        return
    raise ApiError(400, f"{param} {problem}", hint=hint, param=param, code="context_length_exceeded")


def compute_body_limit(context_chars: int, list_chars: int, most_bytes: int = MAX_BODY_BYTES) -> int:
    """Most bytes of a body that can be valid: its text, each character escaped, and room for all else.

    >>> compute_body_limit(8192 * 81, 0), compute_body_limit(10**9, 0)
    (4046848, 4194304)
    """
    return min(ROOM_BESIDE_TEXT + ESCAPED_BYTES * max(context_chars, list_chars), most_bytes)


def read_digits(text: str, longest: int = 18) -> int | None:
    """A number in decimal digits, or None. Longer ones are not turned: that takes time, and Python refuses 4,301.

    >>> read_digits("42"), read_digits("-1"), read_digits("9" * 5000), read_digits("٤")
    (42, None, 999999999999999999, None)
    """
    if not (text.isascii() and text.isdecimal()):
        return None
    return int(text) if len(text) <= longest else 10**longest - 1


def refuse_foreign_page(host: str, origin: str | None, config: ServeConfig) -> None:
    """403 where a browser calls on behalf of a page that is not ours, or under a name that is not this machine's.

    Without this, any page that a person opens could read their donors or flush their cache.
    """
    if config.local_only and not is_loopback(_read_host(f"//{host}")):
        raise ApiError(403, f"this server does not answer to the name {host[:100]!r}", hint="call it as localhost")
    if origin is None or origin in config.origins or _read_part(origin, "netloc") == host:
        return
    raise ApiError(403, f"the page {origin[:100]!r} may not call this server", hint="add it to the allowed origins")


def _read_part(url: str, name: str) -> str | None:
    try:
        found: str | None = getattr(urlsplit(url), name)
    except ValueError:
        return None
    return found


def _read_host(url: str) -> str:
    return _read_part(url, "hostname") or ""
