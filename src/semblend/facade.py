"""`SemBlend`: the library as one object. It keeps the donors, runs the pipeline, tells what happened."""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from semblend.config import SemBlendConfig, load_config
from semblend.confirm.ledger import Ledger, Totals
from semblend.confirm.metrics import Metrics, make_metrics
from semblend.confirm.receipt import Receipt
from semblend.confirm.sinks import Sink, open_stream
from semblend.confirm.tracing import trace as trace_span
from semblend.discover.donor import Donor, Eviction, EvictionReason, check_donor_id, check_ttl
from semblend.discover.journal import SqliteJournal, write_snapshot
from semblend.discover.similarity import SimilarityIndex
from semblend.discover.store import DonorStore, StoreStats
from semblend.errors import InputError, SemBlendError, StoreError
from semblend.explanation import Explanation, explain
from semblend.fingerprint.embedder import make_embedder
from semblend.fingerprint.fingerprinter import Fingerprinter
from semblend.fingerprint.hashes import DEFAULT_SCHEME, HashScheme
from semblend.name_clash import refuse_foreign_distribution
from semblend.pipeline import NOTHING_ALIGNED, LookupTrace, Pipeline
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan, Similar
from semblend.prompt import Prompt, check_exact_tokens
from semblend.reporting import Reporter, report_policy_failure

_WORTH_ASKING = {DeclineReason.NOTHING_SHARED, DeclineReason.BELOW_BREAK_EVEN, DeclineReason.LOW_REUSE_RATIO}


