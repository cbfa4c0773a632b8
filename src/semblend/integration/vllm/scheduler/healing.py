"""Healing: a prefix that many requests load is computed exactly, once, and from then on found in vLLM's prefix cache.

Loading moved KV is cheap, but every request pays for it again and holds blocks of its own; computing is dear, but is
paid once and held once. So each prefix has an account of what its loads have cost, and vLLM says which requests have
come and wait. When what was paid, what those who wait would pay and the next load come to the price of computing the
prefix, the next request is not claimed: vLLM computes it under its own hashes, and others of the prefix wait for it.
Users who come together are served as by stock vLLM, and one who comes alone is loaded at once.

Nobody knows who comes later. This is the rule of renting and buying: however many requests come, the prefix costs less
than twice what it would have cost to know that number beforehand (decisions/vllm.md).

Prefixes are told apart by vLLM's own block hashes. Each is made from the one before, so one hash stands for all tokens
up to its block. An account belongs to the segment between two marks (`list_marks`): prompts that part somewhere share
the accounts in front of that place, and no cost is counted in two of them.

Pure books. Costs are rows of the forward pass; where the engine was timed, its times say what a load costs at least.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

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
"""Scheduler steps that a request waits for another's prefill without finding more of it; then it loads."""


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


@dataclass(slots=True)
class _Waiting:
    """Requests with one prompt that wait, and the marks of that prompt."""

    keys: Sequence[bytes]
    requests: set[str] = field(default_factory=set)


class WaitingPrompts:
    """How many different prompts wait, by tenant and mark. Equal prompts share one load, and count once.

    Bounded by vLLM's own queue: a request adds references to hashes that it has anyway.
    """

    def __init__(self) -> None:
        self._prompts: dict[tuple[str, bytes], _Waiting] = {}
        self._requests: dict[str, tuple[str, bytes]] = {}
        self._counts: Counter[tuple[str, bytes]] = Counter()

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, request_id: str, tenant: str, prompt: bytes, keys: Sequence[bytes]) -> None:
        """A request has come; ``prompt`` stands for all its tokens, ``keys`` for those up to each mark."""
        self.remove(request_id)
        if (tenant, prompt) not in self._prompts:
            self._prompts[tenant, prompt] = _Waiting(keys)
            self._counts.update((tenant, key) for key in keys)
        self._prompts[tenant, prompt].requests.add(request_id)
        self._requests[request_id] = tenant, prompt

    def remove(self, request_id: str) -> None:
        """It waits no longer: it was admitted, or has ended."""
        name = self._requests.pop(request_id, None)
        if name is None:
            return
        waiting = self._prompts[name]
        waiting.requests.remove(request_id)
        if not waiting.requests:
            del self._prompts[name]
            for key in waiting.keys:
                self._counts[name[0], key] -= 1
                if not self._counts[name[0], key]:
                    del self._counts[name[0], key]

    def count_others(self, cost: LoadCost) -> list[int]:
        """How many other prompts wait that are the same up to each mark of this request."""
        own = cost.request_id in self._requests
        return [max(0, self._counts.get((cost.tenant, mark.key), 0) - own) for mark in cost.marks]


