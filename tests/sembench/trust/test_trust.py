"""What ties evidence to a run, who counts as a witness, and which behaviour gives a server away."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verdict_samples import PREFIX, changed, live_records, result_of

from sembench.result import RequestRecord, Result
from sembench.trust import (
    Doubt,
    bind_summary,
    compute_luck,
    examine,
    find_impossible,
    is_overlong,
    list_channels,
    require_witnesses,
)
from sembench.witnesses.engine_events import summarize_log
from tools.reference.support_tables import DOUBTS

LINE = "[2026-11-07T12:00:{second:02d}Z] SemBlend materialized request_id={name} donor_id=d tokens={tokens}"


def result(*records: RequestRecord, **changes: Any) -> Result:
    run = {"request_prefix": PREFIX, "first_sent_unix_s": 1794052800.0, "last_finished_unix_s": 1794052830.0}
    return result_of(list(records or live_records(1)), run=run, **changes)


def log(*names: str, tokens: int = 100) -> dict[str, Any]:
    return summarize_log("vllm", [LINE.format(second=at, name=name, tokens=tokens) for at, name in enumerate(names)])


def test_events_count_by_the_name_that_the_run_gave_its_requests() -> None:
    bound = bind_summary(log(f"chatcmpl-{PREFIX}-p0-warm-0", "chatcmpl-sb-0badc0de-p0-warm"), result())
    assert (bound.problem, bound.events, bound.tokens) == (None, 1, 100)


def test_events_count_by_the_name_that_the_server_gave_a_request() -> None:
    own = replace(live_records(1)[1], request_ids=(f"{PREFIX}-a", "chatcmpl-77ab"), donor_request_ids=("chatcmpl-d1",))
    bound = bind_summary(log("chatcmpl-77ab", "chatcmpl-d1", "chatcmpl-other"), result(own))
    assert bound.tokens == 200
    assert bound.tokens_by_request == {"77ab": 100, "d1": 100}


def test_a_name_that_a_server_gives_to_every_request_joins_nothing() -> None:
    same = [replace(record, request_ids=("chatcmpl-x",)) for record in live_records(1)[:2]]
    assert bind_summary(log("chatcmpl-x"), result(*same)).problem is not None


@pytest.mark.parametrize(("second", "counts"), [(10, True), (59, True)])
def test_events_without_a_name_count_inside_the_time_of_the_run(second: int, counts: bool) -> None:
    inside = [f"[2026-11-07T12:00:{second:02d}Z] [FUZZY] Realized 64 fuzzy tokens"]
    outside = ["[2026-11-07T15:00:00Z] [FUZZY] Realized 64 fuzzy tokens"]
    assert (bind_summary(summarize_log("sglang", inside), result()).tokens == 64) is counts
    assert bind_summary(summarize_log("sglang", outside), result()).problem is not None


def test_a_summary_of_an_older_version_is_tied_to_nothing() -> None:
    old = {name: value for name, value in log(f"{PREFIX}-a").items() if name != "requests"}
    assert "make it again" in str(bind_summary(old, result()).problem)


def test_receipt_and_usage_are_one_channel() -> None:
    record = replace(live_records(1)[1], confirmation_sources=("receipt", "usage"))
    assert list_channels(record, {}) == {"answer"}
    assert list_channels(replace(record, confirmation_sources=("receipt", "audit")), {}) == {"answer", "engine log"}
    assert list_channels(replace(record, request_ids=("chatcmpl-a",)), {"a": 5}) == {"answer", "engine log"}


def test_a_log_that_says_less_lowers_what_is_confirmed() -> None:
    record = replace(live_records(1)[4], request_ids=("a",), confirmation_sources=("receipt",))
    assert record.backend_confirmed_tokens
    (kept,), alone = require_witnesses([record], 2, {"a": 48}, 16)
    assert (kept.backend_confirmed_tokens, kept.backend_confirmed_blocks, alone) == (48, 3, [])


def test_one_claim_is_enough_where_nothing_may_be_reused() -> None:
    record = replace(live_records(1)[1], negative_control=True, backend_confirmed_tokens=9, confirmation_sources=())
    assert require_witnesses([record], 2, {}, 16)[0][0].backend_confirmed_tokens == 9


def test_the_sample_is_believed() -> None:
    assert examine(result_of(live_records())).findings == ()


IMPOSSIBLE = [
    ({"backend_confirmed_tokens": 10**6}, "backend_confirmed_tokens is 1000000"),
    ({"exact_tokens": -1}, "exact_tokens is -1"),
    ({"backend_confirmed_blocks": 10**6}, "full blocks"),
    ({"quality_f1": 1.5}, "not between 0 and 1"),
    ({"ttft_ms": 9e9}, "the first token came after"),
    ({"ttft_ms": -1.0}, "ttft_ms is -1"),
]


@pytest.mark.parametrize(("damage", "words"), IMPOSSIBLE)
def test_a_number_that_no_request_can_have_is_named(damage: dict[str, Any], words: str) -> None:
    record = replace(live_records(1)[1], **damage)
    assert any(words in line for line in find_impossible(record))
    records = changed(live_records(2), lambda r: r.item_id == record.item_id and r.arm == "warm", **damage)
    assert Doubt.IMPOSSIBLE_NUMBERS in {one.doubt for one in examine(result_of(records)).findings}


def test_hits_that_are_not_faster_save_nothing() -> None:
    slow = changed(live_records(2), lambda r: r.arm == "warm", ttft_ms=9e5, latency_ms=9e5)
    assert Doubt.HITS_SAVE_NOTHING in {one.doubt for one in examine(result_of(slow)).findings}


def test_a_run_whose_negatives_all_failed_is_not_enough() -> None:
    broken = changed(live_records(2), lambda r: r.negative_control, error="HTTP 400: too long")
    examined = examine(result_of(broken))
    assert [one.doubt for one in examined.findings] == [Doubt.NO_NEGATIVES, Doubt.REQUESTS_FAILED]
    assert examined.grave == ()  # nothing is shown to be wrong, so requested gates are judged; the default ones fail


def test_an_answer_is_overlong_by_its_count_or_by_its_words() -> None:
    record = replace(live_records(1)[0], max_tokens=10, output_tokens=10, output_text="word " * 20)
    assert not is_overlong(record)
    assert is_overlong(replace(record, output_tokens=11))
    assert is_overlong(replace(record, output_text="word " * 40))
    assert not is_overlong(replace(record, max_tokens=None, output_tokens=10**6))


@given(st.integers(0, 30), st.integers(2, 3))
def test_luck_falls_from_certainty_as_more_come_first(cases: int, arms: int) -> None:
    lucks = [compute_luck(firsts, cases, arms) for firsts in range(cases + 1)]
    assert lucks[0] == pytest.approx(1.0)
    assert lucks == sorted(lucks, reverse=True)
    assert lucks[-1] == pytest.approx(arms**-cases)


def test_every_doubt_is_explained() -> None:
    assert set(DOUBTS) == set(Doubt)
