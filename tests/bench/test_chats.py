"""Chats by turn: what each request holds, and how hits of a prefix cache and moved ones are told apart."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import chats  # noqa: E402

TURNS = [{"role": role, "content": f"said {n}"} for n, role in enumerate(("user", "assistant") * 2 + ("user",))]


def make_row(*, exact: int, reused: int, cold_ms: float = 100.0, warm_ms: float = 50.0) -> dict[str, Any]:
    counts = {"exact_tokens": exact, "reused_tokens": reused, "recomputed_tokens": 0, "prefill_tokens": 100}
    warm = counts | {"ttft_ms": warm_ms, "cpu_ms": warm_ms}
    return {"kind": "turn 2", "warm": warm, "cold": {"ttft_ms": cold_ms, "cpu_ms": cold_ms}}


def test_a_later_turn_begins_with_the_earlier_one_and_a_dropped_history_does_not() -> None:
    prompts = chats.list_prompts(TURNS)
    tail = "<|im_start|>assistant\n"
    assert prompts["turn 2"].startswith(prompts["turn 1"].removesuffix(tail))
    assert prompts["turn 3"].startswith(prompts["turn 2"].removesuffix(tail))
    dropped = prompts[chats.DROPPED]
    assert "said 0" not in dropped
    assert "said 2" in dropped
    assert not prompts["turn 3"].startswith(dropped.removesuffix(tail))


def test_a_request_with_moved_tokens_is_no_hit_of_the_prefix_cache_and_the_common_instruction_is_none() -> None:
    rows = [make_row(exact=16, reused=0), make_row(exact=200, reused=0), make_row(exact=64, reused=80)]
    line = chats.summarize("turn 2", rows)
    assert line[3:5] == [pytest.approx(1 / 3), pytest.approx(1 / 3)]


def test_all_requests_and_hits_alone_are_counted_apart() -> None:
    rows = [make_row(exact=0, reused=0, warm_ms=100.0), make_row(exact=200, reused=0, warm_ms=25.0)]
    all_of_them, hits = chats.summarize("turn 2", rows)[6:8]
    assert all_of_them == pytest.approx(200 / 125)
    assert hits == pytest.approx(4.0)
    assert chats.summarize("turn 2", rows[:1])[7] is None
