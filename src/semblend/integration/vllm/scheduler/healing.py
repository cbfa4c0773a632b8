"""Healing: a prefix that many requests load is computed exactly, once, and from then on found in vLLM's prefix cache.

Loading moved KV is cheap, but every request pays for it again and holds blocks of its own; computing is dear, but is
paid once and held once. Nobody knows how many requests will come. So each prefix has an account of what its loads have
cost. When the next load would bring it to the price of computing the prefix, that request is not claimed, and vLLM
computes it under its own hashes. This is the rule of renting and buying: however many requests come, the prefix costs
less than twice what it would have cost to know that number beforehand (decisions/vllm.md).

Prefixes are told apart by vLLM's own block hashes. Each is made from the one before, so one hash stands for all tokens
up to its block. An account belongs to the segment between two marks (`list_marks`): prompts that part somewhere share
the accounts in front of that place, and no cost is counted in two of them.

Pure books: rows in, a verdict out. Costs are rows of the forward pass, not time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from semblend.integration.vllm.scheduler.records import LoadCost, Mark, Record
from semblend.materialize.blend.passes import first_rows
from semblend.materialize.blend.quality import QualitySettings
from semblend.plan.reuse_plan import ReusePlan
from semblend.plan.selection import keep_in_order, list_reused_positions
from semblend.session.session import State

MARK_TOKENS = 256
"""Tokens between two marks of a short prompt. In longer ones they lie 1/16 of the way apart, or less."""
MIN_SHARE = 0.1
"""A load counts at least this share of a prefill. Fewest rows is not least time (7 % was measured for 24k tokens on an
H200), and the blocks that it holds alone are a cost too."""
MAX_TENANTS, MAX_ACCOUNTS = 64, 4096
MAX_WAITS = 32
"""Scheduler steps that a request waits for another's prefill; then it loads. 24k tokens take 3 steps of 8,192."""


class Verdict(StrEnum):
    """What to do with a request that could be loaded."""

    LOAD = "load"
    PREFILL = "prefill"
    WAIT = "wait"


@dataclass(slots=True)
class _Account:
    """Rows that loads have paid for a segment; ``owner`` computes it, or did."""

    paid: float = 0.0
    owner: str = ""


