"""An earlier prompt whose KV may be reused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from semblend.prompt import Namespace


@dataclass(frozen=True, slots=True)
class Donor:
    """One registration of a prompt. ``generation`` differs for every registration, also of the same id."""

    donor_id: str
    namespace: Namespace
    generation: int
    token_count: int
    created_unix_s: float
    expires_unix_s: float | None = None
    pinned: bool = False


EvictionReason = Literal["capacity", "expired", "forgotten", "replaced", "engine"]


@dataclass(frozen=True, slots=True)
class Eviction:
    """A donor that is gone, and why."""

    donor: Donor
    reason: EvictionReason
