"""What the page says in words: the sentence at the top, the tiles, the sections that have nothing to show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sembench.report.view import View, noise_band
from sembench.report.words import UNKNOWN, number, percent, plural, span, times

Tone = Literal["", "good", "bad"]
Show = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Tile:
    """One number that a reader should leave with."""

    value: str
    label: str
    detail: str
    tone: Tone = ""


def headline(view: View) -> str:
    """One or two sentences: faster or not, reused or not, harmed or not. Unknown parts are left out, not guessed."""
    parts = [part for part in (_speed_words(view), _reuse_words(view), _harm_words(view)) if part]
    if not parts:
        return "This result measured neither time nor reuse."
    return " ".join(parts)


def tiles(view: View) -> list[Tile]:
    """The numbers that this run has; what it has not is told under "not measured"."""
    found = [
        _rate(view, "blended_ttft_speedup_median", "faster to first token", times, times),
        _rate(view, "backend_confirmed_block_rate", "of blocks reused, confirmed", percent, _fine),
        *([] if _live(view) else _offline_tiles(view)),
        _rate(view, "mean_cold_f1", "F1 against the cold answer", number, number),
        _rate(view, "quality_pass_rate", "pass against gold", percent, _fine),
        _negatives_tile(view),
        _share_tile(view, "false_safe_rate", "false safe", "of confirmed reuses"),
        _contradictions(view),
    ]
    return [tile for tile in found if tile is not None]


def engine_rows(summaries: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """One row an engine summary."""
    names = (
        "engine",
        "lines",
        "donor_registrations",
        "semantic_hits",
        "materialization_events",
        "materialized_tokens",
        "errors",
    )
    return [tuple(str(summary.get(name, UNKNOWN)) for name in names) for summary in summaries]


def provenance(view: View) -> list[tuple[str, str]]:
    """Every fact about the run that the file carries, flattened."""
    result = view.result
    rows = [("result_version", result.result_version), ("created_at_utc", result.created_at_utc)]
    for part in ("run", "config", "engine", "environment"):
        rows += _flat(part, getattr(result, part) or {})
    return rows


def absent(view: View) -> list[str]:
    """What this run did not measure, and what would."""
    lines = []
    if not view.points:
        lines.append("Time to first token of pairs: run live with --paired.")
    if view.estimate("backend_confirmed_block_rate").value is None:
        lines.append("Confirmed reuse: needs a live backend that states it. Eligible blocks are a proposal, not reuse.")
    if view.estimate("mean_cold_f1").value is None:
        lines.append("Answers against cold: run live with --paired.")
    if not view.kl and view.points:
        lines.append("KL from the cold answer: run with --capture-logprobs, on a backend that gives logprobs.")
    if not view.aggregate.get("confirmation_sources") and _live(view):
        lines.append("Contradictions: only one side of the story is in this file.")
    if view.estimate("quality_pass_rate").value is None:
        lines.append("Answers against gold: needs a live run over cases with answers.")
    if not view.negative_records:
        lines.append("Negative controls: the manifest has none.")
    if view.points and noise_band(view) is None:
        lines.append("Noise of cold against cold: no rerun arm, so small speed-ups can't be told from luck.")
    return lines


def _speed_words(view: View) -> str:
    speed = view.estimate("blended_ttft_speedup_median")
    if speed.value is None:
        return ""
    band = noise_band(view)
    if band and band[0] <= speed.value <= band[1]:
        return f"Warm requests were not faster than the noise: {times(speed.value)} at the median."
    if speed.ci and speed.ci[0] <= 1 <= speed.ci[1]:
        spread = f"the 95 % interval ({span(speed.ci, times)}) holds 1"
        return f"Warm requests were {times(speed.value)} as fast at the median, but {spread}: not shown to be faster."
    ci = f" (95 % {span(speed.ci, times)})" if speed.ci else ""
    if speed.value < 1:
        return f"Warm requests were slower: {times(speed.value)} the cold speed at the median{ci}."
    return f"Warm requests reached their first token {times(speed.value)} sooner at the median{ci}."


def _reuse_words(view: View) -> str:
    confirmed, eligible = view.estimate("backend_confirmed_block_rate"), view.estimate("semantic_eligible_block_rate")
    exact = view.estimate("exact_block_hit_rate")
    if confirmed.value is not None:
        return f"The backend confirmed reuse of {percent(confirmed.value)} of all full blocks beyond exact prefixes."
    if eligible.value is not None:
        beside = f"; an exact block cache holds {percent(exact.value)}" if exact.value is not None else ""
        words = f"A planner could reuse {percent(eligible.value)} of all full blocks{beside}."
        return f"{words} Nothing was confirmed: no backend ran."
    return ""


def _harm_words(view: View) -> str:
    count, reused = _negative_counts(view)
    words = []
    if count:
        did = "reused anything" if _live(view) else "had anything eligible"
        words.append(f"{reused} of {plural(count, 'unrelated pair')} {did}")
    unsafe = view.estimate("false_safe_rate")
    if unsafe.value is not None:
        words.append(f"{percent(unsafe.value, 1)} of confirmed reuses left the cold answer")
    contradictions = view.aggregate.get("contradiction_count") or 0
    if contradictions:
        words.append(f"{plural(contradictions, 'contradiction')} between sources of confirmation")
    text = ", ".join(words)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _negative_counts(view: View) -> tuple[int, int]:
    told = [
        r
        for r in view.negative_records
        if r.backend_confirmed_tokens is not None or r.semantic_eligible_blocks is not None
    ]
    live = [r for r in told if r.backend_confirmed_tokens is not None]
    if live:
        return len(live), sum(bool(r.backend_confirmed_tokens) for r in live)
    return len(told), sum(bool(r.semantic_eligible_blocks) for r in told)


def _negatives_tile(view: View) -> Tile | None:
    count, reused = _negative_counts(view)
    if not count:
        return None
    label = "unrelated pairs that reused" if _live(view) else "unrelated pairs with eligible blocks"
    return Tile(f"{reused} of {count}", label, "must be none", "bad" if reused else "good")


def _share_tile(view: View, name: str, label: str, detail: str) -> Tile | None:
    found = view.estimate(name)
    if found.value is None:
        return None
    return Tile(percent(found.value, 1), label, f"{detail}, n={found.n}", "bad" if found.value else "good")


def _contradictions(view: View) -> Tile | None:
    count = view.aggregate.get("contradiction_count") or 0
    sources = view.aggregate.get("confirmation_sources") or {}
    if not sources:
        return None
    detail = f"between {', '.join(sorted(sources))}" if len(sources) > 1 else f"only {next(iter(sources))} spoke"
    return Tile(str(count), "contradictions", detail, "bad" if count else "good" if len(sources) > 1 else "")


def _offline_tiles(view: View) -> list[Tile | None]:
    wrong = view.estimate("wrong_tokens")
    return [
        _rate(view, "semantic_eligible_block_rate", "of blocks eligible (offline)", percent, _fine),
        _rate(view, "exact_block_hit_rate", "of blocks in an exact cache", percent, _fine),
        _rate(view, "semantic_eligible_lift", "eligible beyond exact", percent, _fine),
        None
        if wrong.value is None
        else Tile(number(wrong.value), "wrong tokens", "must be none", "bad" if wrong.value else "good"),
    ]


def _rate(view: View, name: str, label: str, show: Show, show_ci: Show) -> Tile | None:
    found = view.estimate(name)
    return (
        None
        if found.value is None
        else Tile(show(found.value), label, _detail(span(found.ci, show_ci), found.n, found.ci))
    )


def _live(view: View) -> bool:
    return view.estimate("backend_confirmed_block_rate").value is not None


def _fine(value: float) -> str:
    return percent(value, 1)


def _detail(words: str, n: int | None, ci: object) -> str:
    parts = ([f"95 %: {words}"] if ci else []) + ([f"n={n}"] if n else [])
    return ", ".join(parts)


def _flat(prefix: str, value: object) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [row for name, inner in value.items() for row in _flat(f"{prefix}.{name}", inner)]
    if value is None or value in ("", [], {}, ()):
        return []
    return [(prefix, ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))]
