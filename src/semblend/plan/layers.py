"""Which layers to recompute: an option that our measurements speak against as a default.

On SmolLM2-135M a bathtub schedule (first and last layers) cost 30 % of the prefill and gained nothing over
recomputing the tokens after each seam, so the default schedule recomputes no layer as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from semblend.errors import InputError


@dataclass(frozen=True, slots=True)
class LayerSchedule:
    """Layers whose reused KV is computed again for every token; ``recompute`` ascends.

    >>> LayerSchedule.none(4).reuse
    (0, 1, 2, 3)
    """

    layers: int
    recompute: tuple[int, ...]

    def __post_init__(self) -> None:
        if list(self.recompute) != sorted({i for i in self.recompute if 0 <= i < self.layers}):
            raise InputError(f"layers {self.recompute} are not distinct, ascending and below {self.layers}",
                             hint="give each layer once, counted from 0")  # fmt: skip

    @property
    def reuse(self) -> tuple[int, ...]:
        dropped = set(self.recompute)
        return tuple(i for i in range(self.layers) if i not in dropped)

    @property
    def leading(self) -> int:
        """How many layers from the first on have no gap: those need no hidden states of a donor.

        >>> LayerSchedule(12, (0, 1, 2, 10, 11)).leading
        3
        """
        return next((i for i in range(self.layers) if i not in self.recompute), self.layers)

    @classmethod
    def none(cls, layers: int) -> LayerSchedule:
        return cls(layers, ())

    @classmethod
    def from_profile(cls, deviation: Sequence[float], share: float) -> LayerSchedule:
        """The ``share`` of layers with the largest measured deviation (ties: the lower layer).

        >>> LayerSchedule.from_profile([.9, .1, .2, .8], share=.5).recompute
        (0, 3)
        """
        if not 0 <= share <= 1 or any(not math.isfinite(d) for d in deviation):
            raise InputError("a profile needs finite deviations and a share in [0, 1]", hint="measure it again")
        count = round(share * len(deviation))
        worst = sorted(range(len(deviation)), key=lambda i: (-deviation[i], i))[:count]
        return cls(len(deviation), tuple(sorted(worst)))

    @classmethod
    def bathtub(cls, layers: int, share: float, *, early: float = 0.35, late: float = 0.20,
                early_decay: float = 3.0, late_decay: float = 4.0) -> LayerSchedule:  # fmt: skip
        """High deviation at both ends, low in the middle, decaying exponentially inwards.

        >>> LayerSchedule.bathtub(12, share=.25).recompute
        (0, 1, 11)
        >>> LayerSchedule.bathtub(12, share=.5).recompute
        (0, 1, 2, 3, 10, 11)
        """
        rims = [
            early * math.exp(-i / early_decay) + late * math.exp(-(layers - 1 - i) / late_decay) for i in range(layers)
        ]
        return cls.from_profile(rims, share)
