"""Who may go on, in fair order between tenants: requests to the engine, reads to the event loop, texts to the
tokenizer.

A text becomes tokens in one of two threads. Short texts have one and long texts the other, so that a long one never
stands in front of a short one; in each, tenants take turns, whoever has how many texts in line. What waits is counted
in characters and bounded. Work for a client that left, or whose time is over, stops at its next check; what was not
begun is dropped.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from semblend.fairness import FairClock, TenantLine, TenantUsage, may_start
from semblend.text.token_budget import WINDOW_CHARS
from semblend.wire.errors import ApiError

T = TypeVar("T")
Check = Callable[[], None]
SHORT, LONG = "short", "long"
REST = 4
"""Behind a turn of `Turns`, in times of its length."""
MAX_TENANTS = 1000
"""Refusals are counted for so many tenants."""


@dataclass(frozen=True, slots=True)
class TenantPlaces:
    """What one tenant has in the queue: requests that run, that wait, and that were turned away."""

    running: int
    waiting: int
    refused: int


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """One in line; ``came`` is set when its turn has come, or refused when it is displaced."""

    came: asyncio.Future[None]
    tokens: int


class AdmissionQueue:
    """Lets ``max_running`` in, keeps ``max_waiting`` in line, and turns the rest away; all of it fair between tenants.

    Places go to the tenant that was served the fewest tokens (`fairness`), first come first served inside it. A
    tenant with nothing running is let in beyond ``max_running``, up to a quarter more. When the line is full, a
    newcomer displaces the newest request of the tenant with most in line, if that has two more than its own: a flood
    fills its own part of the line. One tenant alone may have everything. Without ``newcomers`` nobody is let in beyond
    ``max_running``.

    For one event loop. Whoever got in must `leave`.
    """

    def __init__(self, max_running: int, max_waiting: int, retry_after_s: int = 1, *, newcomers: bool = True) -> None:
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.running = 0
        self.refused = 0
        self._retry_after_s = retry_after_s
        self._newcomers = newcomers
        self._running_of: Counter[str] = Counter()
        self._refused_of: Counter[str] = Counter()
        self._line: TenantLine[_Turn] = TenantLine()
        self._lengths = TenantUsage()
        self._clock = FairClock()

    @property
    def waiting(self) -> int:
        return len(self._line)

    def count(self, tenant: str) -> TenantPlaces:
        """What one tenant has in the queue."""
        return TenantPlaces(self._running_of[tenant], self._line.count(tenant), self._refused_of[tenant])

    async def enter(self, tenant: str = "", tokens: int = 1) -> None:
        """Wait for a place; ``tokens`` is what the request is expected to cost. Raises `ApiError` 429 for no place."""
        if not self._line.count(tenant):
            self._clock.join(tenant)
            if self._may_start(tenant):
                self._start(tenant, tokens)
                return
        self._make_place_in_line(tenant)
        turn = _Turn(asyncio.get_running_loop().create_future(), tokens)
        self._line.append(tenant, turn)
        self._lengths.add(tenant, 1)
        try:
            await turn.came
        except asyncio.CancelledError:
            if turn.came.cancelled():
                self._forget(tenant, turn)
            elif turn.came.exception() is None:
                self.leave(tenant)  # the place was handed over in the very moment of giving up
            raise

    def charge(self, tenant: str, tokens: int) -> None:
        """Count what a request turned out to cost beyond what was expected; negative where it was less."""
        self._clock.charge(tenant, tokens)

    def leave(self, tenant: str = "") -> None:
        """Hand the place to the next in fair order, or leave it free."""
        self.running -= 1
        self._running_of[tenant] -= 1
        if not self._running_of[tenant]:
            del self._running_of[tenant]
        self._hand_out()
        self._clock.forget_idle(self._line.tenants or self._running_of)

    def _hand_out(self) -> None:
        while (tenant := self._clock.choose(filter(self._may_start, self._line.tenants))) is not None:
            turn = self._line.pop(tenant)
            self._lengths.add(tenant, -1)
            if not turn.came.done():  # else its client has left a moment ago
                self._start(tenant, turn.tokens)
                turn.came.set_result(None)

    def _may_start(self, tenant: str) -> bool:
        own = self._running_of[tenant] if self._newcomers else 1
        return may_start(self.running, self.max_running, own)

    def _start(self, tenant: str, tokens: int) -> None:
        self.running += 1
        self._running_of[tenant] += 1
        self._clock.serve(tenant, tokens)

    def _make_place_in_line(self, tenant: str) -> None:
        """429 for the newcomer, or for whom it displaces, where the line is full."""
        if len(self._line) < self.max_waiting:
            return
        longest = self._lengths.find_largest()
        if longest is None or self._lengths[longest] < self._lengths[tenant] + 2:
            raise self._refuse(tenant)
        turn = self._line.pop_newest(longest)
        self._lengths.add(longest, -1)
        if not turn.came.done():
            turn.came.set_exception(self._refuse(longest))

    def _refuse(self, tenant: str) -> ApiError:
        """What a tenant is told: its own numbers only."""
        self.refused += 1
        self._refused_of[tenant] += 1
        if len(self._refused_of) > MAX_TENANTS:
            del self._refused_of[next(iter(self._refused_of))]
        return ApiError(
            429,
            f"{self._running_of[tenant]} of your requests are running and {self._line.count(tenant)} waiting",
            hint="try again later",
            code="queue_full",
            retry_after_s=self._retry_after_s,
        )

    def _forget(self, tenant: str, turn: _Turn) -> None:
        if self._line.remove(tenant, turn):
            self._lengths.add(tenant, -1)


class Turns:
    """Lets in one at a time whoever is answered without a place in the queue, in fair order between tenants.

    Behind each it rests for `REST` times as long as that took, while ``is_busy``: all of them together take a fifth of
    the event loop, whoever sends how many over how many connections, and the rest is for answers. Fairness is counted
    in microseconds. For one event loop. Whoever took a turn must `give_back`.
    """

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self._is_busy = is_busy
        self._queue = AdmissionQueue(1, sys.maxsize, newcomers=False)

    @property
    def waiting(self) -> int:
        return self._queue.waiting

    async def take(self, tenant: str) -> None:
        """Wait for a turn."""
        await self._queue.enter(tenant, 0)

    def give_back(self, tenant: str, spent_s: float) -> None:
        """Hand the turn on, after a rest."""
        self._queue.charge(tenant, round(1e6 * spent_s))
        if spent_s and self._is_busy():
            asyncio.get_running_loop().call_later(REST * spent_s, self._queue.leave, tenant)
        else:
            self._queue.leave(tenant)


# -- the tokenizer's threads -----------------------------------------------------------------------------------------


class WorkAbandonedError(Exception):
    """Nobody waits for this text's tokens any more."""


