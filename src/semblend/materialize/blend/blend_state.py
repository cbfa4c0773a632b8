"""The state of one request while it is prepared: what is known, what was computed, what passes showed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from semblend.materialize.blend.first_pass import first_rows
from semblend.materialize.blend.quality import OnPass, Pass, QualitySettings, Target
from semblend.materialize.gate.gate import Gate, ThresholdGate
from semblend.materialize.gate.risk import RiskFeatures
from semblend.materialize.gate.thresholds import DEFAULT
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan
from semblend.plan.selection import Positions, list_reused_positions
from semblend.span import Span

Mask = npt.NDArray[np.bool_]


class Refused(Exception):  # noqa: N818  (control flow of the blender)
    """Ends the work on a request with a decline."""

    def __init__(self, reason: DeclineReason, detail: str, faulty_donors: tuple[str, ...] = ()) -> None:
        super().__init__(detail)
        self.decline = Decline(reason, detail, faulty_donors=faulty_donors)


@dataclass(slots=True, eq=False)
class BlendState:
    """One request while it is prepared. ``computed`` marks what passes of ours have computed so far."""

    tokens: Tensor
    context: Tensor
    spans: tuple[Span, ...]
    exact: int
    reused: Positions
    computed: Mask
    gate: Gate = field(default_factory=lambda: ThresholdGate(DEFAULT))
    on_pass: OnPass | None = None
    started: float = field(default_factory=time.perf_counter)
    passes: list[Pass] = field(default_factory=list)
    first_tail: Tensor | None = None
    tail: Tensor | None = None  # logits of the prompt's last tokens after the last pass, [rows, vocabulary]
    mass: npt.NDArray[np.floating[Any]] | None = None
    deviation: npt.NDArray[np.floating[Any]] | None = None
    canary: float | None = None
    deep: float | None = None  # how far donor KV is off above layer 0, by `gate.canary.DeepLook`
    looked_at: tuple[Tensor, Tensor] | None = None  # by the canary: positions, and the error of each on this rank
    risk: float | None = None
    features: RiskFeatures | None = None
    glance: float | None = None
    escalations: int = 0
    repaired: int = 0  # chosen by steps of the gate; heads of spans and the prompt's end come on top
    load_ms: float = 0.0

    @classmethod
    def of(cls, target: Target, plan: ReusePlan, device: torch.device, spans: tuple[Span, ...]) -> BlendState:
        """The state of a prompt whose slots lie on ``device``; refused where plan and prompt do not fit together."""
        if target.slots is None:
            raise Refused(DeclineReason.VALIDATION_FAILED, "the prompt has no slots yet")
        tokens = torch.as_tensor(target.tokens, dtype=torch.long)[: plan.prompt_tokens].cpu()
        context = target.slots[: plan.prompt_tokens].to(device)
        if not 0 <= plan.exact_tokens < plan.prompt_tokens == len(tokens) == len(context):
            raise Refused(
                DeclineReason.VALIDATION_FAILED,
                f"a plan for {plan.prompt_tokens} tokens ({plan.exact_tokens} exact), {len(tokens)} tokens, "
                f"{len(context)} slots",
            )
        end = plan.exact_tokens
        for span in spans:
            if span.target_start < end or span.length < 1 or span.target_end > plan.prompt_tokens:
                raise Refused(DeclineReason.VALIDATION_FAILED, f"{span} does not lie in order inside the prompt")
            end = span.target_end
        computed = np.zeros(plan.prompt_tokens, dtype=bool)
        return cls(tokens, context, spans, plan.exact_tokens, list_reused_positions(spans), computed)

    def first_rows(self, settings: QualitySettings) -> Positions:
        """What the first pass computes."""
        return first_rows(len(self.tokens), self.exact, self.spans, settings)

    @property
    def stale(self) -> Positions:
        """Positions that still hold donor KV."""
        found: Positions = self.reused[~self.computed[self.reused]]
        return found

    def find_faulty_donors(self, tolerance: float) -> tuple[str, ...]:
        """Donors of which the canary has seen a wrong row on this rank; waits for the device."""
        if self.looked_at is None:
            return ()
        at, errors = self.looked_at
        wrong = at.numpy()[~(errors.float().cpu() <= tolerance).numpy()]  # an error that is no number is wrong too
        hit = [span.donor_id for span in self.spans if ((wrong >= span.target_start) & (wrong < span.target_end)).any()]
        return tuple(dict.fromkeys(hit))

    def spent_rows(self, layers: int) -> float:
        """Rows that went through all ``layers`` so far; parts of a pass count as such."""
        return sum(one.rows * one.layers for one in self.passes) / layers

    def count_work(self, layers: int, pass_rows: int) -> float:
        """Work of all passes as a share of a cold prefill's: the mean of its share of rows and, if larger, of keys.

        Products of the layers grow with rows, attention with keys. A pass over scattered rows at the end of a prompt
        has more keys a row than a prefill; which of the two costs more depends on the model and the length. Each pass
        counts ``pass_rows`` more.
        """
        tokens, exact = len(self.tokens), self.exact
        cold_keys = (tokens * (tokens + 1) - exact * (exact + 1)) // 2
        keys = sum(one.keys * one.layers for one in self.passes) / layers
        beside = sum(one.layers for one in self.passes) / layers * pass_rows
        rows = (self.spent_rows(layers) + beside) / (tokens - exact + pass_rows)
        return (rows + max(rows, keys / cold_keys)) / 2

    @property
    def elapsed_ms(self) -> float:
        return (time.perf_counter() - self.started) * 1e3
