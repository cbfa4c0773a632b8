"""Servers that are asked: what is sent, what comes back, and the two APIs, OpenAI's and SGLang's own."""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

from sembench.files import find_bad_counts, read_count, read_float, read_text
from semblend.errors import InputError

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

# -- HTTP ------------------------------------------------------------------------------------------------------------
# One HTTP exchange with a serving engine, timed at the client.
#
# Times come from a clock that cannot jump (`time.perf_counter`). The first token is the first event that carries text
# or a token: an opening event with a role and nothing else is not an answer yet.

JsonObject = dict[str, Any]
CONNECT_S = 10.0
LONGEST_ERROR = 300
MOST_CONNECTIONS = 1024


class SseParser:
    """Cuts a byte stream into server-sent events; a chunk may end anywhere, even inside a character.

    >>> parser = SseParser()
    >>> parser.feed(b'data: {"a"'), parser.feed(b': 1}\\n\\ndata: [DO'), parser.feed(b'NE]\\n\\n')
    ([], ['{"a": 1}'], ['[DONE]'])
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._line = ""
        self._data: list[str] = []
        self._after_return = False

    @property
    def unfinished(self) -> bool:
        """Whether an event has started and not ended."""
        return bool(self._line or self._data)

    def feed(self, data: bytes) -> list[str]:
        """Take the next bytes and return the data of every event that they complete."""
        events: list[str] = []
        text = self._decoder.decode(data)
        if self._after_return and text.startswith("\n"):
            text = text[1:]
        if text:
            self._after_return = text.endswith("\r")
        *lines, self._line = (self._line + text.replace("\r\n", "\n").replace("\r", "\n")).split("\n")
        for line in lines:
            if line.startswith("data:"):
                self._data.append(line[5:].removeprefix(" "))
            elif not line and self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events


@dataclass(slots=True)
class Exchange:
    """What came back: every event as JSON with its arrival time, or one body, or an error.

    ``arrivals_ms`` are counted from the moment the request was handed to the socket.
    """

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    events: list[JsonObject] = field(default_factory=list)
    arrivals_ms: list[float] = field(default_factory=list)
    latency_ms: float = 0.0
    error: str | None = None
    connection_failed: bool = False


@asynccontextmanager
async def open_client(timeout_s: float, headers: Mapping[str, str] | None = None) -> AsyncIterator[ClientSession]:
    """Open a client that ignores proxies and other settings of the environment, since they would change the times."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=min(CONNECT_S, timeout_s), sock_read=timeout_s)
    pool = aiohttp.TCPConnector(limit=MOST_CONNECTIONS)
    async with aiohttp.ClientSession(timeout=timeout, connector=pool, headers=headers, trust_env=False) as made:
        yield made


def check_url(url: str, flag: str) -> str:
    """Check a URL and return it without a trailing slash, and without the ``/v1`` that OpenAI clients are given.

    >>> check_url("http://localhost:1/", "--base-url"), check_url("http://localhost:1/v1/", "--base-url")
    ('http://localhost:1', 'http://localhost:1')
    """
    if not url.startswith(("http://", "https://")):
        raise InputError(f"{flag} {url!r} is not a URL", hint="write it as http://host:port")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


async def post_stream(client: ClientSession, url: str, body: JsonObject, headers: Mapping[str, str]) -> Exchange:
    """Send a POST request and read the events as they arrive. An answer that is not a stream counts as one event."""
    import aiohttp

    exchange = Exchange()
    started = time.perf_counter()
    try:
        async with client.post(url, json=body, headers=headers, allow_redirects=False) as response:
            exchange.status = response.status
            exchange.headers = {name.lower(): value for name, value in response.headers.items()}
            if response.status >= 400:
                exchange.error = describe_error(response.status, await response.read())
            elif "text/event-stream" in exchange.headers.get("content-type", ""):
                await _read_events(response, exchange, started)
            else:
                _take_event(exchange, (await response.read()).decode("utf-8", "replace"), started)
    except TimeoutError as error:
        exchange.error = f"no answer in time ({type(error).__name__})"
        exchange.connection_failed = not exchange.events  # a server that hangs counts as gone
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, aiohttp.ClientResponseError) as error:
        exchange.error = f"the connection broke in the middle of the answer: {error}"[:LONGEST_ERROR]
        exchange.connection_failed = not exchange.events
    except (aiohttp.ClientError, OSError) as error:
        exchange.error = _describe_unreachable(url, error)
        exchange.connection_failed = True
    exchange.latency_ms = 1000 * (time.perf_counter() - started)
    return exchange


