"""The explorer: a local page that shows which tokens of a prompt earlier prompts already hold, and why.

It uses the public library and no model. Its page stands in ``web/static``; this is what answers it: `ExplorerApp` has
one method a route, plain data in and out, and `ExplorerServer` puts it on the server that everything here listens with.

It is meant for one person on one machine. It listens on loopback unless told otherwise; on loopback it
answers only to loopback names, so that a page from elsewhere cannot reach it through a rebound DNS name, and
a request that changes something must be JSON, which a foreign page cannot send without asking first.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from itertools import count
from typing import Any
from urllib.parse import unquote, urlsplit

from semblend._version import __version__
from semblend.config import SemBlendConfig
from semblend.confirm.sinks import MemorySink
from semblend.discover.donor import Donor
from semblend.errors import CapacityError, ConfigError, InputError, SemBlendError
from semblend.facade import SemBlend
from semblend.http.connections import Deadlines
from semblend.http.server import HttpServer, Receive, Scope, Send, ServerLimits, listen, write_url
from semblend.plan.reuse_plan import ReusePlan
from semblend.prompt import Namespace, Prompt, count_common_prefix
from semblend.text.tokenization import Tokenizer
from semblend.web.site import HEADERS, build_explorer, read_static
from semblend.wire.callers import is_loopback
from semblend.wire.errors import ApiError, as_api_error

PREVIEW_CHARACTERS = 240
MAX_PREVIEWS = 10_000
EVENTS_SHOWN = 200
MAX_DONORS_COMPARED = 2000
PREFIX_BLOCK_TOKENS = 16
MAX_DONOR_ID_CHARACTERS = 200
_FIELDS = ("text", "tenant", "donor_id")
_LIKE = 'send JSON such as {"text": "..."}'


class ExplorerApp:
    """The explorer's answers over one `SemBlend` and one tokenizer."""

    def __init__(self, config: SemBlendConfig, tokenizer: Tokenizer) -> None:
        self._recent = MemorySink(EVENTS_SHOWN)
        self.semblend = SemBlend(config, sinks=[self._recent])
        self.tokenizer = tokenizer
        self._previews: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()
        self._numbers = count(1)

    def health(self) -> dict[str, Any]:
        return {
            "status": "ok",
            "version": __version__,
            "tokenizer": self.tokenizer.name,
            "store": self.semblend.config.store or None,
            "donors": self.semblend.stats().donors,
        }

    def examples(self) -> dict[str, Any]:
        """Donors to register, a prompt to ask with, and what to look for."""
        return {"examples": json.loads(read_static("explorer/examples.json"))}

    def add_donor(self, body: dict[str, Any]) -> dict[str, Any]:
        asked = _check_fields(body)
        prompt = self._prompt(asked)
        donor_id = asked["donor_id"] or self._free_id()
        started = time.perf_counter()
        donor = self.semblend.register(prompt, donor_id=donor_id)
        elapsed_ms = _ms_since(started)
        with self._lock:
            self._previews[donor_id] = asked["text"][:PREVIEW_CHARACTERS]
            self._previews.move_to_end(donor_id)
            while len(self._previews) > MAX_PREVIEWS:
                self._previews.popitem(last=False)
        return {"donor": self._donor_row(donor), "register_ms": elapsed_ms}

    def donors(self) -> dict[str, Any]:
        return {"donors": [self._donor_row(donor) for donor in self.semblend.donors()]}

    def forget_donor(self, donor_id: str) -> dict[str, Any]:
        if not self.semblend.forget(donor_id):
            raise ApiError(404, f"no donor {donor_id!r}", hint="GET /api/donors lists them")
        with self._lock:
            self._previews.pop(donor_id, None)
        return {"forgotten": donor_id}

    def explain(self, body: dict[str, Any]) -> dict[str, Any]:
        """Why, and for every token of the prompt the donor that holds it, or null."""
        asked = _check_fields(body)
        started = time.perf_counter()
        prompt = self._prompt(asked)
        tokenize_ms = _ms_since(started)
        started = time.perf_counter()
        self.semblend.lookup(prompt)  # what an engine would wait for: timed by itself, and it leaves its events
        lookup_ms = _ms_since(started)
        explanation = self.semblend.explain(prompt)
        spans = explanation.decision.spans if isinstance(explanation.decision, ReusePlan) else ()
        donor_ids = list(dict.fromkeys(span.donor_id for span in spans))
        owners: list[int | None] = [None] * len(prompt)
        for span in spans:
            number = donor_ids.index(span.donor_id)
            owners[span.target_start : span.target_end] = [number] * span.length
        return {
            "explanation": explanation.to_dict(),
            "text": str(explanation),
            "pieces": self.tokenizer.pieces(asked["text"]),
            "donor_ids": donor_ids,
            "owners": owners,
            "prefix_tokens": self._prefix_tokens(prompt),
            "timing": {"tokenize_ms": tokenize_ms, "lookup_ms": lookup_ms},
        }

    def stats(self) -> dict[str, Any]:
        return asdict(self.semblend.stats())

    def events(self) -> dict[str, Any]:
        """The newest events, oldest first."""
        return {"events": [event.to_dict() for event in self._recent.events]}

    def close(self) -> None:
        self.semblend.close()

    def _prompt(self, asked: dict[str, str]) -> Prompt:
        text = asked["text"]
        return Prompt(self.tokenizer.encode(text), text=text, namespace=Namespace(tenant=asked["tenant"]))

    def _prefix_tokens(self, prompt: Prompt) -> int | None:
        """What an exact-prefix cache would hold, in whole blocks; None when there are too many donors to compare."""
        donors = [donor for donor in self.semblend.donors() if donor.namespace == prompt.namespace]
        if len(donors) > MAX_DONORS_COMPARED:
            return None
        longest = 0
        for donor in donors:
            tokens = self.semblend.donor_tokens(donor.donor_id)
            if tokens is not None:
                longest = max(longest, count_common_prefix(prompt.token_ids, tokens))
        return min(longest, len(prompt) - 1) // PREFIX_BLOCK_TOKENS * PREFIX_BLOCK_TOKENS

    def _free_id(self) -> str:
        taken = {donor.donor_id for donor in self.semblend.donors()}
        return next(name for name in (f"doc-{number}" for number in self._numbers) if name not in taken)

    def _donor_row(self, donor: Donor) -> dict[str, Any]:
        return {
            "donor_id": donor.donor_id,
            "tenant": donor.namespace.tenant,
            "token_count": donor.token_count,
            "generation": donor.generation,
            "created_unix_s": donor.created_unix_s,
            "expires_unix_s": donor.expires_unix_s,
            "pinned": donor.pinned,
            "preview": self._previews.get(donor.donor_id),
        }


