"""What gaps cost: where donors hold passages far apart, everything between them is computed by passes of ours."""

from __future__ import annotations

from dataclasses import replace

from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan

GAP_PRICE = 0.3
"""A row of ours takes so much longer than one of the engine's own prefill: scattered rows attend in more kernels
(H200, vLLM 0.26: 2,499 rows among 24,576 in 87 ms, where a prefill takes 72 ms for as much work; 8,192 tokens with
gaps of 6,000 among them: 94 ms, where a prefill of all takes 71)."""


def keep_paying_spans(plan: ReusePlan, pass_rows: int = 0) -> ReusePlan | Decline:
    """The first spans of a plan, as many as save most; behind the last one the engine goes on by itself.

    ``pass_rows``: what a pass costs beside its rows, in rows. Declines where not even the best choice saves anything.

    >>> from semblend.span import Span
    >>> near, far = Span("d", 0, 10, 500), Span("d", 900, 5000, 600)
    >>> [span.target_start for span in keep_paying_spans(ReusePlan((near, far), 9000)).spans]
    [10]
    >>> keep_paying_spans(ReusePlan((far,), 9000)).detail
    'donors hold 600 tokens behind gaps of 5000, which take 30 % longer than a prefill'
    """
    best, kept, saved, gaps, end = 0.0, 0, 0, 0, plan.exact_tokens
    for count, span in enumerate(plan.spans, start=1):
        gaps += max(0, span.target_start - end)
        saved += span.length
        end = span.target_end
        gain = saved - GAP_PRICE * gaps - pass_rows
        if gain >= best:
            best, kept = gain, count
    if kept and best > 0:
        return plan if kept == len(plan.spans) else replace(plan, spans=plan.spans[:kept], saving_ms=None)
    beside = f"; a pass costs {pass_rows} rows more" if pass_rows else ""
    longer = f"which take {GAP_PRICE:.0%} longer than a prefill".replace("%", " %")
    return Decline(
        DeclineReason.BELOW_BREAK_EVEN, f"donors hold {saved} tokens behind gaps of {gaps}, {longer}{beside}"
    )
