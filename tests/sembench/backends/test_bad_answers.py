"""Answers that no honest server sends: odd counts, odd log-probabilities, odd shapes. None of them breaks a run."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sembench.backends import Exchange, PromptCall, build_chat_answer, build_generate_answer, check_url
from sembench.result import RequestRecord, dump_record
from sembench.witnesses.confirmation import Expectation, confirm

CALL = PromptCall(text="x", max_tokens=4, request_id="sb-1")
odd = (
    st.none() | st.booleans() | st.integers(-5, 10**30) | st.floats() | st.text(max_size=5)
    | st.lists(st.none() | st.integers() | st.floats(), max_size=3) | st.dictionaries(st.text(max_size=3), st.none())
)  # fmt: skip


def answer_of(event: dict[str, Any]) -> Any:
    return build_chat_answer(Exchange(status=200, events=[event], arrivals_ms=[1.0]), CALL)


@given(odd, odd, odd, odd)
def test_no_answer_of_a_gateway_breaks_the_reader(count: Any, details: Any, receipt: Any, logprobs: Any) -> None:
    usage = {"prompt_tokens": count, "completion_tokens": count, "prompt_tokens_details": details}
    choice = {"delta": {"content": "a"}, "logprobs": {"content": [{"token": count, "logprob": logprobs}, logprobs]}}
    found = answer_of(
        {"choices": [choice, details], "usage": usage, "semblend": receipt, "metrics": {"queue_time": count}}
    )
    verdict = confirm(found, Expectation(max_tokens=4))
    assert all(isinstance(line, str) for line in verdict.contradictions)
    record = RequestRecord(
        item_id="i", dataset="d", transform="t", negative_control=False, prompt_tokens=found.prompt_tokens,
        risk=verdict.risk, queue_time_ms=found.queue_time_ms, malformed=found.malformed,
    )  # fmt: skip
    json.dumps(dump_record(record), allow_nan=False)


@given(odd, odd, odd)
def test_no_answer_of_sglang_breaks_the_reader(count: Any, rows: Any, receipt: Any) -> None:
    meta = {"prompt_tokens": count, "cached_tokens_details": rows, "output_top_logprobs": rows, "queue_time": count}
    meta |= {"output_token_logprobs": [rows, [count, count, count]], "finish_reason": receipt, "semblend": [receipt]}
    event = {"text": "a", "output_ids": rows, "meta_info": meta, "semblend": receipt}
    found = build_generate_answer(Exchange(status=200, events=[event], arrivals_ms=[1.0]), CALL)
    confirm(found, Expectation())


def test_a_count_that_is_none_is_a_contradiction_and_no_zero() -> None:
    found = answer_of({"choices": [], "usage": {"prompt_tokens": float("nan"), "completion_tokens": float("inf")}})
    assert found.prompt_tokens is None
    assert confirm(found, Expectation()).contradictions == (
        "usage.prompt_tokens is NaN, not a count", "usage.completion_tokens is Infinity, not a count"
    )  # fmt: skip


def test_the_receipt_is_found_where_vllm_and_sglang_put_it() -> None:
    receipt = {"reused_tokens": 5}
    assert answer_of({"choices": [], "kv_transfer_params": {"semblend": receipt}}).receipt == receipt
    meta = {"text": "a", "meta_info": {"semblend": [receipt]}}
    assert build_generate_answer(Exchange(status=200, events=[meta], arrivals_ms=[1.0]), CALL).receipt == receipt


def test_the_url_that_openai_clients_are_given_works() -> None:
    assert check_url("http://host:1/v1", "--gateway-url") == "http://host:1"
    assert check_url("http://host:1/base/v1/", "--gateway-url") == "http://host:1/base"


@pytest.mark.parametrize("most", [4, None])
def test_an_answer_beyond_what_was_asked_is_flagged(most: int | None) -> None:
    found = answer_of({"choices": [{"delta": {"content": "word " * 50}}], "usage": {"completion_tokens": 3}})
    lines = confirm(found, Expectation(max_tokens=most)).contradictions
    assert lines == (("the answer has 50 words, 4 tokens were asked for",) if most else ())
