"""Edits of agents' histories in a log: what they cost, what batches would save, and what is no edit."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise

import pytest
from estimate_logs import make_prompt, replay
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend.arrange import HistoryEditor
from semblend.cli.commands.estimate import render_tables
from semblend.estimate import history as edits
from semblend.estimate.page import render_page
from semblend.text.chat import list_chat_parts
from semblend.text.parts import join_parts
from semblend.text.tokenization import StableTokenizer

ROOM = {"cache_tokens": 100_000, "donor_tokens": 100_000, "factors": ()}


def say(role, text):
    return {"role": role, "content": text}


def make_run(rounds, task="Find the cheapest flight."):
    history = [say("system", "Be brief. " * 60), say("user", task)]
    for number in range(rounds):
        call = {"id": f"{task[:6]}{number}", "type": "function", "function": {"name": "find", "arguments": f"{number}"}}
        text = " ".join(f"flight {task[-4]}{number}{n} costs {n * number} dollars" for n in range(40 + 7 * number))
        history += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": text},
        ]
    return history


def list_prompts(history):
    return [history[:at] for at, one in enumerate(history) if one["role"] == "assistant"] + [history]


def clear(messages, keep=2):
    """What a client does that clears old results at every step."""
    results = [at for at, one in enumerate(messages) if one["role"] == "tool"][:-keep]
    return [one | {"content": "[cleared]"} if at in results else one for at, one in enumerate(messages)]


def drop(messages, most=8):
    rounds = (len(messages) - 2) // 2
    return [*messages[:2], *messages[2 + 2 * max(0, rounds - most // 2) :]]


def estimate(prompts, **options):
    logged = [make_prompt(line, {"messages": one}) for line, one in enumerate(prompts, 1)]
    for one, messages in zip(logged, prompts, strict=True):
        object.__setattr__(one, "messages", tuple(messages))
    return replay(logged, **ROOM | options)[1]


def count(message):
    return len(StableTokenizer().encode(join_parts(list_chat_parts([message]))))


@pytest.mark.parametrize("change", [clear, drop])
def test_an_edit_costs_the_kept_messages_behind_it_that_a_prefix_cache_would_have_hit(change):
    prompts = [change(one) for one in list_prompts(make_run(10))]
    answer = estimate(prompts)
    expected, number = 0, 0
    for before, after in pairwise(prompts):
        edited = next((at for at, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), None)
        kept = [one for one in after[edited:] if one in before] if edited is not None else []
        expected, number = expected + sum(map(count, kept)), number + bool(kept)
    history = answer["history"]
    assert (history["edits"], history["conversations"]) == (number, 1)
    assert history["tokens"]["cost"] == pytest.approx(expected, abs=20 * number)
    assert expected / number < history["dearest"]["tokens"] < expected


@pytest.mark.parametrize("change", [clear, drop])
def test_batches_are_what_the_editor_makes_of_the_whole_history(change):
    whole = list_prompts(make_run(14))
    prompts = [change(one) for one in whole]
    first = next(at for at, (a, b) in enumerate(pairwise(prompts)) if b[: len(a)] != a)
    editor = HistoryEditor(budget_tokens=6000, drop_turns=True, count=count)
    batched = [*prompts[: first + 1], *(editor.edit(one).messages for one in whole[first + 1 :])]
    as_it_is, then = estimate(prompts, history_tokens=6000), estimate(batched)
    saved = as_it_is["rows"][0]["computed_tokens"] - then["rows"][0]["computed_tokens"]
    history = as_it_is["history"]
    assert history["tokens"]["batches"] == pytest.approx(saved, abs=32)
    assert saved > 0.3 * history["tokens"]["cost"]
    assert 0 < history["edits_in_batches"] < history["edits"] / 2
    assert "6,000 tokens" in render_tables(as_it_is)


def test_a_summary_in_place_of_old_messages_is_an_edit_where_the_last_ones_stay():
    run = make_run(8)
    summary = say("user", "So far: flights 1 to 5 are too dear. " * 5)
    history = estimate([run[:-2], [*run[:1], summary, *run[-8:]]])["history"]
    assert (history["edits"], history["dearest"]["line"]) == (1, 2)
    assert history["tokens"]["cost"] == pytest.approx(sum(map(count, run[-8:-2])), abs=32)


RUN = make_run(6)
OTHER = make_run(6, "Find a hotel.")


@pytest.mark.parametrize(
    "prompts",
    [
        list_prompts(RUN),
        [*list_prompts(RUN), RUN, RUN[:6], RUN],  # retries
        [RUN[:6], [*RUN[:5], say("tool", "another result")], [*RUN[:6], say("user", "Well?")]],  # answered anew
        [x for pair in zip(list_prompts(RUN), list_prompts(OTHER), strict=True) for x in pair],  # two at once
        [[*one, say("user", f"It is {at} o'clock.")] for at, one in enumerate(list_prompts(RUN))],  # a reminder behind
        [[say("system", f"It is {at} o'clock. " * 9), *one[1:]] for at, one in enumerate(list_prompts(RUN))],
        [
            RUN,
            [RUN[0], say("user", "Good day."), *RUN[2:4], say("user", "Thanks.")],
        ],  # another run, the same first step
    ],
)
def test_what_is_no_edit_is_not_told(prompts):
    answer = estimate(prompts)
    assert answer["history"] == {"edits": 0, "conversations": 0, "edits_in_batches": 0, "tokens": {}, "dearest": {}}
    assert "edits of histories" not in render_tables(answer)
    assert "Edits of histories" not in render_page(answer)


def test_edited_conversations_that_run_at_once_are_told_apart_also_by_tenant():
    one, other = (
        [clear(prompt) for prompt in list_prompts(run)] for run in (make_run(8), make_run(8, "Find a hotel."))
    )
    alone = [estimate(prompts)["history"] for prompts in (one, other)]
    both = estimate([prompt for pair in zip(one, other, strict=True) for prompt in pair])["history"]
    assert both["conversations"] == 2
    assert both["edits"] == sum(history["edits"] for history in alone)
    assert both["tokens"]["cost"] == pytest.approx(sum(history["tokens"]["cost"] for history in alone), abs=100)


def test_an_edit_costs_nothing_where_the_cache_had_forgotten_the_prompt():
    run = [clear(one) for one in list_prompts(make_run(8))]
    assert estimate(run, cache_tokens=200)["history"]["edits"] == 0


def test_the_rows_are_shown_but_for_those_of_nothing():
    prompts = [clear(one) for one in list_prompts(make_run(12))]
    answer = estimate(prompts)
    for shown in (render_tables(answer), render_page(answer)):
        assert "computed again behind edits" in shown
        assert "edits in batches would save" in shown
        assert "reuse at any offset would save, fast" in shown
        assert "its history was edited" in shown
    answer = estimate(prompts, pass_tokens=100_000)
    assert "reuse at any offset would save" not in render_tables(answer)


def test_little_is_remembered_of_a_long_log(monkeypatch):
    monkeypatch.setattr(edits, "MAX_BYTES", 60_000)
    prompts = [
        prompt for task in "abcdefghij" for prompt in list_prompts(make_run(5, f"Task {task} is to be done now."))
    ]
    logged = [make_prompt(line, {"messages": one}) for line, one in enumerate(prompts)]
    for one, messages in zip(logged, prompts, strict=True):
        object.__setattr__(one, "messages", tuple(messages))
    found = replay(logged, **ROOM)[0].history
    assert found._size <= 60_000
    assert len(found._held) < 5
    assert {id(talk) for talk in found._index.values()} <= {id(talk) for talk in found._held}


messages = st.one_of(
    st.builds(say, st.sampled_from(["system", "user", "assistant", "tool"]), st.text("ab ", max_size=60)),
    st.builds(lambda name: {"role": "tool", "tool_call_id": name, "content": name * 50}, st.sampled_from("xyz")),
    st.builds(
        lambda name: {"role": "assistant", "content": None, "tool_calls": [{"id": name}]}, st.sampled_from("xyz")
    ),
    st.just({"role": "assistant", "content": "odd", "tool_calls": "none"}),
    st.just(say("critic", "a role of somebody else's")),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(messages, min_size=1, max_size=8), min_size=1, max_size=8), st.sampled_from([64, 10_000]))
def test_any_log_is_read_and_no_edit_costs_more_than_was_computed(prompts, room):
    answer = estimate(prompts, cache_tokens=room)
    cost = answer["history"]["tokens"].get("cost", 0)
    assert 0 <= cost <= answer["rows"][0]["computed_tokens"]
    assert all(0 <= answer["history"]["tokens"].get(name, 0) <= cost for name in ("balanced", "fast"))


def test_real_runs_with_old_results_cleared(data_dir, is_long):
    """Runs of tau-bench (gpt-4o, airline): a client that keeps the last three results."""
    with gzip.open(data_dir / "agent_traces" / "taubench_gpt4o_airline_even.jsonl.gz", "rt") as lines:
        runs = [json.loads(line)["traj"] for line in lines][: 30 if is_long else 20]
    whole = [prompt for run in runs for prompt in list_prompts(run)[1:]]
    assert estimate(whole)["history"]["edits"] == 0
    history = estimate([clear(prompt, 3) for prompt in whole])["history"]
    assert history["edits"] > 50
    assert history["edits_in_batches"] < history["edits"] / 5
    assert history["tokens"]["batches"] > 0.7 * history["tokens"]["cost"]
    assert history["tokens"]["fast"] > history["tokens"]["balanced"] > 0
