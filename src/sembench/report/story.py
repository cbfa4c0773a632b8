"""The words of the report: the sentence at the top, the tiles, what was not measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from sembench.report.view import ReportView, find_noise_band
from sembench.trust import UNSEEN
from semblend.formatting import UNKNOWN, format_interval, format_number, format_percent, format_plural, format_ratio
from semblend.web.report import Tile, Tone

Show = Callable[[float], str]


def write_headline(view: ReportView) -> str:
    """Say in one or two sentences whether it was faster, reused and harmless. Unknown parts are left out.

    How much faster is said only of reuse that was confirmed and that nothing speaks against.
    """
    parts = [part for part in (_describe_speed(view), _describe_reuse(view), _describe_harm(view)) if part]
    if not parts:
        return "This result measured neither time nor reuse."
    return " ".join(parts)


def build_tiles(view: ReportView) -> list[Tile]:
    """Return the tiles of the numbers that this run has."""
    speed = _make_rate_tile(view, "blended_ttft_speedup_median", "faster to first token", format_ratio)
    found = [
        speed if not view.grave and view.paired.get("hit_rate") else None,
        _make_rate_tile(view, "backend_confirmed_block_rate", "of blocks reused, confirmed"),
        *([] if _is_live(view) else _make_offline_tiles(view)),
        _make_rate_tile(view, "mean_cold_f1", "F1 against the cold answer", format_number),
        _make_rate_tile(view, "quality_pass_rate", "pass against gold"),
        _make_negatives_tile(view),
        _make_share_tile(view, "false_safe_rate", "false safe", "of confirmed reuses"),
        _make_contradictions_tile(view),
    ]
    return [tile for tile in found if tile is not None]


def list_engine_rows(summaries: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return one row for each engine summary."""
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


def list_provenance(view: ReportView) -> list[tuple[str, str]]:
    """Return every fact about the run in the file as (name, value)."""
    result = view.result
    rows = [("result_version", result.result_version), ("created_at_utc", result.created_at_utc)]
    for part in ("run", "config", "engine", "environment"):
        rows += flatten(part, getattr(result, part) or {})
    return rows


def list_absent(view: ReportView) -> list[str]:
    """Return what this run did not measure, and how to measure it."""
    lines = []
    if not view.points:
        lines.append("Time to first token of pairs: run live with --paired.")
    if view.estimate("backend_confirmed_block_rate").value is None:
        lines.append("Confirmed reuse: needs a live backend that states it. Eligible blocks are a proposal, not reuse.")
    if view.estimate("mean_cold_f1").value is None:
        lines.append("Answers against cold: run live with --paired.")
    if not view.kl and view.points:
        lines.append("KL from the cold answer: run with --capture-logprobs, on a backend that gives logprobs.")
    if not view.aggregate.get("confirmation_sources") and _is_live(view):
        lines.append("Contradictions: only one side of the story is in this file.")
    if view.estimate("quality_pass_rate").value is None:
        lines.append("Answers against gold: needs a live run over cases with answers.")
    if not view.negative_records:
        lines.append("Negative controls: the manifest has none.")
    if view.points and find_noise_band(view) is None:
        lines.append("Noise of cold against cold: no rerun arm, so small speed-ups can't be told from luck.")
    lines += [f"{finding.words[:1].upper()}{finding.words[1:]}." for finding in view.findings if finding.is_open]
    if _is_live(view):
        lines.append(UNSEEN)
    return lines


def _describe_speed(view: ReportView) -> str:
    speed = view.estimate("blended_ttft_speedup_median")
    if view.grave:
        return "Do not believe this result: see the reasons below. No speed-up is stated."
    if speed.value is None:
        return ""
    band = find_noise_band(view)
    if not view.paired.get("hit_rate"):
        return "Nothing was confirmed to be reused, so no speed-up is stated."
    negatives = view.estimate("negative_control_ttft_speedup_median")
    if negatives.value is not None and negatives.value >= speed.value > 1:
        gained = f"Unrelated pairs gained as much ({format_ratio(negatives.value)} at the median)"
        return f"{gained} as those with donors, so no speed-up is stated."
    if band and band[0] <= speed.value <= band[1]:
        return f"Warm requests were not faster than the noise: {format_ratio(speed.value)} at the median."
    if speed.ci and speed.ci[0] <= 1 <= speed.ci[1]:
        spread = f"but the 95 % interval ({format_interval(speed.ci, format_ratio)}) holds 1: not shown to be faster"
        return f"Warm requests were {format_ratio(speed.value)} as fast at the median, {spread}."
    ci = f" (95 % {format_interval(speed.ci, format_ratio)})" if speed.ci else ""
    if speed.value < 1:
        return f"Warm requests were slower: {format_ratio(speed.value)} the cold speed at the median{ci}."
    return f"Warm requests reached their first token {format_ratio(speed.value)} sooner at the median{ci}."


