"""The store of donors: their tokens, their seeds, and the order in which they leave when room is needed."""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from semblend.discover.beginnings import Beginnings
from semblend.discover.donor import Donor, Eviction, EvictionReason
from semblend.discover.slots import (
    BYTES_PER_POSTING,
    EXPIRES,
    FILL,
    NAMESPACE,
    FlatIndex,
    SlotTable,
    TokenLog,
    to_microseconds,
)
from semblend.errors import CapacityError
from semblend.eviction.policy import guard_policy, make_policy
from semblend.fairness import EvictionOrder
from semblend.fingerprint.fingerprinter import Fingerprint
from semblend.prompt import Namespace, Prompt, TokenArray

POSTINGS_PER_TOKEN = 0.14  # measured 0.111 on random tokens, less on repetitive text; the rest is headroom
BYTES_PER_TOKEN = 4 / FILL + POSTINGS_PER_TOKEN * BYTES_PER_POSTING
WHOLE_STORE = 1 << 40  # what a donor takes of the store is counted in parts of this
PART_BITS = 20  # an eviction policy counts parts of the store so much coarser: its clock must not run out
BYTES_PER_DONOR = 640  # the Donor value, its id, dictionary entries and slot columns


class Journal(Protocol):
    """Where changes are written to disk; see `semblend.discover.journal`."""

    def take_generation(self) -> int: ...

    def record(self, added: tuple[Donor, TokenArray] | None, removed: list[Donor]) -> None: ...

    def touch(self, generations: list[int], unix_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class StoreStats:
    """How full the store is. ``used_bytes`` is what live donors occupy, ``budget_bytes`` what they may occupy."""

    donors: int
    tokens: int
    postings: int
    namespaces: int
    used_bytes: int
    budget_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """For each seed its newest posting, 0 where no donor has it; older postings follow in the index's chains.

    ``now`` is the one moment at which a whole lookup asks who has expired: a donor may not expire halfway through.
    """

    fingerprint: Fingerprint
    first: npt.NDArray[np.uint32]
    namespace_id: int
    now: int

    def __len__(self) -> int:
        """Seeds that some donor holds."""
        return int(np.count_nonzero(self.first))


_NO_POSTINGS = np.zeros(0, np.uint32)
_NO_FINGERPRINT = Fingerprint(np.empty(0, np.int64), np.empty(0, np.uint64))


class DonorStore:
    """Thread-safe; every change holds ``lock``, and so must a reader that works with slots.

    Adding and evicting cost time proportional to the tokens that change, whatever else the store holds.
    """

    def __init__(
        self,
        *,
        max_donors: int,
        max_bytes: int,
        journal: Journal | None = None,
        clock: Callable[[], float] = time.time,
        eviction: str = "lru",
        on_policy_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        capacity = max(int(max_bytes / BYTES_PER_TOKEN), 1)
        self.lock = threading.RLock()
        self.max_donors = max_donors
        self.max_bytes = max_bytes
        self.slots = SlotTable()
        postings = int(capacity * POSTINGS_PER_TOKEN) + 1
        try:  # address space is reserved for the whole budget, memory is taken as it is touched
            self.log = TokenLog(int(capacity / FILL) + 1, self.slots)
            self.index = FlatIndex(postings)
        except MemoryError:
            raise CapacityError(
                f"this machine cannot reserve max_bytes={max_bytes}", hint="lower max_bytes (SEMBLEND_MAX_BYTES)"
            ) from None
        self._journal = journal
        self._clock = clock
        self._donors: list[Donor | None] = []
        self._slot_of: dict[str, int] = {}
        self._recency: OrderedDict[int, None] = OrderedDict()  # slots, least recently used first
        policy = make_policy(eviction, WHOLE_STORE >> PART_BITS, chained=False, items=max_donors)
        self._policy = guard_policy(policy, on_policy_failure)  # knows donors by their generation
        # The same slots by tenant, with the part of the store each takes.
        self._leavers = EvictionOrder(self._policy, self._find_key, clock)
        self._beginnings = Beginnings()
        self._free_slots: list[int] = []
        self._postings_of: dict[int, int] = {}
        self._pins: dict[int, int] = {}
        self._expiry: list[tuple[float, int, int]] = []  # heap of (when, generation, slot)
        self._namespaces: dict[Namespace, list[int]] = {}  # namespace -> [id, donors]
        self._tenant_tokens: Counter[str] = Counter()
        self._next_namespace = 0
        self._next_generation = 0

    # -- reading ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._slot_of)

    def get(self, donor_id: str) -> Donor | None:
        """Return a donor by its id; None if it is gone."""
        with self.lock:
            slot = self._slot_of.get(donor_id)
            return None if slot is None else self._describe(slot)

    def list_donors(self, *, expired: bool = False) -> tuple[Donor, ...]:
        """List the donors that may be served now, least recently used first; with ``expired`` also expired ones."""
        with self.lock:
            after = -1 if expired else self.read_clock()
            return tuple(self._describe(slot) for slot in self._recency if self.slots.rows[slot, EXPIRES] > after)

    def count(self, tenant: str | None = None) -> tuple[int, int]:
        """Donors and their tokens, of one tenant or of all, those included that expired and were not swept yet."""
        with self.lock:
            if tenant is None:
                return len(self), self.log.live_tokens
            return self._leavers.count(tenant), self._tenant_tokens[tenant]

    def find_slot(self, donor_id: str) -> int | None:
        """Find where a donor is kept; None if it is gone."""
        return self._slot_of.get(donor_id)

    def get_at(self, slot: int) -> Donor:
        """Return the donor in a slot; raise LookupError if the slot is empty."""
        donor = self._donors[slot]
        if donor is None:
            raise LookupError(f"slot {slot} is empty")
        return donor

    def copy_tokens(self, donor_id: str, generation: int | None = None) -> TokenArray | None:
        """Return a copy of a donor's tokens; None if it is gone, or not of this generation."""
        with self.lock:
            slot = self._slot_of.get(donor_id)
            if slot is None or (generation is not None and self.get_at(slot).generation != generation):
                return None
            return self.log.view(slot).copy()

    def find_beginnings(self, prompt: Prompt) -> tuple[Donor, ...]:
        """Find the donors of its namespace that a prompt begins with, token for token, the longest first."""
        with self.lock:
            known, tokens = self._namespaces.get(prompt.namespace), prompt.token_ids
            if known is None:
                return ()
            alike = ((slot, self.log.view(slot)) for slot in self._beginnings.find(known[0], tokens))
            return tuple(
                self._describe(slot) for slot, theirs in alike if np.array_equal(theirs, tokens[: len(theirs)])
            )

    def find_candidates(self, fingerprint: Fingerprint, within: Namespace) -> Candidates:
        """Find the seeds of a fingerprint that donors of the namespace ``within`` hold.

        The caller holds the lock for as long as it uses the candidates.
        """
        known = self._namespaces.get(within)
        if known is None:
            return Candidates(_NO_FINGERPRINT, _NO_POSTINGS, -2, self.read_clock())
        first = self.index.probe(fingerprint.hashes, compute_namespace_key(known[0]))
        return Candidates(fingerprint, first, known[0], self.read_clock())

    def read_clock(self) -> int:
        """Return the time in microseconds, as slots keep their expiry."""
        return to_microseconds(self._clock())

    def compute_stats(self) -> StoreStats:
        """Count donors, tokens, postings and bytes."""
        with self.lock:
            used = self.log.live_tokens * 4 / FILL + self.index.used * BYTES_PER_POSTING
            return StoreStats(
                donors=len(self),
                tokens=self.log.live_tokens,
                postings=self.index.used,
                namespaces=len(self._namespaces),
                used_bytes=int(used) + len(self) * BYTES_PER_DONOR,
                budget_bytes=self.max_bytes,
            )

    # -- changing --------------------------------------------------------------------------------------------------

    def add(
        self, prompt: Prompt, fingerprint: Fingerprint, donor_id: str, *, ttl_s: float = 0.0
    ) -> tuple[Donor, tuple[Eviction, ...]]:
        """Register a donor, replacing one of the same id; return it and the donors evicted for it. All or nothing."""
        with self.lock:
            evictions = self._make_room(len(prompt), len(fingerprint), donor_id, prompt.namespace.tenant)
            now = self._clock()
            donor = Donor(
                donor_id,
                prompt.namespace,
                self._take_generation(),
                len(prompt),
                created_unix_s=now,
                expires_unix_s=now + ttl_s if ttl_s > 0 else None,
            )
            if self._journal is not None:
                self._journal.record((donor, prompt.token_ids), [eviction.donor for eviction in evictions])
            for eviction in evictions:
                self._drop(self._slot_of[eviction.donor.donor_id])
            self._insert(donor, prompt.token_ids, fingerprint)
            return donor, tuple(evictions)

    def restore(self, donor: Donor, prompt: Prompt, fingerprint: Fingerprint) -> bool:
        """Add a donor that the journal already holds; False if there is no room for it."""
        with self.lock:
            try:
                if self._make_room(len(prompt), len(fingerprint), donor.donor_id, donor.namespace.tenant):
                    return False
            except CapacityError:
                return False
            self._next_generation = max(self._next_generation, donor.generation + 1)
            self._insert(donor, prompt.token_ids, fingerprint)
            return True

    def remove(self, donor_ids: list[str], reason: EvictionReason, *, journal: bool = True) -> tuple[Eviction, ...]:
        """Remove donors and return their evictions; unknown ids are ignored."""
        with self.lock:
            slots = [self._slot_of[donor_id] for donor_id in dict.fromkeys(donor_ids) if donor_id in self._slot_of]
            evictions = tuple(Eviction(self.get_at(slot), reason) for slot in slots)
            if journal and self._journal is not None and evictions:
                self._journal.record(None, [eviction.donor for eviction in evictions])
            for slot in slots:
                self._drop(slot)
            return evictions

    def expire(self) -> tuple[Eviction, ...]:
        """Remove expired donors. (They are never served, removed or not.)"""
        with self.lock:
            return self.remove([donor.donor_id for donor in self._find_expired()], "expired")

    def touch(self, donor_ids: tuple[str, ...], *, reused: bool = False) -> None:
        """Move donors to the recent end, because they were claimed, or confirmed as ``reused``: only that is a use."""
        with self.lock:
            slots = [self._slot_of[donor_id] for donor_id in donor_ids if donor_id in self._slot_of]
            for slot in slots:
                if reused:
                    self._count_use(slot)
                self._recency.move_to_end(slot)
                self._leavers.touch(slot)
            if self._journal is not None and slots:
                self._journal.touch([self.get_at(slot).generation for slot in slots], self._clock())

    def keep(self, donor_id: str, seconds: float) -> None:
        """For so long a donor leaves after the others of its tenant (see `EvictionOrder.keep`)."""
        with self.lock:
            if (slot := self._slot_of.get(donor_id)) is not None:
                self._recency.move_to_end(slot)
                self._leavers.keep(slot, seconds)

    def pin(self, donor_id: str, generation: int | None = None) -> bool:
        """Keep a donor from being evicted for room; pins are counted. False if it is gone or replaced."""
        with self.lock:
            slot = self._slot_of.get(donor_id)
            if slot is None or self.slots.rows[slot, EXPIRES] <= self.read_clock():
                return False
            if generation is not None and self.get_at(slot).generation != generation:
                return False
            self._pins[slot] = self._pins.get(slot, 0) + 1
            return True

    def unpin(self, donor_id: str, generation: int | None = None) -> None:
        """Take back one pin of a donor."""
        with self.lock:
            slot = self._slot_of.get(donor_id)
            if slot is None or slot not in self._pins:
                return
            if generation is not None and self.get_at(slot).generation != generation:
                return
            self._pins[slot] -= 1
            if self._pins[slot] == 0:
                del self._pins[slot]

    # -- the parts of a change -------------------------------------------------------------------------------------

    def _make_room(self, tokens: int, postings: int, donor_id: str, tenant: str) -> list[Eviction]:
        """Choose the donors that must leave; changes nothing."""
        evictions: dict[int, Eviction] = {}
        need_tokens = self.log.live_tokens + tokens - self.log.capacity
        need_postings = self.index.used + postings - self.index.capacity
        need_donors = len(self) + 1 - self.max_donors
        if tokens > self.log.capacity or postings > self.index.capacity:
            raise CapacityError(
                f"a prompt of {tokens} tokens does not fit in a store of {self.max_bytes} bytes",
                hint=f"raise max_bytes (SEMBLEND_MAX_BYTES) to at least {int(tokens * BYTES_PER_TOKEN * 1.2) + 1}",
            )
        with closing(self._order_leavers(donor_id, tenant, self._measure(tokens, postings))) as leavers:
            for slot, reason in leavers:
                required = reason in ("replaced", "expired")
                if not required and need_tokens <= 0 and need_postings <= 0 and need_donors <= 0:
                    break
                if slot in evictions:
                    continue
                evictions[slot] = Eviction(self.get_at(slot), reason)
                need_tokens -= self.get_at(slot).token_count
                need_postings -= self._postings_of[slot]
                need_donors -= 1
        if need_tokens > 0 or need_postings > 0 or need_donors > 0:
            raise CapacityError(
                f"no room for {tokens} tokens: every other donor is pinned, or within its tenant's share",
                hint="confirm or release claims, or raise max_bytes or max_donors",
            )
        return list(evictions.values())

    def _measure(self, tokens: int, postings: int) -> int:
        """The part of the store that a donor takes, by what it takes most of: many tiny donors fill it too."""
        part = max(tokens / self.log.capacity, postings / self.index.capacity, 1 / self.max_donors)
        return math.ceil(WHOLE_STORE * part)

    def _order_leavers(
        self, donor_id: str, tenant: str, part: int
    ) -> Generator[tuple[int, EvictionReason], None, None]:
        """Yield slots in the order in which they leave: the one replaced, the expired, then by share and worth."""
        if donor_id in self._slot_of:
            yield self._slot_of[donor_id], "replaced"
        for donor in self._find_expired():
            yield self._slot_of[donor.donor_id], "expired"
        with closing(self._leavers.order_leavers(tenant, part, WHOLE_STORE, self._may_leave)) as leavers:
            for slot in leavers:
                yield slot, "capacity"

    def _count_use(self, slot: int) -> None:
        """Tell the eviction policy of one use of a donor."""
        if self._policy is not None:
            part = self._measure(self.get_at(slot).token_count, self._postings_of[slot])
            self._policy.use([self._find_key(slot)], sizes=[max(1, part >> PART_BITS)])

    def _find_key(self, slot: int) -> int:
        """The number under which the eviction policy knows the donor of a slot."""
        return self.get_at(slot).generation

    def _may_leave(self, slot: int) -> bool:
        return slot not in self._pins

    def _find_expired(self) -> list[Donor]:
        """List the donors whose time is over."""
        now = self._clock()
        expired: list[Donor] = []
        while self._expiry and self._expiry[0][0] <= now:
            entry = heapq.heappop(self._expiry)
            if self._is_current(entry):
                expired.append(self.get_at(entry[2]))
        for donor in expired:  # put back: the caller may fail before it drops them
            heapq.heappush(self._expiry, (donor.expires_unix_s or 0.0, donor.generation, self._slot_of[donor.donor_id]))
        return expired

    def _insert(self, donor: Donor, tokens: TokenArray, fingerprint: Fingerprint) -> None:
        """Add a donor to the token log, the index and all tables."""
        slot = self._free_slots.pop() if self._free_slots else len(self._donors)
        if slot == len(self._donors):
            self._donors.append(None)
        known = self._namespaces.get(donor.namespace)
        if known is None:
            known = self._namespaces[donor.namespace] = [self._next_namespace, 0]
            self._next_namespace += 1
        known[1] += 1
        self.log.append(slot, tokens)
        self._postings_of[slot] = self.index.add(
            slot, fingerprint.positions, fingerprint.hashes, compute_namespace_key(known[0])
        )
        self._beginnings.add(slot, known[0], tokens)
        self._donors[slot] = donor
        self._slot_of[donor.donor_id] = slot
        self._recency[slot] = None
        self._tenant_tokens[donor.namespace.tenant] += donor.token_count
        self._count_use(slot)
        self._leavers.add(slot, donor.namespace.tenant, self._measure(len(tokens), self._postings_of[slot]))
        self.slots.rows[slot, NAMESPACE:] = (known[0], to_microseconds(donor.expires_unix_s))
        if donor.expires_unix_s is not None:
            heapq.heappush(self._expiry, (donor.expires_unix_s, donor.generation, slot))
            if len(self._expiry) > 2 * len(self) + 1024:  # most of them speak of donors that left before their time
                self._expiry = [entry for entry in self._expiry if self._is_current(entry)]
                heapq.heapify(self._expiry)

    def _is_current(self, entry: tuple[float, int, int]) -> bool:
        """Whether an entry of the expiry heap still speaks of a live donor."""
        donor = self._donors[entry[2]]
        return donor is not None and donor.generation == entry[1]

    def _drop(self, slot: int) -> None:
        """Remove the donor of a slot from the index, the token log and all tables."""
        donor = self.get_at(slot)
        self.index.remove(slot)
        self.log.remove(slot)
        self._beginnings.remove(slot)
        known = self._namespaces[donor.namespace]
        known[1] -= 1
        if known[1] == 0:
            del self._namespaces[donor.namespace]
        del self._slot_of[donor.donor_id], self._recency[slot], self._postings_of[slot]
        self._leavers.remove(slot)
        if self._policy is not None:
            self._policy.forget(donor.generation)
        self._tenant_tokens[donor.namespace.tenant] -= donor.token_count
        if not self._leavers.count(donor.namespace.tenant):
            del self._tenant_tokens[donor.namespace.tenant]
        self._pins.pop(slot, None)
        self._donors[slot] = None
        self._free_slots.append(slot)

    def _take_generation(self) -> int:
        """Take the next generation, from the journal if there is one."""
        if self._journal is not None:
            return self._journal.take_generation()
        self._next_generation += 1
        return self._next_generation - 1

    def _describe(self, slot: int) -> Donor:
        """Return the donor of a slot with its present pin."""
        donor = self.get_at(slot)
        return replace(donor, pinned=True) if slot in self._pins else donor


def compute_namespace_key(namespace_id: int) -> np.uint64:
    """Compute the number mixed into every seed so that namespaces share no chain. The id is checked separately."""
    return np.uint64((namespace_id * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & 0xFFFFFFFFFFFFFFFF)