class SemBlend:
    """Finds which KV a prompt can reuse, and keeps the books on what was reused.

    >>> sb = SemBlend()
    >>> donor = sb.register(Prompt(range(100)), donor_id="req-1")
    >>> sb.lookup(Prompt(range(40, 90))).spans
    (Span(donor_id='req-1', donor_start=40, target_start=0, length=50, generation=0),)

    Thread-safe. `lookup` never raises for what goes wrong inside: the request runs cold, and an event says why.
    ``compiled`` has no effect any more: where numba is absent, the kernels run as plain Python.
    """

    def __init__(
        self,
        config: SemBlendConfig | None = None,
        *,
        sinks: Iterable[Sink] = (),
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.time,
        scheme: HashScheme = DEFAULT_SCHEME,
        compiled: bool | None = None,
    ) -> None:
        refuse_foreign_distribution()
        if config is not None and not isinstance(config, SemBlendConfig):
            raise InputError(f"config is {type(config).__name__}, not SemBlendConfig", hint="SemBlendConfig(...)")
        self.config = SemBlendConfig() if config is None else config
        self.events = open_stream(self.config, *sinks)
        self.metrics = make_metrics(self.config.metrics) if metrics is None else metrics
        self.ledger = Ledger()
        self._reporter = Reporter(self.events, self.metrics)
        self._clock = clock
        self._switched_on = True
        self._listeners: list[Callable[[Eviction], None]] = []
        self._claims: dict[str, tuple[tuple[str, int], ...]] = {}
        self._claims_lock = threading.Lock()
        del compiled  # one release longer
        self._fingerprinter = Fingerprinter(scheme)
        self._journal: SqliteJournal | None = None
        try:
            if self.config.store:
                self._journal = SqliteJournal(Path(self.config.store).expanduser())
            self._store = DonorStore(
                max_donors=self.config.max_donors,
                max_bytes=self.config.max_bytes,
                journal=self._journal,
                clock=clock,
                eviction=self.config.eviction,
                on_policy_failure=partial(report_policy_failure, self.events),
            )
            self._pipeline = Pipeline(self.config, self._store, self._fingerprinter)
            self._evidence = self._make_evidence()
            if self._journal is not None:
                self._restore(self._journal)
        except BaseException:
            self._close_files()
            raise

    @classmethod
    def from_env(cls, **arguments: Any) -> SemBlend:
        """Configured by the TOML file, then ``SEMBLEND_*`` variables, then ``arguments``."""
        return cls(load_config(**arguments))

    # -- donors ----------------------------------------------------------------------------------------------------

    def register(self, prompt: Prompt, donor_id: str, *, ttl_s: float | None = None) -> Donor:
        """Make a prompt a donor; one of the same id is replaced. Evicts what is worth least when full."""
        _check_prompt(prompt)
        check_donor_id(donor_id)
        ttl_s = self.config.donor_ttl_s if ttl_s is None else check_ttl(ttl_s)
        fingerprint = self._fingerprinter.fingerprint(prompt)
        donor, evictions = self._store.add(prompt, fingerprint, donor_id, ttl_s=ttl_s)
        self._gone(evictions)
        self._evidence.add(donor_id, prompt)
        self._reporter.report_donor(donor)
        self._reporter.report_store(self._store.compute_stats())
        return donor

    def forget(self, donor_id: str, *, reason: EvictionReason = "forgotten") -> bool:
        """Drop a donor, from the store file too. ``reason="engine"`` when the engine evicted its KV."""
        return bool(self._forget([donor_id], reason))

    def forget_where(self, *, tenant: str | None = None, older_than_s: float | None = None) -> int:
        """Drop the donors of a tenant, those older than an age, or those that are both; returns how many."""
        if tenant is None and older_than_s is None:
            raise InputError("forget_where needs a tenant or an age", hint="to drop everything call clear()")
        born_before = self._clock() - older_than_s if older_than_s is not None else float("inf")
        chosen = [
            donor.donor_id
            for donor in self._store.list_donors(expired=True)
            if donor.created_unix_s <= born_before and (tenant is None or donor.namespace.tenant == tenant)
        ]
        return self._forget(chosen, "forgotten")

    def supersede(
        self,
        donor_id: str,
        may_go: Callable[[str], bool] = lambda donor_id: True,  # noqa: ARG005
    ) -> tuple[Donor, ...]:
        """Drop the donors that this one begins with, token for token, but those that are claimed or pinned.

        For engines, whose newer donor holds all that the older ones do: a conversation is one donor, not one a turn.
        """
        donor, tokens = self._store.get(donor_id), self._store.copy_tokens(donor_id)
        if donor is None or tokens is None:
            return ()
        older = self._store.find_beginnings(Prompt(tokens, namespace=donor.namespace))
        gone = [one for one in older if one.donor_id != donor_id and not one.pinned and may_go(one.donor_id)]
        if gone:
            self._forget([one.donor_id for one in gone], "superseded")
        return tuple(gone)

    def find_beginning(self, prompt: Prompt) -> Donor | None:
        """The longest donor that a prompt begins with, token for token."""
        return next(iter(self._store.find_beginnings(prompt)), None)

    def keep(self, donor_id: str, seconds: float) -> None:
        """For so long a donor leaves after others of its tenant, which keeps half of its share in this way at most."""
        self._store.keep(donor_id, seconds)

    def clear(self) -> int:
        """Drop every donor; returns how many."""
        return self._forget([donor.donor_id for donor in self._store.list_donors(expired=True)], "forgotten")

    def on_evicted(self, listener: Callable[[Eviction], None]) -> None:
        """Call ``listener`` for every donor that goes, whatever the reason: whoever keeps its KV can let it go too."""
        self._listeners.append(listener)

    def donors(self) -> tuple[Donor, ...]:
        """All donors, least recently used first."""
        return self._store.list_donors()

    def count_donors(self, tenant: str | None = None) -> tuple[int, int]:
        """Donors and their tokens, of one tenant or of all; takes the same time however many there are."""
        return self._store.count(tenant)

    def donor_tokens(self, donor_id: str) -> np.ndarray[Any, np.dtype[np.int32]] | None:
        return self._store.copy_tokens(donor_id)

    def get_donor(self, donor_id: str) -> Donor | None:
        return self._store.get(donor_id)

    def pin(self, donor_id: str) -> bool:
        """Keep a donor from eviction until `unpin`; False when it is not there."""
        return self._store.pin(donor_id)

    def unpin(self, donor_id: str) -> None:
        self._store.unpin(donor_id)

    def stats(self) -> StoreStats:
        return self._store.compute_stats()

    # -- a request -------------------------------------------------------------------------------------------------

    def lookup(
        self, prompt: Prompt, *, request_id: str = "", exact_tokens: int = 0, opt_out: bool = False, base: str = ""
    ) -> ReusePlan | Decline:
        """What of this prompt donors hold. Changes nothing; `claim` the plan before acting on it.

        ``exact_tokens``: leading tokens that the engine holds already. ``opt_out``: this request wants no reuse.
        ``base``: a donor that is taken alone where it holds nearly all that donors hold, as of an edited history.
        """
        _check_prompt(prompt)
        if not isinstance(request_id, str):
            raise InputError(f"request_id is {type(request_id).__name__}, not str", hint="pass request_id=str(...)")
        exact_tokens = check_exact_tokens(exact_tokens, len(prompt))
        started = time.perf_counter()
        with trace_span("semblend.lookup", prompt_tokens=len(prompt)) as span:
            decline = self.decline_beforehand(prompt, request_id, opt_out)
            trace = (
                LookupTrace(decline, NOTHING_ALIGNED)
                if decline
                else self._search(prompt, request_id, exact_tokens, base)
            )
            decision = self._apply_discovery_only(trace.decision)
            span.set(reused_tokens=_count_reused(decision), reason=str(getattr(decision, "reason", "")))
        seconds = time.perf_counter() - started
        self._reporter.report_lookup(prompt, request_id, exact_tokens, trace, decision, seconds)
        if request_id and isinstance(decision, ReusePlan):
            self.ledger.note_plan(request_id, decision)
        return decision

    def decline_beforehand(self, prompt: Prompt, request_id: str, opt_out: bool) -> Decline | None:
        """Why this request is not even looked up: opted out, switched off, or outside the canary share."""
        if opt_out:
            return Decline(DeclineReason.DISABLED, "the request opted out")
        if not self.config.enabled or not self._switched_on:
            return Decline(DeclineReason.DISABLED, "switched off")
        if self.config.kill_file and os.path.exists(self.config.kill_file):
            return Decline(DeclineReason.DISABLED, f"{self.config.kill_file} exists")
        if self.config.canary_percent < 100:
            ticket = zlib.crc32(request_id.encode("utf-8", "surrogatepass") or prompt.token_ids.tobytes()) % 10_000
            if ticket >= self.config.canary_percent * 100:
                return Decline(DeclineReason.DISABLED, "outside the canary share")
        return None

    def explain(self, prompt: Prompt, *, exact_tokens: int = 0) -> Explanation:
        """Why a lookup of this prompt ends as it does, stage by stage. Emits nothing."""
        _check_prompt(prompt)
        exact_tokens = check_exact_tokens(exact_tokens, len(prompt))
        decline = self.decline_beforehand(prompt, "", False)
        trace = LookupTrace(decline, NOTHING_ALIGNED) if decline else self._search(prompt, "", exact_tokens)
        return explain(prompt, trace, self._apply_discovery_only(trace.decision), len(self._store))

    def similar(self, prompt: Prompt, *, limit: int = 5) -> tuple[Similar, ...]:
        """Donors that look alike, best first: for routing and telemetry, never a permission to reuse."""
        _check_prompt(prompt)
        return self._evidence.find_similar(prompt, limit)

    def claim(self, plan: ReusePlan, request_id: str) -> ReusePlan | Decline:
        """Hold a plan's donors until its receipt: they can't be evicted for room and count as just used."""
        if not isinstance(plan, ReusePlan):
            raise InputError(
                f"only a ReusePlan can be claimed, not a {type(plan).__name__}", hint="match on lookup's answer"
            )
        wanted = tuple(dict.fromkeys((span.donor_id, span.generation) for span in plan.spans))
        held: list[tuple[str, int]] = []
        with self._store.lock:
            for donor_id, generation in wanted:
                if not self._store.pin(donor_id, generation):
                    for other in held:
                        self._store.unpin(*other)
                    return self._stale(donor_id, request_id)
                held.append((donor_id, generation))
            self._touch_donors(plan.donor_ids)
        self.release(request_id)
        with self._claims_lock:
            self._claims[request_id] = wanted
        self.ledger.note_plan(request_id, plan)
        return plan

    def confirm(self, receipt: Receipt) -> Receipt:
        """A backend tells what it did. Only this counts as reuse."""
        if not isinstance(receipt, Receipt):
            raise InputError(f"expected a Receipt, got {type(receipt).__name__}", hint="Receipt(...) or from_dict")
        self.ledger.confirm(receipt)
        self.release(receipt.request_id)
        self._touch_donors(receipt.donor_ids, reused=True)
        self._reporter.report_receipt(receipt)
        return receipt

    def release(self, request_id: str) -> None:
        """Give up a claim, as when a request is aborted."""
        with self._claims_lock:
            held = self._claims.pop(request_id, ())
        for donor_id, generation in held:
            self._store.unpin(donor_id, generation)

    def totals(self) -> Totals:
        """What receipts add up to."""
        return self.ledger.totals()

    # -- the object itself -----------------------------------------------------------------------------------------

    def warm_up(self) -> float:
        """Compile or load the kernels now instead of in the first request; returns the seconds it took."""
        started = time.perf_counter()
        scratch = DonorStore(max_donors=2, max_bytes=1 << 20, eviction=self.config.eviction)
        pipeline = Pipeline(replace(self.config, lookup_budget_ms=0.0), scratch, self._fingerprinter)
        prompt = Prompt(np.arange(1024) % 997)
        for donor_id in ("a", "b", "c"):
            scratch.add(prompt, self._fingerprinter.fingerprint(prompt), donor_id)
        pipeline.run(prompt)
        return time.perf_counter() - started

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every registered donor can be found by likeness; tokens can be found at once."""
        return self._evidence.flush(timeout_s)

    def disable(self) -> None:
        """The kill switch: every lookup declines until `enable`."""
        self._switched_on = False

    def enable(self) -> None:
        self._switched_on = True

    def save(self, path: str | Path) -> int:
        """Write all donors to a new store file, which replaces ``path`` only when whole; returns how many.

        Requests go on meanwhile: the store is locked for one donor at a time, and each donor is whole.
        """
        donors = self._store.list_donors()
        copies = ((donor, self._store.copy_tokens(donor.donor_id, donor.generation)) for donor in donors)
        return write_snapshot(path, ((donor, tokens) for donor, tokens in copies if tokens is not None))

    def refresh(self) -> int:
        """Take over what other processes changed in a shared store file; returns how many donors differ."""
        if self._journal is None:
            return 0
        with self._store.lock:
            self._gone(self._store.expire())
            theirs = self._journal.list_generations()
            ours = {donor.generation: donor.donor_id for donor in self._store.list_donors()}
            gone = [donor_id for generation, donor_id in ours.items() if generation not in theirs]
            evictions = self._store.remove(gone, "forgotten", journal=False)
            fresh = sum(self._take_in(self._journal.fetch(generation)) for generation in sorted(theirs - ours.keys()))
        self._gone(evictions)
        return len(gone) + fresh

    def close(self) -> None:
        self._evidence.close()
        with self._store.lock:
            self._close_files()

    def _close_files(self) -> None:
        try:
            if self._journal is not None:
                self._journal.close()
        finally:
            self.events.close()
            self.metrics.close()

    def __enter__(self) -> SemBlend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- parts -----------------------------------------------------------------------------------------------------

    def _make_evidence(self) -> SimilarityIndex:
        config = self.config
        embedder = make_embedder(config.embedder, config.models_dir)
        if config.embedder == "auto" and embedder.name == "none":
            self._reporter.report_missing("no MiniLM files on this machine: lookups carry no paraphrase evidence")
        return SimilarityIndex(embedder, min_similarity=config.min_similarity, fuzzy=config.fuzzy_chunks)

    def _find_evidence(self, decision: ReusePlan | Decline, prompt: Prompt) -> tuple[Similar, ...]:
        """Similar donors for a prompt that shares no tokens worth reusing: never part of what may be reused."""
        if not isinstance(decision, Decline) or decision.reason not in _WORTH_ASKING:
            return ()
        return self._evidence.find_similar(prompt, budget_ms=self.config.evidence_budget_ms or None)

    def _search(self, prompt: Prompt, request_id: str, exact_tokens: int, base: str = "") -> LookupTrace:
        try:
            trace = self._pipeline.run(prompt, exact_tokens, base)
            evidence = self._find_evidence(trace.decision, prompt)
        except Exception as error:  # whatever fails in here must cost the request time, never an answer
            self._reporter.report_failure("lookup", error, request_id)
            return LookupTrace(Decline(DeclineReason.ERROR, f"{type(error).__name__}: {error}"), NOTHING_ALIGNED)
        return replace(trace, decision=replace(trace.decision, evidence=evidence)) if evidence else trace

    def _apply_discovery_only(self, decision: ReusePlan | Decline) -> ReusePlan | Decline:
        if isinstance(decision, ReusePlan) and (self.config.discovery_only or self.config.quality == "exact"):
            why = "discovery only" if self.config.discovery_only else "quality mode exact"
            detail = f"{why}: {decision.reused_tokens} tokens in {len(decision.spans)} spans found, none handed out"
            return Decline(DeclineReason.DISABLED, detail, decision.evidence, self.config.discovery_only)
        return decision

    def _stale(self, donor_id: str, request_id: str) -> Decline:
        decline = Decline(DeclineReason.STALE, f"donor {donor_id} was replaced or evicted after the lookup")
        self._reporter.report_decline(decline, request_id)
        return decline

    def _touch_donors(self, donor_ids: tuple[str, ...], *, reused: bool = False) -> None:
        """Recency is advice: a file that cannot take it now must not cost the request its claim."""
        try:
            self._store.touch(donor_ids, reused=reused)
        except StoreError as error:
            self._reporter.report_failure("store", error)

    def _forget(self, donor_ids: list[str], reason: EvictionReason) -> int:
        evictions = self._store.remove(donor_ids, reason)
        if evictions and reason == "forgotten" and self._journal is not None:
            with self._store.lock:
                self._journal.scrub()
        self._gone(evictions)
        self._reporter.report_store(self._store.compute_stats())
        return len(evictions)

    def _gone(self, evictions: tuple[Eviction, ...]) -> None:
        for eviction in evictions:
            if eviction.reason != "replaced":
                self._evidence.remove(eviction.donor.donor_id)
        self._reporter.report_evictions(evictions)
        for eviction in evictions:
            for listener in self._listeners:
                listener(eviction)

    def _restore(self, journal: SqliteJournal) -> None:
        journal.drop_expired(self._clock())
        for item in journal.load(self.config.max_donors, self._store.log.capacity):
            self._take_in(item)
        if journal.bad_rows:
            self._reporter.report_failure(
                "store", SemBlendError(f"{journal.bad_rows} damaged donors in {journal.path} left out")
            )

    def _take_in(self, item: tuple[Donor, np.ndarray[Any, np.dtype[np.int32]]] | None) -> bool:
        if item is None or (item[0].expires_unix_s is not None and item[0].expires_unix_s <= self._clock()):
            return False
        donor, tokens = item
        prompt = Prompt(tokens, namespace=donor.namespace)
        taken = self._store.restore(donor, prompt, self._fingerprinter.fingerprint(prompt))
        if taken:
            self._evidence.add(donor.donor_id, prompt)
        return taken


def _check_prompt(prompt: Prompt) -> None:
    if not isinstance(prompt, Prompt):
        raise InputError(f"expected a Prompt, got {type(prompt).__name__}", hint="wrap the ids: Prompt(token_ids)")


def _count_reused(decision: ReusePlan | Decline) -> int:
    return decision.reused_tokens if isinstance(decision, ReusePlan) else 0
