"""What a server refuses: texts that cannot fit, pages that are not ours, requests beyond the places in line."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from semblend.engine.server.config import ServeConfig
from semblend.fairness import FairClock, TenantLine, TenantUsage, may_start
from semblend.wire.errors import ApiError
from semblend.wire.loopback import is_loopback

REST = 4
"""Behind a turn of `Turns`, in times of its length."""
MOST_TENANTS = 1000
"""Refusals are counted for so many tenants."""
ESCAPED_BYTES = 6
"""A character of text takes this much JSON at most (``\\u00e9``); those beyond the BMP, which take 12, are never alone
in the longest token."""
ROOM_BESIDE_TEXT = 64 * 1024
MOST_BODY_BYTES = 4 * 1024**2
"""However long the context: parsing so much takes up to 25 ms (ARM Neoverse-N1), in which nobody else is served."""


def refuse_long_texts(lengths: Sequence[int], context_chars: int, list_chars: int, param: str) -> None:
    """400 for texts, by their ``lengths`` in characters, that cannot fit the context however they are tokenized.

    ``context_chars`` is the context in tokens times the characters of the longest token; ``list_chars`` bounds several
    texts together. A tokenizer takes seconds and gigabytes for a text of 16 MB: it must not see one in vain.

    >>> refuse_long_texts([2001], 2000, 10_000, "text")
    Traceback (most recent call last):
    semblend.wire.errors.ApiError: text has 2001 characters, the context holds at most 2000 (hint: send a shorter text)
    """
    longest, total, most = max(lengths, default=0), sum(lengths), max(context_chars, list_chars)
    if longest > context_chars:
        problem, hint = f"has {longest} characters, the context holds at most {context_chars}", "send a shorter text"
    elif len(lengths) > 1 and total > most:
        problem, hint = f"has {total} characters in {len(lengths)} texts, more than {most}", "send several requests"
    else:
        return
    raise ApiError(400, f"{param} {problem}", hint=hint, param=param, code="context_length_exceeded")


def compute_body_limit(context_chars: int, list_chars: int, most_bytes: int = MOST_BODY_BYTES) -> int:
    """Most bytes of a body that can be valid: its text, each character escaped, and room for all else.

    >>> compute_body_limit(8192 * 81, 0), compute_body_limit(10**9, 0)
    (4046848, 4194304)
    """
    return min(ROOM_BESIDE_TEXT + ESCAPED_BYTES * max(context_chars, list_chars), most_bytes)


def read_digits(text: str, longest: int = 18) -> int | None:
    """A number in decimal digits, or None. Longer ones are not turned: that takes time, and Python refuses 4,301.

    >>> read_digits("42"), read_digits("-1"), read_digits("9" * 5000), read_digits("٤")
    (42, None, 999999999999999999, None)
    """
    if not (text.isascii() and text.isdecimal()):
        return None
    return int(text) if len(text) <= longest else 10**longest - 1


def refuse_foreign_page(host: str, origin: str | None, config: ServeConfig) -> None:
    """403 where a browser calls on behalf of a page that is not ours, or under a name that is not this machine's.

    Without this, any page that a person opens could read their donors or flush their cache.
    """
    if config.local_only and not is_loopback(_read_host(f"//{host}")):
        raise ApiError(403, f"this server does not answer to the name {host[:100]!r}", hint="call it as localhost")
    if origin is None or origin in config.origins or _read_part(origin, "netloc") == host:
        return
    raise ApiError(403, f"the page {origin[:100]!r} may not call this server", hint="add it to the allowed origins")


def _read_part(url: str, name: str) -> str | None:
    try:
        found: str | None = getattr(urlsplit(url), name)
    except ValueError:
        return None
    return found


def _read_host(url: str) -> str:
    return _read_part(url, "hostname") or ""


@dataclass(frozen=True, slots=True)
class TenantPlaces:
    """What one tenant has at the gate: requests that run, that wait, and that were turned away."""

    running: int
    waiting: int
    refused: int


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """One in line; ``came`` is set when its turn has come, or refused when it is displaced."""

    came: asyncio.Future[None]
    tokens: int


class Turns:
    """Lets in one at a time whoever is answered without a place at the gate, in fair order between tenants.

    Behind each it rests for `REST` times as long as that took, while ``is_busy``: all of them together take a fifth of
    the event loop, whoever sends how many over how many connections, and the rest is for answers. Fairness is counted
    in microseconds. For one event loop. Whoever took a turn must `give_back`.
    """

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self._is_busy = is_busy
        self._line: TenantLine[asyncio.Future[None]] = TenantLine()
        self._clock = FairClock()
        self._is_taken = False

    @property
    def waiting(self) -> int:
        return len(self._line)

    async def take(self, tenant: str) -> None:
        """Wait for a turn."""
        if not self._line.count(tenant):
            self._clock.join(tenant)
        if not self._is_taken:
            self._is_taken = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(tenant, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not self._line.remove(tenant, turn):  # it was handed over in the very moment of giving up
                self.give_back(tenant, 0.0)
            raise

    def give_back(self, tenant: str, spent_s: float) -> None:
        """Hand the turn on, after a rest."""
        self._clock.charge(tenant, round(1e6 * spent_s))
        if spent_s and self._is_busy():
            asyncio.get_running_loop().call_later(REST * spent_s, self._hand_on)
        else:
            self._hand_on()

    def _hand_on(self) -> None:
        self._is_taken = False
        if (tenant := self._clock.choose(self._line.tenants)) is not None:
            self._is_taken = True
            self._clock.serve(tenant, 0)
            turn = self._line.pop(tenant)
            if turn.done():  # its client left a moment ago
                self._hand_on()
            else:
                turn.set_result(None)
        self._clock.forget_idle(self._line.tenants)


class Gate:
    """Lets ``max_running`` in, keeps ``max_waiting`` in line, and turns the rest away; all of it fair between tenants.

    Places go to the tenant that was served the fewest tokens (`fairness`), first come first served inside it. A
    tenant with nothing running is let in beyond ``max_running``, up to a quarter more. When the line is full, a
    newcomer displaces the newest request of the tenant with most in line, if that has two more than its own: a flood
    fills its own part of the line. One tenant alone may have everything.

    For one event loop. Whoever got in must `leave`.
    """

    def __init__(self, max_running: int, max_waiting: int, retry_after_s: int = 1) -> None:
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.running = 0
        self.refused = 0
        self._retry_after_s = retry_after_s
        self._running_of: Counter[str] = Counter()
        self._refused_of: Counter[str] = Counter()
        self._line: TenantLine[_Turn] = TenantLine()
        self._lengths = TenantUsage()
        self._clock = FairClock()

    @property
    def waiting(self) -> int:
        return len(self._line)

    def count(self, tenant: str) -> TenantPlaces:
        """What one tenant has at the gate."""
        return TenantPlaces(self._running_of[tenant], self._line.count(tenant), self._refused_of[tenant])

    async def enter(self, tenant: str = "", tokens: int = 1) -> None:
        """Wait for a place; ``tokens`` is what the request is expected to cost. Raises `ApiError` 429 for no place."""
        if not self._line.count(tenant):
            self._clock.join(tenant)
            if may_start(self.running, self.max_running, self._running_of[tenant]):
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
        return may_start(self.running, self.max_running, self._running_of[tenant])

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
        if len(self._refused_of) > MOST_TENANTS:
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