@dataclass(slots=True, eq=False)
class _Job:
    tenant: str
    chars: int
    work: Callable[[Check], Any]
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any]
    gone: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        if self.gone.is_set():
            raise WorkAbandonedError

    def run(self) -> Callable[[], Any]:
        """Do the work, in a thread; returns what hands its result or its error to the waiting loop."""
        try:
            self.check()
            settle = partial(self._settle, self.answer.set_result, self.work(self.check))
        except BaseException as error:
            settle = partial(self._settle, self.answer.set_exception, error)
        return partial(self.loop.call_soon_threadsafe, settle)

    def _settle(self, hand_over: Callable[[Any], None], value: Any) -> None:
        if not self.answer.done():
            hand_over(value)


class TokenizerPool:
    """Runs what turns text into tokens, outside the event loop. Any number of event loops may use it.

    ``max_chars`` bounds the characters in line and in work. Beyond it a tenant that holds more than its share of them
    is refused with 429; one that holds nothing is always let in.
    """

    def __init__(self, max_chars: int, short_chars: int = WINDOW_CHARS, retry_after_s: int = 1) -> None:
        self.max_chars = max_chars
        self.refused = 0
        self.abandoned = 0
        self._short_chars = short_chars
        self._retry_after_s = retry_after_s
        self._lock = threading.Lock()
        self._lines: dict[str, TenantLine[_Job]] = {SHORT: TenantLine(), LONG: TenantLine()}
        self._clocks = {SHORT: FairClock(), LONG: FairClock()}
        self._busy: set[str] = set()
        self._held: Counter[str] = Counter()
        self._threads = ThreadPoolExecutor(len(self._lines), thread_name_prefix="semblend-tokenizer")

    @property
    def waiting(self) -> int:
        """Texts in line."""
        with self._lock:
            return sum(map(len, self._lines.values()))

    @property
    def chars(self) -> int:
        """Characters of the texts in line and in work."""
        with self._lock:
            return self._held.total()

    async def run(self, tenant: str, chars: int, work: Callable[[Check], T]) -> T:
        """The result of ``work``, which is handed a check that raises once nobody waits for it.

        Cancelling gives up at once; the thread goes on to its next check.
        """
        loop = asyncio.get_running_loop()
        job = _Job(tenant, chars, work, loop, loop.create_future())
        line = SHORT if chars <= self._short_chars else LONG
        with self._lock:
            self._refuse_more(tenant, chars)
            self._held[tenant] += chars
            if not self._lines[line].count(tenant):
                self._clocks[line].join(tenant)
            self._lines[line].append(tenant, job)
            start = line not in self._busy
            self._busy.add(line)
        if start:
            self._threads.submit(self._work_through, line)
        try:
            found: T = await job.answer
            return found
        except asyncio.CancelledError:
            self._give_up(job, line)
            raise

    def _refuse_more(self, tenant: str, chars: int) -> None:
        own, total = self._held[tenant], self._held.total()
        share = self.max_chars // len({*self._held, tenant})
        if own == 0 or total + chars <= self.max_chars or own + chars <= share:
            return
        self.refused += 1
        raise ApiError(
            429,
            f"{own} characters of yours wait to be tokenized",
            hint="try again later, or send fewer long texts at once",
            code="tokenizer_busy",
            retry_after_s=self._retry_after_s,
        )

    def _give_up(self, job: _Job, line: str) -> None:
        job.gone.set()
        with self._lock:
            self.abandoned += 1
            if self._lines[line].remove(job.tenant, job):
                self._let_go(job)

    def _work_through(self, line: str) -> None:
        while True:
            with self._lock:
                job = self._take_next(self._lines[line], self._clocks[line])
                if job is None:
                    self._busy.discard(line)
                    return
            tell = job.run()
            with self._lock:
                self._let_go(job)
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                tell()

    def _take_next(self, line: TenantLine[_Job], clock: FairClock) -> _Job | None:
        """The oldest job of the tenant that had the fewest turns."""
        tenant = clock.choose(line.tenants)
        if tenant is None:
            return None
        clock.serve(tenant, 1)
        job = line.pop(tenant)
        clock.forget_idle(line.tenants)
        return job

    def _let_go(self, job: _Job) -> None:
        self._held[job.tenant] -= job.chars
        if self._held[job.tenant] <= 0:
            del self._held[job.tenant]