def _describe_reuse(view: ReportView) -> str:
    confirmed, eligible = view.estimate("backend_confirmed_block_rate"), view.estimate("semantic_eligible_block_rate")
    exact = view.estimate("exact_block_hit_rate")
    if confirmed.value is not None:
        share = format_percent(confirmed.value)
        return f"The backend confirmed reuse of {share} of all full blocks beyond exact prefixes."
    if eligible.value is not None:
        beside = f"; an exact block cache holds {format_percent(exact.value)}" if exact.value is not None else ""
        words = f"A planner could reuse {format_percent(eligible.value)} of all full blocks{beside}."
        return f"{words} Nothing was confirmed: no backend ran."
    return ""


def _describe_harm(view: ReportView) -> str:
    count, reused = _count_negatives(view)
    words = []
    if not count and view.negative_records:
        words.append(f"nobody says what {format_plural(len(view.negative_records), 'unrelated pair')} reused")
    if count:
        did = "reused anything" if _is_live(view) else "had anything eligible"
        words.append(f"{reused} of {format_plural(count, 'unrelated pair')} {did}")
    unsafe = view.estimate("false_safe_rate")
    if unsafe.value is not None:
        words.append(f"{format_percent(unsafe.value, 1)} of confirmed reuses left the cold answer")
    contradictions = view.aggregate.get("contradiction_count") or 0
    if contradictions:
        words.append(f"{format_plural(contradictions, 'contradiction')} between sources of confirmation")
    text = ", ".join(words)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _count_negatives(view: ReportView) -> tuple[int, int]:
    """Return how many unrelated pairs were observed, and how many of them reused (offline: could reuse) anything."""
    name = "backend_confirmed_tokens" if _is_live(view) else "semantic_eligible_blocks"
    observed = [value for record in view.negative_records if (value := getattr(record, name)) is not None]
    return len(observed), sum(map(bool, observed))


def _make_negatives_tile(view: ReportView) -> Tile | None:
    count, reused = _count_negatives(view)
    if not count:
        unknown = len(view.negative_records)
        return Tile(UNKNOWN, f"what {unknown} unrelated pairs reused", "must be none") if unknown else None
    label = "unrelated pairs that reused" if _is_live(view) else "unrelated pairs with eligible blocks"
    return Tile(f"{reused} of {count}", label, "must be none", "bad" if reused else "good")


def _make_share_tile(view: ReportView, name: str, label: str, detail: str) -> Tile | None:
    found = view.estimate(name)
    if found.value is None:
        return None
    return Tile(format_percent(found.value, 1), label, f"{detail}, n={found.n}", "bad" if found.value else "good")


def _make_contradictions_tile(view: ReportView) -> Tile | None:
    count = view.aggregate.get("contradiction_count") or 0
    sources = view.aggregate.get("confirmation_sources") or {}
    if not sources:
        return None
    detail = f"between {', '.join(sorted(sources))}" if len(sources) > 1 else f"only {next(iter(sources))} spoke"
    return Tile(str(count), "contradictions", detail, "bad" if count else "good" if len(sources) > 1 else "")


def _make_offline_tiles(view: ReportView) -> list[Tile | None]:
    wrong = view.estimate("wrong_tokens").value
    tone: Tone = "bad" if wrong else "good"
    return [
        _make_rate_tile(view, "semantic_eligible_block_rate", "of blocks eligible (offline)"),
        _make_rate_tile(view, "exact_block_hit_rate", "of blocks in an exact cache"),
        _make_rate_tile(view, "semantic_eligible_lift", "eligible beyond exact"),
        None if wrong is None else Tile(format_number(wrong), "wrong tokens", "must be none", tone),
    ]


def _make_rate_tile(view: ReportView, name: str, label: str, show: Show = format_percent) -> Tile | None:
    """Return a metric with its interval, percentages of the interval to a tenth; None where it was not observed."""
    found = view.estimate(name)
    if found.value is None:
        return None
    fine = partial(format_percent, digits=1) if show is format_percent else show
    parts = [f"95 %: {format_interval(found.ci, fine)}"] if found.ci else []
    return Tile(show(found.value), label, ", ".join(parts + ([f"n={found.n}"] if found.n else [])))


def _is_live(view: ReportView) -> bool:
    return view.estimate("backend_confirmed_block_rate").value is not None


def flatten(prefix: str, value: object) -> list[tuple[str, str]]:
    """Return nested values as (name with dots, text); what is empty is left out."""
    if isinstance(value, Mapping):
        return [row for name, inner in value.items() for row in flatten(f"{prefix}.{name}", inner)]
    if value is None or value in ("", [], {}, ()):
        return []
    return [(prefix, ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))]
