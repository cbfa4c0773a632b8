"""What is known of captured donors: which tier each lies in, who holds it, whose end has to be told.

A tier that is full makes room by tenant: who lies most above its share gives first (see `semblend.shares`), what the
eviction policy values least, among equals the least recently used. All tiers ask one policy: a donor that moves between
them was not used.

Plain bookkeeping: no tensor is copied and no file touched here. Not thread-safe; `DonorKv` guards it with one lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semblend.errors import StoreError
from semblend.eviction.fair_order import FairOrder
from semblend.eviction.policy import EvictionPolicy, guard_policy, make_policy
from semblend.materialize.donors.disk_tier import KvFile
from semblend.materialize.kv.host_memory import Arrival
from semblend.materialize.kv.moves import DonorTensors
from semblend.materialize.kv.rope import RopeSpec
from semblend.shares import FairLru

TIERS = ("device", "host", "disk")
"""From fast to slow."""
UNIT_BYTES = 1 << 10
"""What an eviction policy counts as one."""
TYPICAL_DONORS = 4096
"""Donors that bound an eviction policy's memory: budgets are in bytes."""


@dataclass(slots=True, eq=False)
class Entry:
    donor_id: str
    generation: int
    nbytes: int
    tier: str
    parts: dict[str, Tensor] | None = None  # the donor's tensors by name, where they are in memory
    file: KvFile | None = None
    device: torch.device | None = None  # where it came from, if that is the device tier's kind
    rope: RopeSpec | None = None
    tenant: str = ""
    arrives: Arrival | None = None  # the copy to the host, where one was queued
    refs: int = 0
    retired: bool = False  # replaced or dropped while held or moving
    moving: bool = False  # between tiers; its tensors belong to the mover alone
    told: bool = False  # its end was reported

    @property
    def key(self) -> int:
        """The number under which the eviction policy knows it."""
        return hash((self.donor_id, self.generation))

    @property
    def about(self) -> dict[str, Any]:
        return {"donor_id": self.donor_id, "generation": self.generation}

    def wait_for_copy(self) -> None:
        """The host may read the tensors from now on."""
        if self.arrives is not None:
            self.arrives.synchronize()
            self.arrives = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        if self.parts is None:
            raise StoreError(f"donor {self.donor_id!r} has no tensors in {self.tier}", hint="this is a bug: report it")
        return self.parts


