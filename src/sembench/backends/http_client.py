"""One HTTP exchange with a serving engine, timed at the client.

Times come from a clock that cannot jump (`time.perf_counter`). The first token is the first event that carries text or
a token: an opening event with a role and nothing else is not an answer yet.
"""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from semblend.errors import InputError, MissingDependencyError

if TYPE_CHECKING:
    import httpx

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
async def open_client(timeout_s: float, headers: Mapping[str, str] | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """Open a client that ignores proxies and other settings of the environment, since they would change the times."""
    try:
        import httpx
    except ImportError:
        raise MissingDependencyError(
            "live runs need the package httpx", hint="pip install 'semblend-suite[live]'"
        ) from None
    limits = httpx.Limits(max_connections=MOST_CONNECTIONS, max_keepalive_connections=MOST_CONNECTIONS)
    timeout = httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s))
    async with httpx.AsyncClient(timeout=timeout, limits=limits, headers=dict(headers or {}), trust_env=False) as made:
        yield made


def check_url(url: str, flag: str) -> str:
    """Check a URL and return it without a trailing slash, and without the ``/v1`` that OpenAI clients are given.

    >>> check_url("http://localhost:1/", "--base-url"), check_url("http://localhost:1/v1/", "--base-url")
    ('http://localhost:1', 'http://localhost:1')
    """
    if not url.startswith(("http://", "https://")):
        raise InputError(f"{flag} {url!r} is not a URL", hint="write it as http://host:port")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


async def post_stream(client: httpx.AsyncClient, url: str, body: JsonObject, headers: Mapping[str, str]) -> Exchange:
    """Send a POST request and read the events as they arrive. An answer that is not a stream counts as one event."""
    import httpx

    exchange = Exchange()
    started = time.perf_counter()
    try:
        async with client.stream("POST", url, json=body, headers=dict(headers)) as response:
            exchange.status = response.status_code
            exchange.headers = {name.lower(): value for name, value in response.headers.items()}
            if response.status_code >= 400:
                exchange.error = describe_error(response.status_code, await response.aread())
            elif "text/event-stream" in exchange.headers.get("content-type", ""):
                await _read_events(response, exchange, started)
            else:
                _take_event(exchange, (await response.aread()).decode("utf-8", "replace"), started)
    except httpx.TimeoutException as error:
        exchange.error = f"no answer in time ({type(error).__name__})"
        exchange.connection_failed = not exchange.events  # a server that hangs counts as gone
    except httpx.RemoteProtocolError as error:
        exchange.error = f"the connection broke in the middle of the answer: {error}"[:LONGEST_ERROR]
        exchange.connection_failed = not exchange.events
    except httpx.TransportError as error:
        exchange.error = f"cannot reach {url}: {error or type(error).__name__}"[:LONGEST_ERROR]
        exchange.connection_failed = True
    exchange.latency_ms = 1000 * (time.perf_counter() - started)
    return exchange


async def _read_events(response: httpx.Response, exchange: Exchange, started: float) -> None:
    parser, done = SseParser(), False
    async for data in response.aiter_bytes():
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


async def get_json(client: httpx.AsyncClient, url: str) -> tuple[Any, str | None]:
    """Return the JSON body of a URL, or None and what went wrong."""
    text, error = await get_text(client, url)
    if text is None:
        return None, error
    try:
        return json.loads(text), None
    except ValueError:
        return None, f"{url} answers with something that is not JSON"


async def get_text(client: httpx.AsyncClient, url: str) -> tuple[str | None, str | None]:
    import httpx

    try:
        response = await client.get(url)
    except httpx.TransportError as error:
        return None, f"cannot reach {url}: {error or type(error).__name__}"
    if response.status_code >= 400:
        return None, describe_error(response.status_code, response.content)
    return response.text, None


async def post_empty(client: httpx.AsyncClient, urls: Sequence[str]) -> str | None:
    """Send a POST request without a body to every URL; this flushes caches. Return None, or what went wrong."""
    import httpx

    for url in urls:
        try:
            response = await client.post(url)
        except httpx.TransportError as error:
            return f"cannot reach {url}: {error or type(error).__name__}"
        if response.status_code >= 400:
            return f"{url}: {describe_error(response.status_code, response.content)}"
    return None