def _check_fields(body: dict[str, Any]) -> dict[str, str]:
    """The fields of a request that carries text; those that it leaves out are empty."""
    for name, value in body.items():
        if name not in _FIELDS:
            raise InputError(f"unknown field {name!r}", hint="the fields are text, tenant and donor_id")
        if value is not None and not isinstance(value, str):
            raise InputError(f"{name} is not a string", hint=_LIKE)
    asked = {name: body.get(name) or "" for name in _FIELDS}
    if not asked["text"]:
        raise InputError("text is missing or empty", hint=_LIKE)
    if len(asked["donor_id"]) > MAX_DONOR_ID_CHARACTERS:
        raise InputError("donor_id is too long", hint=f"use at most {MAX_DONOR_ID_CHARACTERS} characters")
    return asked


def _ms_since(started: float) -> float:
    return round((time.perf_counter() - started) * 1000, 3)


# -- over HTTP -------------------------------------------------------------------------------------------------------

LOG = logging.getLogger(__name__)
MAX_BODY_BYTES = 4 * 1024 * 1024
LIMITS = ServerLimits(Deadlines(header_s=30.0, idle_s=30.0, write_s=30.0), connections=256, drain_s=0.0)
BODY_S = 30.0
PAGE_FILES = build_explorer()
DONOR_PREFIX = "/api/donors/"
GET: dict[str, Callable[[ExplorerApp], dict[str, Any]]] = {
    "/health": ExplorerApp.health,
    "/api/donors": ExplorerApp.donors,
    "/api/examples": ExplorerApp.examples,
    "/api/stats": ExplorerApp.stats,
    "/api/events": ExplorerApp.events,
}
POST: dict[str, Callable[[ExplorerApp, dict[str, Any]], dict[str, Any]]] = {
    "/api/donors": ExplorerApp.add_donor,
    "/api/explain": ExplorerApp.explain,
}
Answer = tuple[int, str, bytes]