def list_marks(blocks: int, block_tokens: int) -> list[int]:
    """The numbers of blocks behind which a prompt of so many full blocks has a mark; the same for all prompts.

    >>> list_marks(70, 16), list_marks(600, 16)[-4:]
    ([16, 32, 48, 64], [496, 512, 544, 576])
    """
    step = at = max(1, MARK_TOKENS // block_tokens)
    marks = []
    while at <= blocks:
        marks.append(at)
        at += max(step, 1 << max(0, at.bit_length() - 5))
    return marks


class PrefixAccounts:
    """The accounts, by tenant: one that invents prefixes pushes out its own. The least recently used goes first."""

    def __init__(self, most_tenants: int = MAX_TENANTS, most_accounts: int = MAX_ACCOUNTS) -> None:
        self._most_tenants, self._most_accounts = most_tenants, most_accounts
        self._tenants: OrderedDict[str, OrderedDict[bytes, _Account]] = OrderedDict()
        self._waits: dict[str, int] = {}  # request -> steps that it has waited
        self._awaited: dict[str, set[str]] = {}  # request -> those that it waits for, also behind the last mark
        self._owners: set[str] = set()  # requests that compute a prefix, until they end

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def judge(self, cost: LoadCost, computes_next: Callable[[str], bool]) -> Verdict:
        """Load it, compute it, or wait a step for the request that computes its prefix. May be asked again each step.

        ``computes_next``: whether a request is being computed now and has yet to compute the next block of this one.
        Once it does not, for whatever reason, nobody waits for it. Where it did not come to its end, the accounts start
        again: prefills that fail cannot follow each other.
        """
        accounts: Mapping[bytes, _Account] = self._tenants.get(cost.tenant, {})
        known = [accounts.get(mark.key) for mark in cost.marks]
        if cost.request_id in self._owners:
            return Verdict.PREFILL
        owners = {one.owner for one in known if one is not None} | self._awaited.get(cost.request_id, set())
        if awaited := {owner for owner in owners if owner and computes_next(owner)}:
            return self._wait(cost.request_id, awaited)
        bought = find_bought(cost.marks, [0.0 if one is None else one.paid for one in known])
        if bought is None:
            return Verdict.LOAD
        for index, account in enumerate(self._open(cost)):
            account.paid, account.owner = 0.0, cost.request_id if index >= bought else ""
        self._owners.add(cost.request_id)
        return Verdict.PREFILL

    def note_load(self, cost: LoadCost) -> None:
        """Its load has begun: it pays."""
        before = 0.0
        for mark, account in zip(cost.marks, self._open(cost), strict=True):
            account.paid += mark.rows - before
            account.owner, before = "", mark.rows

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._waits.pop(request_id, None)
        self._awaited.pop(request_id, None)
        self._owners.discard(request_id)

    def clear(self) -> None:
        """Prefixes are others by now: new weights, or everything was reset."""
        self._tenants.clear()

    def _wait(self, request_id: str, owners: set[str]) -> Verdict:
        waited = self._waits.get(request_id, 0)
        if waited >= MAX_WAITS:
            return Verdict.LOAD
        self._waits[request_id], self._awaited[request_id] = waited + 1, owners
        return Verdict.WAIT

    def _open(self, cost: LoadCost) -> list[_Account]:
        """The account of each mark, made where it is missing."""
        accounts = self._tenants.setdefault(cost.tenant, OrderedDict())
        self._tenants.move_to_end(cost.tenant)
        opened = []
        for mark in cost.marks:
            opened.append(accounts.setdefault(mark.key, _Account()))
            accounts.move_to_end(mark.key)
        while len(accounts) > self._most_accounts:
            accounts.popitem(last=False)
        while len(self._tenants) > self._most_tenants:
            self._tenants.popitem(last=False)
        return opened


def find_bought(marks: Sequence[Mark], paid: Sequence[float]) -> int | None:
    """The last mark up to which loads, the next one included, cost as much as a prefill; None where there is none."""
    bought, total = None, 0.0
    for index, mark in enumerate(marks):
        total += paid[index]
        if total + mark.rows >= mark.price:
            bought = index
    return bought


ReportFailure = Callable[[str, str, str], None]


class PrefixHealing:
    """Asks the accounts about a request. After a failure it is off, and all are loaded as without it."""

    def __init__(self, on: bool, block_tokens: int, seam_tokens: int, report_failure: ReportFailure) -> None:
        self.on, self._block_tokens, self._seam_tokens = on, block_tokens, seam_tokens
        self._report_failure = report_failure
        self.accounts = PrefixAccounts()

    def judge(self, record: Record, plan: ReusePlan, records: Mapping[str, Record]) -> Verdict:
        """Load the plan, leave the prompt to vLLM, or ask again in the next step. The request has its own hashes."""
        if not self.on:
            return Verdict.LOAD
        try:
            if record.cost is None:
                record.cost = estimate_cost(record, plan, self._block_tokens, self._seam_tokens)
            return self.accounts.judge(record.cost, lambda name: self._computes_next(records.get(name), record))
        except Exception as error:
            self._fail(record, error)
            return Verdict.LOAD

    def note_load(self, record: Record) -> None:
        """Its load begins."""
        if self.on and record.cost is not None:
            try:
                self.accounts.note_load(record.cost)
            except Exception as error:
                self._fail(record, error)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self.accounts.forget(request_id)

    def _computes_next(self, other: Record | None, record: Record) -> bool:
        """Whether vLLM computes another request under its own hashes, and this one's next block with it."""
        if other is None or not is_prefilling(other):
            return False
        number, theirs = record.exact_tokens // self._block_tokens, other.source.block_hashes
        return bool(theirs[number : number + 1] == record.source.block_hashes[number : number + 1] != [])

    def _fail(self, record: Record, error: Exception) -> None:
        self.on, record.cost = False, None
        message = f"{type(error).__name__}: {error}; prefixes are no longer healed"
        self._report_failure("healing", message, record.request_id)


def is_prefilling(record: Record) -> bool:
    """Whether vLLM computes the prompt of a request now, under its own hashes."""
    return record.block_ids is not None and not record.restarted and record.state in (State.WAITING, State.COLD)


def estimate_cost(record: Record, plan: ReusePlan, block_tokens: int, seam_tokens: int) -> LoadCost:
    """What a load of this plan computes up to each mark inside of what donors hold, in rows.

    ``block_tokens``: of the blocks that have hashes.
    """
    hashes, exact = record.source.block_hashes, plan.exact_tokens
    full_blocks = min(len(hashes), plan.spans[-1].target_end // block_tokens)
    marks = [number for number in list_marks(full_blocks, block_tokens) if number * block_tokens > exact]
    ends = np.array(marks, dtype=np.int64) * block_tokens
    quality = QualitySettings(seam_tokens=seam_tokens)
    first = first_rows(plan.prompt_tokens, exact, plan.spans, quality)
    reused = np.searchsorted(list_reused_positions(plan.spans), ends)
    rows = np.searchsorted(first, ends).astype(np.float64)
    if record.is_gated:  # a second pass, over gaps again and over what the gate has chosen
        repaired = sum(step.percent / 100 for step in quality.steps[:1])
        second = keep_in_order(plan.spans, quality.moved_ahead_share)[0].target_start
        rows += np.searchsorted(first[first > second], ends) + repaired * reused
    rows = np.maximum(rows, MIN_SHARE * (ends - exact))
    prices = ends - exact + plan.reused_tokens - reused  # what donors hold behind a mark is computed with it
    namespace = record.prompt.namespace
    name = namespace.digest.encode()
    keys = [name + bytes(hashes[number - 1]) for number in marks]
    found = zip(ends.tolist(), keys, rows.tolist(), prices.tolist(), strict=True)
    return LoadCost(record.request_id, namespace.tenant, tuple(Mark(*values) for values in found))
