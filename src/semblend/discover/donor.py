"""An earlier prompt whose KV may be reused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from semblend.config import LARGEST
from semblend.errors import InputError
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


ANSWERED = "+answer"
"""Behind a request's id: its prompt and its answer are one donor."""
EvictionReason = Literal["capacity", "expired", "forgotten", "replaced", "superseded", "engine"]


@dataclass(frozen=True, slots=True)
class Eviction:
    """A donor that was removed, and the reason."""

    donor: Donor
    reason: EvictionReason


def check_donor_id(donor_id: str) -> None:
    """Raise InputError unless the id is a non-empty string of valid Unicode."""
    if not isinstance(donor_id, str) or not donor_id:
        raise InputError("a donor id must be a non-empty string", hint="use the request id")
    try:
        donor_id.encode()
    except UnicodeEncodeError:
        raise InputError(f"donor id {donor_id!r} is not valid Unicode", hint="use the request id") from None


def check_ttl(ttl_s: float) -> float:
    """Return the time to live in seconds; raise InputError unless it is a number from 0 on."""
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, (int, float)) or not 0 <= ttl_s <= LARGEST:
        raise InputError(f"ttl_s={ttl_s!r} is not a number of seconds", hint="pass 0 for a donor that never expires")
    return float(ttl_s)
