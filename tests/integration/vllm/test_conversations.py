"""The next turn of a conversation that was answered from reused KV goes on from that KV, and nobody else does."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend.errors import StoreError
from semblend.integration.vllm.orders import Report
from semblend.integration.vllm.scheduler.admin import DonorAdmin
from semblend.integration.vllm.scheduler.prefix_locks import restore, salt
from semblend.integration.vllm.scheduler.shared_blocks import SharedBlocks
from semblend.materialize.donors.directory import SharedDonors
from semblend.materialize.gate.gate import OutcomeMemory
from semblend.materialize.gate.thresholds import DialTable, choose_table
from semblend.plan.reuse_plan import DeclineReason
from tests.integration.vllm.test_scheduler_connector import (
    BLOCK,
    DOCUMENT,
    CountingPool,
    FakeRequest,
    World,
    find_blocks,
    target,
    watched_pool,
)

FIRST = [*range(2000, 2017), *DOCUMENT, *range(3000, 3010)]  # 227 tokens: 14 blocks and 3
ANSWER = [*range(5000, 5040)]
NEXT = [*FIRST, *ANSWER, *range(4000, 4030)]


@pytest.fixture
def world():
    world = World()
    world.donor()
    return world


def serve(world, name="one", tokens=FIRST, said=40, **rest):
    """A request that is loaded, and answered."""
    loaded = {"risk": rest.pop("risk", None), "passes": rest.pop("passes", 2)}
    request = FakeRequest(name, tokens, **rest)
    claimed, orders = world.admit(request)
    assert claimed
    world.served(orders, **loaded)
    request.say(said)
    return request


def go_on(world, name, earlier, tokens=NEXT, local=BLOCK, **rest):
    """A request that finds the blocks of an earlier one; returns it and its receipt's parts."""
    request = rest.pop("request", None) or FakeRequest(name, tokens, **rest)
    assert world.half.count_matched(request, local) is None, "its hashes are salted now, and vLLM looks again"
    found = min(find_blocks(earlier, request), (len(tokens) - 1) // BLOCK * BLOCK)
    assert world.half.count_matched(request, found) == 0
    world.allocate(request, len(tokens))
    orders = world.step(new=[(request, found, len(tokens) - found)])
    assert (orders.loads, orders.captures) == ([], [])
    world.told(orders)
    return request, found


def test_the_next_turn_goes_on_from_prompt_and_answer_and_computes_only_what_is_new(world):
    one = serve(world)
    _, found = go_on(world, "two", one)
    assert found == (len(FIRST) + len(ANSWER)) // BLOCK * BLOCK
    receipt = world.half.finish("two")
    assert (receipt.outcome, receipt.exact_tokens, receipt.reused_tokens) == ("backend_materialized_reuse", BLOCK, 200)
    assert receipt.detail == f"goes on from {found} tokens of an earlier prompt, whose risk this is"
    assert "earlier prompt" in receipt.to_caller_dict()["detail"]
    assert not world.errors()
    world.half.finish("one")
    assert world.half._records == {}
    assert world.half.semblend._claims == {}


def test_the_third_turn_goes_on_from_the_second(world):
    two, _ = go_on(world, "two", serve(world))
    two.say(40)
    third = [*NEXT, *two.said, *range(6000, 6010)]
    _, found = go_on(world, "three", two, third)
    assert found == (len(NEXT) + 40) // BLOCK * BLOCK


def test_an_answer_that_was_not_the_engines_own_is_computed(world):
    one = serve(world)
    other = [*FIRST, *range(8000, 8040), *range(4000, 4030)]
    _, found = go_on(world, "two", one, other)
    assert found == len(FIRST) // BLOCK * BLOCK


def test_of_several_prompts_that_it_begins_with_the_longest_counts(world):
    longer = serve(world, "longer", NEXT, said=0)
    shorter = serve(world, "shorter", FIRST)
    assert len(world.half.shares) == 2
    follower, _ = go_on(world, "follower", longer, [*NEXT, *range(7000, 7030)])
    assert find_blocks(longer, follower) == len(NEXT) // BLOCK * BLOCK
    assert find_blocks(shorter, follower) == BLOCK


@pytest.mark.parametrize(
    "differs",
    [
        {"salt": "tenant"},
        {"kv_transfer_params": {"semblend": {"quality": "balanced"}}},
        {"kv_transfer_params": {"semblend": {"quality": 0.5}}},
        {"kv_transfer_params": {"semblend": {"quality": "exact"}}},
        {"kv_transfer_params": {"semblend": {"opt_out": True}}},
        {"lora_request": SimpleNamespace(lora_name="a", lora_int_id=1, lora_path="p")},
    ],
)
def test_another_tenant_mode_or_adapter_does_not_go_on(world, differs):
    world.donor("theirs", salt="tenant")
    one = serve(world)
    request = FakeRequest("two", NEXT, **differs)  # the stand-in's hashes know none of these
    assert world.half.count_matched(request, 0) is not None
    world.admit(request)
    assert not set(one.block_hashes[1:]) & set(request.block_hashes[1:])


@pytest.mark.parametrize("changed", [0, 100, len(FIRST) - 20, len(FIRST) - 1])
def test_a_prompt_that_differs_in_any_token_of_the_earlier_one_does_not_go_on(world, changed):
    serve(world)
    other = [*NEXT]
    other[changed] += 10_000
    assert world.half.count_matched(FakeRequest("two", other), 0) is not None


@pytest.mark.parametrize("length", [len(FIRST) - 1, len(FIRST) // BLOCK * BLOCK, len(FIRST) // BLOCK * BLOCK + 1])
def test_a_prompt_that_ends_before_the_earlier_one_does_not_go_on(world, length):
    serve(world)
    assert world.half.count_matched(FakeRequest("two", FIRST[:length]), 0) is not None


def test_a_turn_whose_blocks_were_evicted_is_planned_anew(world):
    serve(world)
    request = FakeRequest("two", NEXT)
    before = list(request.block_hashes)
    assert world.half.count_matched(request, BLOCK) is None
    assert world.half.count_matched(request, 6 * BLOCK) > 0, "less than half of the document is there"
    assert request.block_hashes == before
    assert len(world.half.shares) == 0


def test_a_turn_goes_on_where_only_a_few_blocks_were_evicted(world):
    serve(world)
    request = FakeRequest("two", NEXT)
    assert world.half.count_matched(request, BLOCK) is None
    assert world.half.count_matched(request, 10 * BLOCK) == 0
    world.allocate(request, len(NEXT))
    world.told(world.step(new=[(request, 10 * BLOCK, len(NEXT) - 10 * BLOCK)]))
    receipt = world.half.finish("two")
    assert receipt.reused_tokens == receipt.span_tokens == 10 * BLOCK - 17


def forget_by_operator(world):
    world.half.donors.admin = DonorAdmin(world.half.semblend, world.half.donors.act, patience_s=0)
    world.half.donors.admin.answer({"action": "forget", "donor_id": "donor"})


def find_donor_wrong(world):
    world.served(world.admit(target("other"))[1], reused_tokens=0, reason=DeclineReason.VALIDATION_FAILED)


def change_weights(world):
    world.half.note_report(Report(weights="aa"))
    world.half.note_report(Report(weights="bb"))


def empty_prefix_cache(world):
    world.half.donors.resets._pool.cached_block_hash_to_block = {}


@pytest.mark.parametrize("end", [forget_by_operator, find_donor_wrong, change_weights, empty_prefix_cache])
@pytest.mark.parametrize("looks", ["before", "after"])
def test_nobody_goes_on_from_what_is_void(world, end, looks):
    watched_pool(world)
    one = serve(world)
    request = FakeRequest("two", NEXT)
    before = list(request.block_hashes)
    if looks == "before":
        assert world.half.count_matched(request, BLOCK) is None
        found = find_blocks(one, request)
    end(world)
    assert world.half.count_matched(request, found if looks == "before" else 0) is not None
    assert request.block_hashes == before
    assert len(world.half.shares) == 0
    world.donor("new")
    serve(world, "stranger", [*FIRST[:-1], 77])
    assert world.half.count_matched(FakeRequest("later", NEXT), 0) is not None, "nor once others share again"


def test_a_turn_whose_prompt_is_exact_by_now_takes_that(world):
    serve(world)
    request = FakeRequest("two", NEXT)
    before = list(request.block_hashes)
    claimed = world.half.count_matched(request, 2 * BLOCK)
    assert claimed is not None
    assert request.block_hashes == before
    assert world.half.count_matched(request, 14 * BLOCK) == 0, "a donor holds no more than that"


def test_a_donor_that_only_had_no_room_any_more_leaves_its_conversations_going(world):
    one = serve(world)
    world.half.semblend.forget("donor", reason="engine")
    go_on(world, "two", one)


def test_a_turn_that_comes_while_the_first_is_loaded_waits_for_it(world):
    _, orders = world.admit(FakeRequest("one", FIRST))
    request = FakeRequest("two", NEXT)
    before = list(request.block_hashes)
    assert world.half.count_matched(request, 0) is None
    assert request.block_hashes == before
    world.served(orders)
    go_on(world, "three", world.requests["one"])


@pytest.mark.parametrize("end", ["refused", "aborted"])
def test_a_turn_does_not_wait_for_a_load_that_came_to_nothing(world, end):
    _, orders = world.admit(FakeRequest("one", FIRST))
    request = FakeRequest("two", NEXT)
    assert world.half.count_matched(request, 0) is None
    if end == "refused":
        world.loaded(orders, reused_tokens=0, reason=DeclineReason.STALE)
    else:
        world.half.finish("one")
    assert world.half.count_matched(request, 0) > 0


def test_a_turn_that_is_aborted_while_it_looks_leaves_nothing_behind(world):
    one = serve(world)
    world.half.finish("one")
    assert world.half.count_matched(FakeRequest("two", NEXT), BLOCK) is None
    world.half.finish("two")
    assert world.half._records == {}
    go_on(world, "three", one)


def test_a_turn_that_is_preempted_before_it_answers_goes_on_again(world):
    one = serve(world)
    request = FakeRequest("two", NEXT)
    before = list(request.block_hashes)
    world.half.count_matched(request, BLOCK)
    found = find_blocks(one, request)
    world.half.count_matched(request, found)
    world.allocate(request, found + 16)
    world.step(new=[(request, found, 16)])
    world.step(preempted=["two"])
    assert request.block_hashes == before
    assert world.half.count_matched(request, BLOCK) is None
    assert find_blocks(one, request) == found


def test_a_turn_whose_owner_was_preempted_still_finds_what_it_had_filled(world):
    one = serve(world)
    salted = list(one.block_hashes)
    world.step(preempted=["one"])
    go_on(world, "two", SimpleNamespace(block_hashes=salted))


def test_the_least_recently_used_prompt_is_forgotten_and_a_turn_is_a_use(world):
    world.half.shares = SharedBlocks(world.half.locks, BLOCK, most=2)
    one = serve(world)
    serve(world, "other", [*FIRST[:-1], 77])
    go_on(world, "two", one)
    serve(world, "third", [*FIRST[:-1], 78])
    assert len(world.half.shares) == 2
    go_on(world, "again", one)
    assert world.half.count_matched(FakeRequest("late", [*FIRST[:-1], 77, *ANSWER]), 0) is not None


def test_with_sharing_off_every_turn_is_planned_anew():
    world = World()
    world.half.settings = dataclasses.replace(world.half.settings, share_equal_prompts=False)
    world.donor()
    one = serve(world)
    request = FakeRequest("two", NEXT)
    assert world.admit(request)[0] > 0
    assert not set(one.block_hashes[1:]) & set(request.block_hashes[1:])


# -- edits in a row ----------------------------------------------------------------------------------------------


EDITED = [*range(2000, 2017), *DOCUMENT[40:], *range(3000, 3200)]  # a donor's text without its beginning, and new ones
FURTHER = [*EDITED[:320], *EDITED[340:], *range(3500, 3600)]  # a later part of it is gone, and more has come


def test_an_edit_of_an_edit_goes_on_from_what_both_begin_with(world):
    one = serve(world, tokens=EDITED)
    _, found = go_on(world, "two", one, FURTHER)
    assert found == 320 // BLOCK * BLOCK
    receipt = world.half.finish("two")
    assert (receipt.outcome, receipt.reused_tokens) == ("backend_materialized_reuse", len(DOCUMENT) - 40)
    assert receipt.detail == f"goes on from {found} tokens of an earlier prompt, whose risk this is"
    world.half.finish("one")
    assert world.half._records == {}


def test_a_third_edit_goes_on_from_the_second_where_they_have_more_in_common(world):
    two, _ = go_on(world, "two", serve(world, tokens=EDITED), FURTHER)
    third = [*FURTHER[:440], *range(3900, 3990)]
    _, found = go_on(world, "three", two, third)
    assert found == 440 // BLOCK * BLOCK


@pytest.mark.parametrize("asked", [{"quality": "exact"}, {"opt_out": True}, {"quality": "balanced"}])
def test_an_edit_in_another_mode_does_not_go_on(world, asked):
    serve(world, tokens=EDITED)
    other = FakeRequest("two", FURTHER, kv_transfer_params={"semblend": asked})
    assert world.half.count_matched(other, BLOCK) is not None


def test_an_edit_of_another_tenant_does_not_go_on(world):
    serve(world, tokens=EDITED)
    assert world.half.count_matched(FakeRequest("two", FURTHER, salt="theirs"), BLOCK) is not None


def test_another_question_about_one_document_does_not_go_on_from_the_first_ones_blocks(world):
    serve(world, tokens=[*range(2000, 2017), *DOCUMENT, *range(3000, 3100)])
    assert world.half.count_matched(FakeRequest("two", [*range(2000, 2017), *DOCUMENT, *range(3500, 3600)]), BLOCK) > 0


def test_an_edit_that_is_to_be_computed_once_for_later_ones_is_computed(world, monkeypatch):
    serve(world, tokens=EDITED)
    monkeypatch.setattr(world.half.sessions.debts, "settle", lambda *_: "computed once")
    assert world.half.count_matched(FakeRequest("two", FURTHER), BLOCK) == 0


def test_what_edits_of_a_conversation_cost_is_counted_by_the_cheaper_way_of_both(world, monkeypatch):
    debts, settled, noted = world.half.sessions.debts, [], []

    def settle(history, forecast):
        settled.append((history, forecast.reuse))

    def note(history, forecast):
        noted.append((history, forecast.reuse))

    monkeypatch.setattr(debts, "settle", settle)
    monkeypatch.setattr(debts, "note", note)
    one = serve(world, tokens=EDITED)
    world.half.finish("one")
    go_on(world, "two", one, FURTHER)
    world.half.finish("two")
    assert settled == noted
    (first, alone), (second, further) = noted
    assert first == second, "one conversation, one account"
    assert further < alone


def test_an_edit_of_which_more_is_exact_by_now_keeps_that(world):
    serve(world, tokens=EDITED)
    request = FakeRequest("two", FURTHER)
    before = list(request.block_hashes)
    assert world.half.count_matched(request, 3 * BLOCK) is not None
    assert request.block_hashes == before


def test_a_reset_between_the_look_and_the_blocks_leaves_nothing_to_find(world):
    one = serve(world, tokens=EDITED)
    request = FakeRequest("two", FURTHER)
    assert world.half.count_matched(request, BLOCK) is None
    found = find_blocks(one, request)
    assert world.half.count_matched(request, found) == 0
    world.half.shares.clear()
    world.allocate(request, len(FURTHER))
    assert not world.half.shares._begun


def test_an_edit_whose_common_beginning_was_evicted_is_planned_anew(world):
    serve(world, tokens=EDITED)
    request = FakeRequest("two", FURTHER)
    before = list(request.block_hashes)
    assert world.half.count_matched(request, BLOCK) is None
    assert world.half.count_matched(request, 2 * BLOCK) is not None
    assert request.block_hashes == before
    assert len(world.half.shares) == 0
    assert not world.half.shares._begun


# -- the risk ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quality", "risk", "goes"),
    [
        ("balanced", 0.009, True),
        ("balanced", 0.011, False),
        ("balanced", None, False),
        ("0.05", 0.024, True),
        ("0.05", 0.026, False),
        ("fast", None, True),
    ],
)
def test_a_turn_goes_on_only_where_the_risk_leaves_room_for_another_question(world, quality, risk, goes):
    asked = {"kv_transfer_params": {"semblend": {"quality": quality}}}
    one = serve(world, risk=risk, **asked)
    if goes:
        go_on(world, "two", one, **asked)
        assert world.half.finish("two").risk == risk
    else:
        assert world.half.count_matched(FakeRequest("two", NEXT, **asked), BLOCK) is not None
    go_on(world, "equal", one, FIRST, **asked)
    assert world.half.finish("equal").detail == "", "the gate has judged this very question"


@pytest.mark.parametrize(
    ("risk", "passes", "measured", "goes"),
    [(0.019, 1, True, True), (0.021, 1, True, False), (0.019, 2, True, False), (0.019, 1, False, False)],
)
def test_the_turn_behind_an_edit_has_its_risk_where_no_question_was_looked_at(world, risk, passes, measured, goes):
    """One pass repairs what deviates, whatever is asked; a second one repaired what the first question reads. So does
    the only one where edits were not measured."""
    asked = {"kv_transfer_params": {"semblend": {"quality": "balanced"}}}
    thresholds = choose_table("qwen2.5-coder-1.5b").thresholds
    outcomes = OutcomeMemory(thresholds if measured else dataclasses.replace(thresholds, edit_dial=DialTable()))
    world.half.sessions.outcomes = outcomes
    rules, kept, asks = 64, [*range(10_000, 11_000)], [*range(3000, 3040)]
    world.donor("long", [*range(8000, 8200), *kept], lead=rules)
    request = FakeRequest("one", [*range(rules), *asks, *kept, *asks], **asked)
    claimed, orders = world.admit(request, local=rules)
    assert claimed
    world.served(orders, risk=risk, passes=passes)
    request.say(40)
    following = [*request.prompt_token_ids, *ANSWER, *range(4000, 4030)]
    if goes:
        go_on(world, "two", request, following, local=rules, **asked)
        assert world.half.finish("two").risk == risk
    else:
        assert world.half.count_matched(FakeRequest("two", following, **asked), rules) is not None


def test_a_turn_teaches_nothing_about_how_long_loads_and_prefills_take():
    world = World(learn_costs=True)
    world.donor()
    request = FakeRequest("two", NEXT)
    assert world.half.count_matched(request, 0) > 0, "it gets no blocks yet"
    one = serve(world)
    world.half.note_report(Report())  # with which it gets its receipt
    times = world.half.sessions.times
    before = len(times._cold), {path: len(fit) for path, fit in times._reuse.items()}
    go_on(world, "two", one, request=request)
    assert (len(times._cold), {path: len(fit) for path, fit in times._reuse.items()}) == before


# -- hashes -----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 20), st.integers(0, 400), st.integers(0, 2100))
def test_whoever_has_the_key_finds_prompt_and_answer_in_a_later_prompt(first, prompt, said):
    one, exact = (FakeRequest(name, range(prompt)) for name in ("one", "exact"))
    first = min(first, len(one.block_hashes))
    before = list(one.block_hashes)
    salted = salt(one, first, b"key")
    for part in (said // 3, said - said // 3):
        one.say(part)
    later = FakeRequest("later", [*range(prompt), *one.said])
    exact = list(later.block_hashes)
    salt(later, first, b"key")
    assert later.block_hashes == one.block_hashes
    assert one.block_hashes[:first] == exact[:first]
    assert not set(one.block_hashes[first:]) & set(exact)
    restore(one, salted)
    assert one.block_hashes == exact
    assert before == exact[: len(before)]


def test_other_keys_give_other_hashes():
    requests = [FakeRequest(name, range(100)) for name in ("one", "two")]
    for request, key in zip(requests, (b"one", b"two"), strict=True):
        salt(request, 0, key)
        request.say(40)
    assert not set(requests[0].block_hashes) & set(requests[1].block_hashes)


def test_of_a_request_that_we_gave_up_no_further_block_enters(world):
    world.half.locks.block_pool, world.half.locks.cached_counts = CountingPool(), [{}]
    one = serve(world)
    salted = list(one.block_hashes)
    assert "one" not in world.half.locks.cached_counts[0]
    world.half.give_up("one")
    assert world.half.locks.cached_counts[0]["one"] > 1000, "nobody would take back what is announced of it"
    assert one.block_hashes == salted


class Pool(CountingPool):
    """Blocks that vLLM has entered under the hashes that a request has."""

    def __init__(self, request, exact=()):
        super().__init__()
        self.request, self.exact = request, exact

    @property
    def blocks(self):
        self.looks += 1
        found = {at: bytes(h) + b"\0\0\0\0" for at, h in enumerate([*self.request.block_hashes])}
        found |= {at: h + b"\0\0\0\0" for at, h in self.exact}
        return [SimpleNamespace(block_hash=found.get(at)) for at in range(1000)]


def test_a_block_of_an_answer_under_an_exact_hash_is_taken_out_of_the_cache(world):
    one = serve(world, said=0)
    record = world.half._records["one"]
    plain = FakeRequest("plain", FIRST)
    plain.say(40)
    one.say(40)
    record.block_ids = [*range(len(one.block_hashes) + 1)]
    pool = world.half.locks.block_pool = Pool(one)
    world.half.locks.keep_private([record])
    assert (pool.evicted, world.errors()) == (set(), [])
    record.checked_blocks -= 1
    at = len(one.block_hashes) - 1
    pool = world.half.locks.block_pool = Pool(one, [(at, plain.block_hashes[at])])
    world.half.locks.keep_private([record])
    assert at in pool.evicted
    assert [event.fields["where"] for event in world.errors()] == ["withdraw"]


def test_a_block_that_was_allocated_ahead_of_guesses_is_looked_at_when_it_fills(world):
    one = serve(world, said=0)
    record = world.half._records["one"]
    plain = FakeRequest("plain", FIRST)
    record.block_ids = [*range(len(one.block_hashes) + 8)]
    pool = world.half.locks.block_pool = Pool(one)
    world.half.locks.keep_private([record])
    assert (pool.evicted, world.errors()) == (set(), [])
    for request in (plain, one):
        request.say(40)
    at = len(one.block_hashes) - 1
    pool = world.half.locks.block_pool = Pool(one, [(at, plain.block_hashes[at])])
    world.half.locks.keep_private([record])
    assert at in pool.evicted
    assert [event.fields["where"] for event in world.errors()] == ["withdraw"]


# -- A conversation that nobody has edited: its turns are exact, and one donor --------------------------------------


def answer(world, name, tokens, local=0, said=200, **rest):
    """A request that vLLM computes behind ``local`` exact tokens and answers; it ends, and its blocks go."""
    request = FakeRequest(name, tokens, **rest)
    claimed, orders = world.admit(request, local)
    assert not claimed
    world.told(orders)
    request.say(said)
    blocks = range(world.blocks, world.blocks + -(-request.num_tokens // BLOCK))
    world.half.finish(name, list(blocks))
    return request, world.step()


def keep(world, orders):
    """The worker has copied what was ordered."""
    captures = [*orders.captures, *orders.ended]
    world.half.note_report(Report(captured={(one.donor_id, one.generation) for one in captures}))
    return world.step()


def donor_ids(world):
    return [donor.donor_id for donor in world.half.semblend.donors()]


FRESH = [*range(40), *DOCUMENT]


def test_a_prompt_and_its_answer_become_one_donor_in_the_place_of_the_prompt():
    world = World()
    _, orders = answer(world, "one", FRESH)
    (order,) = orders.ended
    assert (order.donor_id, order.tokens) == ("one+answer", len(FRESH) + 199), "the last token was said, not computed"
    assert len(order.block_ids) == -(-order.tokens // BLOCK)
    assert donor_ids(world) == ["one"]
    orders = keep(world, orders)
    assert donor_ids(world) == ["one+answer"]
    assert orders.drops == [("one", 1)]
    assert orders.heirs == [(("one", 1), ("one+answer", 2))]
    edited = FakeRequest("edited", [7, 7, 7, *DOCUMENT[100:], *range(5000, 5190), 8, 9])
    assert world.half.count_matched(edited, 0) > 280, "what was answered is found too"


@pytest.mark.parametrize(("said", "kept"), [(40, False), (64, False), (65, True)])
def test_an_answer_is_kept_where_it_is_worth_the_copy(said, kept):
    _, orders = answer(World(), "one", FRESH, said=said)
    assert bool(orders.ended) == kept


def test_an_answer_of_a_request_that_opted_out_or_was_aborted_in_its_prompt_is_not_kept():
    world = World()
    _, orders = answer(world, "one", FRESH, kv_transfer_params={"semblend": {"opt_out": True}})
    assert (orders.captures, orders.ended) == ([], [])
    begun = FakeRequest("begun", [*range(60), *DOCUMENT])
    world.admit(begun, tokens=32)
    world.half.finish("begun", [1, 2])
    assert world.step().ended == []


def test_an_answer_over_reused_kv_is_no_donor(world):
    serve(world, said=200)
    world.half.finish("one", list(range(40)))
    assert world.step().ended == []


def test_a_conversation_is_one_donor_however_many_turns_it_has():
    world, tokens = World(), FRESH
    for turn in range(5):
        local = 0 if not turn else len(tokens) // BLOCK * BLOCK
        request, orders = answer(world, f"turn-{turn}", tokens, local)
        keep(world, keep(world, orders))
        tokens = [*request.all_token_ids, *range(7000 + 100 * turn, 7100 + 100 * turn)]
    assert donor_ids(world) == ["turn-4+answer"]
    assert len(world.half.donors._prefixes._marks) == 1


def test_a_donor_that_is_claimed_is_not_superseded():
    world = World()
    request = FakeRequest("one", FRESH)
    _, orders = world.admit(request)
    world.told(orders)
    claimed, loading = world.admit(target())
    assert claimed
    request.say(200)
    world.half.finish("one", list(range(40)))
    orders = world.step()
    keep(world, orders)
    assert donor_ids(world) == ["one", "one+answer"]
    world.served(loading)
    assert world.half.finish("target").reused_tokens == len(DOCUMENT)


def test_what_was_made_from_an_earlier_turn_goes_when_somebody_forgets_the_conversation(world):
    serve(world)
    whole = FakeRequest("longer", [*range(40), *DOCUMENT, *range(9000, 9100)])
    _, orders = world.admit(whole, 240 // BLOCK * BLOCK)
    keep(world, orders)
    assert donor_ids(world) == ["longer"]
    assert len(world.half.shares) == 1
    world.half.semblend.forget("longer")
    world.step()
    assert len(world.half.shares) == 0


def test_the_donor_of_a_conversation_that_goes_on_is_told_to_the_workers():
    world = World()
    request, orders = answer(world, "one", FRESH)
    keep(world, orders)
    other = FakeRequest("other", [*range(300, 340), *DOCUMENT, *range(5)])
    _, orders = world.admit(other)
    world.told(orders)
    world.half.finish("other")
    _, orders = answer(world, "two", [*request.all_token_ids, 1, 2, 3], local=432, said=1)
    assert world.half.semblend.donors()[-1].donor_id == "one+answer", "the last to leave"
    assert orders.kept_first == [("one+answer", 2, 600.0)]


def declared(name, tokens, base, **rest):
    return FakeRequest(name, tokens, kv_transfer_params={"semblend": {"edit": {"base": base}}}, **rest)


def two_histories():
    """A conversation and a newer one that holds most of its tokens too; a prompt edited from the first."""
    world = World()
    _, orders = answer(world, "chatcmpl-a-1a2b3c4d", FRESH)
    keep(world, orders)
    other, computed = [*range(500, 540), *DOCUMENT[:150], 1, 2, 3, *DOCUMENT[150:]], {"quality": "exact"}
    _, orders = answer(world, "chatcmpl-b-1a2b3c4d", other, kv_transfer_params={"semblend": computed})
    keep(world, orders)
    return world, [*range(40), *DOCUMENT[40:], *range(8000, 8020)]


@pytest.mark.parametrize("base", ["chatcmpl-a", "chatcmpl-a-1a2b3c4d"])
def test_a_declared_base_is_the_donor_and_is_kept_first(base):
    world, edited = two_histories()
    _, orders = world.admit(declared("edited", edited, base))
    assert {span.donor_id for span in orders.loads[0].spans} == {"chatcmpl-a-1a2b3c4d+answer"}
    world.served(orders)
    world.half.finish("edited")
    assert ("chatcmpl-a-1a2b3c4d+answer", 2, 600.0) in world.step().kept_first
    assert world.half.sessions.lineage.find("edited", lambda name: name.endswith("+answer")), "an edit of an edit"


@pytest.mark.parametrize("base", ["nobody", "chatcmpl-b", "", 7, None])
def test_a_wrong_declaration_finds_what_none_finds(base):
    claims = []
    for request in (FakeRequest, lambda name, tokens: declared(name, tokens, base)):
        world, edited = two_histories()
        claimed, orders = world.admit(request("edited", edited))
        claims.append((claimed, sum(span.length for span in orders.loads[0].spans)))
    assert claims[0] == claims[1]


def test_a_base_of_another_tenant_is_not_heard():
    world, edited = two_histories()
    claimed, orders = world.admit(declared("theirs", edited, "chatcmpl-a", salt="theirs"))
    assert (claimed, orders.loads) == (0, [])
    world.told(orders)
    assert world.step().kept_first == []


def test_nothing_is_copied_in_place_of_an_answer_whose_step_has_failed(monkeypatch):
    world = World()
    request, orders = FakeRequest("one", FRESH), None
    claimed, orders = world.admit(request)
    assert not claimed
    world.told(orders)
    request.say(200)
    world.half.finish("one", list(range(30)))
    with monkeypatch.context() as broken:
        broken.setattr(world.half.sessions, "answer", None)
        broken.setattr(world.half.donors, "catch_up", None)
        with pytest.raises(TypeError):
            world.step()
    world.half.build_least_orders(())  # what the border to vLLM does then
    assert world.step().ended == [], "others have its blocks by now"
    again = FakeRequest("again", [*FRESH, *range(9000, 9100)])
    _, orders = world.admit(again, len(FRESH) // BLOCK * BLOCK)
    assert orders.captures, "what was lost is news again"


def test_captures_that_no_worker_heard_of_because_their_step_failed_are_ordered_again(monkeypatch):
    world = World()
    with monkeypatch.context() as broken:
        broken.setattr(world.half.locks, "keep_private", None)
        with pytest.raises(TypeError):
            world.admit(FakeRequest("one", FRESH))
    world.half.build_least_orders(())
    _, orders = world.admit(FakeRequest("two", FRESH))
    assert [order.donor_id for order in orders.captures] == ["two"]


def test_beside_another_connector_which_may_write_its_blocks_at_once_no_answer_is_copied():
    world = World()
    world.half.donors.stands_beside_others = True
    _, orders = answer(world, "one", FRESH)
    assert orders.ended == []
    assert donor_ids(world) == ["one"], "its prompt is copied while it holds its blocks"


@pytest.mark.parametrize("action", ["forget", "pin"])
def test_an_operator_may_name_a_conversation_by_any_of_its_turns(action):
    world = World()
    _, orders = answer(world, "one", FRESH)
    keep(world, orders)
    donors = world.half.donors
    desk = donors.admin = DonorAdmin(world.half.semblend, donors.act, find_heir=donors.find_heir, patience_s=0)
    assert desk.answer({"action": "list", "donor_id": "one"})["total"] == 1
    assert desk.answer({"action": action, "donor_id": "one"})["donors"] == 1
    world.step()
    assert donor_ids(world) == ([] if action == "forget" else ["one+answer"])


def test_where_an_earlier_turn_cannot_be_let_go_it_stays_and_the_step_goes_on(monkeypatch):
    world = World()
    _, orders = answer(world, "one", FRESH)

    def fail(*_):
        raise StoreError("database is locked", hint="later")

    monkeypatch.setattr(world.half.semblend, "supersede", fail)
    keep(world, orders)
    assert donor_ids(world) == ["one", "one+answer"]
    assert [event.fields["where"] for event in world.errors()] == ["supersede"]


# -- in the donor directory ----------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path):
    """A world whose donors are published, and the records that lie in the folder."""
    world = World()
    shared = SharedDonors(str(tmp_path), 1 << 30, world.half.facts.namespace, token_bytes=16.0, every_s=0.0)
    shared.knows_weights = True
    world.half.donors.shared = shared
    yield world, lambda: len([path for path in tmp_path.iterdir() if path.suffix == ".donor"])
    world.half.donors.close()


def test_an_earlier_turn_leaves_the_directory_with_its_place(directory):
    world, count_published = directory
    _, orders = answer(world, "one", FRESH)
    assert count_published() == 2, "the prompt, and what an idle engine has answered"
    keep(world, orders)
    world.half.donors.shared.flush()
    assert count_published() == 1
    world.half.semblend.forget("one+answer")
    world.half.donors.shared.flush()
    assert count_published() == 0


def test_an_answer_that_workers_may_refuse_is_published_once_they_have_it(directory):
    world, count_published = directory
    other = FakeRequest("other", range(9000, 9100))
    _, orders = world.admit(other)
    world.told(orders)
    before = count_published()
    _, orders = answer(world, "one", FRESH)
    assert orders.ended[0].publication is None
    assert count_published() == before + 1
    orders = keep(world, orders)
    assert [one.donor_id for one in orders.publications] == ["one+answer"]
