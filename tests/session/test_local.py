"""The sessions over the shortest engine there is: offers, loads in pieces, slots that come back. Without any engine."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from local_world import DOCUMENT, TARGET, LocalWorld

from semblend.materialize.blend.blender import Blender
from semblend.materialize.blend.quality import Rejected
from semblend.materialize.contract import Rows
from semblend.plan.reuse_plan import DeclineReason
from semblend.prompt import Prompt


@pytest.fixture
def world():
    return LocalWorld()


@pytest.mark.parametrize("page", [1, 4])
def test_a_document_at_another_place_is_provided_in_whole_pages_up_to_the_last_token(page):
    world = LocalWorld(page)
    world.donate()
    free = len(world.slots.free)
    request = world.request("r", TARGET)
    offered = world.begin(request)
    assert offered == (len(TARGET) - 1) // page * page
    assert world.sessions.work("r", busy=False) == offered
    tail = world.sessions.find_tail("r")
    assert len(tail) == offered
    assert len(world.slots.free) == free - offered, "what is not provided goes back at once"
    assert world.sessions.count_waiting_slots() == 0
    world.sessions.note_prompt("r", torch.cat([tail, world.slots.take(page)])[: len(TARGET)])
    (_, receipt) = world.receipts()
    assert receipt.reused_tokens > 60
    first = receipt.spans[0].target_start
    assert first < world.sessions.find_exact_until("r") <= first + 32


@pytest.mark.parametrize("asked", [{"quality": "exact"}, {"opt_out": True}])
def test_a_receipt_says_that_a_request_wanted_no_reuse(world, asked):
    world.donate()
    world.compute(world.request("r", TARGET, **asked))
    assert [(one.reused_tokens, one.reason) for one in world.receipts()][-1] == (0, "disabled")


def test_what_one_tenant_keeps_first_pushes_out_nothing_of_another():
    """Room for two donors of each of two tenants."""
    texts = {
        name: [number * 131 + at for at in range(100)] for number, name in enumerate(("a1", "a2", "b1", "b2", "a3"))
    }
    one = LocalWorld(slots=1024).donate_as("a", texts["a1"])[1]
    world = LocalWorld(slots=1024, donor_host_bytes=4 * one)
    held = {name: world.donate_as(name[0], texts[name])[0] for name in ("a1", "a2", "b1", "b2")}
    for name in ("a1", "a2"):
        world.sessions.donors.keep_first(held[name], 600.0)
    world.donate_as("a", texts["a3"])
    left = world.sessions.donors.generations
    assert held["b1"] in left
    assert held["b2"] in left
    assert (held["a1"] in left) + (held["a2"] in left) == 1


def test_while_others_run_a_load_goes_on_step_by_step(world):
    world.donate()
    world.begin(world.request("r", TARGET))
    world.sessions.settings = replace(world.sessions.settings, step_work_ms=1e-9)
    steps = 0
    while (provided := world.sessions.work("r", busy=True)) is None:
        steps += 1
        assert world.sessions.count_waiting_slots() == len(TARGET) - 1, "they can be had while the load waits"
    assert steps > 0
    assert provided == len(TARGET) - 1


def test_one_load_waits_at_most_and_the_other_gives_everything_back(world):
    world.donate()
    world.sessions.settings = replace(world.sessions.settings, step_work_ms=1e-9)
    free = len(world.slots.free)
    world.begin(world.request("first", TARGET))
    assert world.sessions.work("first", busy=True) is None
    world.begin(world.request("second", [1, *TARGET]))
    assert len(world.slots.free) == free - len(TARGET), "the second's slots are taken, the first's are back"
    assert world.sessions.count_waiting_slots() == len(TARGET)
    assert world.sessions.work("second", busy=False)
    assert world.begin(world.request("first", TARGET)), "it may begin again"


@pytest.mark.parametrize("end", ["forget", "stop_loads", "reset"])
def test_whatever_ends_a_load_gives_slots_prefix_and_donors_back(world, end):
    world.donate()
    world.sessions.settings = replace(world.sessions.settings, step_work_ms=1e-9)
    free = len(world.slots.free)
    world.begin(world.request("r", TARGET))
    assert world.sessions.work("r", busy=True) is None
    getattr(world.sessions, end)(*(["r"] if end == "forget" else []))
    found = (len(world.slots.free), world.sessions.count_waiting_slots(), world.sessions.donors.kv.holders)
    assert found == (free, 0, 0)


def test_a_failure_after_slots_were_taken_gives_them_back_and_is_not_tried_again(world, monkeypatch):
    world.donate()
    free = len(world.slots.free)
    request = world.request("r", TARGET)
    world.sessions.offer(request, 0)

    def fail(*args, **more):
        raise RuntimeError("no memory")

    monkeypatch.setattr(Blender, "prepare_in_pieces", fail)
    with pytest.raises(RuntimeError):
        world.sessions.load("r", lambda: torch.zeros(0, dtype=torch.int64))
    world.sessions.give_up("r", "load", RuntimeError("no memory"))
    assert len(world.slots.free) == free
    assert world.sessions.offer(request, 0) == 0
    assert world.sessions.find_tail("r") is None


def test_without_room_the_request_is_computed(world):
    world.donate()
    kept = world.slots.take(len(world.slots.free) - 20)
    world.begin(world.request("r", TARGET))
    assert world.sessions.work("r", busy=False) == 0
    world.slots.give_back(kept)
    world.compute(world.request("r", TARGET))
    assert world.receipts()[-1].reason is DeclineReason.CAPACITY


def test_a_salt_sees_its_own_donors_only(world):
    world.donate(salt="anna")
    assert world.begin(world.request("other", TARGET, salt="ben")) == 0
    assert world.begin(world.request("same", TARGET, salt="anna")) > 0


def test_a_request_that_opted_out_is_no_donor(world):
    world.donate(opt_out=True)
    assert world.begin(world.request("r", TARGET)) == 0


def test_a_retracted_request_has_one_receipt(world):
    world.compute(world.request("r", TARGET))
    world.compute(world.request("r", TARGET, answered=True, unsupported="it was retracted"))
    assert len(world.receipts()) == 1


def test_an_id_that_is_used_again_is_another_request(world):
    first, second = object(), object()
    request = world.request("r", TARGET, source=first)
    world.sessions.offer(request, 0)
    assert world.sessions.find_request("r", first) is request
    assert world.sessions.find_request("r", second) is None


def test_a_caller_cannot_replace_a_donor_by_choosing_its_id(world):
    world.donate()
    world.compute(world.request("sglang-1", [30 - token % 20 for token in range(60)]))
    assert world.begin(world.request("r", TARGET)) > 0


def test_what_somebody_proposes_is_adopted_once(world):
    row = world.slots.take(len(DOCUMENT))
    world.engine.forward(Rows.of(DOCUMENT, list(range(len(DOCUMENT))), row))
    prompt = Prompt(DOCUMENT)
    assert world.sessions.donors.adopt(prompt, row)
    assert not world.sessions.donors.adopt(prompt, row)
    assert world.begin(world.request("r", TARGET)) > 0


def test_a_private_request_publishes_its_exact_hit_and_nothing_else(world):
    world.sessions.offer(world.request("r", TARGET), 0)
    world.sessions.keep_private("r")
    assert world.sessions.find_exact_until("r") == 0


@pytest.mark.parametrize("end", ["abort", "asked again"])
def test_a_request_that_is_loaded_and_then_not_admitted_gives_its_slots_back(world, end):
    """Between the load and the allocation of its row SGLang may still turn a request away."""
    world.donate()
    free = len(world.slots.free)
    request = world.request("r", TARGET)
    world.begin(request)
    assert world.sessions.work("r", busy=False) > 0
    assert len(world.slots.free) < free
    if end == "asked again":
        assert world.sessions.offer(request, 0) == 0
        world.sessions.note_prompt("r", torch.zeros(len(TARGET), dtype=torch.int64))
        assert world.receipts()[-1].reused_tokens == 0, "what was loaded and not used is no reuse"
    else:
        world.sessions.forget("r")
    assert len(world.slots.free) == free
    world.sessions.forget("r")
    assert len(world.slots.free) == free, "once"


def test_slots_in_a_row_are_the_engines_to_free(world):
    world.donate()
    free = len(world.slots.free)
    world.begin(world.request("r", TARGET))
    world.sessions.work("r", busy=False)
    row = world.sessions.find_tail("r")
    world.sessions.forget("r")
    assert len(world.slots.free) == free - len(row)
    world.slots.give_back(row)


def test_while_the_engine_loads_its_own_pages_nothing_is_offered_and_the_request_becomes_a_donor(world):
    world.donate()
    free = len(world.slots.free)
    request = world.request("r", TARGET)
    world.begin(request)
    world.sessions.stand_back(request, 40, "it loads pages of its own")
    assert len(world.slots.free) == free, "a load under way is given up"
    row = world.slots.take(len(TARGET))
    world.engine.forward(Rows.of(TARGET, list(range(len(TARGET))), row))
    world.sessions.note_prompt("r", row)
    world.sessions.forget("r")
    receipt = world.receipts()[-1]
    assert (receipt.exact_tokens, receipt.reused_tokens, receipt.prefill_tokens) == (40, 0, len(TARGET) - 40)
    assert len(list(world.sessions.semblend.donors())) == 2


def test_a_request_whose_pages_have_arrived_is_offered_what_is_behind_them(world):
    world.donate()
    request = world.request("r", TARGET)
    world.sessions.stand_back(request, 5, "it loads pages of its own")
    assert world.sessions.offer(request, 5) == len(TARGET) - 1 - 5


def test_kinds_of_prompts_that_the_gate_refuses_are_no_longer_begun(world, monkeypatch):
    """As in the other engines: the memory of the gate's verdicts saves passes in vain."""
    world.donate()
    rejected = Rejected(0, 0.5, 1, 0.0, 1.0, 1.0, work=0.7)
    monkeypatch.setattr(Blender, "prepare_in_pieces", lambda *args, **more: give(rejected))
    outcomes = []
    for number in range(3):
        request = world.request(f"r{number}", TARGET, quality="balanced")
        offered = world.begin(request)
        if offered:
            assert world.sessions.work(request.request_id, busy=False) == 0
        world.sessions.note_prompt(request.request_id, torch.zeros(len(TARGET), dtype=torch.int64))
        world.sessions.forget(request.request_id)
        outcomes.append((bool(offered), world.receipts()[-1].reason))
    assert outcomes == [(number == 0, DeclineReason.QUALITY_RISK) for number in range(3)]


