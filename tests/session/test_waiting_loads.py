"""Random lives of requests over a sessions, an engine that admits as SGLang does, and a pool that is small.

Whatever comes when: every request ends, and every slot comes back. The scheduler below asks for all slots of a request
again while its load holds some, counts free and evictable ones against that, and lets nobody in behind a request for
which they are not enough.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from local_world import DOCUMENT, TARGET, LocalWorld

from semblend.materialize.contract import Rows
from semblend.plan.reuse_plan import DeclineReason
from semblend.session.local import SlotPool
from semblend.session.sessions import MAX_BEGINNINGS

MOST_STEPS = 400
"""More than a request needs whose load is stopped as often as may be while the others answer."""


@dataclass(eq=False)
class Entry:
    """A prompt in the exact cache, and how many requests read its slots."""

    tokens: list[int]
    slots: torch.Tensor
    readers: int = 0


@dataclass(eq=False)
class Running:
    """A request with a row: the first ``shared`` slots are the cache's."""

    name: str
    entry: Entry | None
    row: torch.Tensor
    shared: int
    used: int
    left: int


class Scheduler:
    """Admission, decoding, retraction and eviction, one step at a time."""

    def __init__(self, seed: int, slots: int = 280, page: int = 1) -> None:
        self.world, self.page, self.rng = LocalWorld(page, slots), page, random.Random(seed)
        self.sessions, self.slots = self.world.sessions, self.world.slots
        self.sessions.settings = replace(self.sessions.settings, step_work_ms=1e-9, donor_min_new_tokens=8)
        self.sessions._pool = SlotPool(self.take, self.slots.give_back, page)
        self.whole = len(self.slots.free)
        self.tree: list[Entry] = []
        self.queue: list[Any] = []
        self.running: list[Running] = []
        self.answers, self.ended, self.names = {}, set(), count()
        self.retracted = 0

    # -- slots -------------------------------------------------------------------------------------------------------

    def count_evictable(self) -> int:
        return sum(len(one.slots) for one in self.tree if not one.readers) + self.sessions.count_waiting_slots()

    def take(self, tokens: int) -> torch.Tensor | None:
        """Slots; prompts that nobody reads leave the cache first, and then the load that waits gives its own back."""
        while tokens > len(self.slots.free) and (idle := [one for one in self.tree if not one.readers]):
            self.tree.remove(idle[0])
            self.slots.give_back(idle[0].slots)
        if tokens > len(self.slots.free):
            self.sessions.stop_loads()
        return self.slots.take(tokens)

    def check_books(self) -> None:
        held = sum(len(one.slots) for one in self.tree) + sum(len(one.row) - one.shared for one in self.running)
        assert len(self.slots.free) + held + self.sessions.count_waiting_slots() == self.whole

    def find_entry(self, tokens: list[int]) -> tuple[Entry | None, int]:
        best, length = None, 0
        for one in self.tree:
            same = next((n for n, pair in enumerate(zip(one.tokens, tokens, strict=False)) if pair[0] != pair[1]), None)
            same = min(len(one.tokens), len(tokens)) if same is None else same
            same = min(same, len(tokens) - 1) // self.page * self.page
            if same > length:
                best, length = one, same
        return best, length

    def cut(self, entry: Entry, length: int) -> None:
        """Only what a request shares is kept for it; a tree has nodes for that."""
        if not entry.readers:
            self.slots.give_back(entry.slots[length:])
            entry.tokens, entry.slots = entry.tokens[:length], entry.slots[:length]

    # -- requests ----------------------------------------------------------------------------------------------------

    def send(self, tokens: list[int], answer: int) -> str:
        request = self.world.request(f"r{next(self.names)}", tokens)
        self.answers[request.request_id] = answer
        self.queue.append(request)
        return request.request_id

    def abort(self, name: str) -> None:
        self.ended.add(name)
        self.queue = [one for one in self.queue if one.request_id != name]
        for one in [one for one in self.running if one.name == name]:
            self.release(one)
        self.sessions.forget(name)

    def release(self, one: Running) -> None:
        self.running.remove(one)
        self.slots.give_back(one.row[one.shared :])
        if one.entry is not None:
            one.entry.readers -= 1

    def flush(self) -> None:
        """Empty the cache, as an engine does while requests wait and none runs."""
        if not self.running:
            self.sessions.reset()
            for one in self.tree:
                self.slots.give_back(one.slots)
            self.tree = []

    # -- a step ------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        for request in list(self.queue):
            if not self.admit(request):
                break
        self.decode()
        self.check_books()

    def admit(self, request: Any) -> bool:
        """Whether the request has a row now, and the next one may be looked at."""
        tokens, name = request.prompt.token_ids.tolist(), request.request_id
        entry, hit = self.find_entry(tokens)
        offered = self.sessions.offer(request, hit)
        if entry is not None:
            self.cut(entry, hit)
            entry.readers += 1
        if self.has_room(len(tokens) - hit + self.answers[name]) and self.load(request, entry, hit, offered):
            return True
        if entry is not None:
            entry.readers -= 1
        return False

    def has_room(self, tokens: int) -> bool:
        promised = sum(one.left for one in self.running) // 2  # an answer may end early, so not all is kept for it
        return tokens + self.page < len(self.slots.free) + self.count_evictable() - promised

    def load(self, request: Any, entry: Entry | None, hit: int, offered: int) -> bool:
        tokens, name = request.prompt.token_ids.tolist(), request.request_id
        prefix = torch.zeros(0, dtype=torch.int64) if entry is None else entry.slots[:hit]
        loaded = 0
        if offered:
            self.sessions.load(name, lambda: prefix)
            done = self.sessions.work(name, busy=bool(self.running))
            if done is None:
                return False
            loaded = done
            if not loaded and not self.has_room(len(tokens) - hit + self.answers[name]):
                return False
        rest = self.take(self.round_up(len(tokens) - hit - loaded))
        assert rest is not None, "admission has promised these"
        tail = self.sessions.find_tail(name) if loaded else None
        row = torch.cat([prefix, *([] if tail is None else [tail]), rest])
        begin = hit + loaded
        self.world.engine.forward(Rows.of(tokens[begin:], list(range(begin, len(tokens))), row[: len(tokens)]))
        self.sessions.note_prompt(name, row[: len(tokens)])
        self.queue.remove(request)
        self.running.append(Running(name, entry, row, hit, len(tokens), self.answers[name]))
        return True

    def round_up(self, tokens: int) -> int:
        return -(-tokens // self.page) * self.page

    def decode(self) -> None:
        for one in list(self.running):
            if one.left <= 0:
                self.finish(one)
            else:
                one.left, one.used = one.left - 1, one.used + 1
        while len(self.running) > 1 and self.count_missing() > len(self.slots.free) + self.count_evictable():
            self.retract()
        for one in [one for one in self.running if one.used > len(one.row)]:
            more = self.take(self.page)
            assert more is not None, "one request alone has room"
            one.row = torch.cat([one.row, more])

    def count_missing(self) -> int:
        return sum(self.page for one in self.running if one.used > len(one.row))

    def retract(self) -> None:
        """Take the row of the request that came last; it begins again."""
        one, self.retracted = self.running[-1], self.retracted + 1
        self.release(one)
        record = self.sessions.find(one.name)
        self.sessions.forget(one.name)
        again = replace(record.request, unsupported="it was retracted", answered=True)
        self.answers[one.name] = max(1, one.left)
        self.queue.insert(0, again)

    def finish(self, one: Running) -> None:
        """The row of a request that is exact from its first token on goes to the cache."""
        record = self.sessions.find(one.name)
        tokens = record.request.prompt.token_ids.tolist()
        exact_until = self.sessions.find_exact_until(one.name)
        if one.entry is None and exact_until is None:
            kept = len(tokens) // self.page * self.page
            self.tree.append(Entry(tokens[:kept], one.row[:kept]))
            one.shared = kept
        self.release(one)
        self.ended.add(one.name)
        self.sessions.forget(one.name)


OTHERS = [[(11 * n + k) % 29 + 1 for n in range(40)] for k in range(3)]
HEADS = ([5, 9, 2, 6, 5, 3], [3, 1, 4], [2, 7, 1, 8, 2, 8], [1] * 12)


def make_prompt(rng: random.Random) -> list[int]:
    body = rng.choice([DOCUMENT, DOCUMENT, DOCUMENT[:60], rng.choice(OTHERS)])
    return [*rng.choice(HEADS), *body, *([rng.randrange(1, 31)] * rng.randrange(1, 4))]


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("pool", [160, 180, 208, 288])
def test_every_request_ends_and_every_slot_comes_back(pool, page):
    """The longest prompt and its answer need 129 slots, twice the prompt and the answer 234."""
    loads = sum(live(Scheduler(seed, pool, page), seed) for seed in range(2))
    assert loads or pool < 200, "no load has waited"


def live(scheduler: Scheduler, seed: int) -> int:
    """Requests that come, go and change places at random, until all have ended; steps in which a load waited."""
    rng, names, loads = scheduler.rng, [], 0
    for _ in range(40):
        if rng.random() < 0.5:
            names.append(scheduler.send(make_prompt(rng), rng.randrange(1, 24)))
        scheduler.step()
        loads += scheduler.sessions.count_waiting_slots() > 0
        waiting = [one.request_id for one in scheduler.queue] + [one.name for one in scheduler.running]
        if waiting and rng.random() < 0.1:
            scheduler.abort(rng.choice(waiting))
        if rng.random() < 0.15:
            rng.shuffle(scheduler.queue)
        if rng.random() < 0.04:
            scheduler.flush()
        if rng.random() < 0.04:
            scheduler.sessions.donors.drop_all()
        scheduler.check_books()
    for _ in range(MOST_STEPS):
        if not scheduler.queue and not scheduler.running:
            break
        scheduler.step()
    assert set(names) <= scheduler.ended, f"seed {seed}: {len(scheduler.queue)} requests wait for ever"
    scheduler.flush()
    assert len(scheduler.slots.free) == scheduler.whole, f"seed {seed}"
    assert not len(scheduler.sessions), f"seed {seed}"
    assert scheduler.sessions.donors.kv.holders == 0, f"seed {seed}"
    return loads


def test_a_prompt_that_fits_in_once_and_not_twice_is_admitted():
    scheduler = Scheduler(1, slots=2 * len(TARGET) + 20)
    scheduler.world.donate()
    running = scheduler.send([7, 7, 7, 8], 8)
    scheduler.step()
    long, behind = scheduler.send(TARGET, 24), scheduler.send([9, 9, 9], 4)
    scheduler.step()
    assert scheduler.sessions.count_waiting_slots() > 0
    for _ in range(MOST_STEPS):
        scheduler.step()
    assert scheduler.ended == {running, long, behind}
    assert max(receipt.reused_tokens for receipt in scheduler.world.receipts()) > 60


def test_a_load_whose_exact_prefix_has_moved_begins_again():
    world = LocalWorld()
    world.donate()
    world.sessions.settings = replace(world.sessions.settings, step_work_ms=1e-9)
    request = world.request("r", TARGET)
    head = len(TARGET) - len(DOCUMENT) - 3
    first, second = world.slots.take(head), world.slots.take(head)
    for slots in (first, second):
        world.engine.forward(Rows.of(TARGET[:head], list(range(head)), slots))
    free = len(world.slots.free)
    world.sessions.offer(request, head)
    world.sessions.load("r", lambda: first)
    assert world.sessions.work("r", busy=True) is None
    world.sessions.load("r", lambda: first)
    assert world.sessions.find("r").loads_begun == 1, "it goes on"
    world.sessions.load("r", lambda: second)
    assert world.sessions.find("r").loads_begun == 2
    assert world.sessions.work("r", busy=False) == len(TARGET) - 1 - head
    world.sessions.forget("r")
    assert len(world.slots.free) == free


def test_a_load_that_is_stopped_again_and_again_is_computed_by_the_engine():
    world = LocalWorld()
    world.donate()
    world.sessions.settings = replace(world.sessions.settings, step_work_ms=1e-9)
    request, free = world.request("r", TARGET), len(world.slots.free)
    for _ in range(MAX_BEGINNINGS):
        assert world.begin(request)
        assert world.sessions.work("r", busy=True) is None
        assert world.sessions.stop_loads()
    assert world.begin(request)
    assert world.sessions.work("r", busy=True) == 0
    assert len(world.slots.free) == free
    world.sessions.note_prompt("r", None)
    assert world.receipts()[-1].reason is DeclineReason.CAPACITY
