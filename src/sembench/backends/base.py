"""The types between the live loop and a server: a call, an answer, a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from sembench.backends.http_client import Exchange, JsonObject
from sembench.values import find_bad_counts, read_float, read_text

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


def measure_times(exchange: Exchange, has_text: Callable[[JsonObject], bool]) -> tuple[float | None, tuple[float, ...]]:
    """Return the time to the first event with text and the gaps between such events, in milliseconds."""
    times = [at for event, at in zip(exchange.events, exchange.arrivals_ms, strict=True) if has_text(event)]
    if not times:
        return None, ()
    return times[0], tuple(later - earlier for earlier, later in pairwise(times))


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


def list_malformed(**parts: JsonObject | None) -> tuple[str, ...]:
    """Return one line for each count in these parts of an answer that is no count."""
    return tuple(line for name, part in parts.items() for line in find_bad_counts(part or {}, name))


def collect_ids(*names: Any) -> tuple[str, ...]:
    """Return the names of a request, each once, in order; what is no text is left out."""
    return tuple(dict.fromkeys(name for name in map(read_text, names) if name))
