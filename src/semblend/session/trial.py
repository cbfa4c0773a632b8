"""Does reuse pay here? A random share of the requests that could reuse something is computed without it.

Requests are compared within their kind, in what each was expected to take without reuse: a day's long prompts do not
make reuse look slow. A request belongs to the arm that was drawn for it, whatever became of it: what the gate refused
after some passes counts as reuse.
"""

from __future__ import annotations

import math
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

BEFORE_FIRST = 50
"""So many requests reuse before the first is computed without: a short run is not disturbed."""
MIN_OF_AN_ARM = 5
MAX_KINDS = 512
OFF_AFTER, ON_AFTER = 8, 3
"""So many plans of a kind in a row switch it off, or on again; a single try between many declines is no row."""
Z = 1.96


@dataclass(slots=True)
class Arm:
    """Times of one arm, as shares of what was expected without reuse; `milliseconds` as they were."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    milliseconds: float = 0.0

    def add(self, share: float, ms: float) -> None:
        self.count += 1
        before = share - self.mean
        self.mean += before / self.count
        self.squares += before * (share - self.mean)
        self.milliseconds += (ms - self.milliseconds) / self.count

    @property
    def error(self) -> float:
        """Of the mean, squared."""
        return self.squares / (self.count - 1) / self.count if self.count > 1 else math.inf


@dataclass(frozen=True, slots=True)
class Comparison:
    """Time to the first token with reuse over without, and its interval (95 %): below 1 it pays.

    ``with_ms`` and ``without_ms``: the means as they were.
    """

    kind: str
    with_count: int
    without_count: int
    with_ms: float
    without_ms: float
    ratio: float
    low: float
    high: float

    def describe(self) -> str:
        return (
            f"{self.ratio:.2f} [{self.low:.2f}, {self.high:.2f}] of the time without reuse "
            f"({self.with_count} with, {self.without_count} without: {self.kind})"
        )


def compare(kind: str, reused: Arm, control: Arm) -> Comparison | None:
    """The two arms of a kind; None where one of them has too few requests.

    >>> reused, control = Arm(), Arm()
    >>> for number in range(10):
    ...     reused.add(0.5 + number % 3 / 100, ms=40)
    ...     control.add(1.0 + number % 5 / 100, ms=80)
    >>> round(compare("k", reused, control).ratio, 2)
    0.5
    """
    if min(reused.count, control.count) < MIN_OF_AN_ARM or control.mean <= 0 or reused.mean <= 0:
        return None
    ratio = reused.mean / control.mean
    # Of the ratio's logarithm, by the errors of both means; few of an arm widen it (Student's t, about).
    spread = math.sqrt(reused.error / reused.mean**2 + control.error / control.mean**2)
    spread *= Z * (1 + 1.5 / (min(reused.count, control.count) - 1))
    return Comparison(
        kind,
        reused.count,
        control.count,
        reused.milliseconds,
        control.milliseconds,
        ratio,
        ratio * math.exp(-spread),
        ratio * math.exp(spread),
    )


class KindSwitches:
    """Which kinds of prompts are begun: tells when one is no longer, and when it is again. Thread-safe.

    Plans of a kind differ, and now and then one is tried that is not expected to pay: only many in a row count.

    >>> switches = KindSwitches()
    >>> [switches.note("k", begun=number < 10) for number in range(18)][-2:]
    [None, False]
    """

    def __init__(self) -> None:
        self._kinds: OrderedDict[str, tuple[bool, int]] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, kind: str, *, begun: bool) -> bool | None:
        """A plan of this kind was begun, or was not, by its cost; whether its kind now is, where that has changed."""
        with self._lock:
            is_on, others = self._kinds.get(kind, (begun, 0))
            others = 0 if begun == is_on else others + 1
            switched = begun if others >= (ON_AFTER if begun else OFF_AFTER) else None
            self._kinds[kind] = (is_on, others) if switched is None else (begun, 0)
            self._kinds.move_to_end(kind)
            if len(self._kinds) > MAX_KINDS:
                self._kinds.popitem(last=False)
        return switched


class Trial:
    """Draws the arm of each request and keeps what both took, by kind. Thread-safe.

    ``share`` of the requests that could reuse are computed without; 0: none is.
    """

    def __init__(self, share: float, draw: Callable[[], float] = random.random) -> None:
        self.share, self._draw = share, draw
        self._begun = 0
        self._kinds: OrderedDict[str, tuple[Arm, Arm]] = OrderedDict()
        self._lock = threading.Lock()

    def draws_control(self) -> bool:
        """Whether the next request is computed without reuse."""
        with self._lock:
            self._begun += 1
            return self._begun > BEFORE_FIRST and self._draw() < self.share

    def note(self, kind: str, ms: float, expected_cold_ms: float, *, control: bool) -> Comparison | None:
        """A request of either arm has its first token; how its kind compares now, where enough is known."""
        if not (expected_cold_ms > 0 and 0 < ms < math.inf):
            return None
        with self._lock:
            arms = self._kinds.setdefault(kind, (Arm(), Arm()))
            self._kinds.move_to_end(kind)
            if len(self._kinds) > MAX_KINDS:
                self._kinds.popitem(last=False)
            arms[control].add(ms / expected_cold_ms, ms)
            return compare(kind, *arms)

    def compare(self) -> Mapping[str, Comparison]:
        """By kind, those of which enough is known."""
        with self._lock:
            found = {kind: compare(kind, *arms) for kind, arms in self._kinds.items()}
        return {kind: one for kind, one in found.items() if one is not None}