async def _read_events(response: ClientResponse, exchange: Exchange, started: float) -> None:
    parser, done = SseParser(), False
    async for data in response.content.iter_any():
        for event in parser.feed(data):
            done = done or event.strip() == "[DONE]"
            if not done:
                _take_event(exchange, event, started)
    if exchange.error is None and (parser.unfinished or not done):
        exchange.error = "the stream was cut: it ended without [DONE]"


def _take_event(exchange: Exchange, text: str, started: float) -> None:
    arrived = 1000 * (time.perf_counter() - started)
    try:
        event = json.loads(text)
    except ValueError:
        exchange.error = exchange.error or f"an event is not JSON: {text[:80]!r}"
        return
    if not isinstance(event, dict):
        exchange.error = exchange.error or f"an event is not an object: {text[:80]!r}"
        return
    if event.get("error"):
        exchange.error = exchange.error or describe_error(exchange.status, text.encode())
    exchange.events.append(event)
    exchange.arrivals_ms.append(arrived)


def describe_error(status: int, body: bytes) -> str:
    """Describe an error answer in one line, with its own message where it has one.

    >>> describe_error(404, b'{"error": {"message": "no model x here"}}')
    'HTTP 404: no model x here'
    """
    text = body.decode("utf-8", "replace")
    try:
        said: Any = json.loads(text)
    except ValueError:
        said = text
    if isinstance(said, dict):
        said = said.get("error") or said.get("detail") or said.get("message") or text
    if isinstance(said, dict):
        said = said.get("message") or text
    return f"HTTP {status}: {' '.join(str(said).split())}"[:LONGEST_ERROR]


def _describe_unreachable(url: str, error: Exception) -> str:
    return f"cannot reach {url}: {str(error) or type(error).__name__}"[:LONGEST_ERROR]


async def get_json(client: ClientSession, url: str) -> tuple[Any, str | None]:
    """Return the JSON body of a URL, or None and what went wrong."""
    text, error = await get_text(client, url)
    if text is None:
        return None, error
    try:
        return json.loads(text), None
    except ValueError:
        return None, f"{url} answers with something that is not JSON"


async def get_text(client: ClientSession, url: str, method: str = "GET") -> tuple[str | None, str | None]:
    """Return the body of a URL as text, or None and what went wrong."""
    import aiohttp

    try:
        async with client.request(method, url, allow_redirects=False) as response:
            body = await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return None, _describe_unreachable(url, error)
    if response.status >= 400:
        return None, describe_error(response.status, body)
    return body.decode("utf-8", "replace"), None


async def post_empty(client: ClientSession, urls: Sequence[str]) -> str | None:
    """Send a POST request without a body to every URL; this flushes caches. Return None, or what went wrong."""
    for url in urls:
        _, error = await get_text(client, url, "POST")
        if error is not None:
            return error if url in error else f"{url}: {error}"
    return None


# -- calls and answers -----------------------------------------------------------------------------------------------
# The types between the live loop and a server: a call, an answer, a backend.

