"""Sessions learn what requests take: what does not pay is not begun, kinds switch themselves off, some are compared."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest

from semblend.config import SemBlendConfig
from semblend.confirm.events import EventKind
from semblend.confirm.sinks import MemorySink
from semblend.facade import SemBlend
from semblend.materialize.blend.quality import Blended, Pass
from semblend.materialize.gate.gate import OutcomeMemory
from semblend.materialize.gate.thresholds import DEFAULT, choose_table
from semblend.plan.reuse_plan import DeclineReason
from semblend.prompt import Prompt
from semblend.session.local import describe_outcome
from semblend.session.session import LoadResult, SessionRequest
from semblend.session.sessions import EngineTraits, Sessions


class Donors:
    """Every donor that the library knows is there."""

    epoch = 0

    def look_around(self):
        pass

    def list_missing(self, plan):
        return []

    def find_beginning(self, session):
        return None

    def keep_first(self, donor_id, seconds):
        pass


class World:
    """An engine with a clock of its own: a prefill takes 1 ms for 10 tokens, a reuse ``reuse_ms``."""

    def __init__(self, reuse_ms: float, *, outcomes=None, **config) -> None:
        self.at_once_ms, self.asked = reuse_ms, set()
        self.now, self.reuse_ms, self.count, self.sink = 0.0, reuse_ms, 0, MemorySink()
        settings = SemBlendConfig(
            **{"quality": "fast", "metrics": False, "embedder": "none", "control_share": 0.0} | config
        )
        library = SemBlend(settings, sinks=[self.sink])
        traits = EngineTraits("made", "1", samples=True)
        self.sessions = Sessions(library, traits, Donors(), config=settings, clock=lambda: self.now, outcomes=outcomes)
        self.rng, self.repairs, self.escalations = random.Random(7), [], 0

    def draw(self, tokens: int) -> list[int]:
        return [self.rng.randrange(50_000) for _ in range(tokens)]

    def ask(self, tokens: list[int], keep: bool = False, exact: int = 0):
        """The receipt of a request; kept as a donor if wished."""
        self.count += 1
        session = self.sessions.make(SessionRequest(f"r{self.count}", Prompt(tokens)))
        if self.sessions.offer(session, exact):
            plan = self.sessions.begin_load(session)
            at_once = self.asked.issuperset(plan.donor_ids)
            self.asked.update(plan.donor_ids)
            self.now += (self.at_once_ms if at_once else self.reuse_ms) / 1e3
            until = plan.spans[0].target_start
            self.repairs.append(plan.repair)
            more = 0 if plan.repair else self.escalations
            done = LoadResult(until, plan.reused_tokens, load_ms=1.0, escalations=more, work=0.2, passes=2 - at_once)
            self.sessions.finish_load(session, done)
        else:
            self.now += (len(tokens) - exact) / 10 / 1e3
        self.sessions.answer(session)
        if keep:
            self.sessions.semblend.register(Prompt(tokens), donor_id=f"r{self.count}")
        receipt = self.sessions.confirm(session)
        self.sessions.end(session)
        return receipt

    def hit(self):
        """A document of 2,000 tokens, then the same under another instruction: the second one's receipt."""
        document = self.draw(2000)
        self.ask([*self.draw(20), *document], keep=True)
        return self.ask([*self.draw(30), *document, *self.draw(10)])


def test_a_reuse_that_pays_goes_on_and_its_forecast_comes_true():
    world = World(reuse_ms=60.0)
    receipts = [world.hit() for _ in range(60)]
    assert all(one.reused_tokens for one in receipts)
    assert receipts[-1].service_ms == pytest.approx(60.0)
    assert receipts[-1].expected_ms == pytest.approx(60.0, rel=0.05)
    assert receipts[-1].expected_cold_ms == pytest.approx(204.0, rel=0.05)
    assert receipts[0].expected_ms is None, "nothing was timed yet"


def test_an_engine_in_which_reuse_is_slow_switches_itself_off_and_says_both_times():
    world = World(reuse_ms=400.0)
    receipts = [world.hit() for _ in range(80)]
    late = receipts[-30:]
    assert sum(bool(one.reused_tokens) for one in late) <= 3, "one is tried now and then"
    declined = next(one for one in reversed(late) if one.reason)
    assert declined.reason is DeclineReason.BELOW_BREAK_EVEN
    assert "ms, a prefill 20" in declined.detail


def test_reuse_that_became_slow_is_switched_off_by_an_event_and_on_again_when_it_is_fast():
    world = World(reuse_ms=60.0)
    for _ in range(50):
        world.hit()
    world.reuse_ms = 500.0
    for _ in range(60):
        world.hit()
    world.reuse_ms = 60.0
    receipts = [world.hit() for _ in range(600)]
    assert all(one.reused_tokens for one in receipts[-20:])
    switches = [event.fields["on"] for event in world.sink.events if event.kind is EventKind.REUSE_SWITCHED]
    assert switches[0] is False
    assert True in switches


