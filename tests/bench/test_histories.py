"""Edited histories as a setting of the quality benchmark: hand-made runs, no data, no model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the benchmarks of real weights need torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from lib.histories import BLOCK_TOKENS, CLEARED, EDITS, Message, Run, edited_prompts, find_call
from lib.quality_cases import Case, make_history
from lib.quality_lab import decide

from semblend.materialize.blend.quality import QualitySettings
from semblend.plan.reuse_plan import ReusePlan

WORDS = ("flight", "seat", "paid", "name", "date", "meal", "gate", "cabin", "bag", "child", "card", "visa")


def make_run(name: str, turns: int, system: str = "Be kind. " * 40) -> Run:
    messages = [Message("system", system), Message("user", f"I am {name}, help me.")]
    for turn in range(turns):
        words = " ".join(f"{WORDS[(turn * 7 + i * 3) % 12]}-{turn}-{i}" for i in range(40))
        call = f'<tool_call>{{"name": "look", "arguments": {{"id": {turn}}}}}</tool_call>'
        messages += [Message("assistant", f"THOUGHT: turn {turn}. ```bash\n{call}```"), Message("tool", words)]
    return Run(name, name, "made up", tuple(messages))


def encode(message: Message) -> list[int]:
    return [ord(char) for char in f"<{message.role}>{message.text}\n"]


def count(message: Message) -> int:
    return len(encode(message))


def make_cases(how: str, runs: list[Run], length: int = 4000) -> list[Case]:
    return [make_history(one, how, encode, [60]) for one in edited_prompts(runs, how, count, length)]


@pytest.mark.parametrize("how", EDITS)
def test_kept_messages_stay_in_order_and_the_donor_is_the_prompt_one_call_before(how: str) -> None:
    run = make_run("a", 12)
    for found in edited_prompts([run], how, count, 4000):
        assert found.before == run.messages[: len(found.before)]
        assert run.messages[len(found.before)].role == "assistant"
        kept = [one for one in found.now if one in run.messages]
        assert kept == sorted(kept, key=run.messages.index)
        assert found.now[-1] == found.reworded[-1]
        assert found.now != found.reworded


@pytest.mark.parametrize("how", EDITS)
def test_a_case_reuses_tokens_that_are_equal_behind_whole_blocks_of_a_prefix_cache(how: str) -> None:
    cases = make_cases(how, [make_run("a", 12)])
    assert cases
    for case in cases:
        assert case.is_history
        assert case.exact_tokens % BLOCK_TOKENS == 0
        assert case.tokens[: case.exact_tokens] == case.donors[0][: case.exact_tokens]
        assert case.spans
        for span in case.spans:
            assert span.target_start >= case.exact_tokens
            assert case.tokens[span.target_start : span.target_end] == case.donors[0][span.donor_start : span.donor_end]


def test_old_results_are_cleared_and_the_last_two_stay() -> None:
    now = next(edited_prompts([make_run("a", 12)], "cleared", count, 4000)).now
    results = [one.text for one in now if one.role == "tool"]
    assert set(results[:-2]) == {CLEARED[0]}
    assert CLEARED[0] not in results[-2:]


def test_a_short_run_stands_behind_others_of_its_half_and_says_so() -> None:
    runs = [make_run(f"run {number}", 5) for number in range(8)]
    found = list(edited_prompts(runs, "dropped", count, 6000))
    assert {one.dataset for one in found} == {"made up, joined"}
    assert len({one.now for one in found}) == len(found)
    assert all(f"I am {one.run.name}," in " ".join(message.text for message in one.before) for one in found)
    half = {one.name: one.half for one in runs}
    for one in found:
        names = {name for name in half if any(name in message.text for message in one.before)}
        assert {half[name] for name in names} == {one.run.half}


def test_the_same_call_in_another_spelling_is_the_same_call() -> None:
    one = find_call('<tool_call>{"name": "book", "arguments": {"a": 1, "b": 2}}</tool_call>')
    assert one == find_call('Yes. <tool_call>\n{"arguments": {"b": 2, "a": 1}, "name": "book"}\n</tool_call>')
    assert one != find_call('<tool_call>{"name": "book", "arguments": {"a": 1, "b": 3}}</tool_call>')


def test_the_default_begins_what_an_engine_begins_and_leaves_repetitions_out() -> None:
    case = make_cases("dropped", [make_run("a", 12)])[0]
    plan = ReusePlan(case.spans, len(case.tokens), case.exact_tokens)
    decided = decide(plan, QualitySettings())
    assert isinstance(decided, ReusePlan)
    assert set(decided.spans) <= set(plan.spans)
