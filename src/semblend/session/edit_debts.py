"""When an edited history is computed once, exactly, although a reuse would be cheaper today.

Donors are exact, so an edited prompt is none. All that came since its donor is computed again behind every further
edit, more each time. What the edits of one donor have cost beyond the first of them is its debt; once it exceeds what a
prefill costs more than one more reuse, the prompt is computed and becomes the donor of the edits to come. Whatever
comes, that costs at most twice what knowing it beforehand would (as who rents skis until the rent is their price).

Who edits again sends what came since the donor again: edits belong together where they have a donor in common, and the
first tokens that follow it. Other users of the same document ask something else behind it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from semblend.plan.reuse_plan import ReusePlan
from semblend.plan.times import Forecast
from semblend.prompt import TokenArray

MOST_HISTORIES = 4096
FOLLOWING = 32
"""Tokens behind the last reused one by which an edited history is known again; fewer are too little to compute."""


@dataclass(frozen=True, slots=True)
class EditedHistory:
    """The donor that a history was edited from, and what follows it."""

    donor_id: str
    generation: int
    following: tuple[int, ...]

    @classmethod
    def of(cls, plan: ReusePlan, tokens: TokenArray) -> EditedHistory | None:
        """None where little is computed behind what is reused."""
        first, last = plan.spans[0], plan.spans[-1]
        following = tuple(tokens[last.target_end : last.target_end + FOLLOWING].tolist())
        return cls(first.donor_id, first.generation, following) if len(following) == FOLLOWING else None


@dataclass(slots=True)
class _Account:
    first: float
    debt: float = 0.0
    edits: int = 1


class EditDebts:
    """Debts by history, in what a forecast counts in; the least recently edited history is forgotten."""

    def __init__(self, most: int = MOST_HISTORIES) -> None:
        self._most = most
        self._accounts: OrderedDict[EditedHistory, _Account] = OrderedDict()

    def __len__(self) -> int:
        return len(self._accounts)

    def note(self, history: EditedHistory, forecast: Forecast) -> None:
        """An edit of this history was served by reuse."""
        account = self._accounts.pop(history, None)
        if account is None:
            account = _Account(forecast.reuse)
        else:
            account.debt = max(0.0, account.debt + forecast.reuse - account.first)
            account.edits += 1
        self._accounts[history] = account
        if len(self._accounts) > self._most:
            self._accounts.popitem(last=False)

    def settle(self, history: EditedHistory, forecast: Forecast) -> str | None:
        """Why this edit is to be computed, which pays the debt; None where it is not yet time for that."""
        account = self._accounts.get(history)
        if account is None or account.debt + forecast.reuse - account.first < forecast.cold - forecast.reuse:
            return None
        del self._accounts[history]
        return (
            f"computed once, to be the donor of later edits: {account.edits} edits since donor {history.donor_id} have "
            "cost more together than that"
        )
