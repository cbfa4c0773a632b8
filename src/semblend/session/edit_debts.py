"""When an edited history is computed once, exactly, although a reuse would be cheaper today.

Donors are exact, so an edited prompt is none. All that came since its donor is computed again behind every further
edit, more each time. What the edits of one donor have cost beyond the first of them is its debt; once it exceeds what a
prefill costs more than one more reuse, the prompt is computed and becomes the donor of the edits to come. Whatever
comes, that costs at most twice what knowing it beforehand would (as who rents skis until the rent is their price).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from semblend.plan.reuse_plan import ReusePlan
from semblend.plan.times import Forecast

MOST_DONORS = 4096
Key = tuple[str, int]


@dataclass(slots=True)
class _Account:
    first: float
    debt: float = 0.0
    edits: int = 1


class EditDebts:
    """Debts by donor, in what a forecast counts in; the least recently edited donor is forgotten."""

    def __init__(self, most: int = MOST_DONORS) -> None:
        self._most = most
        self._accounts: OrderedDict[Key, _Account] = OrderedDict()

    def __len__(self) -> int:
        return len(self._accounts)

    def note(self, plan: ReusePlan, forecast: Forecast) -> None:
        """An edited prompt was served by this plan."""
        key = _name_donor(plan)
        account = self._accounts.pop(key, None)
        if account is None:
            account = _Account(forecast.reuse)
        else:
            account.debt = max(0.0, account.debt + forecast.reuse - account.first)
            account.edits += 1
        self._accounts[key] = account
        if len(self._accounts) > self._most:
            self._accounts.popitem(last=False)

    def settle(self, plan: ReusePlan, forecast: Forecast) -> str | None:
        """Why this prompt is to be computed, which pays its donor's debt; None where it is not yet time for that."""
        key = _name_donor(plan)
        account = self._accounts.get(key)
        if account is None or account.debt + forecast.reuse - account.first < forecast.cold - forecast.reuse:
            return None
        del self._accounts[key]
        return (
            f"computed once, to be the donor of later edits: {account.edits} edits since donor {key[0]} have cost more "
            "together than that"
        )


def _name_donor(plan: ReusePlan) -> Key:
    return plan.spans[0].donor_id, plan.spans[0].generation