ROUTE_HEADERS = ("x-semantic-route", "x-gateway-route", "x-route")
SEMANTIC_WORDS = ("semantic_placement", "semantic")
IMPOSSIBLE_LOGPROB = -100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCall:
    """One prompt to send. ``salt`` gives it a cache of its own on servers that know cache salts.

    ``messages`` and ``tools`` are the same prompt as a logged chat; APIs for chat send them instead of the text.
    """

    text: str
    max_tokens: int
    request_id: str
    tenant: str = ""
    template: str = ""
    salt: str = ""
    top_logprobs: int | None = None
    reuse: bool = True
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Any] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What a router reports about its choice, in headers. It says where a request ran, never what it reused."""

    header: str | None = None
    endpoint_id: str | None = None
    outcome: str | None = None
    semantic_score: float | None = None
    total_score: float | None = None
    reason: str | None = None
    worker_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAnswer:
    """A server's answer, in one shape for all servers. A field is None where the server did not report it.

    ``cached_tokens`` is the total that usage reports. ``cached_exact`` and ``cached_semantic`` are its parts, where the
    server splits it. ``receipt`` is the ``semblend`` object as it came. ``ids`` are all names that the request had.
    ``malformed`` says which counts were none: NaN, a negative number, a text.
    """

    text: str = ""
    ttft_ms: float | None = None
    latency_ms: float | None = None
    inter_token_ms: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    token_ids: tuple[int, ...] = ()
    tokens: tuple[str, ...] = ()
    token_logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[Mapping[str, float], ...] = ()
    finish_reason: str | None = None
    receipt: JsonObject | None = None
    cached_tokens: int | None = None
    cached_exact: int | None = None
    cached_semantic: int | None = None
    engine_ttft_ms: float | None = None
    queue_time_ms: float | None = None
    ids: tuple[str, ...] = ()
    route: Route = field(default_factory=Route)
    malformed: tuple[str, ...] = ()
    error: str | None = None
    connection_failed: bool = False

    @property
    def output_units(self) -> Sequence[object]:
        """The units that divergence is measured on: token ids, else token texts, else words."""
        return self.token_ids or self.tokens or tuple(self.text.split())


class ServerBackend(Protocol):
    """A kind of server."""

    name: str

    async def ask(self, call: PromptCall, *, donor: bool = False) -> ServerAnswer:
        """Send a prompt and return the answer. A ``donor`` goes to the server where donors are primed."""

    async def flush(self) -> str | None:
        """Empty every cache. Return None, or what went wrong."""

    async def list_models(self) -> tuple[Sequence[str], str | None]:
        """Return the names of the models that the server has, and what went wrong."""


def add_cache_fields(body: JsonObject, call: PromptCall) -> JsonObject:
    """Add the cache salt and "do not reuse" to a request body; both APIs use the same fields."""
    if call.salt:
        body["cache_salt"] = call.salt
    if not call.reuse:
        body["semblend"] = {"reuse": False}
    return body


def build_headers(call: PromptCall, keys: Mapping[str, str], **more: str) -> dict[str, str]:
    """Return the HTTP headers of a call; empty ones are left out.

    >>> build_headers(PromptCall(text="", max_tokens=1, request_id="r", tenant="t"), {"": "k"})
    {'X-Request-Id': 'r', 'x-tenant-id': 't', 'Authorization': 'Bearer k'}
    """
    key = keys.get(call.tenant) or keys.get("")
    headers = {"X-Request-Id": call.request_id, "x-tenant-id": call.tenant, **more}
    headers["Authorization"] = f"Bearer {key}" if key else ""
    return {name: value for name, value in headers.items() if value}


def list_cards(listed: Any) -> list[str]:
    """Return the model names in the answer of ``/v1/models``, or none if the answer has another shape."""
    cards = listed.get("data", []) if isinstance(listed, dict) else []
    return [str(card.get("id")) for card in cards]


def _build_answer(
    exchange: Exchange,
    call: PromptCall,
    has_text: Callable[[JsonObject], bool],
    *,
    receipt: JsonObject,
    server_id: Any,
    counts: Mapping[str, JsonObject],
    **own: Any,
) -> ServerAnswer:
    """Return an answer with what both APIs have in common; ``own`` is read from the API's own fields.

    The first token is the first event with text. ``counts`` are the objects whose counts are checked.
    """
    times = [at for event, at in zip(exchange.events, exchange.arrivals_ms, strict=True) if has_text(event)]
    names = (call.request_id, exchange.headers.get("x-request-id"), server_id, receipt.get("request_id"))
    parts = {**counts, "receipt": receipt}
    return ServerAnswer(
        ttft_ms=times[0] if times else None,
        latency_ms=exchange.latency_ms,
        inter_token_ms=tuple(later - earlier for earlier, later in pairwise(times)),
        receipt=receipt or None,
        ids=tuple(dict.fromkeys(name for name in map(read_text, names) if name)),
        malformed=tuple(line for name, part in parts.items() for line in find_bad_counts(part, name)),
        route=read_route(exchange.headers),
        error=exchange.error or (None if exchange.events else "an empty answer"),
        connection_failed=exchange.connection_failed,
        **own,
    )


def _read_object(value: Any) -> JsonObject:
    return value if isinstance(value, dict) else {}


def read_route(headers: Mapping[str, str]) -> Route:
    """Read the routing fields from response headers.

    >>> read_route({"x-semantic-route": "semantic_placement", "x-semantic-score": "0.9"}).outcome
    'semantic_placement'
    """
    said = next((headers[name] for name in ROUTE_HEADERS if headers.get(name)), None)
    return Route(
        header=said,
        endpoint_id=_find_header(headers, "x-semantic-endpoint", "x-route-endpoint", "x-replica-id", "x-upstream"),
        outcome=_read_outcome(_find_header(headers, "x-semantic-placement", "x-route-outcome"), said),
        semantic_score=_parse_number(_find_header(headers, "x-semantic-score", "x-route-semantic-score")),
        total_score=_parse_number(_find_header(headers, "x-route-score", "x-route-total-score")),
        reason=_find_header(headers, "x-route-reason", "x-semantic-reason"),
        worker_id=_find_header(headers, "x-worker-id", "x-semantic-endpoint", "x-replica-id"),
    )


def _read_outcome(placement: str | None, route: str | None) -> str | None:
    """Read x-semantic-placement (yes, no or a word); without it, the first word of the route header."""
    if placement is not None:
        plain = placement.strip().lower()
        if plain in ("1", "true", "yes", "semantic"):
            return "semantic_placement"
        return "cold_fallback" if plain in ("0", "false", "no", "none") else plain
    if route is None:
        return None
    word = route.split(";")[0].strip().lower().replace("-", "_")
    return "semantic_placement" if word in SEMANTIC_WORDS else word


def _find_header(headers: Mapping[str, str], *names: str) -> str | None:
    return next((headers[name] for name in names if headers.get(name)), None)


def _parse_number(text: str | None) -> float | None:
    try:
        return None if text is None else read_float(float(text))
    except ValueError:
        return None


def convert_to_ms(seconds: Any) -> float | None:
    """Convert seconds from JSON to milliseconds; None for anything that is not a number."""
    number = read_float(seconds)
    return None if number is None else 1000.0 * number


def read_logprob(value: Any) -> float:
    """Return a log-probability; what is no finite number counts as impossible, which agrees with no other answer."""
    number = read_float(value)
    return IMPOSSIBLE_LOGPROB if number is None else number


# -- OpenAI's API ----------------------------------------------------------------------------------------------------
# The backend for any OpenAI-compatible gateway: ``/v1/chat/completions``, streamed.

CHAT = "/v1/chat/completions"


class GatewayBackend:
    """Sends recipients to the gateway, and donors to ``donor_url``; if that is empty, donors go to the gateway too."""

    name = "gateway"

    def __init__(
        self,
        client: ClientSession,
        gateway_url: str,
        model: str,
        *,
        donor_url: str = "",
        reset_urls: Sequence[str] = (),
        keys: Mapping[str, str] | None = None,
        tokenizer: str = "",
    ) -> None:
        self._client = client
        self._gateway = gateway_url
        self._donor = donor_url or gateway_url
        self._model = model
        self._resets = tuple(reset_urls)
        self._keys = dict(keys or {})
        self._tokenizer = tokenizer or model

    async def ask(self, call: PromptCall, *, donor: bool = False) -> ServerAnswer:
        url = (self._donor if donor else self._gateway) + CHAT
        headers = build_headers(
            call, self._keys, **{"x-tokenizer-id": self._tokenizer, "x-chat-template-id": call.template}
        )
        exchange = await post_stream(self._client, url, build_chat_body(call, self._model), headers)
        return build_chat_answer(exchange, call)

    async def flush(self) -> str | None:
        return await post_empty(self._client, self._resets)

    async def list_models(self) -> tuple[Sequence[str], str | None]:
        listed, error = await get_json(self._client, f"{self._gateway}/v1/models")
        if error is not None or not isinstance(listed, dict):
            return (), error or "the list of models is not an object"
        return list_cards(listed), None


def build_chat_body(call: PromptCall, model: str) -> JsonObject:
    body: JsonObject = {
        "model": model,
        "messages": [dict(one) for one in call.messages] or [{"role": "user", "content": call.text}],
        "max_tokens": call.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if call.tools:
        body["tools"] = list(call.tools)
    if call.top_logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": call.top_logprobs}
    return add_cache_fields(body, call)


def build_chat_answer(exchange: Exchange, call: PromptCall) -> ServerAnswer:
    usage = _find_last(exchange.events, "usage")
    details = _read_object(usage.get("prompt_tokens_details"))
    timings = _find_last(exchange.events, "timings") or _find_last(exchange.events, "metrics")
    logprobs = [row for event in exchange.events for row in _extract_logprobs(event)]
    finish = [choice.get("finish_reason") for event in exchange.events for choice in _list_choices(event)]
    return _build_answer(
        exchange,
        call,
        lambda event: bool(_extract_text(event)),
        receipt=_find_chat_receipt(exchange.events),
        server_id=exchange.events[0].get("id") if exchange.events else None,
        counts={"usage": usage, "details": details},
        text="".join(_extract_text(event) for event in exchange.events),
        prompt_tokens=read_count(usage.get("prompt_tokens")),
        output_tokens=read_count(usage.get("completion_tokens")),
        tokens=tuple(str(row.get("token")) for row in logprobs),
        token_logprobs=tuple(read_logprob(row.get("logprob")) for row in logprobs),
        top_logprobs=tuple(
            {str(one.get("token")): read_logprob(one.get("logprob")) for one in _list_objects(row.get("top_logprobs"))}
            for row in logprobs
        ),
        finish_reason=next((str(one) for one in reversed(finish) if one), None),
        cached_tokens=read_count(details.get("cached_tokens")),
        cached_exact=read_count(details.get("exact_tokens")),
        cached_semantic=read_count(details.get("semantic_tokens", details.get("fuzzy_tokens"))),
        engine_ttft_ms=convert_to_ms(timings.get("time_to_first_token")),
        queue_time_ms=convert_to_ms(timings.get("queue_time")),
    )


def _find_chat_receipt(events: Sequence[JsonObject]) -> JsonObject:
    """Return the receipt: at the top of an event, or where vLLM puts what a connector says."""
    receipt = _find_last(events, "semblend") or _find_last(events, "kv_transfer_params").get("semblend")
    return receipt if isinstance(receipt, dict) else {}


def _list_objects(value: Any) -> list[JsonObject]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _list_choices(event: JsonObject) -> list[JsonObject]:
    return _list_objects(event.get("choices"))


def _extract_text(event: JsonObject) -> str:
    """Return the text of an event. An answer that is not streamed has a message instead of a delta."""
    said = []
    for choice in _list_choices(event)[:1]:
        part = choice.get("delta") or choice.get("message")
        if isinstance(part, dict):
            said.append(str(part.get("content") or part.get("reasoning_content") or ""))
    return "".join(said)


def _extract_logprobs(event: JsonObject) -> list[JsonObject]:
    rows: list[JsonObject] = []
    for choice in _list_choices(event)[:1]:
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict):
            rows.extend(_list_objects(logprobs.get("content")))
    return rows


def _find_last(events: Sequence[JsonObject], name: str) -> dict[str, Any]:
    return next((event[name] for event in reversed(events) if isinstance(event.get(name), dict)), {})


# -- SGLang's API ----------------------------------------------------------------------------------------------------
# The backend for SGLang's native API: ``/generate`` and ``/flush_cache``. The embedded server has it too.


class SglangBackend:
    """Sends donors and recipients to the same server."""

    name = "sglang"

    def __init__(self, client: ClientSession, base_url: str, *, keys: Mapping[str, str] | None = None) -> None:
        self._client = client
        self._base = base_url
        self._keys = dict(keys or {})

    async def ask(self, call: PromptCall, *, donor: bool = False) -> ServerAnswer:
        del donor
        exchange = await post_stream(
            self._client, f"{self._base}/generate", build_generate_body(call), build_headers(call, self._keys)
        )
        return build_generate_answer(exchange, call)

    async def flush(self) -> str | None:
        return await post_empty(self._client, [f"{self._base}/flush_cache"])

    async def list_models(self) -> tuple[Sequence[str], str | None]:
        listed, error = await get_json(self._client, f"{self._base}/v1/models")
        if error is None and isinstance(listed, dict):
            return list_cards(listed), None
        info, error = await get_json(self._client, f"{self._base}/get_model_info")
        return ([str(info.get("model_path"))], None) if isinstance(info, dict) else ((), error)


def build_generate_body(call: PromptCall) -> JsonObject:
    """Return the request body. ``rid`` is our id, so that the engine's log can be joined to our records."""
    body: JsonObject = {
        "text": call.text,
        "sampling_params": {"temperature": 0, "max_new_tokens": call.max_tokens, "ignore_eos": True},
        "stream": True,
        "rid": call.request_id,
    }
    if call.top_logprobs is not None:
        body |= {"return_logprob": True, "top_logprobs_num": call.top_logprobs, "return_text_in_logprobs": True}
    return add_cache_fields(body, call)