class ExplorerServer:
    """Listens at once; ``serve_forever`` answers. ``port=0`` takes a free port, see ``url``."""

    def __init__(self, app: ExplorerApp, host: str = "127.0.0.1", port: int = 8765) -> None:
        self.app = app
        self.host = host
        try:
            self._sock = listen(host, port)
        except ConfigError as error:
            raise InputError(error.message, hint="choose another --port; 0 takes any free one") from None
        self.server_address = self._sock.getsockname()
        self.url = write_url(self._sock, host) + "/"
        self._server = HttpServer(self, self._sock, LIMITS, lifespan=False)

    def __enter__(self) -> ExplorerServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    @property
    def on_loopback(self) -> bool:
        return is_loopback(self.host)

    def serve_forever(self) -> None:
        """Answer until a signal comes, or `shutdown` is called."""
        self._server.run()

    def shutdown(self) -> None:
        """Stop answering; from another thread."""
        self._server.started.wait()
        self._server.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; every error is JSON."""
        try:
            status, kind, body = await self._answer(scope, receive)
        except SemBlendError as error:
            status = 507 if isinstance(error, CapacityError) else as_api_error(error).status
            status, kind, body = _json(status, {"error": error.message, "hint": error.hint})
        except ConnectionError:  # the browser went away
            return
        except Exception as error:  # a fault of ours: the page is told, the log has the traceback
            LOG.exception("%s %s failed", scope["method"], scope["path"])
            status, kind, body = _json(500, {"error": f"internal error: {error!r}", "hint": "see the terminal"})
        named = {"content-type": kind, "content-length": str(len(body)), **HEADERS}
        headers = [(name.lower().encode(), value.encode()) for name, value in named.items()]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    async def _answer(self, scope: Scope, receive: Receive) -> Answer:
        """Find the route, and do its work in a thread: lookups take milliseconds."""
        headers = dict(scope["headers"])
        self._check_host(headers.get(b"host", b"").decode("latin-1"))
        method, path = scope["method"], scope["path"]
        if method in ("GET", "HEAD"):
            if path in PAGE_FILES:
                body, kind = PAGE_FILES[path]
                return 200, kind, body
            if path in GET:
                return _json(200, await asyncio.to_thread(GET[path], self.app))
        elif method == "POST" and path in POST:
            asked = await _read_body(headers, receive)
            return _json(200, await asyncio.to_thread(POST[path], self.app, asked))
        elif method == "DELETE" and path.startswith(DONOR_PREFIX):
            name = unquote(scope["raw_path"].decode("latin-1").removeprefix(DONOR_PREFIX))
            return _json(200, await asyncio.to_thread(self.app.forget_donor, name))
        if path in PAGE_FILES or path in GET or path in POST or path.startswith(DONOR_PREFIX):
            raise ApiError(405, f"{method} is not possible on {path}", hint="see docs/reference/cli.md")
        raise ApiError(404, f"nothing at {path}", hint="the page is at /")

    def _check_host(self, given: str) -> None:
        if not self.on_loopback:
            return
        try:
            name = urlsplit("//" + given).hostname or ""
        except ValueError:
            name = ""
        if not is_loopback(name):
            raise ApiError(403, f"this explorer does not answer to the name {name!r}", hint=f"open {self.url}")


async def _read_body(headers: dict[bytes, bytes], receive: Receive) -> dict[str, Any]:
    kind = headers.get(b"content-type", b"text/plain").decode("latin-1").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"the body is {kind}", hint="send Content-Type: application/json")
    announced = headers.get(b"content-length", b"0")
    if announced.isdigit() and (len(announced) > 15 or int(announced) > MAX_BODY_BYTES):
        raise ApiError(413, f"the body is {announced[:20].decode()} bytes", hint=f"the limit is {MAX_BODY_BYTES} bytes")
    raw, is_whole = b"", False
    try:
        async with asyncio.timeout(BODY_S):
            while not is_whole:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ConnectionError
                raw += message.get("body", b"")
                is_whole = not message.get("more_body", False)
                if len(raw) > MAX_BODY_BYTES:
                    raise ApiError(413, "the body is too large", hint=f"the limit is {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise ApiError(408, "the body did not come in time", hint="send it in one go") from None
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not JSON", hint=_LIKE) from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body is not a JSON object", hint=_LIKE)
    return body


def _json(status: int, body: dict[str, Any]) -> Answer:
    # ASCII only: a lone surrogate in a prompt must not stop the answer from being encoded.
    return status, "application/json", json.dumps(body, ensure_ascii=True, allow_nan=False).encode("ascii")
