"""Calls to engines over HTTP: one `Upstream` for each engine, with a pool of connections, and faults as values.

aiohttp does the work. It was chosen over httpx by what it adds to a request and by the events a second that it passes
on (docs/research/decisions/forwarding.md has the tables). Three rules stand above it:

- An answer's bytes belong to the request that asked for them. A connection on which an engine sends more than that is
  closed, and nothing of it becomes part of the next client's answer.
- What stands behind a body (trailers, a second answer) never becomes a header of the first answer.
- A request goes out a second time only where a kept connection was closed before one byte came back.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict
from yarl import URL

from semantickv.edge.headers import RawHeaders
from semblend.errors import ConfigError
from semblend.wire.errors import ApiError

MAX_HEAD_BYTES = 64 << 10
IDLE_S = 30.0
PIECE_BYTES = 256 << 10
"""Larger bodies are sent in pieces of this size, so that others have their turn between them."""
_IS_KEPT = ContextVar("is_kept", default=False)
"""Whether the connection of the call that runs had served another one before; its task sets it, and reads it."""
_AUTOMATIC = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


# -- where an engine is ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine listens. ``path`` is put in front of every path that is asked of it.

    >>> EngineAddress.parse("http://localhost:8001/").url
    'http://localhost:8001'
    """

    scheme: str
    host: str
    port: int
    path: str = ""

    @classmethod
    def parse(cls, url: str) -> EngineAddress:
        """Read a URL; `ConfigError` if it is none that can be forwarded to."""
        try:
            parts = urlsplit(url.strip())
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"{url!r} is not the address of an engine", hint="for example http://127.0.0.1:8001")
        if parts.username or parts.password:
            raise ConfigError("the address of an engine holds a password", hint="send an Authorization header instead")
        if not (parts.hostname + parts.path).isprintable() or " " in parts.path:
            raise ConfigError(f"{url!r} is not the address of an engine", hint="for example http://127.0.0.1:8001")
        return cls(
            parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80), parts.path.rstrip("/")
        )

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"


# -- what can go wrong -------------------------------------------------------------------------------------------------


class FaultKind(StrEnum):
    """Where a call ended before its end."""

    REFUSED = "refused"
    """No connection to the engine."""
    CONNECT_TIMEOUT = "connect_timeout"
    """The engine's machine did not accept a connection in time."""
    CLOSED_EARLY = "closed_early"
    """The engine closed the connection before the first byte of its answer."""
    GARBAGE = "garbage"
    """The engine sent something that is not HTTP/1.1."""
    BUSY = "busy"
    """The engine answered 503, and another one may have room."""
    GIVEN_UP = "given_up"
    """The engine was taken out while the request waited there."""
    NO_ANSWER = "no_answer"
    """The engine took the request and sent no answer in time."""
    STALLED = "stalled"
    """The engine stopped sending in the middle of its answer."""
    CUT_OFF = "cut_off"
    """The connection ended in the middle of the answer."""
    CLIENT_LEFT = "client_left"
    """The client closed its connection."""
    STOPPED = "stopped"
    """This server was stopped while the call ran."""


# Sent again to another engine, or on another connection. Not NO_ANSWER: the engine may still compute, and a second
# copy of the same long prompt would add to the load that made the first one late.
_RETRIED = frozenset(
    {
        FaultKind.REFUSED,
        FaultKind.CONNECT_TIMEOUT,
        FaultKind.CLOSED_EARLY,
        FaultKind.GARBAGE,
        FaultKind.BUSY,
        FaultKind.GIVEN_UP,
    }
)
_OF_ENGINE = frozenset(FaultKind) - {FaultKind.BUSY, FaultKind.GIVEN_UP, FaultKind.CLIENT_LEFT, FaultKind.STOPPED}
_MAY_BE_THE_REQUEST = frozenset({FaultKind.CLOSED_EARLY, FaultKind.GARBAGE})


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a call has no whole answer. ``is_mid_answer``: the first byte had come.

    >>> Fault(FaultKind.REFUSED, "nobody listens").may_retry, Fault(FaultKind.GARBAGE, "", is_mid_answer=True).may_retry
    (True, False)
    """

    kind: FaultKind
    detail: str = ""
    is_mid_answer: bool = False

    @property
    def may_retry(self) -> bool:
        """Whether the request may be sent again: nothing of the answer has been passed on."""
        return self.kind in _RETRIED and not self.is_mid_answer

    @property
    def blames_engine(self) -> bool:
        """Whether this fault counts against the engine's health."""
        return self.kind in _OF_ENGINE

    @property
    def may_be_the_request(self) -> bool:
        """Whether the request itself may have caused it: then other engines fail on it in the same way."""
        return self.kind in _MAY_BE_THE_REQUEST and not self.is_mid_answer

    @property
    def before_answer(self) -> Fault:
        """The same where only a head had come, and nothing was passed on."""
        kinds = {FaultKind.CUT_OFF: FaultKind.CLOSED_EARLY, FaultKind.STALLED: FaultKind.NO_ANSWER}
        return Fault(kinds.get(self.kind, self.kind), self.detail)

    def as_api_error(self) -> ApiError:
        """The answer for the client, where it has had none yet."""
        status = 504 if self.kind in (FaultKind.NO_ANSWER, FaultKind.CONNECT_TIMEOUT) else 502
        if self.kind in (FaultKind.STOPPED, FaultKind.GIVEN_UP):
            status = 503
        return ApiError(
            status, f"the engine did not answer: {self.kind.value}", hint="try again in a moment", code=self.kind.value
        )


