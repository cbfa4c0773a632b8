"""Reasons not to believe a result: what is wrong with the file, with the evidence beside it, and with what it shows.

`examine` asks all of it. Gates and the report read the same findings. Nothing here talks to a server.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from math import comb
from typing import Any

from sembench.files import hash_file, read_float
from sembench.manifests.cases import read_manifest
from sembench.result import LoadRequest, LoadResult, RequestRecord, Result, compute_digest, compute_load_digest
from sembench.scoring.aggregate import ArmPair, aggregate, pair_records, summarize_load, summarize_pairs
from sembench.scoring.statistics import compute_mean
from sembench.witnesses.audit import CLOCK_SLACK_S, strip_id
from sembench.witnesses.confirmation import WORDS_SLACK

# -- the names of doubts ---------------------------------------------------------------------------------------------
# The names of what makes a result unbelievable. A finding is a name and one sentence with the numbers.


class Doubt(StrEnum):
    """Why a result is not believed, the gravest first; the report keeps this order.

    docs/METRICS.md explains each.
    """

    TENANT_LEAK = "tenant_leak"
    WRONG_KV = "wrong_kv"
    REUSE_ON_NEGATIVES = "reuse_on_negatives"
    EDITED_RESULT = "edited_result"
    IMPOSSIBLE_NUMBERS = "impossible_numbers"
    MIXED_SERVERS = "mixed_servers"
    FOREIGN_EVIDENCE = "evidence_of_another_run"
    MALFORMED_COUNTS = "malformed_counts"
    CONTRADICTED = "contradicted"
    OVERLONG_ANSWERS = "overlong_answers"
    ECHO = "echo"
    SPEED_WITHOUT_REUSE = "speed_without_reuse"
    HITS_SAVE_NOTHING = "hits_save_nothing"
    ONE_WITNESS = "one_witness"
    ANSWERS_LEFT_COLD = "answers_left_cold"
    NOTHING_CONFIRMED = "nothing_confirmed"
    NOT_PAIRED = "not_paired"
    NO_NEGATIVES = "no_negatives"
    REQUESTS_FAILED = "requests_failed"


OPEN = frozenset({Doubt.NOTHING_CONFIRMED, Doubt.NOT_PAIRED, Doubt.NO_NEGATIVES, Doubt.REQUESTS_FAILED})
"""What was not shown, rather than what was shown to be wrong: it fails the default gates, not requested ones."""
INTEGRITY = frozenset({Doubt.EDITED_RESULT, Doubt.IMPOSSIBLE_NUMBERS, Doubt.MIXED_SERVERS, Doubt.FOREIGN_EVIDENCE})
"""What is wrong with the files themselves; no flag lets it pass."""
UNSEEN = (
    "A server that slows its cold requests on purpose, or that forges answers, counters and logs alike, can't be told "
    "from an honest one by asking it."
)
"""What no run of this benchmark can find, said in the report and in the guide."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason not to believe a result."""

    doubt: Doubt
    words: str

    @property
    def is_open(self) -> bool:
        return self.doubt in OPEN

    def to_line(self) -> str:
        """Return the finding as one line.

        >>> Finding(Doubt.ECHO, "3 of 3 answers begin like their prompts").to_line()
        'echo: 3 of 3 answers begin like their prompts'
        """
        return f"{self.doubt}: {self.words}"


def sort_findings(findings: list[Finding]) -> list[Finding]:
    """Return the findings, the gravest first."""
    order = list(Doubt)
    return sorted(findings, key=lambda finding: order.index(finding.doubt))


# -- the file itself -------------------------------------------------------------------------------------------------
# Is the file what was measured? Its digest, its aggregates, and numbers that a request can have at all.

