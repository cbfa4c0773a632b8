"""The record of one request: who, where, how long, and what the engine said that it reused.

The answer is read as it passes: events are parsed only until the first one with content and, at the end, in the last
bytes. An answer of 1,000 events must not cost 1,000 parses.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from semantickv.edge.headers import RawHeaders, find_header
from semantickv.routing.prompt_view import load_json
from semantickv.traces.collection import has_content
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


TAIL_BYTES = 32 << 10
MOST_WHOLE_BYTES = 1 << 20
MOST_OPENING_BYTES = 64 << 10
_TOLD = (b'"usage"', b'"semblend"', b'"sglext"')


class AnswerReader:
    """Show it every piece with `observe`; ask for `receipt` at the end."""

    def __init__(self, headers: RawHeaders, clock: Callable[[], float] = time.perf_counter) -> None:
        self.received_bytes = 0
        self.first_token_at: float | None = None
        self._clock = clock
        self.is_stream = "event-stream" in find_header(headers, b"content-type")
        self._is_plain = find_header(headers, b"content-encoding") in ("", "identity")
        self._opening = b""
        self._is_opening = self.is_stream and self._is_plain
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0

    def observe(self, piece: bytes) -> None:
        """Take the next bytes."""
        self.received_bytes += len(piece)
        if not self._is_plain:
            return
        if self._is_opening:
            self._look_for_content(piece)
        self._tail.append(piece)
        self._tail_bytes += len(piece)
        most = TAIL_BYTES if self.is_stream else MOST_WHOLE_BYTES
        while len(self._tail) > 1 and self._tail_bytes - len(self._tail[0]) >= most:
            self._tail_bytes -= len(self._tail.popleft())

    def read_receipt(self) -> EngineReceipt:
        """What the answer says of tokens and reuse; empty where it says nothing or was not read."""
        usage: Mapping[str, Any] = {}
        receipt: Mapping[str, Any] = {}
        for value in self._list_objects():
            if isinstance(value.get("usage"), Mapping):
                usage = value["usage"]
            receipt = _find_receipt(value) or receipt
        return EngineReceipt.read(usage, receipt)

    def _list_objects(self) -> Iterator[Mapping[str, Any]]:
        data = b"".join(self._tail)
        if not self.is_stream:
            texts = [data] if self.received_bytes <= MOST_WHOLE_BYTES else []
        else:
            texts = [line[5:] for line in data.split(b"\n") if line.startswith(b"data:")]
        for text in texts:
            if not any(word in text for word in _TOLD):
                continue
            value = _parse(text)
            if value is not None:
                yield value

    def _look_for_content(self, piece: bytes) -> None:
        """Note the time of the first event that carries text or a tool call."""
        self._opening += piece
        *lines, self._opening = self._opening.split(b"\n")
        for line in lines:
            value = _parse(line[5:]) if line.startswith(b"data:") else None
            if value is not None and has_content(value):
                self.first_token_at = self._clock()
                self._is_opening, self._opening = False, b""
                return
        if len(self._opening) > MOST_OPENING_BYTES:
            self._is_opening, self._opening = False, b""


def _find_receipt(value: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What an answer says of reuse: our server under ``semblend``, vLLM with our connector in ``kv_transfer_params``,
    SGLang in ``sglext``, where device, host and storage are told apart."""
    for holder in (value, value.get("kv_transfer_params")):
        if isinstance(holder, Mapping) and isinstance(holder.get("semblend"), Mapping):
            found: Mapping[str, Any] = holder["semblend"]
            return found
    extension = value.get("sglext")
    details = extension.get("cached_tokens_details") if isinstance(extension, Mapping) else None
    if not isinstance(details, Mapping):
        return None
    outside = [details.get(name) or 0 for name in ("host", "storage")]
    return {"exact_tokens": details.get("device"), "external_tokens": sum(one for one in outside if type(one) is int)}


def _parse(text: bytes) -> Mapping[str, Any] | None:
    try:
        value = load_json(text)
    except (ValueError, RecursionError):
        return None  # [DONE], or half an event
    return value if isinstance(value, Mapping) else None
