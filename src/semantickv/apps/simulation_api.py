"""``uvicorn semantickv.apps.simulation_api:app``: the cache simulator behind HTTP. Every number is simulated."""

from __future__ import annotations

import random
import threading
import uuid
from collections import deque
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from semantickv.analysis.experiments import SIX, Experiment, load_experiment, run_experiment
from semantickv.analysis.live_simulation import LiveSimulation
from semantickv.apps.proxy import LazyApp
from semantickv.apps.simulation_bodies import (
    BlockReply,
    ErrorReply,
    ExperimentBody,
    MockReply,
    SimulateBody,
    SimulateReply,
)
from semantickv.edge.intake import Intake, IntakeLimits
from semantickv.settings import ApiSettings
from semantickv.traces.collection import build_trace_line
from semantickv.traces.segmentation import Segmenter, TextBlock
from semantickv.workloads.mock_traffic import METADATA, MockBackend, MockClock
from semblend._version import __version__
from semblend.errors import SemBlendError
from semblend.wire.errors import ApiError, as_api_error

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BODY_BYTES = 1 << 20
LATEST = 100
BUSY = ApiError(429, "an experiment is running", hint="ask again when it is done", code="busy", retry_after_s=5)


class SimulationService:
    """The state behind the API: one simulated cache, one mock backend, the latest traces. All of it bounded."""

    def __init__(self, settings: ApiSettings) -> None:
        self.segmenter = Segmenter(max_block_tokens=2048)
        self.live = LiveSimulation(settings.cache_policy, settings.capacity_tokens)
        self.latest: deque[dict[str, Any]] = deque(maxlen=LATEST)
        self._experiment = threading.Lock()
        self._mock = threading.Lock()
        self._start_mock()

    def _start_mock(self) -> None:
        self._clock = MockClock()
        self._backend = MockBackend(self._clock, random.Random("mock"), self.segmenter)
        self._mocked = 0

    def simulate(self, body: SimulateBody) -> SimulateReply:
        """Simulate one request."""
        done = self.live.add(
            self._cut(body),
            request_id=body.request_id or uuid.uuid4().hex,
            session=body.session_id,
            tenant=body.tenant_id,
        )
        return SimulateReply(
            request_id=done.request_id,
            policy=self.live.policy,
            prompt_tokens=done.prompt_tokens,
            cached_prompt_tokens=done.hit_tokens,
            uncached_prompt_tokens=done.prompt_tokens - done.hit_tokens,
            estimated_ttft_ms=done.estimated_ttft_ms,
            blocks=[_describe_block(block, at < done.hit_blocks) for at, block in enumerate(done.blocks)],
            replayed_requests=done.replayed_requests,
        )

    def run_experiment(self, body: ExperimentBody) -> dict[str, Any]:
        """Run an experiment, one at a time."""
        if not self._experiment.acquire(blocking=False):
            raise BUSY
        try:
            return run_experiment(_read_experiment(body), over_time=False).as_json()
        finally:
            self._experiment.release()

    def generate_mock(self, body: SimulateBody) -> MockReply:
        """Send a prompt to the mock backend, and write its trace line."""
        blocks = self._cut(body)
        asked = {"messages": [turn.model_dump() for turn in body.messages]}
        with self._mock:
            if self._mocked >= 10_000:  # the backend remembers every beginning that it saw
                self._start_mock()
            began = self._clock.now
            usage: dict[str, Any] = {}
            first = began
            for part in self._backend.stream(asked):
                first = self._clock.now if "choices" in part else first
                usage = part.get("usage", usage)
            self._mocked += 1
            line = build_trace_line(
                blocks,
                request_id=f"r{self._mocked:08d}",
                at_ms=1000 * began,
                output_tokens=usage["completion_tokens"],
                observed_ttft_ms=round(1000 * (first - began), 3),
                observed_total_latency_ms=round(1000 * (self._clock.now - began), 3),
                observed_prefix_hit_tokens=usage["prompt_tokens_details"]["cached_tokens"],
                metadata=dict(METADATA),
            )
            self.latest.append(line)
        return MockReply(usage=usage, trace=line)

    def _cut(self, body: SimulateBody) -> tuple[TextBlock, ...]:
        return self.segmenter.cut_messages([turn.model_dump() for turn in body.messages])