SAME = 1e-6
_SHOWN = 3
_SHARES = (
    "quality_score",
    "quality_f1",
    "quality_rouge_l",
    "exact_match",
    "cold_f1",
    "cold_rouge_l",
    "edit_similarity",
)
_COUNTS = ("exact_tokens", "reused_tokens", "recomputed_tokens", "prefill_tokens", "backend_confirmed_tokens")
_BLOCKS = ("exact_hit_blocks", "semantic_candidate_blocks", "semantic_eligible_blocks", "backend_confirmed_blocks")
_TIMES = ("ttft_ms", "latency_ms", "server_ttft_ms", "engine_ttft_ms", "queue_time_ms", "cold_kl_topk", "ppl_ratio")
_ROUNDING_MS = 1.0
_BAD_DIGEST = "the digest does not fit the requests, the settings and the run"


def check_integrity(result: Result) -> list[Finding]:
    """Return what is wrong with the file itself."""
    return [*_check_whole(result), *_check_aggregates(result), *_check_numbers(result), *_check_sessions(result)]


def _check_whole(result: Result) -> Iterator[Finding]:
    if not result.requests:
        yield Finding(Doubt.EDITED_RESULT, "the file holds no requests, so that nothing in it can be computed again")
    elif result.digest is None:
        yield Finding(
            Doubt.EDITED_RESULT, "the file has no digest: an older version wrote it, or a hand; run the benchmark again"
        )
    elif result.digest != compute_digest(result):
        yield Finding(Doubt.EDITED_RESULT, _BAD_DIGEST)


def _check_aggregates(result: Result) -> Iterator[Finding]:
    """Compute every aggregate again; an older version may have had other ones, which its missing digest tells."""
    if not result.requests or result.digest is None:
        return
    parts: tuple[tuple[Mapping[str, Any], Mapping[str, Any]], ...] = (
        (result.aggregate, aggregate(result.requests)),
        (result.paired or {}, summarize_pairs(result.requests) or {}),
    )
    wrong = [
        f"{name} is {stated!r} in the file and {computed.get(name)!r} by its requests"
        for file_says, computed in parts
        for name, stated in file_says.items()
        if not name.endswith("_ci") and not is_same(stated, computed.get(name))
    ]
    if wrong:
        yield Finding(Doubt.EDITED_RESULT, _join(wrong))


def is_same(left: Any, right: Any) -> bool:
    """Return whether two values of JSON are equal, numbers to a part in a million."""
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return math.isclose(left, right, rel_tol=SAME, abs_tol=SAME)
    return bool(left == right)


def _check_numbers(result: Result) -> Iterator[Finding]:
    wrong = [
        f"{record.item_id} ({record.arm}): {line}" for record in result.requests for line in find_impossible(record)
    ]
    if wrong:
        yield Finding(Doubt.IMPOSSIBLE_NUMBERS, _join(wrong))


def find_impossible(record: RequestRecord) -> Iterator[str]:
    """Yield one line for each number that no request can have."""
    prompt, blocks = record.prompt_tokens, record.total_blocks
    for names, most, unit in ((_COUNTS, prompt, "tokens"), (_BLOCKS, blocks, "full blocks")):
        for name in names:
            value = getattr(record, name)
            if value is not None and (value < 0 or (most is not None and value > most)):
                yield f"{name} is {value}, the prompt has {most} {unit}"
    held = (record.exact_tokens or 0) + (record.backend_confirmed_tokens or 0)
    if prompt is not None and held > prompt and not record.cross_tenant:
        yield f"{held} tokens exact or confirmed, the prompt has {prompt}"
    for name in _SHARES:
        value = getattr(record, name)
        if value is not None and not 0 <= value <= 1:
            yield f"{name} is {value}, not between 0 and 1"
    for name in _TIMES:
        value = getattr(record, name)
        if value is not None and not (value >= 0 and math.isfinite(value)):
            yield f"{name} is {value}"
    first, last = record.ttft_ms, record.latency_ms
    if first is not None and last is not None and first > last + _ROUNDING_MS:
        yield f"the first token came after {first:g} ms, the last after {last:g} ms"


