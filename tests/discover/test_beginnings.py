"""Which donors a prompt begins with, and what becomes of them when a newer one holds all of theirs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend import Namespace, Prompt, SemBlend, SemBlendConfig
from semblend.discover.beginnings import Beginnings

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
LONG = np.arange(100, 300)


def ids(sb: SemBlend) -> list[str]:
    return sorted(donor.donor_id for donor in sb.donors())


@given(st.lists(st.tuples(st.integers(0, 1), TOKENS), max_size=20), st.data())
def test_exactly_the_slots_that_a_prompt_begins_with_are_found_the_longest_first(donors, data):
    known, held = Beginnings(), dict(enumerate(donors))
    for slot, (namespace, tokens) in held.items():
        known.add(slot, namespace, np.array(tokens, np.int32))
    for slot in data.draw(st.sets(st.sampled_from(sorted(held)))) if held else ():
        known.remove(slot)
        del held[slot]
    asked = data.draw(TOKENS)
    found = list(known.find(0, np.array(asked, np.int32)))
    assert sorted(found) == sorted(
        slot for slot, (namespace, tokens) in held.items() if namespace == 0 and asked[: len(tokens)] == tokens
    )
    lengths = [len(held[slot][1]) for slot in found]
    assert lengths == sorted(lengths, reverse=True)
    assert len(known) == len(held)


def test_a_number_that_stands_for_other_tokens_too_finds_no_donor(sb, monkeypatch):
    monkeypatch.setattr(Beginnings, "_sum", lambda self, tokens: np.zeros(len(tokens), np.uint64))
    sb.register(Prompt(LONG), "a")
    assert sb.find_beginning(Prompt(LONG + 1)) is None
    assert sb.find_beginning(Prompt([*LONG, 7])).donor_id == "a"


def test_a_donor_supersedes_those_that_it_begins_with(sb):
    gone = []
    sb.on_evicted(lambda eviction: gone.append((eviction.donor.donor_id, eviction.reason)))
    for name, tokens in (("short", LONG[:90]), ("other", [*LONG[:90], 1, 2]), ("equal", LONG), ("new", LONG)):
        sb.register(Prompt(tokens), name)
    sb.register(Prompt(LONG[:90], namespace=Namespace(tenant="acme")), "theirs")
    assert {donor.donor_id for donor in sb.supersede("new")} == {"short", "equal"}
    assert ids(sb) == ["new", "other", "theirs"]
    assert sorted(gone) == [("equal", "superseded"), ("short", "superseded")]
    assert sb.supersede("new") == () == sb.supersede("nobody")


@pytest.mark.parametrize("hold", ["pin", "claim", "refusal"])
def test_a_donor_that_somebody_holds_stays(sb, hold):
    sb.register(Prompt(LONG[:90]), "held")
    if hold == "pin":
        sb.pin("held")
    elif hold == "claim":
        sb.claim(sb.lookup(Prompt([7, *LONG[:90]])), "request")
    sb.register(Prompt(LONG), "new")
    assert sb.supersede("new", lambda name: hold != "refusal") == ()
    assert ids(sb) == ["held", "new"]


def test_what_a_conversation_goes_on_from_leaves_last():
    now = [0.0]
    sb = SemBlend(SemBlendConfig(embedder="none", metrics=False, max_donors=4), clock=lambda: now[0])
    for name in ("talk", "b", "c"):
        sb.register(Prompt([*name.encode(), *LONG]), name)
    sb.keep("talk", 600.0)
    for number in range(10):
        sb.register(Prompt([number, *LONG]), f"one-time-{number}")
    assert "talk" in ids(sb)
    now[0] = 601.0
    for number in range(4):
        sb.register(Prompt([number, 1, *LONG]), f"later-{number}")
    assert "talk" not in ids(sb)


def test_a_base_is_taken_alone_where_it_holds_nearly_all_and_is_advice_elsewhere(sb):
    talk, extra = np.arange(1000, 2000), np.arange(5000, 5040)
    sb.register(Prompt(talk), "talk")
    sb.register(Prompt([*extra, *talk[500:560]]), "other")
    edited = Prompt([*talk[:300], *talk[400:900], *extra, 7, 8, 9])

    def donors(**named):
        return sb.lookup(edited, **named).donor_ids

    assert donors() == donors(base="nobody") == donors(base="other") == ("talk", "other")
    assert donors(base="talk") == ("talk",)
    sb.register(Prompt(talk, namespace=Namespace(tenant="acme")), "theirs")
    assert donors(base="theirs") == ("talk", "other"), "a wall is a wall"


@given(st.lists(st.integers(0, 5), min_size=2, max_size=6, unique=True), st.data())
def test_a_base_counts_whatever_other_donors_hold_the_same_text(messages, data):
    """Conversations of some messages out of six; a prompt that was edited from one of them."""
    text = [np.arange(1000 * number, 1000 * number + 60 + 20 * number) for number in range(1, 7)]
    others = data.draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True), max_size=4))
    held = {f"other-{number}": [text[one] for one in chosen] for number, chosen in enumerate(others)}
    held["base"] = [text[one] for one in messages]
    order = data.draw(st.permutations(list(held)))
    edited = Prompt(np.concatenate([[7, 8, 9], *held["base"][data.draw(st.integers(1, len(messages) - 1)) :], [3]]))
    together, alone = (SemBlend(SemBlendConfig(embedder="none", metrics=False)) for _ in range(2))
    for name in order:
        together.register(Prompt(np.concatenate(held[name])), name)
    alone.register(Prompt(np.concatenate(held["base"])), "base")
    spans = [
        [(span.donor_id, span.target_start, span.length) for span in sb.lookup(edited, base="base").spans]
        for sb in (together, alone)
    ]
    assert spans[0] == spans[1]
