"""Histories that are edited in batches: what must hold for any history, and what is removed of a usual one."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend.arrange import EditOutcome, HistoryEditor
from semblend.arrange.history import PLACEHOLDER, Removed
from semblend.errors import InputError

WORDS = "the flight to Seattle leaves at nine and costs ninety dollars without a bag "


def call(name, *, thought="", text=None):
    found = {"role": "assistant", "content": text, "tool_calls": [{"id": name, "function": {"name": "find"}}]}
    return found | ({"reasoning_content": thought} if thought else {})


def result(name, size=20):
    return {"role": "tool", "tool_call_id": name, "content": f"{name}: " + WORDS * size}


def say(role, text="And now?"):
    return {"role": role, "content": text}


def write_block(name, text="r" * 300):
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": name, "content": text}]}


def find_name(message):
    """Whether a message is a call or a result, and its id; None for talk."""
    if "tool_call_id" in message:
        return "result", message["tool_call_id"]
    if isinstance(message["content"], list):
        return "result", message["content"][0]["tool_use_id"]
    return ("call", message["tool_calls"][0]["id"]) if "tool_calls" in message else None


def make_run(rounds, *, size=20, thought=""):
    history = [say("system", "Be brief."), say("user", "Find the cheapest flight.")]
    for number in range(rounds):
        history += [call(f"c{number}", thought=thought), result(f"c{number}", size)]
    return history


def list_prompts(history):
    """The prompts of a run: whatever stands in front of an answer, and the whole."""
    ends = [at for at, one in enumerate(history) if one["role"] == "assistant" and at]
    return [history[:end] for end in (*ends, len(history)) if end]


def apply(edit, messages):
    """What an engine knows of an edit: messages that are gone, and places whose text is another one (None)."""
    left = list(messages)
    for one in reversed(edit.to_dict()["ranges"]):
        left[one["start"] : one["end"]] = [None] * ((one["end"] - one["start"]) * (one["action"] == "replace"))
    return left


@st.composite
def runs(draw):
    """Conversations as agents have them: turns of a user, rounds of calls with their results, answers."""
    history = [say("system", "Rules. " * draw(st.integers(0, 40)))] if draw(st.booleans()) else []
    for turn in range(draw(st.integers(1, 5))):
        history.append(say("user", f"Question {turn}. " * draw(st.integers(1, 30))))
        for number in range(draw(st.integers(0, 5))):
            names = [f"{turn}.{number}.{n}" for n in range(draw(st.integers(1, 3)))]
            answer = call(names[0], thought="Hm. " * draw(st.integers(0, 30)))
            answer["tool_calls"] = [{"id": name, "function": {"name": "find"}} for name in names]
            history += [answer, *(result(name, draw(st.integers(0, 12))) for name in names)]
        if draw(st.booleans()):
            history.append(say("assistant", "<think>so</think>Done. " * draw(st.integers(1, 20))))
        if draw(st.integers(0, 9)) == 0:
            history.append(say("developer", "From now on in French."))
    return history


@st.composite
def heaps(draw):
    """Messages in no order that makes sense: results without calls, calls without results, names that come twice."""
    one = st.one_of(
        st.builds(result, st.sampled_from("abc"), st.integers(0, 9)),
        st.builds(call, st.sampled_from("abc"), thought=st.sampled_from(["", "Hm. " * 20])),
        st.builds(say, st.sampled_from(["user", "assistant", "system"]), st.text("xy ", max_size=200)),
        st.builds(write_block, st.sampled_from("abc")),
    )
    return draw(st.lists(one, min_size=1, max_size=25))


editors = st.builds(
    lambda budget, target, least, **more: HistoryEditor(
        budget_tokens=budget, target_tokens=budget * target // 10, at_least_tokens=least, **more
    ),
    st.integers(50, 1500),
    st.integers(0, 9),
    st.one_of(st.none(), st.integers(1, 300)),
    keep_results=st.integers(1, 4),
    clear_results=st.booleans(),
    strip_reasoning=st.booleans(),
    drop_turns=st.booleans(),
)
anything = st.one_of(runs(), heaps())


@given(anything, editors)
def test_the_same_history_gives_the_same_edits_and_stays_as_it_is(history, editor):
    before = copy.deepcopy(history)
    found = editor.edit(history)
    assert history == before
    assert editor.edit(copy.deepcopy(history)) == found


@given(anything, editors)
def test_a_prompt_is_the_one_before_it_and_what_came_since_but_for_the_ranges_of_the_edit(history, editor):
    prompts = list_prompts(history)
    sent, size = editor.edit(prompts[0]).messages, len(prompts[0])
    for prompt in prompts[1:]:
        found = editor.edit(prompt, sent=size)
        expected = apply(found.edit, [*sent, *prompt[size:]])
        assert len(found.messages) == len(expected)
        assert all(old is None or old == new for old, new in zip(expected, found.messages, strict=True))
        assert (found.outcome is EditOutcome.EDITED) == bool(found.edit.removals)
        if found.outcome is EditOutcome.WITHIN_BUDGET:
            assert found.tokens <= editor.budget_tokens
        sent, size = found.messages, len(prompt)


@given(anything, editors)
def test_what_was_edited_is_edited_no_further(history, editor):
    found = editor.edit(history)
    assert editor.edit(found.messages).messages == found.messages


@given(runs(), editors)
def test_system_messages_the_first_and_the_last_question_and_the_last_results_stay(history, editor):
    sent = editor.edit(history).messages
    places = [at for at, one in enumerate(history) if one["role"] == "user"]
    results = [one for one in history if one["role"] == "tool"][-editor.keep_results :]
    system = [one for one in history if one["role"] in ("system", "developer")]
    assert [one for one in sent if one["role"] in ("system", "developer")] == system
    stays = [history[places[0]], history[places[-1]], *results]
    assert all(any(one is other for other in sent) for one in stays)
    assert sent[-1] is history[-1], "the model has not seen it yet"


@given(runs(), editors)
def test_a_call_is_never_apart_from_its_results_and_users_and_assistants_take_turns_as_before(history, editor):
    sent = editor.edit(history).messages
    calls = [one["id"] for message in sent for one in message.get("tool_calls", ())]
    assert calls == [message["tool_call_id"] for message in sent if message["role"] == "tool"]
    pairs = {(a["role"], b["role"]) for a, b in pairwise(history)}
    if ("user", "user") not in pairs and ("user", "developer") not in pairs:
        assert ("user", "user") not in {(a["role"], b["role"]) for a, b in pairwise(sent)}


@given(heaps(), editors)
def test_a_call_and_its_result_stay_together_also_where_something_stands_between_them(history, editor):
    """No id comes twice: which of two results is the call's nobody knows, nor that a second one will come."""
    seen = set()
    history = [one for one in history if (name := find_name(one)) is None or not (name in seen or seen.add(name))]
    if history:
        left = {find_name(one) for one in editor.edit(history).messages}
        pairs = {name[1] for name in seen if {("call", name[1]), ("result", name[1])} <= seen}
        assert all((("call", name) in left) == (("result", name) in left) for name in pairs)


