"""What the first pass over a prompt computes, and whether a second one still pays: known from the plan alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from semblend.materialize.blend.quality import QualitySettings
from semblend.plan.selection import Positions, keep_in_order, list_reused_positions, select_seams
from semblend.span import Span


def first_rows(tokens: int, exact: int, spans: Sequence[Span], settings: QualitySettings) -> Positions:
    """Gaps, the heads of spans, what moved ahead, and the end of the prompt, whoever holds it.

    The attention of the end is the question's. What moved ahead: docs/research/decisions/0112-moved-ahead.md.

    >>> settings = QualitySettings(seam_tokens=1, first_seam_tokens=2, question_tokens=1)
    >>> first_rows(10, 1, [Span("d", 0, 3, 6)], settings).tolist()
    [1, 2, 3, 4, 9]
    """
    kept = keep_in_order(spans, settings.moved_ahead_share)
    wanted = np.ones(tokens, dtype=bool)
    wanted[:exact] = False
    wanted[list_reused_positions(kept)] = False
    wanted[select_seams(kept, settings.seam_tokens)] = True
    wanted[select_seams(kept[:1], settings.first_seam_tokens)] = True
    wanted[max(exact, tokens - max(1, settings.question_tokens)) :] = True
    return np.flatnonzero(wanted)


def two_passes_cost_more(first: Positions, spans: Sequence[Span], cold: int, settings: QualitySettings) -> str | None:
    """Why mode balanced is not worth its work; None when it is. ``cold``: the rows of a prefill.

    Two passes at least: with many gaps behind the first donor token they cost nearly as much as a prefill. And they may
    be in vain. So the bound is that of all repairs, not the whole prefill. What each pass costs beside its rows counts:
    a short prompt cannot win.
    """
    second = keep_in_order(spans, settings.moved_ahead_share)[0].target_start
    again, reused = int((first > second).sum()), sum(span.length for span in spans)
    rows = len(first) + again + sum(round(step.percent / 100 * reused) for step in settings.steps[:1])
    bound = min(1.0, settings.most_work)
    if rows + 2 * settings.pass_rows < bound * (cold + settings.pass_rows):
        return None
    beside = f" and cost {settings.pass_rows} rows more each" if settings.pass_rows else ""
    return f"two passes compute {rows} rows{beside}, over {bound:.0%} of a prefill's {cold}"
