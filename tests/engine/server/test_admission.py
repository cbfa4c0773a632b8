"""The gate: who gets in, who waits, who is turned away; against a plain gate that looks at everybody each time."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend.engine.server.admission import AdmissionQueue, TenantPlaces, Turns
from semblend.fairness import MAX_REMEMBERED
from semblend.wire.errors import ApiError

TENANTS = ["acme", "bolt", "coil"]


@dataclass
class PlainGate:
    """The rules of `AdmissionQueue` in lists. Requests are (number, tenant, tokens)."""

    max_running: int
    max_waiting: int
    running: list[tuple[int, str, int]] = field(default_factory=list)
    waiting: list[tuple[int, str, int]] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    served: Counter[str] = field(default_factory=Counter)
    now: int = 0

    def enter(self, number: int, tenant: str, tokens: int) -> None:
        mine = [one for one in self.waiting if one[1] == tenant]
        if not mine:
            self.served[tenant] = max(self.served[tenant], self.now)
            if self.may_start(tenant):
                self.start((number, tenant, tokens))
                return
        if len(self.waiting) >= self.max_waiting:
            counts = Counter(one[1] for one in self.waiting)
            longest = min(counts, key=lambda name: (-counts[name], name), default=None)
            if longest is None or counts[longest] < len(mine) + 2:
                self.refused.append(number)
                return
            displaced = [one for one in self.waiting if one[1] == longest][-1]
            self.waiting.remove(displaced)
            self.refused.append(displaced[0])
        self.waiting.append((number, tenant, tokens))

    def may_start(self, tenant: str) -> bool:
        own = any(one[1] == tenant for one in self.running)
        return len(self.running) < self.max_running + (0 if own else max(1, self.max_running // 4))

    def start(self, one: tuple[int, str, int]) -> None:
        self.running.append(one)
        self.now = max(self.now, self.served[one[1]])
        self.served[one[1]] += one[2]

    def leave(self, one: tuple[int, str, int]) -> None:
        self.running.remove(one)
        while startable := [one for one in self.waiting if self.may_start(one[1])]:
            behind = min(self.served[one[1]] for one in startable)
            tied = {one[1] for one in startable if self.served[one[1]] == behind}
            chosen = self.choose_among(tied)
            first = next(one for one in startable if one[1] == chosen)
            self.waiting.remove(first)
            self.start(first)
        if not self.running and not self.waiting:
            self.served.clear()  # nobody is there to be owed anything

    def choose_among(self, tied: set[str]) -> str:
        """Of equals the one that stands longest in line without a break; the lists remember that order."""
        return next(one[1] for one in self.order if one[1] in tied)

    @property
    def order(self) -> list[tuple[int, str, int]]:
        return sorted(self.waiting, key=lambda one: self.since[one[1]])

    since: dict[str, int] = field(default_factory=dict)


class Crowd:
    """Requests at a real gate, each a task that stays inside until it is told to leave."""

    def __init__(self, gate: AdmissionQueue) -> None:
        self.gate = gate
        self.inside: set[int] = set()
        self.refused: set[int] = set()
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.doors: dict[int, asyncio.Event] = {}

    async def come(self, number: int, tenant: str, tokens: int) -> None:
        self.doors[number] = asyncio.Event()
        self.tasks[number] = asyncio.create_task(self.visit(number, tenant, tokens))
        await settle()

    async def visit(self, number: int, tenant: str, tokens: int) -> None:
        try:
            await self.gate.enter(tenant, tokens)
        except ApiError as error:
            self.refused.add(number if (error.status, error.retry_after_s) == (429, 1) else -1)
            return
        self.inside.add(number)
        try:
            await self.doors[number].wait()
        finally:
            self.inside.discard(number)
            self.gate.leave(tenant)

    async def end(self, number: int, *, cancel: bool) -> None:
        if cancel:
            self.tasks[number].cancel()
        self.doors[number].set()
        await settle()


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


events = st.lists(
    st.tuples(st.sampled_from(["come", "come", "leave", "cancel"]), st.sampled_from(TENANTS), st.integers(1, 40)),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(events, st.integers(1, 5), st.integers(0, 5))
def test_the_gate_keeps_the_plain_rules_whoever_comes_leaves_or_gives_up(steps, max_running, max_waiting):
    async def check():
        crowd, plain = Crowd(AdmissionQueue(max_running, max_waiting)), PlainGate(max_running, max_waiting)
        for number, (what, tenant, tokens) in enumerate(steps):
            here = [*plain.running, *plain.waiting]
            if what == "come":
                if not any(one[1] == tenant for one in plain.waiting):
                    plain.since[tenant] = number
                plain.enter(number, tenant, tokens)
                await crowd.come(number, tenant, tokens)
            elif here:
                one = here[tokens % len(here)]
                if one in plain.running:
                    plain.leave(one)
                elif what == "cancel":
                    plain.waiting.remove(one)
                else:
                    continue  # only who is inside can leave in peace
                await crowd.end(one[0], cancel=what == "cancel")
            gate = crowd.gate
            assert crowd.inside == {one[0] for one in plain.running}
            assert crowd.refused == set(plain.refused)
            assert (gate.running, gate.waiting, gate.refused) == (
                len(plain.running),
                len(plain.waiting),
                len(plain.refused),
            )
            for name in TENANTS:
                counts = gate.count(name)
                assert counts.running == sum(one[1] == name for one in plain.running)
                assert counts.waiting == sum(one[1] == name for one in plain.waiting)
            assert gate.running >= min(max_running, gate.running + gate.waiting), "a place is free and somebody waits"
        for number in list(crowd.tasks):
            await crowd.end(number, cancel=True)
        assert (crowd.gate.running, crowd.gate.waiting) == (0, 0)

    asyncio.run(check())


def test_a_flood_fills_its_own_part_of_the_line_and_the_neighbour_is_served():
    async def check():
        gate = AdmissionQueue(2, 4)
        crowd = Crowd(gate)
        for number in range(10):
            await crowd.come(number, "loud", 10)
        assert gate.count("loud") == TenantPlaces(running=2, waiting=4, refused=4)
        await crowd.come(10, "quiet", 10)
        assert 10 in crowd.inside  # a place of its own: it has nothing running
        await crowd.come(11, "quiet", 10)
        await crowd.come(12, "quiet", 10)
        assert gate.count("quiet") == TenantPlaces(running=1, waiting=2, refused=0)
        assert gate.count("loud") == TenantPlaces(running=2, waiting=2, refused=6)
        assert {5, 4} <= crowd.refused  # the newest of the flood
        for number in range(13):
            await crowd.end(number, cancel=False)
        assert (gate.running, gate.waiting) == (0, 0)

    asyncio.run(check())


def test_places_go_to_the_tenant_that_was_served_fewer_tokens():
    async def check():
        crowd = Crowd(AdmissionQueue(2, 20))
        for number in range(4):
            await crowd.come(number, "long", 100)
        for number in range(4, 12):
            await crowd.come(number, "short", 10)
        assert crowd.inside == {0, 1, 4}
        await crowd.end(0, cancel=False)
        for number in range(4, 10):
            await crowd.end(number, cancel=False)
            # one place each: eight short ones cost less than the second long one of the other
            assert crowd.inside == {1, number + 1}
        await crowd.end(1, cancel=False)
        assert crowd.inside == {10, 11, 2}

    asyncio.run(check())


def test_what_a_request_turned_out_to_cost_is_charged():
    async def check():
        for charged, starts in ((0, 4), (500, 5)):
            gate = AdmissionQueue(4, 20)
            crowd = Crowd(gate)
            for number, tenant in enumerate(["a", "a", "b", "b", "a", "b"]):
                await crowd.come(number, tenant, 1)
            gate.charge("a", charged)
            await crowd.end(0, cancel=False)
            assert starts in crowd.inside
            for number in range(6):
                await crowd.end(number, cancel=True)

    asyncio.run(check())


def test_without_tenants_the_line_is_first_come_first_served():
    async def check():
        crowd = Crowd(AdmissionQueue(1, 5))
        for number in range(7):
            await crowd.come(number, "", 10 * (7 - number))
        assert crowd.refused == {6}
        for number in range(6):
            assert crowd.inside == {number}
            await crowd.end(number, cancel=False)

    asyncio.run(check())


def test_who_is_displaced_in_the_moment_of_giving_up_holds_nothing():
    async def check():
        gate = AdmissionQueue(1, 2)
        crowd = Crowd(gate)
        for number in range(3):
            await crowd.come(number, "loud", 1)
        await crowd.come(3, "quiet", 1)
        crowd.doors[4] = asyncio.Event()
        displacing = asyncio.create_task(crowd.visit(4, "quiet", 1))
        await asyncio.sleep(0)
        crowd.tasks[2].cancel()  # displaced a moment ago, and does not know it yet
        await settle()
        assert gate.count("loud").waiting == 1
        assert gate.count("quiet") == TenantPlaces(1, 1, 0)
        displacing.cancel()
        for number in range(4):
            await crowd.end(number, cancel=True)
        assert (gate.running, gate.waiting) == (0, 0)

    asyncio.run(check())


def test_a_refusal_tells_a_tenant_of_its_own_requests_only():
    async def check():
        gate = AdmissionQueue(3, 0)
        for tenant in ("acme", "acme", "bolt"):
            await gate.enter(tenant)
        with pytest.raises(ApiError, match="1 of your requests are running and 0 waiting"):
            await gate.enter("bolt")

    asyncio.run(check())


def test_many_tenants_leave_nothing_behind():
    async def check():
        gate = AdmissionQueue(1, 1)
        for number in range(5000):
            await gate.enter(f"tenant{number}", 10)
            gate.charge(f"tenant{number}", 3)
            gate.leave(f"tenant{number}")
        assert (len(gate._clock), len(gate._running_of)) == (0, 0)
        await gate.enter("busy")
        for number in range(5000):
            await gate.enter(f"tenant{number}", 10)
            gate.leave(f"tenant{number}")
        assert len(gate._clock) <= 2 * MAX_REMEMBERED + 1

    asyncio.run(check())


# -- turns of those without a place --------------------------------------------------------------------------------


def test_a_tenants_read_is_the_next_one_however_many_strangers_wait():
    async def check():
        turns, order = Turns(lambda: False), []

        async def read(tenant: str) -> None:
            await turns.take(tenant)
            order.append(tenant)
            turns.give_back(tenant, 0.001)

        await turns.take("stranger")
        strangers = [asyncio.create_task(read("stranger")) for _ in range(64)]
        await asyncio.sleep(0)
        asked = asyncio.create_task(read("acme"))
        await asyncio.sleep(0)
        assert turns.waiting == 65
        turns.give_back("stranger", 0.001)
        await asyncio.gather(*strangers, asked)
        assert order.index("acme") <= 1
        assert turns.waiting == 0

    asyncio.run(check())


def test_behind_a_read_the_loop_rests_while_requests_run_and_only_then():
    async def check():
        busy = True
        turns, delays = Turns(lambda: busy), []
        loop = asyncio.get_running_loop()
        later = loop.call_later
        loop.call_later = lambda delay, *rest: delays.append(delay) or later(0, *rest)
        await turns.take("acme")
        turns.give_back("acme", 0.5)
        assert delays == [2.0]  # four times as long
        await turns.take("acme")  # it is handed over when the rest is over
        busy = False
        turns.give_back("acme", 0.5)
        assert delays == [2.0]
        await turns.take("acme")

    asyncio.run(check())


def test_who_leaves_while_it_waits_for_a_turn_takes_none():
    async def check():
        turns = Turns(lambda: False)
        await turns.take("acme")
        gone, next_one = (asyncio.create_task(turns.take(name)) for name in ("acme", "bolt"))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        turns.give_back("acme", 0.0)
        await next_one
        handed = asyncio.create_task(turns.take("acme"))
        last = asyncio.create_task(turns.take("coil"))
        await asyncio.sleep(0)
        turns.give_back("bolt", 0.0)
        handed.cancel()  # in the very moment of its turn
        await asyncio.gather(handed, return_exceptions=True)
        await last

    asyncio.run(check())
