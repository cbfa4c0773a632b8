"""Who owns donor KV, in which memory, and for how long.

A captured donor is a copy: the engine may reuse its blocks at once. Copies live in three tiers, each with a budget in
bytes and a least-recently-used order; what no longer fits moves down, and what fits nowhere is gone and told:

    device   the accelerator's memory, beside the pool     spliced at memory bandwidth
    host     pinned where there is CUDA                    spliced over the bus
    disk     one checksummed, memory-mapped file a donor   read once, verified, then moved up

`acquire` holds a donor until `release`: what is held is neither moved nor evicted, and stays readable even when the
donor is replaced or dropped meanwhile. One lock guards everything, file reads and writes included.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from semblend.errors import CapacityError, InputError, StoreError
from semblend.materialize.disk_tier import DiskTier, KvFile

TIERS = ("device", "host", "disk")
"""From fast to slow."""

OnEvicted = Callable[[str, int, str], None]
"""Called with donor id, generation, and why it is gone: ``budget``, ``disk`` (not writable) or ``corrupt``."""


class Pool(Protocol):
    """Where KV is captured from: ``k`` and ``v`` are [layers, slots, kv_heads, head_dim]."""

    @property
    def k(self) -> Tensor: ...

    @property
    def v(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class DonorHandle:
    """What was captured; ``tier`` is where it lay at that moment."""

    donor_id: str
    generation: int
    tokens: int
    nbytes: int
    tier: str


@dataclass(frozen=True, slots=True, eq=False)
class DonorTensors:
    """Held KV of one donor: [layers, tokens, kv_heads, head_dim] each. Read it, never write it; give it back."""

    donor_id: str
    generation: int
    k: Tensor
    v: Tensor

    @property
    def tokens(self) -> int:
        return int(self.k.shape[1])


@dataclass(slots=True, eq=False)
class _Entry:
    donor_id: str
    generation: int
    nbytes: int
    tier: str
    k: Tensor | None
    v: Tensor | None
    file: KvFile | None = None
    device: torch.device | None = None  # where it came from, if that is the device tier's kind
    refs: int = 0
    retired: bool = False  # replaced or dropped while held

    @property
    def about(self) -> dict[str, Any]:
        return {"donor_id": self.donor_id, "generation": self.generation}

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        if self.k is None or self.v is None:
            raise StoreError(f"donor {self.donor_id!r} has no tensors in {self.tier}", hint="this is a bug: report it")
        return self.k, self.v


class DonorKv:
    """The copies of all donors; ``device_type`` names the kind of memory that the device tier is."""

    def __init__(
        self,
        budget_device_bytes: int,
        budget_host_bytes: int,
        disk_dir: str | Path | None = None,
        *,
        budget_disk_bytes: int = 0,
        on_evicted: OnEvicted | None = None,
        device_type: str = "cuda",
    ) -> None:
        self._budget = {"device": budget_device_bytes, "host": budget_host_bytes, "disk": budget_disk_bytes}
        if min(self._budget.values()) < 0:
            raise InputError("a byte budget is negative", hint="0 turns a tier off")
        self._disk = DiskTier(disk_dir) if disk_dir is not None and budget_disk_bytes else None
        if self._disk is None:
            self._budget["disk"] = 0
        self._tiers: dict[str, OrderedDict[int, _Entry]] = {tier: OrderedDict() for tier in TIERS}  # oldest use first
        self._held: dict[int, _Entry] = {}  # by the identity of the K tensor that was handed out
        self._current: dict[str, _Entry] = {}
        self._used = dict.fromkeys(TIERS, 0)
        self._device_type = device_type
        self._pinned = torch.cuda.is_available()
        self._lock = threading.Lock()
        self._on_evicted = on_evicted
        self._gone: list[tuple[str, int, str]] = []

    def capture(self, donor_id: str, generation: int, pool: Pool, slots: Tensor) -> DonorHandle:
        """Copies the KV of ``slots``, in order; replaces an earlier capture of this donor.

        Raises CapacityError when no tier can take it; an earlier capture is then gone all the same, since the donor
        was registered anew.
        """
        if slots.numel() == 0:
            raise InputError(f"donor {donor_id!r} has no tokens to capture", hint="capture after its prefill")
        wide = 2 * pool.k.shape[0] * slots.numel() * pool.k.shape[2] * pool.k.shape[3] * pool.k.element_size()
        device = pool.k.device if pool.k.device.type == self._device_type else None
        first, k, v = self._copy_of(
            donor_id, pool, slots, on_device=device is not None and wide <= self._budget["device"]
        )
        entry = _Entry(donor_id, generation, wide, first, k, v, device=device)
        with self._telling():
            self._retire(donor_id)
            if not self._settle(entry, TIERS.index(first)):
                self._gone = [gone for gone in self._gone if gone[:2] != (donor_id, generation)]  # never promised
                raise CapacityError(
                    f"donor {donor_id!r} needs {wide} bytes and fits in no tier", hint="raise the donor budgets"
                )
            self._current[donor_id] = entry
            return DonorHandle(donor_id, generation, slots.numel(), wide, entry.tier)

    def acquire(self, donor_id: str, generation: int) -> DonorTensors | None:
        """Holds the donor's KV until `release`; None when it is gone, was replaced, or its file is damaged."""
        with self._telling():
            entry = self._current.get(donor_id)
            if entry is None or entry.generation != generation or not self._lift(entry):
                return None
            entry.refs += 1
            self._tiers[entry.tier].move_to_end(id(entry))
            k, v = entry.tensors
            self._held[id(k)] = entry
            return DonorTensors(donor_id, generation, k, v)

    def release(self, tensors: DonorTensors) -> None:
        """Ends one hold; the last one lets go of a donor that was replaced or dropped meanwhile."""
        with self._telling():
            entry = self._held.get(id(tensors.k))
            if entry is None:
                raise InputError(f"donor {tensors.donor_id!r} is not held", hint="release each acquire once")
            entry.refs -= 1
            if entry.refs == 0:
                del self._held[id(tensors.k)]
                if entry.retired:
                    self._discard(entry)
                elif entry.tier == "disk":
                    entry.k = entry.v = None  # unmap; the file stays

    def drop(self, donor_id: str) -> bool:
        """Forgets a donor without telling; False when it was not there."""
        with self._telling():
            return self._retire(donor_id)

    def holds(self, donor_id: str, generation: int) -> bool:
        """Whether `acquire` would find it now (a damaged file is found out only there)."""
        with self._lock:
            entry = self._current.get(donor_id)
            return entry is not None and entry.generation == generation

    @property
    def used_bytes(self) -> dict[str, int]:
        """Bytes by tier, held and retired copies included."""
        with self._lock:
            return dict(self._used)

    def __len__(self) -> int:
        return len(self._current)

    def close(self) -> None:
        """Lets go of everything and removes the files."""
        with self._lock:
            self._current.clear()
            for tier in TIERS:
                self._tiers[tier].clear()
                self._held.clear()
                self._used[tier] = 0
            if self._disk is not None:
                self._disk.close()

    def check(self) -> None:
        """Raises StoreError when the books do not agree with what is there."""
        with self._lock:
            for tier, entries in self._tiers.items():
                total = sum(entry.nbytes for entry in entries.values())
                _agree(total == self._used[tier], f"{tier} holds {total} bytes, {self._used[tier]} are booked")
                _agree(total <= self._budget[tier], f"{tier} holds {total} bytes over its budget")
                for entry in entries.values():
                    key = f"{entry.donor_id!r} generation {entry.generation}"
                    _agree(entry.tier == tier, f"{key} lies in {tier}")
                    _agree(entry.refs > 0 if entry.retired else entry.refs >= 0, f"{key} has {entry.refs} holders")
                    _agree((entry.file is not None) == (tier == "disk"), f"{key} has a file in {tier}")
                    _agree(entry.retired != (self._current.get(entry.donor_id) is entry), f"{key} is nobody's")
            files = {entry.file.path for entry in self._tiers["disk"].values() if entry.file is not None}
            if self._disk is not None:
                _agree(files == self._disk.files(), "the files on disk are not those that are booked")
            known = sum(not entry.retired for entries in self._tiers.values() for entry in entries.values())
            _agree(known == len(self._current), f"{known} donors lie in tiers, {len(self._current)} are known")

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """The lock, and afterwards, without it, the callbacks: they may call back into us."""
        try:
            with self._lock:
                yield
                gone, self._gone = self._gone, []
        except BaseException:
            with self._lock:
                gone, self._gone = self._gone, []
            self._tell(gone)
            raise
        self._tell(gone)

    def _tell(self, gone: list[tuple[str, int, str]]) -> None:
        if self._on_evicted is not None:
            for donor_id, generation, reason in gone:
                self._on_evicted(donor_id, generation, reason)

    def _copy_of(self, donor_id: str, pool: Pool, slots: Tensor, *, on_device: bool) -> tuple[str, Tensor, Tensor]:
        """Tier, K and V; host memory where the device has none left."""
        if on_device:
            try:
                return "device", self._gathered(pool.k, slots, "device"), self._gathered(pool.v, slots, "device")
            except torch.OutOfMemoryError:
                pass  # the pool and the weights leave less than the budget says
        try:
            return "host", self._gathered(pool.k, slots, "host"), self._gathered(pool.v, slots, "host")
        except (MemoryError, RuntimeError) as error:
            raise CapacityError(f"no memory to copy donor {donor_id!r}", hint="lower the donor budgets") from error

    def _gathered(self, part: Tensor, slots: Tensor, tier: str) -> Tensor:
        shape = (part.shape[0], slots.numel(), *part.shape[2:])
        index = slots.to(part.device)
        if tier == "device":
            return part.index_select(1, index)
        out = self._host_buffer(shape, part.dtype)
        for layer in range(part.shape[0]):  # layer by layer: no second copy of the whole on the device
            out[layer].copy_(part[layer].index_select(0, index))
        return out

    def _host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self._pinned)

    def _settle(self, entry: _Entry, first: int) -> bool:
        """Puts an entry into the first tier from ``first`` on that takes it; its tensors move with it."""
        for tier in TIERS[first:]:
            if self._make_room(tier, entry.nbytes) and self._move(entry, tier):
                return self._list(entry, tier)
        return False

    def _list(self, entry: _Entry, tier: str) -> bool:
        self._tiers[tier][id(entry)] = entry
        self._used[tier] += entry.nbytes
        entry.tier = tier
        return True

    def _make_room(self, tier: str, nbytes: int) -> bool:
        """Moves the least recently used out until ``nbytes`` fit; moves nothing when held donors are in the way."""
        excess = self._used[tier] + nbytes - self._budget[tier]
        victims = []
        for entry in self._tiers[tier].values():
            if excess <= 0:
                break
            if entry.refs == 0:
                victims.append(entry)
                excess -= entry.nbytes
        if excess > 0:
            return False
        for entry in victims:
            self._unlist(entry)
            if not self._settle(entry, TIERS.index(tier) + 1):
                self._forget(entry, "budget")
        return True

    def _move(self, entry: _Entry, tier: str) -> bool:
        """Brings the tensors of an unlisted entry into ``tier``; False when the disk would not take them."""
        if tier == "disk":
            if self._disk is None:
                return False
            try:
                entry.file = self._disk.write(*entry.tensors, entry.about)
            except OSError:
                self._forget_later(entry, "disk")
                return False
            entry.k = entry.v = None
            return True
        target = entry.device if tier == "device" else torch.device("cpu")
        k, v = entry.tensors
        if entry.tier != tier and target is not None:
            try:
                entry.k, entry.v = (self._copied(part, target) for part in (k, v))
            except (MemoryError, RuntimeError):  # torch reports a failed allocation as either
                return False
        return True

    def _copied(self, part: Tensor, target: torch.device) -> Tensor:
        if target.type == "cpu":
            return self._host_buffer(tuple(part.shape), part.dtype).copy_(part)
        return part.to(target)

    def _lift(self, entry: _Entry) -> bool:
        """Moves a donor up before it is used, if nobody holds it and there is room; verifies what comes from disk."""
        if entry.refs or entry.tier == "device":
            return True
        if entry.tier == "disk":
            try:
                if self._disk is None or entry.file is None:
                    raise StoreError("its file is not booked", hint="this is a bug: report it")
                entry.k, entry.v = self._disk.load(entry.file, entry.about)
            except StoreError:
                self._forget(entry, "corrupt")
                return False
        self._unlist(entry)  # its own place is free for what sinks to make room for it
        file, start = entry.file, TIERS.index(entry.tier)
        higher = [tier for tier in TIERS[:start] if tier != "device" or entry.device is not None]
        if any(self._make_room(tier, entry.nbytes) and self._move(entry, tier) and self._list(entry, tier)
               for tier in higher):  # fmt: skip
            if file is not None and self._disk is not None:
                self._disk.remove(file)
            entry.file = None
            return True
        if self._make_room(entry.tier, entry.nbytes):
            return self._list(entry, entry.tier)
        self._forget(entry, "budget")
        return False

    def _retire(self, donor_id: str) -> bool:
        entry = self._current.pop(donor_id, None)
        if entry is None:
            return False
        entry.retired = True
        if entry.refs == 0:
            self._discard(entry)
        return True

    def _discard(self, entry: _Entry) -> None:
        """Takes an entry out of its tier and frees what it owns."""
        self._unlist(entry)
        if entry.file is not None and self._disk is not None:
            self._disk.remove(entry.file)
        entry.file = entry.k = entry.v = None
        if self._current.get(entry.donor_id) is entry:
            del self._current[entry.donor_id]

    def _unlist(self, entry: _Entry) -> None:
        if self._tiers[entry.tier].pop(id(entry), None) is not None:
            self._used[entry.tier] -= entry.nbytes

    def _forget(self, entry: _Entry, reason: str) -> None:
        """An entry that found no place: free it, and tell unless a reason was given already."""
        if self._current.get(entry.donor_id) is entry:
            self._forget_later(entry, reason)
        self._discard(entry)

    def _forget_later(self, entry: _Entry, reason: str) -> None:
        told = [gone for gone in self._gone if gone[:2] == (entry.donor_id, entry.generation)]
        if not told:
            self._gone.append((entry.donor_id, entry.generation, reason))


def _agree(holds: bool, problem: str) -> None:
    if not holds:
        raise StoreError(f"donor KV: {problem}", hint="this is a bug: report it")