class PrefixAccounts:
    """The accounts, by tenant: one that invents prefixes pushes out its own. The least recently used goes first."""

    def __init__(self, most_tenants: int = MAX_TENANTS, most_accounts: int = MAX_ACCOUNTS) -> None:
        self._most_tenants, self._most_accounts = most_tenants, most_accounts
        self._tenants: OrderedDict[str, OrderedDict[bytes, _Account]] = OrderedDict()
        self._waits: dict[str, tuple[int, int]] = {}  # request -> exact tokens it found, steps that it has waited since
        self._owners: set[str] = set()  # requests that compute a prefix, until they end
        self.waiting = WaitingPrompts()

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def must_wait(
        self,
        request_id: str,
        tenant: str,
        keys: Sequence[bytes],
        exact_tokens: int,
        computes_next: Callable[[str], bool],
    ) -> bool:
        """Whether a request waits a step for one that computes its prefix. Asked in each step, before any lookup.

        ``keys``: of all its marks. ``computes_next``: whether a request is being computed now and has yet to compute
        what is behind the ``exact_tokens`` of this one. Once it does not, for whatever reason, nobody waits for it.
        """
        if not self._owners or request_id in self._owners:
            return False
        accounts: Mapping[bytes, _Account] = self._tenants.get(tenant, {})
        owners = {accounts[key].owner for key in keys if key in accounts}
        if not any(owner in self._owners and computes_next(owner) for owner in owners):
            return False
        found, waited = self._waits.get(request_id, (-1, 0))
        waited = 0 if exact_tokens > found else waited
        self._waits[request_id] = max(found, exact_tokens), waited + 1
        return waited < MAX_WAITS

    def must_compute(self, cost: LoadCost) -> bool:
        """Whether a request that could be loaded is computed, for all that share its prefix.

        Then the accounts start again, also where it does not come to its end: only new loads, or others who wait, let
        another prefill follow.
        """
        if cost.request_id in self._owners:
            return True
        accounts: Mapping[bytes, _Account] = self._tenants.get(cost.tenant, {})
        paid, before = [], 0.0
        for mark, others in zip(cost.marks, self.waiting.count_others(cost), strict=True):
            account = accounts.get(mark.key)
            paid.append((0.0 if account is None else account.paid) + others * (mark.rows - before))
            before = mark.rows
        bought = find_bought(cost.marks, paid)
        if bought is None:
            return False
        for index, account in enumerate(self._open(cost)):
            account.paid, account.owner = 0.0, cost.request_id if index >= bought else ""
        self._owners.add(cost.request_id)
        return True

    def note_load(self, cost: LoadCost) -> None:
        """Its load has begun: it pays."""
        before = 0.0
        for mark, account in zip(cost.marks, self._open(cost), strict=True):
            account.paid += mark.rows - before
            account.owner, before = "", mark.rows

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self.waiting.remove(request_id)
        self._waits.pop(request_id, None)
        self._owners.discard(request_id)

    def clear(self) -> None:
        """Prefixes are others by now: new weights, or everything was reset."""
        self._tenants.clear()

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

    def note_arrival(self, record: Record, *, shares_equal: bool) -> None:
        """A request waits from now on. ``shares_equal``: one load serves all with an equal prompt."""
        if not self.on:
            return
        try:
            name, hashes = record.request_id, record.source.block_hashes
            rest = record.source.prompt_token_ids[len(hashes) * self._block_tokens :]
            prompt = b"".join(hashes[-1:]) + repr(rest).encode() if shares_equal else name.encode()
            if keys := self._list_keys(record):
                self.accounts.waiting.add(name, record.prompt.namespace.tenant, prompt, keys)
        except Exception as error:
            self._fail(record, error)

    def note_admitted(self, request_id: str) -> None:
        """It has blocks, to be loaded or computed."""
        self.accounts.waiting.remove(request_id)

    def must_wait(self, record: Record, exact_tokens: int, records: Mapping[str, Record]) -> bool:
        """Whether to ask again in the next step: another request computes its prefix. It has its own hashes."""
        if not self.on:
            return False
        try:
            return self.accounts.must_wait(
                record.request_id,
                record.prompt.namespace.tenant,
                self._list_keys(record),
                exact_tokens,
                lambda name: self._computes_next(records.get(name), record, exact_tokens),
            )
        except Exception as error:
            self._fail(record, error)
            return False

    def must_compute(self, record: Record, plan: ReusePlan) -> bool:
        """Whether to leave the prompt to vLLM, in place of loading the plan. The request has its own hashes."""
        if not self.on:
            return False
        try:
            if record.cost is None:
                record.cost = estimate_cost(record, plan, self._block_tokens, self._seam_tokens)
            return self.accounts.must_compute(record.cost)
        except Exception as error:
            self._fail(record, error)
            return False

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

    def _computes_next(self, other: Record | None, record: Record, exact_tokens: int) -> bool:
        """Whether vLLM computes another request under its own hashes, and the next block of this one with it."""
        if other is None or not is_prefilling(other):
            return False
        number, theirs = exact_tokens // self._block_tokens, other.source.block_hashes
        return bool(theirs[number : number + 1] == record.source.block_hashes[number : number + 1] != [])

    def _list_keys(self, record: Record) -> list[bytes]:
        hashes = record.source.block_hashes
        return [bytes(hashes[number - 1]) for number in list_marks(len(hashes), self._block_tokens)]

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
    forecast = record.expected.forecast if record.expected is not None else None
    share = max(MIN_SHARE, forecast.cost) if forecast is not None and forecast.timed else MIN_SHARE
    rows = np.maximum(rows, share * (ends - exact))
    prices = ends - exact + plan.reused_tokens - reused  # what donors hold behind a mark is computed with it
    keys = [bytes(hashes[number - 1]) for number in marks]
    found = zip(ends.tolist(), keys, rows.tolist(), prices.tolist(), strict=True)
    return LoadCost(record.request_id, record.prompt.namespace.tenant, tuple(Mark(*values) for values in found))
