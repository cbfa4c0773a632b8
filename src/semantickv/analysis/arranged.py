"""A trace as it would be if passages were arranged: those that stand side by side, in the order of earlier prompts.

The arranger is the one of `semblend serve` and `semblend estimate`. A block of the type ``retrieved_context`` is taken
for a passage; neighbours are one group. Whether they may change places is the caller's to say; here they may.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np

from semantickv.traces.trace import Trace
from semblend.estimate.steps import ArrangePassages
from semblend.prompt import Namespace
from semblend.text.parts import Part

PASSAGE = "retrieved_context"


def arrange_trace(trace: Trace, cache_tokens: int) -> Trace | None:
    """Return the trace with its passages arranged beside a cache of so many tokens; None where none can move.

    A trace whose ids stand for whole prefixes has no blocks that could be put elsewhere.
    """
    if trace.chained or not trace.holds_content or PASSAGE not in trace.type_names:
        return None
    is_passage = (trace.types == trace.type_names.index(PASSAGE)).tolist()
    step = ArrangePassages(cache_tokens)
    order, moved = np.arange(trace.block_accesses), False
    names, starts = trace.ids.tolist(), trace.starts.tolist()
    for r in range(len(trace)):
        places = range(starts[r], starts[r + 1])
        groups = [list(run) for found, run in groupby(places, key=is_passage.__getitem__) if found]
        group_of = {at: str(number) for number, run in enumerate(groups) if len(run) > 1 for at in run}
        if not group_of:
            continue
        parts = tuple(_build_part(names[at], int(trace.tokens[at]), group_of.get(at)) for at in places)
        sent = step.apply(parts, Namespace(tenant=trace.tenant_names[trace.tenant[r]]))
        # Equal passages of one prompt have one text: each takes the next place that had it.
        left: dict[str, list[int]] = {}
        for at, part in zip(places, parts, strict=True):
            left.setdefault(part.text, []).append(at)
        order[starts[r] : starts[r + 1]] = [left[part.text].pop(0) for part in sent]
        moved = True
    return trace.select(order, slice(None), trace.starts) if moved else None


def _build_part(name: int, tokens: int, group: str | None) -> Part:
    length = np.zeros(tokens, np.int32)  # only its length counts: the arranger weighs passages by it
    return Part(f"{name} ", "text" if group is None else "passage", group or "", token_ids=length)