def _check_sessions(result: Result) -> Iterator[Finding]:
    sessions = (result.run or {}).get("sessions")
    known = [one.get("servers") for one in sessions if isinstance(one, dict)] if isinstance(sessions, list) else []
    different = [one for one in known if one is not None and one != known[-1]]
    if different:
        yield Finding(
            Doubt.MIXED_SERVERS, f"{len(known)} sessions on different servers: {different[0]} and {known[-1]}"[:300]
        )


def _join(lines: Iterable[str]) -> str:
    found = list(lines)
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return "; ".join(found[:_SHOWN]) + more


# -- evidence and its run --------------------------------------------------------------------------------------------
# Ties evidence to its run: engine logs by ids and times of requests, manifests by checksum, calibrations by model.
#
# Every request of a live run has an id that begins with the run's own prefix (``run.request_prefix``), and the names
# that the server gave it are in its record. A log that names none of them is about other requests.

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
    if not own and not mentions and (named or not _covers(summary, run)):
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


def _read_window(part: Mapping[str, Any], first: str, last: str) -> tuple[float, float] | None:
    begin, end = read_float(part.get(first)), read_float(part.get(last))
    return None if begin is None or end is None else (begin, end)


def _covers(summary: Mapping[str, Any], run: Mapping[str, Any]) -> bool:
    """Return whether a log was written while the run was under way."""
    log = _read_window(summary, "first_time_unix_s", "last_time_unix_s")
    own = _read_window(run, "first_sent_unix_s", "last_finished_unix_s")
    if log is None or own is None:
        return False
    return log[0] <= own[1] + CLOCK_SLACK_S and log[1] >= own[0] - CLOCK_SLACK_S


def _is_inside(part: Mapping[str, Any], run: Mapping[str, Any]) -> bool:
    """Return whether all of these events happened during the run."""
    events = _read_window(part, "first_unix_s", "last_unix_s") if part.get("events") else None
    own = _read_window(run, "first_sent_unix_s", "last_finished_unix_s")
    if events is None or own is None:
        return False
    return own[0] - CLOCK_SLACK_S <= events[0] and events[1] <= own[1] + CLOCK_SLACK_S


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


# -- independent witnesses -------------------------------------------------------------------------------------------
# Counts independent witnesses. Receipt and usage come in one answer, so they are one channel.

CHANNELS = {"receipt": "answer", "usage": "answer", "prometheus": "counters", "audit": "engine log"}
MIN_WITNESSES = 2


def list_channels(record: RequestRecord, logged: Mapping[str, int]) -> set[str]:
    """Return the channels that speak about a request: its answer, the counters, the engine's log."""
    found = {CHANNELS[source] for source in record.confirmation_sources if source in CHANNELS}
    return found | ({"engine log"} if _find_logged(record, logged) is not None else set())