@given(runs(), editors)
def test_every_edit_frees_what_makes_it_worth_while(history, editor):
    size = 0
    for end in range(1, len(history) + 1):
        found = editor.edit(history[:end], sent=size)
        assert not found.edit.removals or found.edit.tokens >= editor.at_least_tokens
        size = end


def test_most_steps_of_a_long_run_extend_the_prompt_before_them():
    editor = HistoryEditor(budget_tokens=6000)
    found = [editor.edit(prompt) for prompt in list_prompts(make_run(60))]
    assert [at for at, one in enumerate(found) if one.edit.removals] == [16, 24, 33, 42, 50, 59]
    assert all(len(one.edit.removals) in (9, 10) for one in found if one.edit.removals)
    assert max(one.tokens for one in found) <= 6000


def test_an_edit_tells_what_it_removed_and_of_which_messages():
    thought = "The fare of the second flight is lower than that of the first one. " * 4
    found = HistoryEditor(budget_tokens=2000, target_tokens=900).edit(make_run(5, thought=thought), base="chatcmpl-7")
    assert (found.outcome, found.tokens) == (EditOutcome.EDITED, 1451)
    assert found.edit.to_dict() == {
        "base": "chatcmpl-7",
        "ranges": [{"start": at, "end": at + 1, "action": "replace"} for at in range(2, 6)],
    }
    assert [one.what for one in found.edit.removals] == [Removed.REASONING, Removed.RESULT] * 2
    assert found.edit.tokens == 2 * (67 + 374)


