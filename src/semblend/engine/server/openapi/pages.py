"""The shapes of what the server says of itself: models, health, the dashboard's data."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from semblend.wire.replies import Count, ReceiptShape, Shape

Ms = float | None


class ModelCard(Shape):
    """OpenAI's ``model``."""

    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    root: str
    max_model_len: Annotated[int, Field(ge=1)]


class ModelList(Shape):
    object: Literal["list"]
    data: Annotated[list[ModelCard], Field(min_length=1)]


class Health(Shape):
    status: Literal["ok"]
    model: str
    version: str
    needs_key: bool


class Flushed(Shape):
    success: Literal[True]
    donors_forgotten: Count


class TokensByKind(Shape):
    exact: Count
    reused: Count
    recomputed: Count
    prefill: Count


class TotalsShape(Shape):
    """What receipts add up to."""

    requests: Count
    states: dict[str, Count]
    outcomes: dict[str, Count]
    declines: dict[str, Count]
    tokens: TokensByKind
    saved_ms: float
    cold_ms: float
    risks: list[float]


class LiveRequestShape(Shape):
    """One request; ``tenant`` is shown to an admin only."""

    id: str
    endpoint: str
    state: Literal["waiting", "running", "done", "failed", "refused", "cancelled"]
    opened_unix_s: float
    waited_ms: Ms
    total_ms: Ms
    ttft_ms: Ms
    cold_ttft_ms: Ms
    prompt_tokens: Count
    output_tokens: Count
    quality: str | None
    error: str
    semblend: ReceiptShape | None
    places_known: bool
    strip: list[tuple[Count, Count, Literal["exact", "reused", "recomputed", "prefill"], int | None]]
    tenant: str = ""


class LiveNews(Shape):
    """What changed since ``after``."""

    sequence: Count
    requests: list[LiveRequestShape]
    totals: TotalsShape
    cold_samples: Count
    model: str
    admin: bool
    tenant: str
    running: Count
    waiting: Count
    refused: Count
    max_running: Count
    donors: Count
    donor_tokens: Count


class DonorShape(Shape):
    donor_id: str
    tokens: Count
    created_unix_s: float
    pinned: bool
    tenant: str


class DonorList(Shape):
    count: Count
    donors: list[DonorShape]


class Stats(Shape):
    """``engine`` and ``responses`` are shown to an admin only."""

    uptime_s: Annotated[float, Field(ge=0)]
    totals: TotalsShape
    engine: dict[str, Any] = Field(default={})
    responses: dict[str, Count] = Field(default={})