class Books:
    """Entries by tier, and who leaves a full one; bytes in use stay within ``budget``."""

    def __init__(self, budget: Mapping[str, int], policy: EvictionPolicy | None = None) -> None:
        self.budget = dict(budget)
        self.policy = policy
        self.tiers: dict[str, dict[int, Entry]] = {tier: {} for tier in TIERS}
        self.order: dict[str, FairLru[int]] = {tier: self._make_order(policy, self.tiers[tier]) for tier in TIERS}
        self.held: dict[int, Entry] = {}  # by the identity of the K tensor that was handed out
        self.current: dict[str, Entry] = {}
        self.used = dict.fromkeys(TIERS, 0)
        self.gone: list[tuple[str, int, str]] = []  # to be told
        self.waste: list[KvFile] = []  # to be removed

    @staticmethod
    def _make_order(policy: EvictionPolicy | None, entries: Mapping[int, Entry]) -> FairLru[int]:
        return FairLru() if policy is None else FairOrder(policy, lambda item: entries[item].key)

    def count_use(self, entry: Entry) -> None:
        """Tell the eviction policy that a donor came, or that somebody takes its KV."""
        if self.policy is not None:
            self.policy.use([entry.key], sizes=[max(1, entry.nbytes // UNIT_BYTES)])

    def forget_uses(self, entry: Entry) -> None:
        """Tell the eviction policy that a donor is gone, unless another copy of it took its place."""
        known = self.current.get(entry.donor_id, entry)
        if self.policy is not None and (known is entry or known.key != entry.key):
            self.policy.forget(entry.key)

    def find(self, donor_id: str, generation: int) -> Entry | None:
        entry = self.current.get(donor_id)
        return entry if entry is not None and entry.generation == generation else None

    def should_rise(self, entry: Entry) -> bool:
        """Whether the mover has to look at it before it is held: it is on its way, or lies lower than it could."""
        if entry.moving or entry.refs:
            return entry.moving
        if entry.tier == "host":
            return entry.device is not None and entry.nbytes <= self.budget["device"]
        return entry.tier == "disk"

    def hold(self, entry: Entry | None, *, is_use: bool = True) -> DonorTensors | None:
        """Hand out an entry's tensors until they are released; not every hold is a use: a copy to elsewhere is none."""
        if entry is None:
            return None
        entry.refs += 1
        if is_use:
            self.count_use(entry)
        self.order[entry.tier].touch(id(entry))
        tensors = DonorTensors.of_parts(entry.tensors, entry.donor_id, entry.generation, entry.rope)
        if entry.arrives is not None:
            entry.arrives.wait()  # not this thread: its stream
        self.held[id(tensors.k)] = entry
        return tensors

    def victims(self, tier: str, nbytes: int, tenant: str) -> list[Entry] | None:
        """Those whose going makes room for ``tenant``; None when even all that may go would not."""
        excess = self.used[tier] + nbytes - self.budget[tier]
        if excess <= 0:
            return []
        entries, victims = self.tiers[tier], []
        leavers = self.order[tier].order_leavers(tenant, nbytes, self.budget[tier], lambda key: entries[key].refs == 0)
        with closing(leavers):
            for key in leavers:
                victims.append(entries[key])
                excess -= entries[key].nbytes
                if excess <= 0:
                    return victims
        return None

    def settle(self, entry: Entry, placed: bool, reason: str) -> None:
        """The mover lets go of an entry; one that found no place, or is wanted no more, ends here."""
        entry.moving = False
        if not placed:
            self.tell_later(entry, reason)
        if not placed or entry.retired:
            self.discard(entry)

    def add(self, entry: Entry, tier: str) -> None:
        self.tiers[tier][id(entry)] = entry
        self.order[tier].add(id(entry), entry.tenant, entry.nbytes)
        self.used[tier] += entry.nbytes
        entry.tier = tier

    def take_out(self, entry: Entry) -> None:
        if self.tiers[entry.tier].pop(id(entry), None) is not None:
            self.order[entry.tier].remove(id(entry))
            self.used[entry.tier] -= entry.nbytes

    def retire(self, donor_id: str) -> bool:
        entry = self.current.pop(donor_id, None)
        if entry is None:
            return False
        entry.retired = True
        if entry.refs == 0 and not entry.moving:
            self.discard(entry)
        return True

    def discard(self, entry: Entry) -> None:
        """Takes an entry out of its tier and frees what it owns."""
        self.take_out(entry)
        self.throw_away(entry)
        entry.parts = None
        self.forget_uses(entry)
        if self.current.get(entry.donor_id) is entry:
            del self.current[entry.donor_id]

    def throw_away(self, entry: Entry) -> None:
        """Its file is removed once the books are free again."""
        if entry.file is not None:
            self.waste.append(entry.file)
        entry.file = None

    def tell_later(self, entry: Entry, reason: str) -> None:
        """Once, and only of a donor that was promised to somebody."""
        if not entry.told and self.current.get(entry.donor_id) is entry:
            self.gone.append((entry.donor_id, entry.generation, reason))
            entry.told = True

    def clear(self) -> None:
        """Forget everything, told or not; files are the owner's business."""
        self.current.clear()
        self.held.clear()
        for tier in TIERS:
            self.tiers[tier].clear()
            self.order[tier].clear()
            self.used[tier] = 0

    def check(self, on_disk: Set[Path] | None) -> None:
        """Raises StoreError when the books do not agree with themselves, or with the files that are there."""
        for tier, entries in self.tiers.items():
            total = sum(entry.nbytes for entry in entries.values())
            _agree(total == self.used[tier], f"{tier} holds {total} bytes, {self.used[tier]} are booked")
            _agree(total <= self.budget[tier], f"{tier} holds {total} bytes over its budget")
            booked = sum(self.order[tier].shares.to_dict().values())
            _agree(booked == total, f"{tier} holds {total} bytes, {booked} are booked for tenants")
            for entry in entries.values():
                key = f"{entry.donor_id!r} generation {entry.generation}"
                _agree(entry.tier == tier and not entry.moving, f"{key} lies in {tier}")
                _agree(entry.refs > 0 if entry.retired else entry.refs >= 0, f"{key} has {entry.refs} holders")
                _agree((entry.file is not None) == (tier == "disk"), f"{key} has a file in {tier}")
                _agree(entry.retired != (self.current.get(entry.donor_id) is entry), f"{key} is nobody's")
        files = {entry.file.path for entry in self.tiers["disk"].values() if entry.file is not None}
        if on_disk is not None:
            _agree(files == on_disk, "the files on disk are not those that are booked")
        known = sum(not entry.retired for entries in self.tiers.values() for entry in entries.values())
        _agree(known == len(self.current), f"{known} donors lie in tiers, {len(self.current)} are known")


def make_donor_policy(
    name: str, budget: Mapping[str, int], on_failure: Callable[[BaseException], None] | None
) -> EvictionPolicy | None:
    """Make the eviction policy of all tiers together, behind a border; None for lru."""
    capacity = max(1, sum(budget.values()) // UNIT_BYTES)
    return guard_policy(make_policy(name, capacity, chained=False, items=TYPICAL_DONORS), on_failure)


def _agree(holds: bool, problem: str) -> None:
    if not holds:
        raise StoreError(f"donor KV: {problem}", hint="this is a bug: report it")
