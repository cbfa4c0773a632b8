"""What the requests themselves give away: leaks, claims on negatives, speed without reuse, reuse without speed.

Times are judged by rank, not by size, so that one slow request decides nothing. Of three arms in random order each is
the fastest in a third of the cases if they do the same work; more than that by luck has a probability.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import comb

from sembench.result import RequestRecord
from sembench.scoring.paired import ArmPair, pair_records
from sembench.scoring.statistics import compute_mean
from sembench.trust.doubts import Doubt, Finding
from sembench.witnesses.confirmation import WORDS_SLACK

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
        *_find_leaks(records),
        *_find_wrong_kv(pairs),
        *_find_reuse_on_negatives(records),
        *_find_malformed(records),
        *_find_contradictions(records),
        *_find_overlong(records),
        *_find_echo(records),
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


def _find_leaks(records: Sequence[RequestRecord]) -> Iterator[Finding]:
    own = [record for record in records if record.cross_tenant]
    leaks = [record for record in own if record.backend_confirmed_tokens]
    if leaks:
        most = max(record.backend_confirmed_tokens or 0 for record in leaks)
        words = f"{len(leaks)} of {len(own)} requests got another tenant's tokens, up to {most}"
        yield Finding(Doubt.TENANT_LEAK, words)


def _find_wrong_kv(pairs: Sequence[ArmPair]) -> Iterator[Finding]:
    wrong = [pair for pair in pairs if pair.warm.donor_fact_answered and not pair.cold.donor_fact_answered]
    if wrong:
        words = f"{len(wrong)} warm answers state a fact that stands in the donor's text alone, such as "
        yield Finding(Doubt.WRONG_KV, words + wrong[0].cold.item_id)


def _find_reuse_on_negatives(records: Sequence[RequestRecord]) -> Iterator[Finding]:
    own = [record for record in records if record.negative_control]
    reused = [record for record in own if record.backend_confirmed_tokens]
    if reused:
        words = f"{len(reused)} of {len(own)} requests claim reuse of donors that they share nothing with"
        yield Finding(Doubt.REUSE_ON_NEGATIVES, words)


def _find_malformed(records: Sequence[RequestRecord]) -> Iterator[Finding]:
    bad = [record for record in records if record.malformed]
    if bad:
        yield Finding(Doubt.MALFORMED_COUNTS, f"{len(bad)} answers, such as {bad[0].item_id}: {bad[0].malformed[0]}")


def _find_contradictions(records: Sequence[RequestRecord]) -> Iterator[Finding]:
    bad = [record for record in records if set(record.contradictions) - set(record.malformed)]
    if bad:
        line = next(line for line in bad[0].contradictions if line not in bad[0].malformed)
        yield Finding(Doubt.CONTRADICTED, f"{len(bad)} requests, such as {bad[0].item_id}: {line}")


def _find_overlong(records: Sequence[RequestRecord]) -> Iterator[Finding]:
    bad = [record for record in records if is_overlong(record)]
    if bad:
        words = f"{len(bad)} of {len(records)} answers are longer than the {bad[0].max_tokens} tokens asked for"
        yield Finding(Doubt.OVERLONG_ANSWERS, words)


def is_overlong(record: RequestRecord) -> bool:
    """Return whether an answer is longer than was asked for, by its own count or by its words."""
    most = record.max_tokens
    if most is None:
        return False
    words = len((record.output_text or "").split())
    return (record.output_tokens or 0) > most or words > most * WORDS_SLACK + 8


def _find_echo(records: Sequence[RequestRecord]) -> Iterator[Finding]:
    told = [record.echoes_prompt for record in records if record.error is None]
    echoes = sum(bool(one) for one in told)
    if echoes > ECHO_SHARE * len(told):
        yield Finding(Doubt.ECHO, f"{echoes} of {len(told)} answers are the beginning of their prompts")


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
