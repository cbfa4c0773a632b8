"""What the facade tells the world: every event, metric and log line of the library leaves from here."""

from __future__ import annotations

import logging

from semblend.confirm import events
from semblend.confirm.metrics import Metrics
from semblend.confirm.receipt import Receipt
from semblend.confirm.sinks import EventStream
from semblend.discover.donor import Donor, Eviction
from semblend.discover.store import StoreStats
from semblend.pipeline import LookupTrace
from semblend.plan.reuse_plan import Decline, ReusePlan
from semblend.prompt import Prompt

log = logging.getLogger("semblend")


class Reporter:
    """Turns what happened into events and metrics; makes no event where nobody listens."""

    def __init__(self, stream: EventStream, metrics: Metrics) -> None:
        self._stream = stream
        self._metrics = metrics

    def report_donor(self, donor: Donor) -> None:
        if self._stream:
            digest = donor.namespace.digest
            self._stream.emit(events.donor_registered(donor.donor_id, digest, donor.token_count, donor.generation))

    def report_evictions(self, evictions: tuple[Eviction, ...]) -> None:
        if self._stream:
            for eviction in evictions:
                donor = eviction.donor
                self._stream.emit(events.donor_evicted(donor.donor_id, donor.generation, eviction.reason))

    def report_store(self, stats: StoreStats) -> None:
        self._metrics.donors(stats.donors, stats.used_bytes, "index")

    def report_lookup(
        self,
        prompt: Prompt,
        request_id: str,
        exact_tokens: int,
        trace: LookupTrace,
        decision: ReusePlan | Decline,
        seconds: float,
    ) -> None:
        """``trace`` says what was found, ``decision`` what was handed out: they differ in discovery-only mode."""
        self._metrics.lookup(seconds)
        best = max((likeness.similarity for likeness in decision.evidence), default=None)
        if best is not None:
            self._metrics.similarity(best)
        reason = decision.reason if isinstance(decision, Decline) else None
        found = trace.decision if isinstance(trace.decision, ReusePlan) else None
        if self._stream:
            self._stream.emit(
                events.lookup(
                    request_id or None,
                    len(prompt),
                    trace.alignment.seeds,
                    trace.alignment.runs_examined,
                    round(seconds * 1e3, 4),
                    exact_tokens=exact_tokens,
                    reusable_tokens=found.reused_tokens if found else 0,
                    donor_ids=found.donor_ids if found else (),
                    similarity=best,
                    reason=reason,
                )
            )
        if isinstance(decision, Decline):
            self.report_decline(decision, request_id)
        elif self._stream:
            self._stream.emit(
                events.reuse_planned(
                    request_id or None,
                    decision.spans,
                    decision.reused_tokens,
                    prompt_tokens=len(prompt),
                    exact_tokens=exact_tokens,
                    saving_ms=decision.saving_ms,
                    similarity=best,
                )
            )

    def report_decline(self, decline: Decline, request_id: str) -> None:
        self._metrics.declined(decline.reason)
        if self._stream:
            self._stream.emit(events.reuse_declined(request_id or None, decline.reason, decline.detail))

    def report_receipt(self, receipt: Receipt) -> None:
        self._metrics.confirmed(receipt)
        if self._stream:
            self._stream.emit(events.from_receipt(receipt))

    def report_missing(self, message: str) -> None:
        """Something optional is not there; nothing is wrong."""
        log.info("%s", message)
        if self._stream:
            self._stream.emit(events.fallback(None, None, message))

    def report_failure(self, where: str, error: BaseException, request_id: str = "") -> None:
        """Our own fault: the request runs cold."""
        log.warning("%s failed, the request runs cold: %s: %s", where, type(error).__name__, error)
        if self._stream:
            self._stream.emit(events.error(where, f"{type(error).__name__}: {error}", request_id or None))


def report_disk_failure(stream: EventStream, message: str) -> None:
    """Donors that should have gone to disk are lost: it is full, or cannot be written to."""
    log.warning("%s (hint: make room there, or lower the limit of the folder)", message)
    if stream:
        stream.emit(events.error("donor_disk", message, None))


def report_policy_failure(stream: EventStream, error: BaseException) -> None:
    """An eviction policy failed and is dropped: what it chose among leaves by age from now on."""
    message = f"{type(error).__name__}: {error}"
    log.warning("the eviction policy failed, lru goes on: %s", message)
    if stream:
        stream.emit(events.error("eviction", message, None))
