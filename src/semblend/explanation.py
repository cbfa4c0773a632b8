"""Why a lookup ended as it did, stage by stage, as data and as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from semblend.pipeline import LookupTrace
from semblend.plan.reuse_plan import Decline, ReusePlan
from semblend.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Stage:
    """One step: what it took in and gave out. ``ms`` is the time it took."""

    name: str
    ms: float
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Explanation:
    """`str()` it to read, `to_dict()` it to keep."""

    decision: ReusePlan | Decline
    stages: tuple[Stage, ...]
    prompt_tokens: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "decision": _decision_dict(self.decision),
            "stages": [{"name": stage.name, "ms": round(stage.ms, 4), **stage.facts} for stage in self.stages],
        }

    def __str__(self) -> str:
        lines = [_headline(self.decision, self.prompt_tokens)]
        for stage in self.stages:
            facts = ", ".join(f"{name.replace('_', ' ')} {_format_value(value)}" for name, value in stage.facts.items())
            lines.append(f"  {stage.name:<12} {stage.ms:8.3f} ms  {facts}")
        if isinstance(self.decision, ReusePlan):
            lines.append(f"  {'target':>17}  {'tokens':>7}  {'donor position':>14}  {'shift':>7}  donor")
            lines += [
                f"  {f'[{span.target_start}, {span.target_end})':>17}  {span.length:>7}  {span.donor_start:>14}"
                f"  {span.shift:>+7}  {span.donor_id}"
                for span in self.decision.spans
            ]
        lines += [f"  looks like {s.donor_id} ({s.source} {s.similarity:.3f})" for s in self.decision.evidence]
        return "\n".join(lines)


def explain(prompt: Prompt, trace: LookupTrace, decision: ReusePlan | Decline, donors: int) -> Explanation:
    alignment = trace.alignment
    stages = (
        Stage("fingerprint", trace.fingerprint_ms, {"tokens": len(prompt), "seeds": alignment.seeds}),
        Stage("discover", trace.search_ms, {"donors": donors, "seeds_held": alignment.seeds_held}),
        Stage(
            "align",
            trace.align_ms,
            {
                "runs_examined": alignment.runs_examined,
                "matches": alignment.matches,
                "spans": len(alignment.spans),
                "shared_tokens": alignment.shared_tokens,
                "complete": alignment.complete,
            },
        ),
        Stage("plan", trace.plan_ms, _plan_facts(decision)),
    )
    return Explanation(decision, stages, len(prompt))


def _plan_facts(decision: ReusePlan | Decline) -> dict[str, Any]:
    if isinstance(decision, Decline):
        return {"decline": str(decision.reason), "detail": decision.detail}
    return {"spans": len(decision.spans), "reused_tokens": decision.reused_tokens, "saving_ms": decision.saving_ms}


def _decision_dict(decision: ReusePlan | Decline) -> dict[str, Any]:
    evidence = [
        {"donor_id": s.donor_id, "similarity": round(s.similarity, 4), "source": s.source} for s in decision.evidence
    ]
    if isinstance(decision, Decline):
        return {"kind": "decline", "reason": str(decision.reason), "detail": decision.detail, "evidence": evidence}
    return {
        "kind": "plan",
        "reused_tokens": decision.reused_tokens,
        "prefill_tokens": decision.prefill_tokens,
        "exact_tokens": decision.exact_tokens,
        "reuse_ratio": round(decision.reuse_ratio, 4),
        "saving_ms": decision.saving_ms,
        "spans": [
            {
                "donor_id": span.donor_id,
                "generation": span.generation,
                "donor_start": span.donor_start,
                "target_start": span.target_start,
                "length": span.length,
            }
            for span in decision.spans
        ],
        "evidence": evidence,
    }


def _headline(decision: ReusePlan | Decline, prompt_tokens: int) -> str:
    if isinstance(decision, Decline):
        return f"decline: {decision.reason} ({decision.detail})"
    share = f"{decision.reuse_ratio:.1%}"
    return (
        f"reuse {decision.reused_tokens} of {prompt_tokens} tokens ({share}) in {len(decision.spans)} spans "
        f"from {len(decision.donor_ids)} donors; prefill {decision.prefill_tokens}"
    )


def _format_value(value: Any) -> str:
    return "unknown" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