def give(value):
    """A load that ends at once."""
    return value
    yield


def test_a_prompt_that_the_engine_holds_but_for_its_last_token_counts_as_exact():
    sessions = LocalWorld()
    request = sessions.request("r", DOCUMENT)
    assert sessions.sessions.offer(request, len(DOCUMENT) - 1) == 0
    receipt = sessions.sessions.note_prompt("r", None)
    assert (receipt.exact_tokens, receipt.prefill_tokens) == (len(DOCUMENT) - 1, 1)


def test_an_answer_behind_an_exact_prompt_is_a_part_of_the_donor():
    sessions = LocalWorld()
    request, answered = sessions.request("r", DOCUMENT), [5, 6, 7]
    row = sessions.slots.take(len(DOCUMENT) + 3)
    sessions.engine.forward(Rows.of([*DOCUMENT, *answered], list(range(len(DOCUMENT) + 3)), row))
    sessions.sessions.offer(request, 0)
    sessions.sessions.note_prompt("r", row, answered)
    (donor,) = sessions.sessions.semblend.donors()
    assert sessions.sessions.semblend.donor_tokens(donor.donor_id).tolist() == [*DOCUMENT, *answered]


@pytest.mark.parametrize(("said", "busy", "kept"), [(80, False, True), (80, True, False), (20, False, False)])
def test_an_answer_that_comes_later_takes_the_prompts_place_where_it_is_long_and_nobody_waits(said, busy, kept):
    world = LocalWorld()
    answered = [(3 * n) % 31 + 1 for n in range(said)]
    row = world.slots.take(len(DOCUMENT) + said)
    world.engine.forward(Rows.of([*DOCUMENT, *answered], list(range(len(row))), row))
    world.sessions.offer(world.request("r", DOCUMENT), 0)
    world.sessions.note_prompt("r", row[: len(DOCUMENT)])
    world.sessions.note_answered("r", row, answered, busy=busy)
    (donor,) = world.sessions.semblend.donors()
    assert donor.token_count == len(DOCUMENT) + (said if kept else 0)
    edited = world.request("edited", [9, 9, *DOCUMENT[40:], *answered[:60], 8], base="r")
    assert bool(world.sessions.offer(edited, 0))
    assert world.sessions.find("edited").decision.donor_ids == (donor.donor_id,), "the caller names its request"