def require_witnesses(
    records: Sequence[RequestRecord], count: int, logged: Mapping[str, int], block_size: int
) -> tuple[list[RequestRecord], list[Finding]]:
    """Return the records with reuse confirmed only where ``count`` channels state it, and what was taken away.

    ``logged`` are the materialized tokens by request of engine logs that belong to the run. Where reuse must not
    happen (negatives, other tenants), one claim is enough to count against the server.
    """
    kept, alone = [], []
    for record in records:
        tokens = record.backend_confirmed_tokens
        if tokens and not record.negative_control and not record.cross_tenant:
            said = _find_logged(record, logged)
            own = min(tokens, said) if said is not None else tokens
            if len(list_channels(record, logged)) < count:
                alone.append(record)
                own = 0
            if own != tokens:
                record = replace(record, backend_confirmed_tokens=own, backend_confirmed_blocks=own // block_size)
        kept.append(record)
    if not alone:
        return kept, []
    who = sorted({channel for record in alone for channel in list_channels(record, logged)}) or ["nobody"]
    claim = f"{len(alone)} requests claim reuse in {len(who)} channel ({', '.join(who)})"
    hint = "give --metrics-url, --connector-audit or --engine-summary"
    return kept, [Finding(Doubt.ONE_WITNESS, f"{claim}; {count} independent ones count ({hint})")]


def _find_logged(record: RequestRecord, logged: Mapping[str, int]) -> int | None:
    names = (*record.request_ids, record.engine_request_id)
    return next((logged[own] for name in names if name and (own := strip_id(name)) in logged), None)


# -- what the requests give away -------------------------------------------------------------------------------------
# Times are judged by rank, not by size, so that one slow request decides nothing. Of three arms in random order each is
# the fastest in a third of the cases if they do the same work; more than that by luck has a probability.

LUCK_OF_HITS = 0.05
"""Hits must be the fastest arm more often than luck makes them in one run of twenty."""
LUCK_OF_MISSES = 0.01
"""Requests without reuse may be the fastest arm as often as luck makes them in one run of a hundred."""
FASTER = 0.9
"""A request without reuse counts as faster only below this share of both cold times: small drifts are no speed-up."""
FEWEST_HITS = 3
MOST_DROP = 0.2
"""How far the mean F1 of reused answers against cold may lie below that of cold answers asked twice."""
ECHO_SHARE = 0.5
MOST_FAILED = 0.05


def find_doubtful_behaviour(records: Sequence[RequestRecord]) -> list[Finding]:
    """Return the findings about requests whose reuse was confirmed as `require_witnesses` left it."""
    pairs = [pair for pair in pair_records(records) if not pair.errored and not pair.contaminated]
    return [
        *_find_wrong_answers(records, pairs),
        *_find_speed_without_reuse(pairs),
        *_find_hits_without_saving(pairs),
        *_find_changed_answers(pairs),
        *_find_missing(records, pairs),
    ]


def compute_luck(firsts: int, cases: int, arms: int) -> float:
    """Return the probability that one of ``arms`` equal arms is the fastest in at least ``firsts`` of the cases.

    >>> round(compute_luck(3, 3, 3), 4), round(compute_luck(0, 3, 3), 4)
    (0.037, 1.0)
    """
    share = 1.0 / arms
    return sum(comb(cases, k) * share**k * (1 - share) ** (cases - k) for k in range(firsts, cases + 1))


def _find_wrong_answers(records: Sequence[RequestRecord], pairs: Sequence[ArmPair]) -> Iterator[Finding]:
    """Yield what single answers show: reuse where there must be none, counts that are none, answers that are none."""
    others = [record for record in records if record.cross_tenant]
    if leaks := [record.backend_confirmed_tokens for record in others if record.backend_confirmed_tokens]:
        words = f"{len(leaks)} of {len(others)} requests got another tenant's tokens, up to {max(leaks)}"
        yield Finding(Doubt.TENANT_LEAK, words)
    if wrong := [pair for pair in pairs if pair.warm.donor_fact_answered and not pair.cold.donor_fact_answered]:
        words = f"{len(wrong)} warm answers state a fact that stands in the donor's text alone, such as "
        yield Finding(Doubt.WRONG_KV, words + wrong[0].cold.item_id)
    negatives = [record for record in records if record.negative_control]
    if reused := sum(bool(record.backend_confirmed_tokens) for record in negatives):
        words = f"{reused} of {len(negatives)} requests claim reuse of donors that they share nothing with"
        yield Finding(Doubt.REUSE_ON_NEGATIVES, words)
    if odd := [record for record in records if record.malformed]:
        yield Finding(Doubt.MALFORMED_COUNTS, f"{len(odd)} answers, such as {odd[0].item_id}: {odd[0].malformed[0]}")
    if bad := [record for record in records if set(record.contradictions) - set(record.malformed)]:
        line = next(line for line in bad[0].contradictions if line not in bad[0].malformed)
        yield Finding(Doubt.CONTRADICTED, f"{len(bad)} requests, such as {bad[0].item_id}: {line}")
    if long := [record for record in records if is_overlong(record)]:
        words = f"{len(long)} of {len(records)} answers are longer than the {long[0].max_tokens} tokens asked for"
        yield Finding(Doubt.OVERLONG_ANSWERS, words)
    told = [bool(record.echoes_prompt) for record in records if record.error is None]
    if sum(told) > ECHO_SHARE * len(told):
        yield Finding(Doubt.ECHO, f"{sum(told)} of {len(told)} answers are the beginning of their prompts")


def is_overlong(record: RequestRecord) -> bool:
    """Return whether an answer is longer than was asked for, by its own count or by its words."""
    most = record.max_tokens
    if most is None:
        return False
    words = len((record.output_text or "").split())
    return (record.output_tokens or 0) > most or words > most * WORDS_SLACK + 8


def _find_speed_without_reuse(pairs: Sequence[ArmPair]) -> Iterator[Finding]:
    misses = [pair for pair in pairs if pair.mechanism == "none" and _list_cold_times(pair)]
    for arms in (2, 3):
        own = [pair for pair in misses if len(_list_cold_times(pair)) == arms - 1]
        firsts = sum((pair.warm.ttft_ms or 0.0) < FASTER * min(_list_cold_times(pair)) for pair in own)
        luck = compute_luck(firsts, len(own), arms)
        if own and luck < LUCK_OF_MISSES:
            negatives = sum(pair.cold.negative_control for pair in own)
            words = f"{firsts} of {len(own)} requests without confirmed reuse ({negatives} of them unrelated to their "
            words += f"donors) were faster than cold; luck does that in {luck:.1g} of runs"
            yield Finding(Doubt.SPEED_WITHOUT_REUSE, words)


def _find_hits_without_saving(pairs: Sequence[ArmPair]) -> Iterator[Finding]:
    hits = [pair for pair in pairs if pair.hit and not pair.cold.negative_control and _list_cold_times(pair)]
    arms = 3 if hits and all(len(_list_cold_times(pair)) == 2 for pair in hits) else 2
    firsts = sum((pair.warm.ttft_ms or 0.0) < min(_list_cold_times(pair)) for pair in hits)
    if len(hits) >= FEWEST_HITS and compute_luck(firsts, len(hits), arms) > LUCK_OF_HITS:
        words = f"{firsts} of {len(hits)} requests with confirmed reuse were faster than cold: luck alone does as well"
        yield Finding(Doubt.HITS_SAVE_NOTHING, words)


def _list_cold_times(pair: ArmPair) -> list[float]:
    """Return the cold times of a pair, in milliseconds; none where the warm time is unknown."""
    if not pair.warm.ttft_ms:
        return []
    rerun = pair.rerun.ttft_ms if pair.rerun is not None and pair.rerun.error is None else None
    return [value for value in (pair.cold.ttft_ms, rerun) if value]


def _find_changed_answers(pairs: Sequence[ArmPair]) -> Iterator[Finding]:
    hits = [pair for pair in pairs if pair.hit and pair.warm.cold_f1 is not None]
    again = [pair.rerun.cold_f1 for pair in pairs if pair.rerun is not None and pair.rerun.cold_f1 is not None]
    warm = compute_mean([pair.warm.cold_f1 or 0.0 for pair in hits])
    ceiling = compute_mean(again)
    if warm is not None and ceiling is not None and ceiling - warm > MOST_DROP:
        words = f"reused answers agree with the cold answer at F1 {warm:.2f}, cold answers asked twice at {ceiling:.2f}"
        yield Finding(Doubt.ANSWERS_LEFT_COLD, words)


def _find_missing(records: Sequence[RequestRecord], pairs: Sequence[ArmPair]) -> Iterator[Finding]:
    positives = [record for record in records if not record.negative_control and not record.cross_tenant]
    if not any(record.backend_confirmed_tokens for record in positives):
        yield Finding(Doubt.NOTHING_CONFIRMED, f"none of {len(positives)} requests has confirmed reuse")
    if not any(record.negative_control and record.error is None for record in records):
        yield Finding(Doubt.NO_NEGATIVES, "no negative control was answered")
    failed = [record for record in records if record.error is not None]
    if len(failed) > MOST_FAILED * len(records):
        words = f"{len(failed)} of {len(records)} requests failed, such as {failed[0].item_id}: {failed[0].error}"
        yield Finding(Doubt.REQUESTS_FAILED, words[:300])
    hits = sum(bool(pair.hit) for pair in pairs if not pair.cold.negative_control)
    if not any(pair.rerun is not None for pair in pairs):
        yield Finding(Doubt.NOT_PAIRED, "time was not measured against cold requests; run with --paired")
    elif hits < FEWEST_HITS:
        yield Finding(
            Doubt.NOT_PAIRED, f"{hits} pairs with confirmed reuse are too few to judge time; {FEWEST_HITS} do"
        )


# -- all of it -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Examination:
    """What is believed of a result: its requests with reuse as far as it is witnessed, and its engine logs."""

    findings: tuple[Finding, ...]
    records: tuple[RequestRecord, ...]
    summaries: tuple[BoundSummary, ...]

    @property
    def grave(self) -> tuple[Finding, ...]:
        """Findings that show something wrong; the others only name what was not shown."""
        return tuple(finding for finding in self.findings if not finding.is_open)


def examine(
    result: Result,
    summaries: Sequence[Mapping[str, Any]] = (),
    *,
    min_witnesses: int = MIN_WITNESSES,
    manifest: str = "",
    calibration: Mapping[str, Any] | None = None,
) -> Examination:
    """Examine a result, the engine summaries, the manifest and the noise floor that are said to belong to it."""
    bound, foreign = bind_summaries(summaries, result)
    findings = [*check_integrity(result), *foreign]
    findings += check_manifest(result, manifest) if manifest else []
    findings += check_calibration(result, calibration) if calibration is not None else []
    logged = {name: tokens for one in bound for name, tokens in one.tokens_by_request.items()}
    size = result.config.get("block_size")
    block_size = size if isinstance(size, int) and size > 0 else 16
    records, alone = require_witnesses(result.requests, min_witnesses, logged, block_size)
    if is_live(result):
        findings += [*alone, *find_doubtful_behaviour(records)]
    return Examination(tuple(sort_findings(findings)), tuple(records), tuple(bound))


def is_live(result: Result) -> bool:
    """Return whether a server was asked; an offline replay claims no reuse and has no times."""
    return result.config.get("mode") != "offline" and any(record.ttft_ms is not None for record in result.requests)


# -- load results ----------------------------------------------------------------------------------------------------


def examine_load(result: LoadResult) -> list[Finding]:
    """Return the reasons not to believe a load result."""
    findings = []
    if not all(point.requests for point in result.points):
        words = "a point holds no requests, so that nothing in it can be computed again"
        findings.append(Finding(Doubt.EDITED_RESULT, words))
    elif result.digest != compute_load_digest(result):
        findings.append(Finding(Doubt.EDITED_RESULT, _BAD_DIGEST))
    for point in result.points:
        again = summarize_load(point.requests, point.duration_s, result.slo)
        wrong = [name for name, value in point.summary.items() if name in again and not is_same(value, again[name])]
        if wrong:
            stated, computed = point.summary[wrong[0]], again[wrong[0]]
            words = f"{point.name}: {wrong[0]} is {stated!r} in the file and {computed!r} by its requests"
            findings.append(Finding(Doubt.EDITED_RESULT, words))
        odd = [(one, line) for one in point.requests for line in _find_impossible_load(one, point.duration_s)]
        if odd:
            words = f"{point.name}: {len(odd)} requests, such as number {odd[0][0].number}: {odd[0][1]}"
            findings.append(Finding(Doubt.IMPOSSIBLE_NUMBERS, words))
    return findings


def _find_impossible_load(one: LoadRequest, duration_s: float) -> Iterator[str]:
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
