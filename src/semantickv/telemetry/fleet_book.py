"""What the fleet page shows: the latest placements with their reasons, and the documents that come again.

No text is kept. A document is known by the smallest hash among the longer pieces of a prompt: prompts that share a long
passage share it, whatever stands around that passage.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from semantickv.routing.fingerprint import PromptPieces
from semantickv.routing.replica import Replica
from semantickv.routing.router import RouteDecision
from semantickv.telemetry.record import ExchangeRecord

MOST_DECISIONS = 200
MOST_DOCUMENTS = 1000
SHOWN_DOCUMENTS = 40
LEAST_DOCUMENT_TOKENS = 128
LONG_PIECE_TOKENS = 64
"""A question is shorter: it must not give its name to the document."""


@dataclass(slots=True)
class ReplicaTotals:
    """What engines reported since the start, of one replica. Only requests whose engine said what it reused count."""

    requests: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0


@dataclass(slots=True)
class _Document:
    pieces: PromptPieces
    requests: int
    seen_at: float


@dataclass(slots=True)
class FleetBook:
    """Bounded: an old placement and a document that nobody asks for make room."""

    clock: Callable[[], float] = time.time
    outcomes: Counter[str] = field(default_factory=Counter)
    reuses: Counter[str] = field(default_factory=Counter)
    totals: dict[str, ReplicaTotals] = field(default_factory=dict)
    _decisions: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_DECISIONS))
    _documents: OrderedDict[int, _Document] = field(default_factory=OrderedDict)

    def note(self, record: ExchangeRecord, decision: RouteDecision, pieces: PromptPieces) -> None:
        """Take a request that was placed and has ended."""
        self.outcomes[decision.outcome.value] += 1
        receipt = record.receipt
        if receipt.kind is not None:
            self.reuses[receipt.kind.value] += 1
        if receipt.prompt_tokens is not None and receipt.reused_tokens is not None:
            totals = self.totals.setdefault(decision.replica.id, ReplicaTotals())
            totals.requests += 1
            totals.prompt_tokens += receipt.prompt_tokens
            totals.reused_tokens += receipt.reused_tokens
        self._decisions.append(self._describe(record, decision))
        if pieces.total_tokens >= LEAST_DOCUMENT_TOKENS and record.status < 400:
            self._note_document(pieces)

    def list_decisions(self) -> list[dict[str, Any]]:
        """The latest placements, newest first."""
        return list(reversed(self._decisions))

    def list_documents(self, replicas: Sequence[Replica]) -> list[dict[str, Any]]:
        """The documents asked for most, with the share of each that every replica has."""
        found = sorted(self._documents.items(), key=lambda item: (-item[1].requests, -item[1].seen_at))
        return [
            {
                "id": f"{key:016x}"[:8],
                "tokens": one.pieces.total_tokens,
                "requests": one.requests,
                "seen_unix_s": round(one.seen_at, 1),
                "held": {replica.id: round(_share(replica, one.pieces), 3) for replica in replicas},
            }
            for key, one in found[:SHOWN_DOCUMENTS]
        ]

    def _note_document(self, pieces: PromptPieces) -> None:
        long = [
            value for value, tokens in zip(pieces.hashes, pieces.tokens, strict=True) if tokens >= LONG_PIECE_TOKENS
        ]
        key = min(long or pieces.hashes)
        known = self._documents.pop(key, None)
        self._documents[key] = _Document(pieces, 1 if known is None else known.requests + 1, self.clock())
        if len(self._documents) > MOST_DOCUMENTS:
            self._documents.popitem(last=False)

    def _describe(self, record: ExchangeRecord, decision: RouteDecision) -> dict[str, Any]:
        return {
            "time_unix_s": round(self.clock(), 1),
            "request_id": record.request_id,
            "model": record.model,
            "status": record.status,
            "replica": record.replica,
            "route": record.route,
            "reason": record.route_reason,
            "score": record.route_score,
            "prompt_tokens": decision.prompt_tokens,
            "new_tokens": decision.new_tokens,
            "reuse": record.receipt.kind,
            "ttft_ms": record.ttft_ms if record.ttft_ms is not None else record.first_byte_ms,
            "arranged": bool(record.arranged),
            "compared": [
                {
                    "replica": replica.id,
                    "known_tokens": max(standing.prefix_tokens, standing.any_tokens),
                    "waiting_tokens": standing.waiting_tokens,
                    "running": standing.running,
                }
                for replica, standing in zip(decision.candidates, decision.standings, strict=False)
            ],
        }


def _share(replica: Replica, pieces: PromptPieces) -> float:
    overlap = replica.memory.match(pieces)
    return max(overlap.prefix_tokens, overlap.any_tokens) / pieces.total_tokens