def test_without_learning_rows_are_counted_and_a_slow_reuse_goes_on():
    world = World(reuse_ms=400.0, learn_costs=False)
    assert all(world.hit().reused_tokens for _ in range(60))


def test_a_share_of_requests_is_computed_without_reuse_and_compared():
    world = World(reuse_ms=60.0, control_share=0.2)
    receipts = [world.hit() for _ in range(300)]
    drawn = [one for one in receipts if one.reason is DeclineReason.CONTROL]
    assert 25 < len(drawn) < 80
    assert all(one.kind and not one.reused_tokens for one in drawn)
    (found,) = world.sessions.trial.compare().values()
    assert found.low <= 60 / 204 * 1.02
    assert found.high >= 60 / 204 * 0.98


def test_prompts_of_a_kind_that_needed_two_repairs_begin_with_the_second():
    world = World(reuse_ms=60.0, quality="balanced")
    world.escalations = 1
    receipts = [world.hit() for _ in range(8)]
    assert world.repairs[:4] == [0] * 4
    assert world.repairs[-2:] == [20, 20]
    assert [one.escalations for one in receipts[-2:]] == [0, 0]


def test_what_an_agent_repeats_of_its_history_does_not_make_another_order_of_it():
    """The new message at the end begins like old ones: before, the plan counted as reordered and was prefilled."""
    world = World(reuse_ms=60.0, quality="balanced", outcomes=OutcomeMemory(DEFAULT))
    rules, old, call, talk = world.draw(300), world.draw(400), world.draw(200), world.draw(1200)
    world.ask([*rules, *old, *call, *talk], keep=True)
    receipt = world.ask([*world.draw(30), *call, *talk, *call, *world.draw(40)])
    assert receipt.reused_tokens == len(call) + len(talk)
    assert "reordered" not in receipt.kind


def test_a_later_question_to_a_donor_has_a_forecast_of_its_own():
    """In mode balanced the first one is looked at before it is repaired, the others take one pass."""
    world = World(reuse_ms=90.0, quality="balanced", outcomes=OutcomeMemory(DEFAULT))
    world.at_once_ms = 40.0
    first, later = [], []
    for _ in range(60):
        document = world.draw(2000)
        world.ask([*world.draw(20), *document], keep=True)
        first.append(world.ask([*world.draw(30), *document, *world.draw(10)]))
        later.append(world.ask([*world.draw(40), *document, *world.draw(10)]))
    assert all(one.reused_tokens for one in (*first, *later))
    assert first[-1].expected_ms == pytest.approx(90.0, rel=0.1)
    assert later[-1].expected_ms == pytest.approx(40.0, rel=0.1)


EDITS_MEASURED = choose_table("qwen2.5-coder-1.5b").thresholds
assert EDITS_MEASURED.edit_dial is not None


def edit(world, kept: int, new: int):
    """A history of which the middle is cleared, of ``kept`` tokens behind it and ``new`` ones: its receipt."""
    rules, rest = world.draw(300), world.draw(kept)
    world.ask([*rules, *world.draw(800), *rest], keep=True)
    return world.ask([*rules, *world.draw(40), *rest, *world.draw(new)], exact=len(rules))


def test_edited_histories_have_times_of_their_own_and_are_no_longer_begun_where_they_are_slow():
    world = World(reuse_ms=60.0, quality="balanced", outcomes=OutcomeMemory(EDITS_MEASURED))
    for _ in range(40):
        world.hit()  # documents are quick, and say nothing of edits
    world.at_once_ms, world.asked = 400.0, _Everything()
    receipts = [edit(world, 2000, 60) for _ in range(90)]
    assert receipts[0].reused_tokens
    assert "edited" in receipts[0].kind
    assert sum(bool(one.reused_tokens) for one in receipts[-30:]) <= 3, "one is tried now and then"
    assert receipts[-1].expected_ms == pytest.approx(400.0, rel=0.1)


def test_an_edit_of_which_a_repair_would_compute_nearly_all_is_not_begun():
    world = World(reuse_ms=60.0, quality="balanced", outcomes=OutcomeMemory(EDITS_MEASURED))
    receipt = edit(world, 300, 2000)
    assert (receipt.reused_tokens, receipt.reason) == (0, DeclineReason.BELOW_BREAK_EVEN)
    assert receipt.detail.startswith("a repair would compute 2,")


def test_a_look_at_the_first_layers_is_no_pass_of_its_own():
    parts = dict.fromkeys((field.name for field in fields(Blended)), 0) | {
        "passes": (Pass("deviation", 900, 0, 1, 1.0), Pass("repair 10 %", 300, 0, 28, 9.0)),
        "recomputed_runs": (),
    }
    assert describe_outcome(Blended(**parts)).passes == 1


class _Everything(set):
    """Each donor was asked about: one pass does."""

    def issuperset(self, other):
        return True