def test_old_turns_go_whole_and_the_first_one_keeps_its_question_and_its_answer():
    history = make_run(1)
    for turn in range(6):
        history += [say("assistant", "It is AS 12. " * 40), say("user", f"Question {turn}? " * 20)]
    found = HistoryEditor(budget_tokens=1500, target_tokens=900, keep_results=1, drop_turns=True).edit(history)
    assert found.messages == [*history[:5], *history[-3:]]
    (removal,) = found.edit.removals
    assert (removal.what, removal.start, removal.end) == (Removed.TURN, 5, 13)


def test_what_cannot_be_shortened_is_left_and_told():
    talk = [say("user", "Tell me a story. " * 300), say("assistant", "Once. " * 300), say("user", "More.")]
    found = HistoryEditor(budget_tokens=1000).edit(talk)
    assert (found.outcome, found.messages, found.edit.removals) == (EditOutcome.TOO_LITTLE, talk, ())


def test_results_in_the_form_of_anthropic_are_cleared_in_their_blocks():
    history = [say("user", "Go.")]
    for number in range(4):
        history.append({"role": "assistant", "content": [{"type": "tool_use", "id": f"t{number}", "name": "find"}]})
        history.append(write_block(f"t{number}", WORDS * 20))
        history[-1]["content"].append({"type": "text", "text": "Hurry."})
    found = HistoryEditor(budget_tokens=1200, target_tokens=500, drop_turns=False, keep_results=1).edit(history)
    first = found.messages[2]["content"]
    assert first[0] == {"type": "tool_result", "tool_use_id": "t0", "content": "[an old tool result was here]"}
    assert first[1] == {"type": "text", "text": "Hurry."}
    assert found.messages[-1] is history[-1]


def test_thoughts_are_taken_in_every_form_they_are_written_in():
    thought = "First the fares, then the bags. " * 30
    forms = [
        say("assistant", "Yes.") | {"reasoning_content": thought},
        say("assistant", "Yes.") | {"reasoning": thought},
        say("assistant", f"<think>{thought}</think>\n\nYes."),
        say("assistant", [{"type": "thinking", "thinking": thought}, {"type": "text", "text": "Yes."}]),
    ]
    for form in forms:
        found = HistoryEditor(budget_tokens=100).edit([say("user"), form, say("user", "Sure?")])
        assert found.messages[1] in (say("assistant", "Yes."), say("assistant", [{"type": "text", "text": "Yes."}]))
    alone = say("assistant", "") | {"reasoning_content": thought}
    assert HistoryEditor(budget_tokens=100).edit([say("user"), alone, say("user")]).messages[1] is alone


@pytest.mark.parametrize("history", [[{"content": "x"}], [{"role": "wizard", "content": "x"}], ["x"]])
def test_messages_that_are_no_chat_are_refused(history):
    with pytest.raises(InputError, match="role"):
        HistoryEditor().edit(history)


@pytest.mark.parametrize(
    "wrong", [{"target_tokens": 50}, {"target_tokens": -1}, {"keep_results": 0}, {"at_least_tokens": -1}]
)
def test_limits_that_make_no_sense_are_refused(wrong):
    with pytest.raises(InputError):
        HistoryEditor(budget_tokens=50, **wrong)


@pytest.mark.parametrize("drop_turns", [False, True])
def test_a_history_that_can_never_be_shortened_costs_little_time(drop_turns, monkeypatch):
    history = [say("system", "x" * (at % 40)) for at in range(2000)]
    looked, tried = [], []
    find = HistoryEditor._find_removals
    monkeypatch.setattr(HistoryEditor, "_find_removals", lambda *given: tried.append(1) or find(*given))
    editor = HistoryEditor(budget_tokens=1000, drop_turns=drop_turns, count=lambda one: looked.append(1) or 10)
    assert editor.edit(history).outcome is EditOutcome.TOO_LITTLE
    assert len(looked) == 2000
    # Each try reads the history from its beginning: none where nothing can go, few where it has to be looked for.
    assert len(tried) == 0 if not drop_turns else 0 < len(tried) <= 2000 * 10 // 62


def test_what_may_never_go_is_looked_for_only_once_it_would_pay(monkeypatch):
    tried, find = [], HistoryEditor._find_removals
    monkeypatch.setattr(HistoryEditor, "_find_removals", lambda *given: tried.append(len(given[1])) or find(*given))
    editor = HistoryEditor(budget_tokens=1000, count=lambda one: 4 if one.get("content") == PLACEHOLDER else 10)
    history = [say("user") for _ in range(150)] + [call("c"), result("c")] * 100
    editor.edit(history)
    assert tried
    assert tried[0] >= 150 + 2 * 250 // 6