def build_generate_answer(exchange: Exchange, call: PromptCall) -> ServerAnswer:
    """Return the answer. SGLang repeats the whole text in each event, so the last event has everything."""
    last: JsonObject = exchange.events[-1] if exchange.events else {}
    meta = _read_object(last.get("meta_info"))
    details = _read_object(meta.get("cached_tokens_details"))
    positions, finish = meta.get("output_top_logprobs"), meta.get("finish_reason")
    drawn = _read_rows(meta.get("output_token_logprobs"))
    return _build_answer(
        exchange,
        call,
        lambda event: bool(event.get("text") or event.get("output_ids")),
        receipt=_find_generate_receipt(last.get("semblend"), meta.get("semblend")),
        server_id=meta.get("id"),
        counts={"meta_info": meta, "details": details},
        text=str(last.get("text") or ""),
        prompt_tokens=read_count(meta.get("prompt_tokens")),
        output_tokens=read_count(meta.get("completion_tokens")),
        token_ids=_read_ids(last.get("output_ids")) or _read_ids([row[1] for row in drawn]),
        tokens=tuple(_name_token(row) for row in drawn),
        token_logprobs=tuple(read_logprob(row[0]) for row in drawn),
        top_logprobs=tuple(
            {_name_token(row): read_logprob(row[0]) for row in _read_rows(position)}
            for position in (positions if isinstance(positions, list) else ())
        ),
        finish_reason=read_text(finish.get("type") if isinstance(finish, dict) else finish),
        cached_tokens=read_count(meta.get("cached_tokens")),
        cached_exact=read_count(details.get("exact", details.get("device"))),
        cached_semantic=read_count(details.get("fuzzy")),
        queue_time_ms=convert_to_ms(meta.get("queue_time")),
    )


