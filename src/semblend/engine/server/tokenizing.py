"""Where texts become tokens: two threads of their own, in which tenants take turns.

Short texts have one thread and long texts the other, so that a long one never stands in front of a short one. In each
thread tenants take turns, whoever has how many texts in line. What waits is counted in characters and bounded. Work for
a client that left, or whose time is over, stops at its next check; what was not begun is dropped.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from semblend.text.token_budget import WINDOW_CHARS
from semblend.wire.errors import ApiError

T = TypeVar("T")
Check = Callable[[], None]
SHORT, LONG = "short", "long"


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


class _TurnQueue:
    """Jobs in line: tenants take turns, and a tenant's own jobs keep their order."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, deque[_Job]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_tenant.values()))

    def put(self, job: _Job) -> None:
        self._by_tenant.setdefault(job.tenant, deque()).append(job)

    def take(self) -> _Job | None:
        """The next job; its tenant goes to the end of the line."""
        if not self._by_tenant:
            return None
        tenant = next(iter(self._by_tenant))
        jobs = self._by_tenant.pop(tenant)
        job = jobs.popleft()
        if jobs:
            self._by_tenant[tenant] = jobs
        return job

    def drop(self, job: _Job) -> bool:
        """Whether the job was still in line; then it no longer is."""
        jobs = self._by_tenant.get(job.tenant)
        if jobs is None or job not in jobs:
            return False
        jobs.remove(job)
        if not jobs:
            del self._by_tenant[job.tenant]
        return True


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
        self._lines = {SHORT: _TurnQueue(), LONG: _TurnQueue()}
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
            self._lines[line].put(job)
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
            if self._lines[line].drop(job):
                self._let_go(job)

    def _work_through(self, line: str) -> None:
        while True:
            with self._lock:
                job = self._lines[line].take()
                if job is None:
                    self._busy.discard(line)
                    return
            tell = job.run()
            with self._lock:
                self._let_go(job)
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                tell()

    def _let_go(self, job: _Job) -> None:
        self._held[job.tenant] -= job.chars
        if self._held[job.tenant] <= 0:
            del self._held[job.tenant]