def build_api(settings: ApiSettings | None = None) -> FastAPI:
    """Build the application."""
    service = SimulationService(settings or ApiSettings.read())
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorReply, "description": text}
        for status, text in ((400, "a mistake, with a hint"), (413, "too large"), (429, "busy"))
    }
    app = FastAPI(title="SemanticKV simulation", version=__version__, responses=errors)
    app.add_middleware(LimitBody)
    app.add_exception_handler(SemBlendError, _answer_error)
    app.add_exception_handler(RequestValidationError, _answer_invalid)

    @app.get("/health")
    def health() -> dict[str, str]:
        """Say that the server is up."""
        return {"status": "ok"}

    @app.post("/v1/simulate/request")
    def simulate_request(body: SimulateBody) -> SimulateReply:
        """Simulate one request against the cache, and keep it there."""
        return service.simulate(body)

    @app.post("/v1/experiments/run")
    def run_one(body: ExperimentBody) -> dict[str, Any]:
        """Run an experiment and return what results.json would hold."""
        return service.run_experiment(body)

    @app.get("/v1/cache/state")
    def cache_state() -> dict[str, Any]:
        """Show what is cached now."""
        return service.live.describe_cache()

    @app.get("/v1/metrics/summary")
    def metrics_summary() -> dict[str, Any]:
        """Show the sums since the start."""
        return service.live.summarize()

    @app.post("/v1/mock/generate")
    def generate_mock(body: SimulateBody) -> MockReply:
        """Send a prompt to a mock backend that takes simulated time."""
        return service.generate_mock(body)

    @app.get("/v1/traces/latest")
    def latest_traces() -> dict[str, list[dict[str, Any]]]:
        """Show the trace lines of the latest mock requests; they hold no text."""
        return {"requests": list(service.latest)}

    return app


class LimitBody:
    """Reads a body before the application does, and refuses one that is too large or too slow."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._intake = Intake(IntakeLimits(requests=256, body_bytes=MOST_BODY_BYTES, all_bytes=64 << 20))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refused = self._intake.enter()
        if refused is not None:
            await _respond(refused)(scope, receive, send)
            return
        body = b""
        try:
            found = await self._intake.read_body(scope["headers"], receive)
            if isinstance(found, ApiError):
                await _respond(found)(scope, receive, send)
            elif isinstance(found, bytes):
                body = found
                await self._app(scope, _replay(body, receive), send)
        finally:
            self._intake.leave(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Give a body that was read already, then whatever comes."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return waiting.pop() if waiting else await receive()

    return next_message


def _read_experiment(body: ExperimentBody) -> Experiment:
    if body.experiment is not None:
        if not body.experiment.replace("_", "").isalnum():  # a name, never a path
            raise ApiError(400, "experiment is not a name", hint="for example low_memory_rag_stress")
        return load_experiment(body.experiment)
    return Experiment(
        "api",
        tuple(body.workload_families or ["repeated_system"]),
        sessions=body.sessions,
        requests=body.requests,
        capacity_tokens=body.capacity_tokens,
        seed=body.seed,
        policies=tuple(body.policies or SIX),
    )


def _describe_block(block: TextBlock, hit: bool) -> BlockReply:
    return BlockReply(semantic_type=block.type, token_count=block.tokens, content_hash=block.content_hash, hit=hit)


def _respond(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers())


async def _answer_error(request: Request, error: Exception) -> JSONResponse:
    del request
    return _respond(as_api_error(error))


async def _answer_invalid(request: Request, error: Exception) -> JSONResponse:
    """400 with the first mistake: its place and pydantic's words, never the value."""
    del request
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body")[:200]
    return _respond(ApiError(400, f"{place or 'the body'}: {first['msg']}", hint="see /docs", param=place or None))


app = LazyApp(build_api)