CLIENT_LEFT = Fault(FaultKind.CLIENT_LEFT)
STOPPED = Fault(FaultKind.STOPPED, "this server stops")


# -- a call ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OutgoingRequest:
    """A request for an engine. ``target`` is the path with its query; ``headers`` hold no host and no length."""

    method: str
    target: str
    headers: RawHeaders
    body: bytes


class UpstreamAnswer:
    """An answer whose head has come; names of headers in lower case. Read it to its end, or close it."""

    def __init__(self, response: aiohttp.ClientResponse, upstream: Upstream) -> None:
        self.status = response.status
        self.headers: RawHeaders = [(name.lower(), value) for name, value in response.raw_headers]
        self._response = response
        self._upstream = upstream
        self._is_over = False

    async def read(self) -> bytes | Fault:
        """Wait for the next piece; empty at the end."""
        try:
            piece = await self._response.content.readany()
        except (aiohttp.ClientError, HttpProcessingError, OSError, TimeoutError) as error:
            self.close()
            return _name_fault(error, is_mid_answer=True)
        except BaseException:
            self.close()
            raise
        if not piece:
            self._end()
        return bytes(piece)

    @property
    def is_over(self) -> bool:
        """Whether every byte has been read, and the connection serves others."""
        if not self._is_over and self._response.content.at_eof() and self._response.content.exception() is None:
            self._end()
        return self._is_over

    def close(self) -> None:
        """Cut the answer: the engine sees its connection closed."""
        self._response.close()
        self._end()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._upstream.open -= 1


