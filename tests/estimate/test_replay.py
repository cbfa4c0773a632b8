"""Every row of the estimate is what a plain replay of the same prompts gives, and the rows add up."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from estimate_logs import DATE, ENCODE, PASSAGES, RULES, ask, make_prompt, replay
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend import Namespace
from semblend.arrange import Arranger, move_to_end
from semblend.errors import InputError
from semblend.estimate.replay import BreakKind, ReplayOptions, redact
from semblend.estimate.steps import MoveFields
from semblend.text.chat import list_chat_parts, render_chat
from semblend.text.logs import LoggedPrompt
from semblend.text.parts import Part, join_parts

REQUESTS = st.tuples(
    st.integers(1, 3),
    st.lists(st.integers(0, 4), min_size=2, max_size=5),
    st.permutations([0, 1, 2]),
    st.sampled_from(["Why?", "When does it leave?"]),
    st.sampled_from(["", "b"]),
)


def count_by_hand(prompts: list[tuple[str, list[int]]], block: int, room: int) -> int:
    """Tokens that an exact prefix cache serves: tuples of whole blocks in a list, the newest last."""
    held: list[tuple[Any, ...]] = []
    hits = 0
    for tenant, ids in prompts:
        ends = range(block, len(ids) + 1, block)
        prefixes = [(tenant, *ids[:end]) for end in ends]
        for prefix in prefixes[: (len(ids) - 1) // block]:
            if prefix not in held:
                break
            hits += block
        for prefix in reversed(prefixes):
            if prefix in held:
                held.remove(prefix)
            held.append(prefix)
        held = held[-room:]
    return hits


def rewrite_by_hand(requests: list[Any], cache_tokens: int) -> dict[str, list[tuple[str, list[int]]]]:
    """The prompts of each stage, by operations on whole requests and on rendered text."""
    arranger = Arranger(exact_size=4 * cache_tokens)
    stages: dict[str, list[tuple[str, list[int]]]] = {
        n: [] for n in ("prefix", "fields", "tools", "repeats", "arrange")
    }
    for date, order, tools, question, tenant in requests:
        body = ask(date, order, tools, question)
        pieces = [part.text for part in list_chat_parts(body["messages"], tools=body["tools"])]

        def encode(pieces: list[str], end: str = "") -> list[int]:
            return [int(token) for piece in [*_merge(pieces), end] for token in ENCODE(piece)]

        stages["prefix"].append((tenant, encode(pieces)))
        end = f"\nDate: {date}"
        pieces = [piece.replace(f"Date: {date}\n", "") for piece in pieces]
        stages["fields"].append((tenant, encode(pieces, end)))
        at = [number for number, piece in enumerate(pieces) if piece.startswith('{"description"')]
        for place, tool in zip(at, sorted(pieces[number] for number in at), strict=True):
            pieces[place] = tool
        stages["tools"].append((tenant, encode(pieces, end)))
        at = [number for number, piece in enumerate(pieces) if piece in PASSAGES]
        for number, place in enumerate(at):
            if pieces[place] in [pieces[other] for other in at[:number]]:
                pieces[place] = f"[same as the passage that begins with “{' '.join(pieces[place].split()[:6])}”]"
        stages["repeats"].append((tenant, encode(pieces, end)))
        at = [number for number in at if pieces[number] in PASSAGES]
        texts, before = [pieces[number] for number in at], "".join(pieces[: at[0]])
        found = arranger.arrange(texts, namespace=Namespace(tenant=tenant), before=before)
        arranger.record(found)
        for place, index in zip(at, found.order, strict=True):
            pieces[place] = texts[index]
        stages["arrange"].append((tenant, encode(pieces, end)))
    return stages


def _merge(pieces: list[str]) -> list[str]:
    """Texts between tools, passages and turns in one piece, as the replay tokenizes them."""
    merged: list[str] = []
    open_ = False
    for number, piece in enumerate(pieces):
        fixed = piece in PASSAGES or piece.startswith('{"description"')
        turn = piece == "\n" and number + 1 < len(pieces) and pieces[number + 1].startswith("<|")
        if fixed or turn or not open_:
            merged.append(piece)
        else:
            merged[-1] += piece
        open_ = not fixed
    return merged


@settings(max_examples=12, deadline=None)
@given(st.lists(REQUESTS, min_size=1, max_size=8), st.integers(20, 200))
def test_every_exact_row_is_what_a_replay_by_hand_counts(requests: list[Any], room: int) -> None:
    prompts = [make_prompt(at, ask(*one[:4]), one[4]) for at, one in enumerate(requests)]
    found, answer = replay(prompts, cache_tokens=16 * room)
    computed = dict(found.list_computed())
    stages = rewrite_by_hand(requests, 16 * room)
    for name, sent in stages.items():
        tokens = sum(len(ids) for _, ids in sent)
        assert computed[name] == tokens - count_by_hand(sent, 16, room), name
    assert answer["total"]["prompt_tokens"] == sum(len(ids) for _, ids in stages["prefix"])


@settings(max_examples=15, deadline=None)
@given(st.lists(REQUESTS, min_size=1, max_size=8), st.integers(1, 400), st.integers(1, 64))
def test_the_rows_add_up_to_the_total_exactly(requests: list[Any], room: int, block: int) -> None:
    prompts = [make_prompt(at, ask(*one[:4]), one[4]) for at, one in enumerate(requests)]
    _, answer = replay(prompts, cache_tokens=block * room, block_tokens=block)
    total, rows = answer["total"], answer["rows"]
    assert sum(row["saved_tokens"] for row in rows) == total["saved_tokens"]
    assert total["prompt_tokens"] - rows[-1]["computed_tokens"] == total["saved_tokens"]
    before = total["prompt_tokens"]
    for row in rows:
        assert row["saved_tokens"] == before - row["computed_tokens"]
        before = row["computed_tokens"]
    for parts in (answer["by_length"], answer["by_tenant"]):
        for name, whole in (("prompts", total["prompts"]), ("prompt_tokens", total["prompt_tokens"])):
            assert sum(part[name] for part in parts.values()) == whole
        saved = total["prompt_tokens"] - next(row for row in rows if row["name"] == "balanced")["computed_tokens"]
        assert sum(part["saved_tokens"] for part in parts.values()) == saved
    ranked = [row for row in rows if row["rank"]]
    assert sorted(row["rank"] for row in ranked) == list(range(1, len(ranked) + 1))
    assert json.dumps(json.loads(json.dumps(answer))) == json.dumps(answer)


@settings(max_examples=6, deadline=None)
@given(st.lists(REQUESTS, min_size=2, max_size=8), st.sampled_from([4, 12, 30, 80]), st.sampled_from([100, 700]))
def test_n_times_the_memory_is_what_a_replay_with_that_memory_counts(
    requests: list[Any], room: int, donor_tokens: int
) -> None:
    """Also for the arranger, which is told the size of the larger cache. The best size up to that one counts."""
    prompts = [make_prompt(at, ask(*one[:4]), one[4]) for at, one in enumerate(requests)]
    asked = {"cache_tokens": 16 * room, "donor_tokens": donor_tokens, "factors": (2, 8)}
    found, answer = replay(prompts, **asked)
    rows, unused = dict(found.list_computed()), found.list_unused()
    best = rows["fast"]
    for factor in (2, 8):
        larger = {"cache_tokens": 16 * room * factor, "donor_tokens": donor_tokens * factor, "factors": ()}
        computed = dict(replay(prompts, **larger)[0].list_computed())["fast"]
        best = min(best, computed)
        assert rows[f"memory x{factor}"] == best
        assert unused.get(f"memory x{factor}", 0) == computed - best
    assert sum(row["saved_tokens"] for row in answer["rows"]) == answer["total"]["saved_tokens"]


def test_more_memory_brings_back_what_was_evicted() -> None:
    prompts = [make_prompt(at, ask(1, [at % 5, (at + 1) % 5], [0, 1, 2], "Why?")) for at in range(20)]
    # Donors of the same size are off: they would give the evicted text back themselves.
    _, answer = replay(prompts, cache_tokens=400, donor_tokens=1, pass_tokens=10_000)
    rows = {row["name"]: row["saved_tokens"] for row in answer["rows"]}
    assert rows["memory x2"] + rows["memory x4"] > 0
    curve = answer["curves"]["as_it_is"]
    assert curve == sorted(curve)
    assert BreakKind.EVICTED in answer["breaks"]


def test_a_step_that_costs_more_than_it_saves_has_a_negative_row_and_no_rank() -> None:
    """A long shared text in front of another one makes every prompt approximate, and its own turns are lost."""
    random = np.random.default_rng(3)
    document, prompts = random.integers(0, 30_000, 900), []
    for chat in range(6):
        history = [*random.integers(40_000, 60_000, 20), *document]
        for _ in range(6):
            history = [*history, *random.integers(0, 2**30, 900)]
            ids = np.array(history, np.int32)
            prompts.append(LoggedPrompt(chat, token_ids=ids, parts=(Part("", token_ids=ids),)))
    _, answer = replay(prompts, cache_tokens=1_000_000, donor_tokens=1_000_000)
    fast = sum(row["saved_tokens"] for row in answer["rows"] if row["name"] in ("balanced", "fast"))
    assert fast < 0
    assert all(row["rank"] is None for row in answer["rows"] if row["saved_tokens"] <= 0)


def test_the_answer_of_a_turn_is_held_for_the_next_one() -> None:
    turns = [{"role": "user", "content": "Tell me about the ferries. " * 10}]
    answer = "They leave at noon. " * 20
    longer = [*turns, {"role": "assistant", "content": answer}, {"role": "user", "content": "And on Sunday?"}]
    prompts = [make_prompt(1, {"messages": turns}, answer=answer), make_prompt(2, {"messages": longer})]
    found, _ = replay(prompts, cache_tokens=100_000)
    both = [len(ENCODE(render_chat(one))) for one in (turns, longer)]
    assert both[0] < dict(found.list_computed())["prefix"] <= both[0] + 40


def test_prompts_of_different_salts_and_adapters_share_nothing() -> None:
    text = "The same text for everybody. " * 20
    prompts = [
        LoggedPrompt(at, text=text, parts=(Part(text),), **{name: value})
        for at, (name, value) in enumerate([("salt", "a"), ("salt", "b"), ("adapter", "x"), ("model", "m")])
    ]
    _, answer = replay(prompts)
    assert answer["total"]["saved_tokens"] == 0


def test_a_break_is_shown_with_its_place_and_both_texts() -> None:
    prompts = [make_prompt(at, ask(at, [0, 1], [0, 1, 2], "Why?")) for at in (1, 2)]
    _, answer = replay(prompts, cache_tokens=100_000)
    (example,) = answer["breaks"]["a field in front changes"]["examples"]
    assert example["line"] == 2
    assert example["before"].endswith("Date: ")
    assert (example["here"][:1], example["earlier"][:1]) == ("2", "1")
    assert prompts[1].text is not None
    assert prompts[1].text[example["position_chars"]] == "2"


def test_a_redacted_answer_holds_no_word_and_no_tenant_of_the_log() -> None:
    secrets = ["Zaphod", "4711", "acme"]
    prompts = [
        make_prompt(at, ask(at, [0, 1], [0, 1, 2], f"Dear Zaphod 4711, {at}?"), tenant="acme") for at in range(4)
    ]
    _, shown = replay(prompts, cache_tokens=100_000)
    assert all(secret in json.dumps(shown) for secret in secrets[2:])
    _, answer = replay(prompts, cache_tokens=100_000, redacted=True)
    kept = json.dumps({name: answer[name] for name in ("breaks", "by_tenant", "fields", "rows")})
    assert not any(secret in kept for secret in [*secrets, "Port", "kind", "Date:"])
    assert redact("Zaphod 4711") == "xxxxxx 0000"


@pytest.mark.parametrize(
    "options", [{"cache_tokens": 8}, {"factors": (4, 2)}, {"factors": (1, 2)}, {"donor_tokens": 0}]
)
def test_options_that_hold_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        ReplayOptions(**options)


def test_moving_by_hand_and_moving_as_a_step_agree_on_one_text() -> None:
    text = f"Date: 7\n{RULES}"
    moved = MoveFields((DATE,)).apply((Part(text),), Namespace())
    assert join_parts(moved) == move_to_end(text, [DATE])
