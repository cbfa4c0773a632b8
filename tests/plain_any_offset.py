"""Reuse at any offset, replayed token by token: the plain twin of `semblend.estimate.any_offset`.

Caches are lists of prefixes, the newest last. Every token of a prompt gets a label, and labels are counted. Donors are
a list, the latest used last; each prompt is looked up in a store that is filled anew. Where there is no room for a
donor, the tenant that holds most, the new donor counted, gives up the one that it used longest ago.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

from semblend import Namespace, Prompt, ReusePlan, SemBlend, SemBlendConfig

SHORTEST, SEAM = 32, 16
WHOLE = 1 << 40
Tokens = tuple[int, ...]


class BlockList:
    """Prefixes that are held, the newest last."""

    def __init__(self, room: int) -> None:
        self.room, self.names = room, list[Any]()

    def count_leading(self, names: list[Any]) -> int:
        return next((at for at, name in enumerate(names) if name not in self.names), len(names))

    def hold(self, names: list[Any]) -> None:
        for name in reversed(names):  # the first block of a prompt stays longest
            if name in self.names:
                self.names.remove(name)
            self.names.append(name)
        self.names = self.names[-self.room :]


class PlainAnyOffset:
    def __init__(
        self,
        mode: str,
        *,
        room: int,
        block: int,
        pass_tokens: int,
        donor_tokens: int = WHOLE,
        most_donors: int = WHOLE,
    ) -> None:
        self.mode, self.block, self.pass_tokens = mode, block, pass_tokens
        self.cache, self.loaded = BlockList(room), BlockList(room)
        self.approximate: set[Any] = set()  # prompts whose blocks hold moved KV
        self.debts: Counter[Any] = Counter()
        self.donor_tokens, self.most_donors = donor_tokens, most_donors
        self.donors: dict[str, Prompt] = {}  # the latest used last
        self.kept = self.forgotten = 0

    def add(self, ids: Tokens, answer: Tokens, tenant: str, *, wanted: bool = True) -> tuple[int, int, int]:
        """Exact, moved and computed tokens of a prompt."""
        whole, block = ids + answer, self.block
        names = [(tenant, whole[: end * block]) for end in range(1, len(whole) // block + 1)]
        asked = (len(ids) - 1) // block
        labels = ["computed"] * len(ids)
        exact = self.cache.count_leading(names[:asked]) * block
        labels[:exact] = ["exact"] * exact
        if not wanted:
            self.cache.hold(names)
            return self._count(labels)
        runs: list[tuple[int, int, str, int]] = []  # start, end, donor, its start in the donor
        if len(ids) - exact > SHORTEST + self.pass_tokens:
            own = [("of one prompt", tenant, ids, name) for name in names]
            if (tenant, ids) in self.approximate and self.cache.count_leading(own[:asked]) == asked:
                labels[exact : asked * block] = ["moved"] * (asked * block - exact)
                self.cache.hold(own)
                return self._count(labels)
            exact, runs = self._find_runs(ids, tenant, exact)
            labels[:exact] = ["exact"] * exact
        for start, end, _, _ in runs:
            labels[start:end] = ["moved"] * (end - start)
        again = self._choose_again(runs, labels, exact)
        if again is None or self._heals(names, asked, exact, labels, again):
            self.cache.hold(names)
            if len(ids) - exact >= SHORTEST:
                self._keep_donor(Prompt(ids, namespace=Namespace(tenant=tenant)))
            return exact, 0, len(ids) - exact
        self.cache.hold([("of one prompt", tenant, ids, name) for name in names])
        self.cache.hold(names[: labels.index("moved") // block])
        self.loaded.hold(names)
        self.approximate.add((tenant, ids))
        exact, moved, computed = self._count(labels)
        return exact, moved - again, computed + again

    def _count(self, labels: list[str]) -> tuple[int, int, int]:
        return labels.count("exact"), labels.count("moved"), labels.count("computed")

    def _find_runs(self, ids: Tokens, tenant: str, exact: int) -> tuple[int, list[tuple[int, int, str, int]]]:
        with SemBlend(SemBlendConfig(embedder="none", metrics=False)) as store:
            for name in sorted(self.donors, key=int):
                store.register(self.donors[name], donor_id=name)
            plan = store.lookup(Prompt(ids, namespace=Namespace(tenant=tenant)))
        spans = plan.spans if isinstance(plan, ReusePlan) else ()
        last = len(ids) - 1  # an engine always computes the last token
        before = exact
        for span in spans:
            if span.target_start == span.donor_start == 0:  # the same tokens from the first one on: exact
                exact = max(exact, min(span.length, last))
        runs = []
        for span in spans:
            places = [at for at in range(span.target_start, span.target_end) if exact <= at < last]
            if len(places) >= SHORTEST:
                runs.append(
                    (places[0], places[-1] + 1, span.donor_id, span.donor_start + places[0] - span.target_start)
                )
        if runs or exact > before:  # they were of use
            for name in dict.fromkeys(span.donor_id for span in spans):
                self.donors[name] = self.donors.pop(name)
        return exact, runs

    def _keep_donor(self, new: Prompt) -> None:
        left = dict(self.donors)
        mine = new.namespace.tenant
        idle = -1  # of what tenants within their share give, once nobody else can: half the store, oldest use first
        while len(left) + 1 > self.most_donors or sum(map(len, left.values())) + len(new) > self.donor_tokens:
            leaver = self._choose_leaver(left, new) if idle < 0 else None
            if leaver is None:
                if not left or mine in {donor.namespace.tenant for donor in left.values()}:
                    return
                leaver = next(iter(left))
                idle = (WHOLE // 2 if idle < 0 else idle) - self._measure(left[leaver])
                if idle < 0:
                    return
            del left[leaver]
        self.forgotten += len(self.donors) - len(left)
        self.kept += 1
        self.donors = left | {str(self.kept): new}

    def _choose_leaver(self, left: dict[str, Prompt], new: Prompt) -> str | None:
        """Of the tenant that holds most, the new donor counted; nobody loses anything below a fair share to others."""
        held: Counter[str] = Counter()
        for donor in (*left.values(), new):
            held[donor.namespace.tenant] += self._measure(donor)
        present = {donor.namespace.tenant for donor in (*self.donors.values(), new)}
        mine = new.namespace.tenant
        for tenant in sorted(held, key=lambda tenant: (-held[tenant], tenant)):
            for name, donor in left.items():
                if donor.namespace.tenant == tenant and (tenant == mine or held[tenant] * len(present) > WHOLE):
                    return name
        return None

    def _measure(self, donor: Prompt) -> int:
        """The part of the store that a donor takes."""
        return math.ceil(WHOLE * max(len(donor) / self.donor_tokens, 1 / self.most_donors))

    def _choose_again(self, runs: list[tuple[int, int, str, int]], labels: list[str], exact: int) -> int | None:
        """Moved tokens that are computed again; None for a prefill."""
        moved = labels.count("moved")
        again = sum(min(SEAM, end - start) for start, end, _, _ in runs)
        if self.mode == "balanced" and runs:
            if not self._stand_in_order(runs, exact):
                return None
            again = min(moved, max(again, math.ceil(0.12 * moved)))
            if labels.count("computed") + again > 0.7 * (len(labels) - exact):
                return None
        return again if moved - again > self.pass_tokens else None

    def _stand_in_order(self, runs: list[tuple[int, int, str, int]], exact: int) -> bool:
        """Whether nine tenths are of one donor and in its order, with a tenth at most left out or new among them; what
        is exact counts as its beginning, from 48 tokens on."""
        held: Counter[str] = Counter()
        for start, end, donor, _ in runs:
            held[donor] += end - start
        main, _ = held.most_common(1)[0]
        total, turned, furthest = sum(held.values()), 0, 0
        mine = [(start, end, begin) for start, end, donor, begin in runs if donor == main]
        for start, end, begin in mine:
            turned += end - start if begin < furthest else 0
            furthest = max(furthest, begin + end - start)
        among = 0
        beginning = [(0, exact, 0)] if exact >= 48 else []
        for (start, end, begin), (next_start, _, next_begin) in itertools.pairwise([*beginning, *mine]):
            among += max(0, next_begin - (begin + end - start), next_start - end)
        return max(total - held[main], turned, among) <= 0.1 * total

    def _heals(self, names: list[Any], asked: int, exact: int, labels: list[str], again: int) -> bool:
        """Whether loads of this beginning have cost as much as computing it would."""
        end, first = self.loaded.count_leading(names[:asked]) * self.block, exact // self.block
        if end <= exact or first >= len(names):
            return False
        cost = end - exact
        self.debts[names[first]] += min(cost, cost - labels[:end].count("moved") + again)
        if self.debts[names[first]] < cost:
            return False
        del self.debts[names[first]]
        return True
