"""The record of one request: who, where, how long, and what the engine said that it reused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from semblend.confirm.outcome import Outcome

MOST_RECORDS = 10_000


class ReuseKind(StrEnum):
    """What an engine did with a prompt, in one word. Where several hold, the one furthest from a cold run."""

    RELOCATED = "relocated"
    EXACT_EXTERNAL = "exact_external"
    EXACT_LOCAL = "exact_local"
    REJECTED = "rejected"
    FALLBACK = "fallback"


@dataclass(frozen=True, slots=True)
class EngineReceipt:
    """What an engine reported of a prompt, in tokens; None where it did not say. Nothing here is estimated.

    ``exact_tokens`` came from its own prefix cache, ``external_tokens`` from an exact cache outside of it,
    ``relocated_tokens`` from donor KV. ``rejected`` is the engine's reason to refuse a donor. ``is_fallback``: it says
    that it computed everything.
    """

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    exact_tokens: int | None = None
    external_tokens: int | None = None
    relocated_tokens: int | None = None
    outcome: str | None = None
    rejected: str | None = None
    is_fallback: bool | None = None

    @property
    def kind(self) -> ReuseKind | None:
        """The receipt in one word; None where the engine said nothing."""
        if self.relocated_tokens:
            return ReuseKind.RELOCATED
        if self.external_tokens:
            return ReuseKind.EXACT_EXTERNAL
        if self.exact_tokens:
            return ReuseKind.EXACT_LOCAL
        if self.rejected is not None:
            return ReuseKind.REJECTED
        return ReuseKind.FALLBACK if self.is_fallback or self.reused_tokens == 0 else None

    @property
    def reused_tokens(self) -> int | None:
        """Tokens of the prompt that the engine did not compute, of whatever kind; None where it did not say."""
        known = [one for one in (self.exact_tokens, self.external_tokens, self.relocated_tokens) if one is not None]
        return sum(known) if known else None

    @classmethod
    def read(cls, usage: Mapping[str, Any], receipt: Mapping[str, Any]) -> EngineReceipt:
        """Read OpenAI's usage and, where the engine is ours, the ``semblend`` object.

        >>> EngineReceipt.read({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}, {}).exact_tokens
        4
        """
        details = usage.get("prompt_tokens_details")
        cached = _read_count(details.get("cached_tokens")) if isinstance(details, Mapping) else None
        outcome = _read_word(receipt.get("outcome"))
        exact = _read_count(receipt.get("exact_tokens"))
        return cls(
            prompt_tokens=_read_count(usage.get("prompt_tokens")),
            output_tokens=_read_count(usage.get("completion_tokens")),
            exact_tokens=cached if exact is None else exact,  # of ours, cached_tokens counts relocated ones too
            external_tokens=_read_count(receipt.get("external_tokens")),
            relocated_tokens=_read_count(receipt.get("reused_tokens")),
            outcome=outcome,
            rejected=_read_word(receipt.get("reason")) if outcome == Outcome.BACKEND_DECLINED_REUSE else None,
            is_fallback=None if outcome is None else outcome == Outcome.COLD_FALLBACK,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRecord:
    """One request from its arrival to its end. Times are milliseconds since its arrival."""

    request_id: str
    path: str
    model: str
    status: int
    fault: str | None
    attempts: int
    replica: str | None
    route: str | None
    route_reason: str | None
    route_score: float | None
    sent_bytes: int
    received_bytes: int
    first_byte_ms: float | None
    ttft_ms: float | None
    total_ms: float
    receipt: EngineReceipt
    arranged: tuple[dict[str, Any], ...] = ()
    """The order of every group of marked passages, as it was sent."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "reuse": self.receipt.kind}


class RecordStore:
    """The latest records by tenant and request; an old one makes room for a new one."""

    def __init__(self, most: int = MOST_RECORDS) -> None:
        self._most = most
        self._records: OrderedDict[tuple[bytes, str], ExchangeRecord] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, namespace: bytes, record: ExchangeRecord) -> None:
        """Keep a record for the tenant whose request it was."""
        self._records[namespace, record.request_id] = record
        self._records.move_to_end((namespace, record.request_id))
        if len(self._records) > self._most:
            self._records.popitem(last=False)

    def find(self, namespace: bytes, request_id: str) -> ExchangeRecord | None:
        """Find a record of this tenant; another tenant's is not there."""
        return self._records.get((namespace, request_id))


def _read_count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _read_word(value: Any) -> str | None:
    return value[:64] if isinstance(value, str) else None
