"""Is a load result what was measured? Its digest, its summaries, and numbers that a request can have at all."""

from __future__ import annotations

from collections.abc import Iterator

from sembench.load_result import LoadRequest, LoadResult, compute_load_digest
from sembench.scoring.load_summary import summarize_load
from sembench.trust.doubts import Doubt, Finding
from sembench.trust.integrity import is_same

_ROUNDING_MS = 1.0


def examine_load(result: LoadResult) -> list[Finding]:
    """Return the reasons not to believe a load result."""
    return [*_check_digest(result), *_check_summaries(result), *_check_requests(result)]


def _check_digest(result: LoadResult) -> Iterator[Finding]:
    if not all(point.requests for point in result.points):
        yield Finding(Doubt.EDITED_RESULT, "a point holds no requests, so that nothing in it can be computed again")
    elif result.digest != compute_load_digest(result):
        yield Finding(Doubt.EDITED_RESULT, "the digest does not fit the requests, the settings and the run")


def _check_summaries(result: LoadResult) -> Iterator[Finding]:
    for point in result.points:
        again = summarize_load(point.requests, point.duration_s, result.slo)
        wrong = [name for name, value in point.summary.items() if name in again and not is_same(value, again[name])]
        if wrong:
            stated, computed = point.summary[wrong[0]], again[wrong[0]]
            words = f"{point.name}: {wrong[0]} is {stated!r} in the file and {computed!r} by its requests"
            yield Finding(Doubt.EDITED_RESULT, words)


def _check_requests(result: LoadResult) -> Iterator[Finding]:
    for point in result.points:
        wrong = [(one, line) for one in point.requests for line in _find_impossible(one, point.duration_s)]
        if wrong:
            words = f"{point.name}: {len(wrong)} requests, such as number {wrong[0][0].number}: {wrong[0][1]}"
            yield Finding(Doubt.IMPOSSIBLE_NUMBERS, words)


def _find_impossible(one: LoadRequest, duration_s: float) -> Iterator[str]:
    times = (one.ttft_ms, one.e2el_ms, one.tpot_ms, one.late_ms, *one.itl_ms)
    if any(value is not None and value < 0 for value in times):
        yield "a time is below 0"
    if one.ttft_ms is not None and one.e2el_ms is not None and one.ttft_ms > one.e2el_ms + _ROUNDING_MS:
        yield f"the first token came after {one.ttft_ms:g} ms, the last after {one.e2el_ms:g} ms"
    if one.finished_s > duration_s + 1.0:
        yield f"it ended after {one.finished_s:g} s, the run after {duration_s:g} s"
    if one.e2el_ms is not None and (one.finished_s - one.due_s) * 1000 + _ROUNDING_MS < one.e2el_ms:
        yield f"it took {one.e2el_ms:g} ms of {(one.finished_s - one.due_s) * 1000:.0f} ms"
    if one.prompt_tokens is not None and max(one.cached_tokens or 0, one.reused_tokens or 0) > one.prompt_tokens:
        yield f"more tokens cached or reused than the {one.prompt_tokens} of the prompt"