def _find_generate_receipt(*places: Any) -> JsonObject:
    """Return the receipt of an answer; SGLang wraps what a request's own processes say in a list."""
    found = (place[0] if isinstance(place, list) and place else place for place in places)
    return next((one for one in found if isinstance(one, dict)), {})


def _read_rows(value: Any) -> list[Sequence[Any]]:
    """Return rows of [logprob, token id, text or null]; other values are left out."""
    rows = value if isinstance(value, list) else []
    return [row for row in rows if isinstance(row, list) and len(row) >= 2 and row[0] is not None]


def _name_token(row: Sequence[Any]) -> str:
    return str(row[2]) if len(row) > 2 and row[2] is not None else f"#{row[1]}"


def _read_ids(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, list) and all(isinstance(one, int) for one in value) else ()


# -- what a server is ------------------------------------------------------------------------------------------------
# Asks a server what it is: its models and its version. A run is continued only on the server that it was begun on.

VERSION_PATHS = ("/version", "/server_info", "/get_server_info")
"""vLLM, SGLang, and SGLang before 0.5."""


async def read_identity(client: ClientSession, url: str) -> dict[str, Any]:
    """Return the URL of a server, its models and its version; None for what it does not tell."""
    listed, error = await get_json(client, f"{url}/v1/models")
    found: dict[str, Any] = {"url": url, "models": None if error else sorted(list_cards(listed)), "version": None}
    for path in VERSION_PATHS:
        told, error = await get_json(client, url + path)
        if error is None and isinstance(told, dict) and read_text(told.get("version")):
            found["version"] = told["version"]
            break
    return found


async def verify_model(backend: ServerBackend, model: str) -> None:
    """Refuse to measure a server that serves another model, or none."""
    names, error = await backend.list_models()
    if error is not None:
        raise InputError(f"the server does not answer: {error}", hint="check the URL, or --skip-verify")
    if model and model not in names:
        raise InputError(
            f"the server serves {', '.join(names) or 'no model'}, not {model}", hint="check --model, or --skip-verify"
        )
