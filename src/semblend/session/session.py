"""Where one request is, and what may come next. It knows tokens and no engine.

     waiting ─offer→ offered ─begin_load→ loading ─fill→ filled ──┐
        │ ↖─ withdraw ─┘ ↖──── stop_load ────┘│                  ├─ answer → answered ─keep→ kept
        └───── run_cold ────────────────→ cold ←── run_cold ─────┘
     restart: back to waiting, without donors where the answer has begun         any state ─end→ ended

A request for which no donor is found stays waiting: it is asked about again as long as the engine has not begun it, and
is answered from there. A cold request was refused for good. Both are answered and kept like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from semblend.confirm.receipt import Receipt
from semblend.errors import SemBlendError
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan
from semblend.plan.times import Forecast, Work
from semblend.prompt import Prompt
from semblend.quality import GATED_MODE, find_path
from semblend.session.edit_debts import EditedHistory

NEVER = -1
"""The epoch of a decision that is taken again whenever somebody asks."""


class State(StrEnum):
    WAITING = "waiting"
    OFFERED = "offered"
    LOADING = "loading"
    FILLED = "filled"
    COLD = "cold"
    ANSWERED = "answered"
    KEPT = "kept"
    ENDED = "ended"


NEXT: Mapping[State, frozenset[State]] = MappingProxyType(
    {
        State.WAITING: frozenset({State.OFFERED, State.FILLED, State.COLD, State.ANSWERED, State.ENDED}),
        State.OFFERED: frozenset({State.WAITING, State.LOADING, State.FILLED, State.COLD, State.ENDED}),
        State.LOADING: frozenset({State.OFFERED, State.FILLED, State.COLD, State.WAITING, State.ENDED}),
        State.FILLED: frozenset({State.ANSWERED, State.COLD, State.WAITING, State.ENDED}),
        State.COLD: frozenset({State.ANSWERED, State.WAITING, State.ENDED}),
        State.ANSWERED: frozenset({State.KEPT, State.WAITING, State.ENDED}),
        State.KEPT: frozenset({State.KEPT, State.WAITING, State.ENDED}),
        State.ENDED: frozenset(),
    }
)
"""What may follow each state. Filled without a load: the request found the KV of an equal prompt."""


class WrongTransition(SemBlendError):  # noqa: N818  (said of a step, not of a failure)
    """An adapter asked for a step that its request cannot take now."""


def is_given(value: object) -> bool:
    """Whether a field of an engine's request says something. It may be a tensor, which cannot be compared with a value.

    >>> [is_given(value) for value in (None, False, [], (), 0, True, ["image"])]
    [False, False, False, False, True, True, True]
    """
    is_empty = isinstance(value, (list, tuple)) and not value
    return value is not None and value is not False and not is_empty


@dataclass(frozen=True, slots=True, eq=False)
class SessionRequest:
    """What an engine says of a request when it first asks about it.

    ``longest_prefix``: how much of the prompt a prefix may cover; None for all of it. ``unsupported``: why a request of
    its kind is computed without us. ``answered``: it has said tokens before, and its receipt is written. ``base``: the
    request that it was edited from, if its caller says so. ``source`` is the engine's own object: a later request may
    have the same id.
    """

    request_id: str
    prompt: Prompt
    longest_prefix: int | None = None
    quality: str | None = None
    unsupported: str = ""
    opt_out: bool = False
    answered: bool = False
    base: str = ""
    source: Any = None


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What became of a load. Plain values: they may come from another process.

    ``exact_until``: KV from there on may be approximate; None where all of it is exact. ``reason`` is set when no donor
    KV is in the prompt: all of it was computed, or, when ``failed``, the engine computes it. ``work`` is what the
    prompt costs in all, in cold prefills; ``passes``: how many it took. ``faulty_donors``: those whose KV was found
    wrong, where that is known.
    """

    exact_until: int | None = None
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    risk: float | None = None
    escalations: int = 0
    canary: float | None = None
    load_ms: float | None = None
    compute_ms: float | None = None
    reason: DeclineReason | None = None
    detail: str = ""
    failed: bool = False
    work: float = 0.0
    passes: int = 0
    faulty_donors: tuple[str, ...] = ()
    recomputed_runs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def refuse(cls, why: Decline) -> LoadResult:
        """A load that ends without donor KV."""
        return cls(reason=why.reason, detail=why.detail, failed=True, faulty_donors=why.faulty_donors)

    @property
    def decline(self) -> Decline | None:
        """Why there is no donor KV in the prompt; None where there is."""
        return None if self.reason is None else Decline(self.reason, self.detail, faulty_donors=self.faulty_donors)


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a plan of a ``kind`` makes us compute, and the engine behind it; how long that was expected to take.

    ``path``: the passes that it takes (`semblend.plan.times`).
    """

    work: Work
    tail: Work
    forecast: Forecast
    kind: str
    path: str


@dataclass(slots=True, eq=False)
class ReuseSession:
    """One request while it is with us.

    ``exact_tokens``: what the engine itself holds of the prompt. ``decision`` is the library's, taken at ``epoch`` of
    the donors. ``plan`` is what a load was begun with, or the plan of the equal prompt whose KV it ``shares``.
    ``approximate_from``: KV from there on may differ from a cold prefill's; None where all is exact. ``cold``: why it
    is computed without donors, for good. ``loads_begun``: how often one has begun. ``predicted_loss``: why a reuse is
    expected to cost more than it saves, once ``judged``: engines ask often, and the memory counts what it declines.
    ``heals``: it is computed so that later edits have a donor. ``edited``: the history that it is an edit of.
    ``goes_on_from``: tokens that it has in common with an earlier edited prompt whose KV it may share, beside what
    donors offer. ``expected``: what its last plan was expected to take.
    ``taken_up``: when the engine began with it, by a clock.
    ``restarted``: the engine took its KV back after the answer had begun. ``private``: nothing of it may be published.
    """

    request: SessionRequest
    mode: str
    state: State = State.WAITING
    exact_tokens: int = 0
    decision: ReusePlan | Decline | None = None
    epoch: int = NEVER
    claim_end: int = 0
    plan: ReusePlan | None = None
    approximate_from: int | None = None
    result: LoadResult | None = None
    cold: Decline | None = None
    shares: bool = False
    loads_begun: int = 0
    judged: bool = False
    predicted_loss: Decline | None = None
    heals: bool = False
    edited: EditedHistory | None = None
    goes_on_from: int = 0
    expected: Expectation | None = None
    taken_up: float | None = None
    kept_tokens: int = 0
    restarted: bool = False
    private: bool = False
    lookup_ms: float | None = None
    receipt: Receipt | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt(self) -> Prompt:
        return self.request.prompt

    @property
    def path(self) -> str:
        """The mode whose passes its quality takes; requests may choose any number, and there are three paths."""
        return find_path(self.mode)

    @property
    def is_gated(self) -> bool:
        """Whether the gate decides about its donor KV."""
        return self.path == GATED_MODE

    @property
    def is_open(self) -> bool:
        """Whether it may still be offered something: it waits, and nothing was refused for good."""
        return self.state in (State.WAITING, State.OFFERED)

    @property
    def is_loading(self) -> bool:
        return self.state is State.LOADING

    @property
    def has_answered(self) -> bool:
        return self.state in (State.ANSWERED, State.KEPT)

    @property
    def offered_tokens(self) -> int:
        """Tokens behind the exact ones that we shall provide, or do."""
        return max(0, self.claim_end - self.exact_tokens)

    @property
    def exact_until(self) -> int | None:
        """Up to where its KV may be published; None for all of it."""
        return self.exact_tokens if self.private else self.approximate_from

    # -- while it waits ----------------------------------------------------------------------------------------------

    def offer(self, plan: ReusePlan, claim_end: int) -> None:
        """Donors hold a part of it, and the claim reaches to ``claim_end``."""
        self._enter(State.OFFERED)
        self.decision, self.claim_end = plan, claim_end

    def withdraw(self) -> None:
        """What was offered holds no more: the engine holds more of it, or donors have changed."""
        if self.state is not State.WAITING:
            self._enter(State.WAITING)
        self._clear()
        self.epoch, self.decision = NEVER, None

    def begin_load(self, plan: ReusePlan) -> None:
        """Donor KV is being moved in: from its first span on, nothing is exact any more, whatever happens."""
        self._enter(State.LOADING)
        self.plan, self.approximate_from = plan, plan.spans[0].target_start

    def stop_load(self) -> None:
        """Its load was given up and may begin again: the engine computes over what was written."""
        self._enter(State.OFFERED)
        self.plan = self.approximate_from = None

    # -- the verdict -------------------------------------------------------------------------------------------------

    def fill(self, result: LoadResult) -> None:
        """Its KV is in place, and checked."""
        self._enter(State.FILLED)
        self.result, self.approximate_from = result, result.exact_until

    def share_kv(self, plan: ReusePlan, result: LoadResult) -> None:
        """It found the KV that was loaded for an equal prompt."""
        self.plan, self.shares = plan, True
        self.fill(result)

    def run_cold(self, why: Decline, result: LoadResult | None = None) -> None:
        """The engine computes it, over whatever was written: that is exact again."""
        self._enter(State.COLD)
        self.cold, self.result, self.approximate_from, self.claim_end = why, result, None, 0

    # -- when it runs ------------------------------------------------------------------------------------------------

    def answer(self) -> None:
        """Its prompt is complete and its first token comes."""
        self._enter(State.ANSWERED)

    def keep(self, tokens: int) -> None:
        """So many tokens of it are a donor."""
        self._enter(State.KEPT)
        self.kept_tokens = tokens

    def restart(self) -> None:
        """The engine has taken its KV back and will ask again. What was refused for good stays so."""
        self.restarted = self.restarted or self.has_answered
        if self.state not in (State.WAITING, State.COLD):
            self._enter(State.WAITING)
            self._clear()
        self.epoch, self.decision = NEVER, None

    def end(self) -> None:
        self._enter(State.ENDED)

    def _clear(self) -> None:
        self.claim_end, self.plan, self.approximate_from, self.result, self.shares = 0, None, None, None, False

    def _enter(self, state: State) -> None:
        if state not in NEXT[self.state]:
            raise WrongTransition(
                f"request {self.request_id} is {self.state} and cannot become {state}", hint="report this: it is a bug"
            )
        self.state = state
