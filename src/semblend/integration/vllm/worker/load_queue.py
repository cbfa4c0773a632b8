"""Loads under way, the oldest first, worked on for a part of each step.

vLLM waits for a load as it waits for KV from another machine: the request holds its blocks and is not scheduled, and
what is running goes on. So a load may take several steps, and its verdict is known before the first token is computed
on it. A step gives all loads together a number of milliseconds. A piece is as long as what is left of them, because
large passes cost less a row than small ones; with less than half of them left the next one waits for the next step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from semblend.errors import RankError
from semblend.integration.vllm.orders import Load
from semblend.materialize.blend.quality import Blended, Pace, Pieces, Rejected
from semblend.plan.reuse_plan import Decline, DeclineReason

Outcome = Blended | Rejected | Decline
Begin = Callable[[Load], Pieces[Outcome]]


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    load: Load
    pieces: Pieces[Outcome]

    def advance(self) -> Outcome | None:
        """Do the next piece; the outcome when it was the last, None before."""
        try:
            next(self.pieces)
        except StopIteration as done:
            outcome: Outcome = done.value
            return outcome
        except RankError:
            raise
        except Exception as error:  # the blender itself does not raise; what is around it may
            return Decline(DeclineReason.ERROR, f"{type(error).__name__}: {error}")
        return None


class LoadQueue:
    """See the module.

    ``pace`` is that of the pieces; if it is 0, a load is one piece. ``agree`` makes one number of what several ranks
    have measured, because all of them have to stop behind the same piece. ``wait`` waits for what the device has to do
    already. ``tell`` hears of a load whose donors could not be let go.
    """

    def __init__(
        self,
        begin: Begin,
        pace: Pace | None = None,
        *,
        agree: Callable[[float], float] = lambda ms: ms,
        wait: Callable[[], None] = lambda: None,
        tell: Callable[[str, Exception, str], None] = lambda *_: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._begin, self._agree, self._wait, self._clock, self._tell = begin, agree, wait, clock, tell
        self._pace = Pace() if pace is None else pace
        self._in_pieces = self._pace.piece_ms > 0
        self._jobs: deque[_Job] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, load: Load) -> None:
        self._jobs.append(_Job(load, self._begin(load)))

    def cancel(self, request_id: str) -> bool:
        """Give up a load and release its donors; False where it is over already."""
        for job in self._jobs:
            if job.load.request_id == request_id:
                self._jobs.remove(job)
                self._close(job)
                return True
        return False

    def work(self, budget_ms: float | None) -> list[tuple[Load, Outcome]]:
        """Go on for about so long; what was finished. None: to the end, at once, because nobody else has work."""
        if not self._jobs:
            return []
        if budget_ms is not None:
            self._wait()
        started, spent = self._clock(), 0.0
        outcomes: list[Outcome] = []
        while len(outcomes) < len(self._jobs):
            self._pace.piece_ms = budget_ms - spent if self._in_pieces and budget_ms is not None else 0.0
            outcome = self._jobs[len(outcomes)].advance()
            if outcome is not None:
                outcomes.append(outcome)
            if budget_ms is None:
                continue
            spent = self._agree((self._clock() - started) * 1e3)
            if spent > budget_ms / 2:
                break
        return [(self._jobs.popleft().load, outcome) for outcome in outcomes]

    def abandon(self) -> list[Load]:
        """Give up everything; also what was finished in a `work` that did not return."""
        jobs, self._jobs = list(self._jobs), deque()
        for job in jobs:
            self._close(job)
        return [job.load for job in jobs]

    def _close(self, job: _Job) -> None:
        try:
            job.pieces.close()
        except Exception as error:  # the load is over all the same
            self._tell("cancel", error, job.load.request_id)
