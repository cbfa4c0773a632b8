"""The order of things: a prompt goes in, a plan or a decline comes out, one line a stage."""

from __future__ import annotations

import time
from dataclasses import dataclass

from semblend.align.aligner import Aligner, Alignment
from semblend.config import SemBlendConfig
from semblend.discover.store import DonorStore
from semblend.fingerprint.fingerprinter import Fingerprinter
from semblend.plan.cost import CostModel
from semblend.plan.planner import Planner
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan
from semblend.prompt import Prompt

NOTHING_ALIGNED = Alignment(())


def kernels_can_be_loaded() -> bool:
    """False where numba is absent, and where it is there and does not work (such as with a numpy it does not know)."""
    from semblend.fingerprint import kernels

    return kernels.COMPILED


@dataclass(frozen=True, slots=True)
class LookupTrace:
    """A decision and how it came about; times in milliseconds."""

    decision: ReusePlan | Decline
    alignment: Alignment
    fingerprint_ms: float = 0.0
    search_ms: float = 0.0
    align_ms: float = 0.0
    plan_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        return self.fingerprint_ms + self.search_ms + self.align_ms + self.plan_ms


class Pipeline:
    """Prompt → Fingerprint → Candidates → Alignment → ReusePlan | Decline. Changes nothing."""

    def __init__(self, config: SemBlendConfig, store: DonorStore, fingerprinter: Fingerprinter) -> None:
        self._budget_ms = config.lookup_budget_ms
        self._shortest = config.min_span_tokens
        self._store = store
        self._fingerprinter = fingerprinter
        self._aligner = Aligner(store, fingerprinter.scheme, min_span_tokens=config.min_span_tokens)
        self._planner = Planner(config.min_span_tokens, config.min_reuse_ratio, cost_model(config))

    def run(self, prompt: Prompt, exact_tokens: int = 0, base: str = "") -> LookupTrace:
        if len(prompt) - exact_tokens < self._shortest:
            left = f"{len(prompt) - exact_tokens} tokens to compute, spans begin at {self._shortest}"
            return LookupTrace(Decline(DeclineReason.TOO_SHORT, left), NOTHING_ALIGNED)
        started = time.perf_counter()
        deadline = started + self._budget_ms / 1e3 if self._budget_ms else 0.0
        fingerprint = self._fingerprinter.fingerprint(prompt)
        fingerprinted = time.perf_counter()
        with self._store.lock:
            candidates = self._store.find_candidates(fingerprint, within=prompt.namespace)
            searched = time.perf_counter()
            alignment = self._aligner.align(
                prompt, candidates, exact_tokens=exact_tokens, deadline=deadline, base=self._store.find_slot(base)
            )
        aligned = time.perf_counter()
        decision = self._planner.plan(prompt, alignment, exact_tokens=exact_tokens)
        planned = time.perf_counter()
        return LookupTrace(
            decision,
            alignment,
            fingerprint_ms=(fingerprinted - started) * 1e3,
            search_ms=(searched - fingerprinted) * 1e3,
            align_ms=(aligned - searched) * 1e3,
            plan_ms=(planned - aligned) * 1e3,
        )


def cost_model(config: SemBlendConfig) -> CostModel | None:
    """None until the engine's prefill rate is known."""
    if not config.prefill_tokens_per_s:
        return None
    return CostModel(
        config.prefill_tokens_per_s, config.load_tokens_per_s, config.reuse_overhead_ms, config.seam_tokens
    )
