"""The desk where the facade asks for likeness: made from settings, asked only when tokens gave nothing."""

from __future__ import annotations

from collections.abc import Callable

from semblend.config import SemBlendConfig
from semblend.discover.evidence import Evidence
from semblend.fingerprint.embedder import make_embedder
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan, Similar
from semblend.prompt import Prompt

_WORTH_ASKING = {DeclineReason.NOTHING_SHARED, DeclineReason.BELOW_BREAK_EVEN, DeclineReason.LOW_REUSE_RATIO}


class EvidenceDesk:
    """Similar donors for a request that shares no tokens worth reusing. Never part of what may be reused."""

    def __init__(self, config: SemBlendConfig, report: Callable[[str], None]) -> None:
        self._budget_ms = config.evidence_budget_ms or None
        embedder = make_embedder(config.embedder, config.models_dir)
        if config.embedder == "auto" and embedder.name == "none":
            report("no MiniLM files on this machine: lookups carry no paraphrase evidence")
        self._evidence = Evidence(embedder, min_similarity=config.min_similarity, fuzzy=config.fuzzy_chunks)

    def add(self, donor_id: str, prompt: Prompt) -> None:
        self._evidence.add(donor_id, prompt)

    def remove(self, donor_id: str) -> None:
        self._evidence.remove(donor_id)

    def find_similar(self, decision: ReusePlan | Decline, prompt: Prompt) -> tuple[Similar, ...]:
        """Evidence for a decision: only where tokens decided nothing, and only within the evidence budget."""
        if not isinstance(decision, Decline) or decision.reason not in _WORTH_ASKING:
            return ()
        return tuple(Similar(*likeness) for likeness in self._evidence.find_similar(prompt, budget_ms=self._budget_ms))

    def similar(self, prompt: Prompt, limit: int) -> tuple[Similar, ...]:
        return tuple(Similar(*likeness) for likeness in self._evidence.find_similar(prompt, limit))

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every registered donor can be found by likeness."""
        return self._evidence.flush(timeout_s)

    def close(self) -> None:
        self._evidence.close()