class Upstream:
    """The connections to one engine; for one event loop, which must run when the first call is made."""

    def __init__(self, address: EngineAddress, *, connect_timeout_s: float = 5.0, idle_s: float = IDLE_S) -> None:
        self.address = address
        self.open = 0
        """Calls under way."""
        self.connections = 0
        self._connect_timeout_s = connect_timeout_s
        self._idle_s = idle_s
        self._session: aiohttp.ClientSession | None = None

    @property
    def idle(self) -> int:
        """Connections that wait for the next call."""
        return max(0, self.connections - self.open)

    async def send(self, request: OutgoingRequest, timeout_s: float) -> UpstreamAnswer | Fault:
        """Send a request and wait for the head of its answer, ``timeout_s`` at most, and as long between two pieces."""
        self.open += 1
        found: UpstreamAnswer | Fault | None = None
        try:
            found = await self._send(request, timeout_s)
        finally:
            if not isinstance(found, UpstreamAnswer):
                self.open -= 1
        return found

    async def close(self) -> None:
        """Close every connection."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _send(self, request: OutgoingRequest, timeout_s: float) -> UpstreamAnswer | Fault:
        session = self._open_session()
        headers = CIMultiDict((_decode(name), _decode(value)) for name, value in request.headers)
        data: Any = request.body or None
        if len(request.body) > PIECE_BYTES:
            headers["Content-Length"] = str(len(request.body))
        elif not request.body and request.method not in ("GET", "DELETE", "HEAD"):
            headers["Content-Length"] = "0"
        url = URL(f"{self.address.url}{request.target}", encoded=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s, sock_read=timeout_s)
        for attempt in range(2):
            if len(request.body) > PIECE_BYTES:
                data = _cut_body(request.body)
            _IS_KEPT.set(False)
            try:
                response = await session.request(
                    request.method, url, headers=headers, data=data, timeout=timeout, allow_redirects=False
                )
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                fault = _name_fault(error)
                if fault.kind is FaultKind.CLOSED_EARLY and _IS_KEPT.get() and attempt == 0:
                    continue  # the engine closed a kept connection in this moment: not one byte had come back
                return fault
            if not 200 <= response.status < 600:
                response.close()
                return Fault(FaultKind.GARBAGE, f"status {response.status} is no answer")
            return UpstreamAnswer(response, self)
        raise AssertionError("unreachable")

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=self._idle_s,
                ssl=_default_tls() if self.address.scheme == "https" else True,
            )
            connector._factory = partial(  # type: ignore[assignment]
                StrictConnection, self, loop=asyncio.get_running_loop()
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=_AUTOMATIC,
                auto_decompress=False,
                trust_env=False,
                max_line_size=MAX_HEAD_BYTES,
                max_field_size=MAX_HEAD_BYTES,
            )
        return self._session


class StrictConnection(ResponseHandler):
    """aiohttp's connection, and one rule more: whatever an engine sends that nobody asked for closes it."""

    def __init__(self, upstream: Upstream, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._upstream = upstream
        self._is_asked = self._is_kept = self._has_answer = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._upstream.connections += 1
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._upstream.connections -= 1
        super().connection_lost(exc)

    def set_response_params(self, **known: Any) -> None:
        _IS_KEPT.set(self._is_kept)
        self._is_asked = self._is_kept = True
        super().set_response_params(**known)

    def data_received(self, data: bytes) -> None:
        if not self._is_asked and data:
            self.close()
            return
        super().data_received(data)
        if self._payload is not None and self._payload.is_eof() and self._has_answer:
            self._is_asked = self._has_answer = False

    def set_exception(self, exc: Any, exc_cause: Any = None) -> None:
        """A connection that failed fails its answer too: aiohttp leaves whoever reads the body waiting."""
        super().set_exception(exc, exc_cause or exc)
        if self._payload is not None and not self._payload.is_eof() and self._payload.exception() is None:
            self._payload.set_exception(exc)

    def feed_data(self, data: Any, size: int = 0) -> None:
        if data[0].code >= 200:  # 100 Continue, 103 Early Hints: the answer is still to come
            self._has_answer = True
        super().feed_data(data, size)


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An answer that was read to its end."""

    status: int
    body: bytes


async def fetch(
    upstream: Upstream, request: OutgoingRequest, timeout_s: float, *, max_bytes: int = 1 << 20
) -> WholeAnswer | Fault:
    """Ask an engine something of our own, and wait for the whole answer; longer than ``max_bytes`` is a fault."""
    answer = await upstream.send(request, timeout_s)
    if isinstance(answer, Fault):
        return answer
    pieces, room = [], max_bytes
    while piece := await answer.read():
        if isinstance(piece, Fault):
            return piece
        pieces.append(piece)
        room -= len(piece)
        if room < 0:
            answer.close()
            return Fault(FaultKind.GARBAGE, "the answer is too long", is_mid_answer=True)
    return WholeAnswer(answer.status, b"".join(pieces))


def _name_fault(error: BaseException, *, is_mid_answer: bool = False) -> Fault:
    """What an error of aiohttp means here."""
    detail = (getattr(error, "strerror", None) or str(error) or type(error).__name__)[:200]
    if is_mid_answer:
        kind = FaultKind.GARBAGE if isinstance(error, HttpProcessingError) else FaultKind.CUT_OFF
        return Fault(FaultKind.STALLED if isinstance(error, TimeoutError) else kind, detail, is_mid_answer=True)
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return Fault(FaultKind.CONNECT_TIMEOUT, detail)
    if isinstance(error, TimeoutError):
        return Fault(FaultKind.NO_ANSWER, detail)
    if isinstance(error, aiohttp.ClientConnectorError):  # refused, unreachable, no such name, an untrusted certificate
        return Fault(FaultKind.REFUSED, detail)
    if isinstance(error, aiohttp.ClientConnectionError | OSError):
        return Fault(FaultKind.CLOSED_EARLY, detail)
    return Fault(FaultKind.GARBAGE, detail)


async def _cut_body(body: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(body), PIECE_BYTES):
        yield body[at : at + PIECE_BYTES]


def _decode(value: bytes) -> str:
    """A header as aiohttp writes it again: it encodes as UTF-8."""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value.decode("latin-1")


@cache
def _default_tls() -> ssl.SSLContext:
    return ssl.create_default_context()
