"""Does a plan pay in mode balanced? Known before anything is claimed, from the plan alone."""

from __future__ import annotations

import numpy as np

from semblend.materialize.quality import QualitySettings
from semblend.plan.reuse_plan import ReusePlan
from semblend.plan.selection import reused_positions, seams


def passes_cost_more(plan: ReusePlan, settings: QualitySettings | None = None) -> str | None:
    """Why two passes of the gate compute more rows than a prefill does; None when they do not.

    The same count as the blender's own, which would find it out only after vLLM had given us the blocks.
    """
    settings = QualitySettings() if settings is None else settings
    reused = reused_positions(plan.spans)
    wanted = np.ones(plan.prompt_tokens, dtype=bool)
    wanted[: plan.exact_tokens] = False
    wanted[reused] = False
    wanted[seams(plan.spans, settings.seam_tokens)] = True
    wanted[seams(plan.spans[:1], settings.first_seam_tokens)] = True
    wanted[max(plan.exact_tokens, plan.prompt_tokens - max(1, settings.question_tokens)) :] = True
    first = np.flatnonzero(wanted)
    again = int((first > reused[0]).sum())
    rows = len(first) + again + sum(round(step.percent / 100 * len(reused)) for step in settings.steps[:1])
    cold = plan.prompt_tokens - plan.exact_tokens
    return f"two passes compute {rows} rows, a prefill {cold}" if rows >= cold else None
