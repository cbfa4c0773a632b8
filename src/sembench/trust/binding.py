"""Ties evidence to its run: engine logs by ids and times of requests, manifests by checksum, calibrations by model.

Every request of a live run has an id that begins with the run's own prefix (``run.request_prefix``), and the names that
the server gave it are in its record. A log that names none of them is about other requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sembench.files import hash_file
from sembench.manifests.cases import read_manifest
from sembench.result import Result
from sembench.trust.doubts import Doubt, Finding
from sembench.values import read_float
from sembench.witnesses.audit import CLOCK_SLACK_S, strip_id

CALIBRATION_VERSION = "sembench.calibration.v1"
CALIBRATION_DAYS = 30.0
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class BoundSummary:
    """What of an engine summary belongs to a run. ``tokens_by_request`` has the server's names, stripped."""

    events: int = 0
    tokens: int = 0
    units: int = 0
    errors: int = 0
    proves_reuse: bool = False
    tokens_by_request: Mapping[str, int] = field(default_factory=dict)
    problem: str | None = None


def list_request_names(result: Result) -> set[str]:
    """Return the names of all requests of a run, donors too; a name that several requests share is nobody's."""
    uses: Counter[str] = Counter()
    donors: set[str] = set()
    for record in result.requests:
        uses.update({strip_id(name) for name in (*record.request_ids, record.engine_request_id) if name})
        donors |= {strip_id(name) for name in record.donor_request_ids}
    return {name for name, count in uses.items() if count == 1} | (donors - uses.keys())


def bind_summary(summary: Mapping[str, Any], result: Result) -> BoundSummary:
    """Return the part of an engine summary that belongs to the run, or why nothing of it does."""
    named = summary.get("requests")
    if not isinstance(named, dict):
        return BoundSummary(problem="the summary does not say whose events it counts; make it again from the log")
    run = result.run or {}
    prefix, names = str(run.get("request_prefix") or ""), list_request_names(result)
    own = {
        name: part
        for name, part in named.items()
        if isinstance(part, dict) and (name in names or (prefix and name.startswith(prefix + "-")))
    }
    unnamed = summary.get("unnamed")
    if isinstance(unnamed, dict) and _is_inside(unnamed, run):
        own[""] = unnamed
    runs = summary.get("runs")
    mentions = isinstance(runs, dict) and prefix in runs
    if not own and not mentions and not _covers(summary, run, has_names=bool(named)):
        others = f"; it is about {', '.join(list(runs)[:3])}" if isinstance(runs, dict) and runs else ""
        return BoundSummary(problem=f"the log names no request of this run ({prefix or 'which has no id'}){others}")
    total = {kind: sum(_read(part, kind) for part in own.values()) for kind in ("events", "tokens", "units")}
    return BoundSummary(
        events=total["events"],
        tokens=total["tokens"],
        units=total["units"],
        errors=_read(summary, "errors"),
        proves_reuse=bool(summary.get("materialized_semantic_kv_reuse")) and total["events"] > 0,
        tokens_by_request={name: _read(part, "tokens") for name, part in own.items() if name},
    )


def _covers(summary: Mapping[str, Any], run: Mapping[str, Any], *, has_names: bool) -> bool:
    """Return whether a log without names of requests was written while the run was under way."""
    first, last = read_float(summary.get("first_time_unix_s")), read_float(summary.get("last_time_unix_s"))
    sent, finished = read_float(run.get("first_sent_unix_s")), read_float(run.get("last_finished_unix_s"))
    if has_names or first is None or last is None or sent is None or finished is None:
        return False
    return first <= finished + CLOCK_SLACK_S and last >= sent - CLOCK_SLACK_S


def _is_inside(part: Mapping[str, Any], run: Mapping[str, Any]) -> bool:
    """Return whether all of these events happened during the run."""
    first, last = read_float(part.get("first_unix_s")), read_float(part.get("last_unix_s"))
    sent, finished = read_float(run.get("first_sent_unix_s")), read_float(run.get("last_finished_unix_s"))
    if not part.get("events") or first is None or last is None or sent is None or finished is None:
        return False
    return sent - CLOCK_SLACK_S <= first and last <= finished + CLOCK_SLACK_S


def _read(part: Mapping[str, Any], name: str) -> int:
    value = part.get(name, 0)
    if isinstance(value, (list, dict)):  # some tools write the list of what they counted
        return len(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def bind_summaries(summaries: Sequence[Mapping[str, Any]], result: Result) -> tuple[list[BoundSummary], list[Finding]]:
    """Return the parts of all summaries that belong to the run, and a finding for each that does not."""
    bound = [bind_summary(summary, result) for summary in summaries]
    findings = [
        Finding(Doubt.FOREIGN_EVIDENCE, f"engine summary of {summary.get('input', 'a log')}: {one.problem}")
        for summary, one in zip(summaries, bound, strict=True)
        if one.problem
    ]
    return [one for one in bound if one.problem is None], findings


# -- manifests and calibrations ------------------------------------------------------------------------------------


def check_manifest(result: Result, path: str) -> list[Finding]:
    """Return how a manifest differs from the one of the run: its checksum, its cases, which of them are negatives."""
    stated, found = str((result.run or {}).get("manifest_sha256")), hash_file(path)
    if stated != found:
        words = f"{path} has the checksum {found[:12]}…, the run was made with {stated[:12]}…"
        return [Finding(Doubt.FOREIGN_EVIDENCE, words)]
    negatives = {case.item_id: case.negative_control for case in read_manifest(path)}
    wrong = [
        record.item_id
        for record in result.requests
        if not record.cross_tenant and negatives.get(record.item_id) is not record.negative_control
    ]
    if wrong:
        words = f"{len(wrong)} requests are not the manifest's cases, such as {wrong[0]}"
        return [Finding(Doubt.IMPOSSIBLE_NUMBERS, words)]
    return []


def check_calibration(result: Result, calibration: Mapping[str, Any], days: float = CALIBRATION_DAYS) -> list[Finding]:
    """Return why a noise floor does not belong to a run: another model, another server, another time, no pairs."""
    run, config = result.run or {}, result.config
    wrong = []
    if calibration.get("calibration_version") != CALIBRATION_VERSION:
        wrong.append(f"it is no {CALIBRATION_VERSION}")
    if calibration.get("model") != config.get("model"):
        wrong.append(f"it was measured with {calibration.get('model')!r}, the run with {config.get('model')!r}")
    server, servers = calibration.get("server"), run.get("servers")
    if server is not None and isinstance(servers, list) and server not in servers:
        wrong.append(f"it was measured on {server}, the run on {', '.join(map(str, servers))}")
    if not calibration.get("n_pairs"):
        wrong.append("it holds no pair")
    apart = _count_days(calibration.get("created_at_utc"), result.created_at_utc)
    if apart is None or apart > days:
        word = "at an unknown time" if apart is None else f"{apart:.0f} days away"
        wrong.append(f"it was made {word}; {days:g} days are allowed")
    return [Finding(Doubt.FOREIGN_EVIDENCE, f"the calibration is not this run's: {'; '.join(wrong)}")] if wrong else []


def _count_days(one: Any, other: Any) -> float | None:
    try:
        times = [datetime.fromisoformat(str(text)) for text in (one, other)]
        return abs((times[0] - times[1]).total_seconds()) / _DAY_S
    except (ValueError, TypeError):
        return None
