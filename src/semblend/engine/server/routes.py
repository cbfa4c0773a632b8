"""The OpenAI-compatible server: routes, and nothing else that thinks.

::

    POST /v1/chat/completions  /v1/completions  /generate       answers, whole or streamed
    GET  /v1/models            /health          /metrics        what is served, and how it fares
    POST /flush_cache          /reset_prefix_cache              forget the prefix cache and every donor
    GET  /openapi.json                                          all of these, described
    GET  /                     /api/live  /api/requests/{id}  /api/donors  /api/stats      the dashboard
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import cached_property, partial
from typing import Any

from semblend.errors import MissingDependencyError, SemBlendError

try:
    from fastapi import FastAPI, Request
except ImportError:
    raise MissingDependencyError("the server needs fastapi", hint="pip install 'semblend-suite[local]'") from None

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semblend._version import __version__
from semblend.arrange import Arranger
from semblend.discover.donor import Donor
from semblend.engine.server.admission import AdmissionQueue, Turns
from semblend.engine.server.answering import (
    CLIENT_LEFT,
    ENDPOINTS,
    Endpoint,
    answer,
    error_response,
    wait_until_gone,
)
from semblend.engine.server.config import ServeConfig
from semblend.engine.server.dashboard import LiveBoard
from semblend.engine.server.exposition import CONTENT_TYPE, write_metrics, write_tenant_metrics
from semblend.engine.server.openapi import write_document
from semblend.engine.server.service import TENANT, PromptArranger, Service, read_digits
from semblend.engine.server.serving import ServingEngine
from semblend.engine.server.tenants import Identity
from semblend.http.connections import Deadlines
from semblend.http.server import Drain, DrainRequests, HttpServer, ServerLimits, listen
from semblend.web.site import HEADERS, build_dashboard
from semblend.wire.errors import ApiError, as_api_error

log = logging.getLogger("semblend.server")
PAGE_FILES = build_dashboard()
MAX_DONORS_SHOWN = 200
MAX_KINDS_SHOWN = 12
STRANGER = "\0"
"""No tenant has this name: names are printable."""
REFUSAL_S = 0.001
"""About what it takes to read a request and to refuse it."""


def create_app(engine: ServingEngine, config: ServeConfig | None = None, arranger: Arranger | None = None) -> FastAPI:
    """The application around an engine. It starts and stops nothing: whoever made engine and arranger owns them."""
    config = ServeConfig() if config is None else config
    queue = AdmissionQueue(config.max_running, config.max_waiting, config.retry_after_s)
    arranging = PromptArranger(arranger or config.make_arranger())
    engine.on_evicted(arranging.forget)
    routes = Routes(Service(engine, config, queue, arranging))
    app = FastAPI(title="SemBlend", version=__version__, openapi_url=None, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False  # a redirect would be the one answer that is not JSON
    for endpoint in ENDPOINTS:
        app.add_api_route(endpoint.path, routes.answering(endpoint), methods=["POST"], response_model=None)
    for method, path, route in routes.table():
        methods = ["GET", "HEAD"] if method == "GET" else [method]  # load balancers look with HEAD
        app.add_api_route(path, route, methods=methods, response_model=None)
    for error in (SemBlendError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(error, _on_error)
    app.state.drain = Drain()
    app.add_middleware(DrainRequests, drain=app.state.drain)
    app.add_middleware(
        CountResponses, counts=routes.responses, board=routes.service.board, paths=frozenset(routes.paths())
    )
    app.state.turns = Turns(lambda: queue.running > 0)
    app.add_middleware(TakeTurns, turns=app.state.turns, service=routes.service)
    app.state.service = routes.service
    app.openapi = lambda: routes.document  # type: ignore[method-assign]
    return app


def make_server(app: FastAPI, sock: socket.socket) -> HttpServer:
    """The server of an application that `create_app` made. Forwarded-for headers are not believed: the peer's address
    decides who is a front.
    """
    config: ServeConfig = app.state.service.config
    deadlines = Deadlines(config.header_timeout_s, config.idle_timeout_s, config.write_timeout_s)
    limits = ServerLimits(deadlines, config.max_connections, config.drain_s)
    return HttpServer(app, sock, limits, drain=app.state.drain, lifespan=False)


def serve(app: FastAPI, sock: socket.socket) -> signal.Signals | None:
    """Run until a signal has ended it, and return that signal."""
    return make_server(app, sock).run()


class Routes:
    """One method a route."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.started = time.time()
        self.responses: Counter[tuple[str, int]] = Counter()

    def table(self) -> list[tuple[str, str, Callable[..., Awaitable[Response]]]]:
        return [
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{name:path}", self.model),
            ("GET", "/health", self.health),
            ("GET", "/metrics", self.metrics),
            ("POST", "/flush_cache", self.flush),
            ("POST", "/reset_prefix_cache", self.flush),
            ("GET", "/api/live", self.live),
            ("GET", "/api/requests/{request_id}", self.one_request),
            ("GET", "/api/donors", self.donors),
            ("GET", "/api/stats", self.stats),
            ("GET", "/openapi.json", self.openapi),
            *(("GET", path, _make_page_route(body, kind)) for path, (body, kind) in PAGE_FILES.items()),
        ]

    def paths(self) -> list[str]:
        return [endpoint.path for endpoint in ENDPOINTS] + [path for _, path, _ in self.table()]

    def answering(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        async def route(request: Request) -> Response:
            return await answer(self.service, request, endpoint)

        return route

    async def models(self, request: Request) -> Response:
        self.service.identify(request)
        names = (self.service.engine.model, *self.service.config.aliases)
        return JSONResponse({"object": "list", "data": [self._describe_model(name) for name in names]})

    async def model(self, request: Request) -> Response:
        self.service.identify(request)
        name = request.path_params["name"]
        if not name:  # in a body it means "whichever you serve"; here it names nothing
            raise ApiError(404, "the path names no model", hint="GET /v1/models lists them", code="model_not_found")
        self.service.check_model(name)
        return JSONResponse(self._describe_model(name))

    async def health(self, request: Request) -> Response:
        del request
        body = {"status": "ok", "model": self.service.engine.model, "version": __version__}
        return JSONResponse(body | {"needs_key": self.service.config.tenants.need_key})

    async def metrics(self, request: Request) -> Response:
        """Everything for an admin, or for anyone where the operator says so; a tenant's own for a tenant."""
        service = self.service
        if service.config.public_metrics or (identity := service.identify(request)).admin:
            text = write_metrics(service.admission, service.tokenizing, self.responses)
        else:
            places, responses = service.admission.count(identity.tenant), service.board.count_responses(identity.tenant)
            text = write_tenant_metrics(places, responses, service.board.tally(identity))
        return PlainTextResponse(text, media_type=CONTENT_TYPE)

    async def flush(self, request: Request) -> Response:
        """Everyone's cache goes, so that only an admin may ask for it."""
        self._require_admin(request)
        gone = await asyncio.to_thread(self.service.engine.reset)
        self.service.arranging.clear()
        return JSONResponse({"success": True, "donors_forgotten": gone})

    async def live(self, request: Request) -> Response:
        identity = self.service.identify(request)
        given = request.query_params.get("after", "0")
        after = read_digits(given)
        if after is None:
            raise ApiError(400, f"after is {given[:40]!r}, not a number", hint="pass the last sequence", param="after")
        queue, (donors, donor_tokens) = self.service.admission, self._count_donors(identity)
        places = queue if identity.admin else queue.count(identity.tenant)
        body = self.service.board.news(identity, after)
        body |= {
            "model": self.service.engine.model,
            "admin": identity.admin,
            "tenant": identity.tenant,
            "running": places.running,
            "waiting": places.waiting,
            "refused": places.refused,
            "max_running": queue.max_running,
            "donors": donors,
            "donor_tokens": donor_tokens,
            "compared": self._list_comparisons() if identity.admin else [],  # of everybody's requests
        }
        return JSONResponse(body)

    def _list_comparisons(self) -> list[dict[str, Any]]:
        """First tokens with reuse and without, the kinds with most requests first."""
        found = sorted(self.service.engine.compare_reuse(), key=lambda one: -one.with_count)
        return [asdict(one) for one in found[:MAX_KINDS_SHOWN]]

    async def one_request(self, request: Request) -> Response:
        found = self.service.board.find(request.path_params["request_id"], self.service.identify(request))
        if found is None:
            raise ApiError(404, "no such request", hint="only the latest are kept")
        return JSONResponse(found)

    async def donors(self, request: Request) -> Response:
        """How many donors there are; which ones is for an admin only."""
        identity = self.service.identify(request)
        latest = self.service.engine.donors()[: -MAX_DONORS_SHOWN - 1 : -1] if identity.admin else ()
        count, _ = self._count_donors(identity)
        return JSONResponse({"count": count, "donors": [_describe_donor(donor) for donor in latest]})

    async def stats(self, request: Request) -> Response:
        identity = self.service.identify(request)
        body: dict[str, Any] = {
            "uptime_s": round(time.time() - self.started, 1),
            "totals": self.service.board.tally(identity).to_dict(),
        }
        if identity.admin:  # how full the machine is tells of others' work
            body["engine"] = dict(self.service.engine.stats())
            body["responses"] = {f"{path} {status}": count for (path, status), count in sorted(self.responses.items())}
        return JSONResponse(body)

    async def openapi(self, request: Request) -> Response:
        del request
        return Response(self.document_bytes, media_type="application/json")

    @cached_property
    def document_bytes(self) -> bytes:
        """Encoding it takes 5 ms, in which nobody else is served: once is enough."""
        return bytes(JSONResponse(self.document).body)

    @cached_property
    def document(self) -> dict[str, Any]:
        config = self.service.config
        return write_document(most_n=config.max_n, need_key=config.tenants.need_key)

    def _count_donors(self, identity: Identity) -> tuple[int, int]:
        return self.service.engine.count_donors(None if identity.admin else identity.tenant)

    def _require_admin(self, request: Request) -> None:
        if not self.service.identify(request).admin:
            raise ApiError(403, "this needs an admin key", hint="send an admin's API key")

    def _describe_model(self, name: str) -> dict[str, Any]:
        engine = self.service.engine
        return {
            "id": name,
            "object": "model",
            "created": int(self.started),
            "owned_by": "semblend",
            "root": engine.model,
            "max_model_len": engine.max_context,
        }


class TakeTurns:
    """Makes whoever is answered without a place in the queue wait for a turn (`Turns`): reads, and whatever is refused.

    Reads are done in their turn and sent behind it: a client that does not read holds up nobody. A refusal was made
    already, and its turn comes before it is sent; a connection does not get on to its next request until then. Who
    shows no key is one of the strangers, and they have one tenant's turns together.
    """

    def __init__(self, app: ASGIApp, turns: Turns, service: Service) -> None:
        self._app = app
        self._turns = turns
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["method"] == "POST":
            await self._app(scope, receive, partial(self._send, scope, send))
        else:
            await self._read(scope, receive, send)

    async def _send(self, scope: Scope, send: Send, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            tenant = scope.get(TENANT, STRANGER)
            await self._turns.take(tenant)
            self._turns.give_back(tenant, REFUSAL_S)
        await send(message)

    async def _read(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            tenant = self._service.identify(Request(scope)).tenant
        except SemBlendError:  # the route says so
            tenant = STRANGER
        if not await self._take_unless_gone(tenant, receive):
            return
        messages: list[Message] = []

        async def keep(message: Message) -> None:
            messages.append(message)

        started = time.perf_counter()
        try:
            await self._app(scope, receive, keep)
        finally:
            self._turns.give_back(tenant, time.perf_counter() - started)
        for message in messages:
            await send(message)

    async def _take_unless_gone(self, tenant: str, receive: Receive) -> bool:
        """Wait for a turn; False where the client left before."""
        turn, gone = asyncio.ensure_future(self._turns.take(tenant)), asyncio.ensure_future(wait_until_gone(receive))
        try:
            await asyncio.wait({turn, gone}, return_when=asyncio.FIRST_COMPLETED)
            return turn.done()
        finally:
            gone.cancel()
            if not turn.done():
                turn.cancel()


class CountResponses:
    """Counts responses by path and status, in all and for the tenant that asked.

    Paths that are not ours count as one: a scan must not fill the memory.
    """

    def __init__(self, app: ASGIApp, counts: Counter[tuple[str, int]], board: LiveBoard, paths: frozenset[str]) -> None:
        self._app = app
        self._counts = counts
        self._board = board
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"
        status = CLIENT_LEFT

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            self._counts[path, status] += 1
            if TENANT in scope:
                self._board.count_response(scope[TENANT], path, status)


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_LEFT)
    if isinstance(error, HTTPException):
        hint = "docs/guides/serve.md lists the paths" if error.status_code in (404, 405) else ""
        told = f"{request.method} {request.url.path[:200]}: {error.detail}"
        response = error_response(ApiError(error.status_code, told, hint=hint))
        response.headers.update(error.headers or {})  # 405 says which methods are allowed
        return response
    if not isinstance(error, SemBlendError):
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_response(as_api_error(error))


def _make_page_route(body: bytes, kind: str) -> Callable[..., Awaitable[Response]]:
    async def page(request: Request) -> Response:
        del request
        return Response(body, media_type=kind, headers=HEADERS)

    return page


def _describe_donor(donor: Donor) -> dict[str, Any]:
    return {
        "donor_id": donor.donor_id,
        "tokens": donor.token_count,
        "created_unix_s": donor.created_unix_s,
        "pinned": donor.pinned,
        "tenant": donor.namespace.tenant,
    }


__all__ = ["ServeConfig", "ServingEngine", "create_app", "listen", "serve"]
