"""Who owns donor KV, in which memory, and for how long.

A captured donor is a copy: the engine may reuse its blocks at once. Copies live in three tiers, each with a budget in
bytes; what no longer fits moves down, and what fits nowhere is gone and told. The tenant that is most above its share
of a tier gives first, its least recently used donor first, or what another ``eviction`` policy values least:

    device   the accelerator's memory, beside the pool     spliced at memory bandwidth
    host     pinned where there is CUDA                    spliced over the bus
    disk     one checksummed file a donor                  read and verified into memory before it is used

No step of an engine waits for a file. A thread writes donors while they still lie in memory, those that leave next
first: one that leaves memory is then dropped there, and stays on the disk. One whose file is not whole by then is gone:
to keep it, the newer donor that needs its place would have to be refused, which is wanted sooner. Copies of what lies
in memory take at most half of the disk's budget. `acquire` of a donor on the disk returns None and has another thread
read it: who may wait asks `await_rise`, who may not computes, and the next request finds the donor in memory.

With ``bits=8`` the host and the disk hold whole numbers and scales (`semblend.materialize.kv.moves`), about half
the bytes. A donor that was packed stays so when it rises.

Donors that other engines of the machine have published (``directory``) are served from their mapped files, beside all
tiers: nothing here owns or evicts them.

`acquire` holds a donor until `release`: what is held is neither moved nor evicted, and stays readable even when the
donor is replaced or dropped meanwhile.

From a GPU to the host copies are queued and nobody waits for them (`host_memory`): an entry says when it ``arrives``,
whoever acquires it is ordered behind that, and `DonorHandle.arrives` says when the slots that it came from may be
written again. While too much is under way nothing more is captured.

Two locks. ``_lock`` guards the books, what is known of the donors, and is never held over a copy or a file. ``_mover``
is held by the one thread that moves KV between tiers in memory, and never over a file; an entry on its way is marked
``moving``, and nobody takes it until it arrives. One that is read from the disk is ``rising``, and held meanwhile.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from semblend.errors import CapacityError, InputError, StoreError
from semblend.eviction.policy import EvictionPolicy, guard_policy, make_policy
from semblend.fairness import EvictionOrder
from semblend.materialize.donors.background import Background
from semblend.materialize.donors.directory_kv import DirectoryKv, PublishedDonors
from semblend.materialize.donors.memory import Arrival, DonorMemory, Entry
from semblend.materialize.donors.store import DiskTier, KvFile
from semblend.materialize.kv.layout import Layout
from semblend.materialize.kv.moves import DonorTensors, Shapes, count_bytes
from semblend.materialize.kv.rope import RopeSpec

# -- What is known of captured donors: which tier each lies in, who holds it, whose end has to be told.
#
# A tier that is full makes room by tenant: who lies most above its share gives first (see `semblend.fairness`), what
# the eviction policy values least, among equals the least recently used. All tiers ask one policy: a donor that
# moves between them was not used.
#
# Plain bookkeeping: no tensor is copied and no file touched here. Not thread-safe; `DonorKv` guards it with one
# lock.


TIERS = ("device", "host", "disk")
"""From fast to slow."""
MEMORY = TIERS[:2]
UNIT_BYTES = 1 << 10
"""What an eviction policy counts as one."""
TYPICAL_DONORS = 4096
"""Donors that bound an eviction policy's memory: budgets are in bytes."""


class DonorTiers:
    """Entries by tier, and who leaves a full one; bytes in use stay within ``budget``."""

    def __init__(self, budget: Mapping[str, int], policy: EvictionPolicy | None = None) -> None:
        self.budget = dict(budget)
        self.policy = policy
        self.tiers: dict[str, dict[int, Entry]] = {tier: {} for tier in TIERS}
        self.order = {tier: EvictionOrder(policy, self._find_key) for tier in TIERS}
        self.held: dict[int, Entry] = {}  # by the identity of the K tensor that was handed out
        self.current: dict[str, Entry] = {}
        self.used = dict.fromkeys(TIERS, 0)
        self.gone: list[tuple[str, int, str]] = []  # to be told
        self.waste: list[KvFile] = []  # to be removed

    def _find_key(self, item: int) -> int:
        return next(entries[item].key for entries in self.tiers.values() if item in entries)

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
        return entry.tier == "host" and entry.device is not None and entry.nbytes <= self.budget["device"]

    def hold(self, entry: Entry | None, *, is_use: bool = True) -> DonorTensors | None:
        """Hand out an entry's tensors until they are released; not every hold is a use: a copy to elsewhere is none."""
        if entry is None:
            return None
        entry.refs += 1
        if is_use:
            self.count_use(entry)
            for order in self.order.values():
                order.touch(id(entry))
        tensors = DonorTensors.of_parts(entry.tensors, entry.donor_id, entry.generation, entry.rope)
        if entry.arrives is not None:
            entry.arrives.wait()  # not this thread: its stream
        self.held[id(tensors.k)] = entry
        return tensors

    def let_go(self, tensors: DonorTensors) -> None:
        """End one hold."""
        entry = self.held.get(id(tensors.k))
        if entry is None:
            raise InputError(f"donor {tensors.donor_id!r} is not held", hint="release each acquire once")
        entry.refs -= 1
        if entry.refs == 0:
            del self.held[id(tensors.k)]
            if entry.retired:
                self.discard(entry)

    def victims(self, tier: str, nbytes: int, tenant: str, *, at_least: int = 0) -> list[Entry] | None:
        """Those whose going makes room for ``tenant``; None when even all that may go would not.

        ``at_least``: so many bytes are to go even where there is room, because it is in no piece.
        """
        excess = max(at_least, self.used[tier] + nbytes - self.budget[tier])
        if excess <= 0:
            return []
        entries, victims = self.tiers[tier], []

        def may_leave(key: int) -> bool:  # from the disk only what lies nowhere else
            return entries[key].refs == 0 and (tier != "disk" or entries[key].tier == "disk")

        leavers = self.order[tier].order_leavers(tenant, nbytes, self.budget[tier], may_leave)
        with closing(leavers):
            for key in leavers:
                victims.append(entries[key])
                excess -= entries[key].count_bytes(tier)
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
        """Book an entry whose tensors lie in a tier of memory now."""
        self._book(entry, tier)
        entry.tier = tier

    def take_out(self, entry: Entry) -> None:
        """Its tensors leave their tier of memory; a file stays."""
        if entry.tier != "disk":
            self._unbook(entry, entry.tier)

    def add_file(self, entry: Entry, file: KvFile) -> None:
        entry.file = file
        self._book(entry, "disk")

    def leave_to_disk(self, entry: Entry) -> bool:
        """An entry that was taken out of memory lies on the disk alone from now on; False where it has no file."""
        if entry.file is None:
            return False
        entry.tier, entry.parts, entry.arrives = "disk", None, None
        return True

    def choose_unwritten(self) -> Entry | None:
        """Who is written to the disk next: what leaves memory first. Copies of what lies there take half of it."""
        lowest = "host" if self.budget["host"] else "device"
        copies = sum(entry.file.nbytes for entry in self.tiers["disk"].values() if entry.file and entry.tier != "disk")
        for key in self.order[lowest]:
            entry = self.tiers[lowest][key]
            if not (entry.file or entry.unwritable or entry.rising or entry.retired):
                fits = not copies or copies + entry.nbytes <= self.budget["disk"] // 2
                return entry if fits and entry.nbytes <= self.budget["disk"] else None
        return None

    def keep(self, entry: Entry, until: float) -> None:
        """Until then, on the monotonic clock, it leaves each tier after the others of its tenant."""
        entry.kept_until = until
        for order in self.order.values():
            order.keep(id(entry), until - time.monotonic())

    def _book(self, entry: Entry, tier: str) -> None:
        self.tiers[tier][id(entry)] = entry
        self.order[tier].add(id(entry), entry.tenant, entry.count_bytes(tier))
        if (left := entry.kept_until - time.monotonic()) > 0:
            self.order[tier].keep(id(entry), left)
        self.used[tier] += entry.count_bytes(tier)

    def _unbook(self, entry: Entry, tier: str) -> None:
        if self.tiers[tier].pop(id(entry), None) is not None:
            self.order[tier].remove(id(entry))
            self.used[tier] -= entry.count_bytes(tier)

    def retire(self, donor_id: str) -> bool:
        entry = self.current.pop(donor_id, None)
        if entry is None:
            return False
        entry.retired = True
        if entry.refs == 0 and not entry.moving:
            self.discard(entry)
        return True

    def discard(self, entry: Entry) -> None:
        """Takes an entry out of its tiers and frees what it owns."""
        self.take_out(entry)
        if entry.file is not None:
            self._unbook(entry, "disk")
            self.waste.append(entry.file)
        entry.file = None
        entry.parts = None
        self.forget_uses(entry)
        if self.current.get(entry.donor_id) is entry:
            del self.current[entry.donor_id]

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
            total = sum(entry.count_bytes(tier) for entry in entries.values())
            _agree(total == self.used[tier], f"{tier} holds {total} bytes, {self.used[tier]} are booked")
            _agree(total <= self.budget[tier], f"{tier} holds {total} bytes over its budget")
            booked = sum(self.order[tier].usage.to_dict().values())
            _agree(booked == total, f"{tier} holds {total} bytes, {booked} are booked for tenants")
            for entry in entries.values():
                key = f"{entry.donor_id!r} generation {entry.generation}"
                _agree(tier in (entry.tier, "disk") and not entry.moving, f"{key} lies in {tier}")
                _agree(entry.refs > 0 if entry.retired else entry.refs >= 0, f"{key} has {entry.refs} holders")
                _agree((entry.file is not None) == (id(entry) in self.tiers["disk"]), f"{key} has a file in {tier}")
                _agree(entry.rising or (entry.parts is None) == (entry.tier == "disk"), f"{key} has tensors")
                _agree(entry.retired != (self.current.get(entry.donor_id) is entry), f"{key} is nobody's")
        files = {entry.file.path for entry in self.tiers["disk"].values() if entry.file is not None}
        if on_disk is not None:
            _agree(files == on_disk, "the files on disk are not those that are booked")
        known = len({id(e) for entries in self.tiers.values() for e in entries.values() if not e.retired})
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


log = logging.getLogger("semblend.donors")

TOLD_EVERY_S = 60.0
"""How often it is told that the disk is full."""
OnEvicted = Callable[[str, int, str], None]
"""Called with donor id, generation, and why it is gone: ``budget`` or ``corrupt``, by any thread; ``published`` for
a donor of the directory that cannot be used."""


@dataclass(frozen=True, slots=True)
class DonorHandle:
    """What was captured; ``tier`` is where it lay at that moment. Until it ``arrives`` its slots must not change."""

    donor_id: str
    generation: int
    tokens: int
    nbytes: int
    tier: str
    arrives: Arrival | None = None


class DonorKv:
    """The copies of all donors; ``device_type`` names the kind of memory that the device tier is.

    ``rope`` is the rotation that the model computes with, and goes with every capture that names none of its own.
    """

    def __init__(
        self,
        budget_device_bytes: int,
        budget_host_bytes: int,
        disk_dir: str | Path | None = None,
        *,
        budget_disk_bytes: int = 0,
        on_evicted: OnEvicted | None = None,
        device_type: str = "cuda",
        rope: RopeSpec | None = None,
        bits: int = 16,
        directory: DirectoryKv | None = None,
        eviction: str = "lru",
        on_policy_failure: Callable[[BaseException], None] | None = None,
        on_disk_failure: Callable[[str], None] = lambda message: log.warning("%s", message),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``on_disk_failure`` is told, at most once in `TOLD_EVERY_S`, that the disk took no donors, and how many.

        A disk alone is refused: what is read from it has to lie in memory to be used.
        """
        budget = {"device": budget_device_bytes, "host": budget_host_bytes, "disk": budget_disk_bytes}
        if min(budget.values()) < 0:
            raise InputError("a byte budget is negative", hint="0 turns a tier off")
        if disk_dir is not None and budget_disk_bytes and not budget_device_bytes + budget_host_bytes:
            raise InputError("donors on a disk need memory to be read into", hint="give them a budget of host memory")
        self._disk = DiskTier(disk_dir) if disk_dir is not None and budget_disk_bytes else None
        budget = budget if self._disk is not None else budget | {"disk": 0}
        self._failures: list[Callable[[], object]] = []  # to be told
        tell = on_policy_failure or _warn
        policy = make_donor_policy(eviction, budget, lambda error: self._failures.append(partial(tell, error)))
        self._books = DonorTiers(budget, policy)
        self._device_type = device_type
        self.memory = DonorMemory(bits)
        self._rope = rope
        self._mover = threading.Lock()  # taken first
        self._lock = threading.Lock()
        self._risen = threading.Condition(self._lock)
        self._writer, self._reader = Background("donor-write"), Background("donor-read")
        self._tends = False  # the writer has been asked to look
        self._on_evicted = on_evicted
        self._on_disk_failure, self._clock = on_disk_failure, clock
        self._lost_to_disk, self._told_of_disk = 0, -math.inf
        self._published = None if directory is None else PublishedDonors(directory)

    def capture(
        self,
        donor_id: str,
        generation: int,
        layout: Layout,
        slots: Tensor,
        rope: RopeSpec | None = None,
        *,
        tenant: str = "",
        slots_stay: bool = False,
    ) -> DonorHandle:
        """Copies the KV of ``slots``, in order, for ``tenant``; replaces an earlier capture of this donor.

        What the caller computes next is ordered behind the copy, unless ``slots_stay``: the caller then sees to it that
        nothing is written there before the donor arrives.

        ``rope`` is the rotation these keys have, where it depends on the prompt (dynamic scaling). Raises CapacityError
        when no tier can take it; an earlier capture is then gone all the same, since the donor was registered anew.
        """
        if slots.numel() == 0:
            raise InputError(f"donor {donor_id!r} has no tokens to capture", hint="capture after its prefill")
        device = layout.device if layout.device.type == self._device_type else None
        entry = Entry(donor_id, generation, 0, "device", device=device, tenant=tenant)
        entry.rope = rope or self._rope
        with self._telling(), self._mover:
            with self._lock:
                self._books.retire(donor_id)
            if not self._take_memory(entry, layout, slots.numel()):
                raise CapacityError(f"no memory to copy donor {donor_id!r}", hint="raise the donor budgets")
            self.memory.fill(entry, layout, slots)
            if entry.arrives is not None and not slots_stay:
                entry.arrives.wait()
            with self._lock:
                self._books.count_use(entry)
            if not self._settle(entry, TIERS.index(entry.tier)):
                with self._lock:
                    self._books.forget_uses(entry)
                raise CapacityError(
                    f"donor {donor_id!r} needs {entry.nbytes} bytes and fits in no tier",
                    hint="raise the donor budgets",
                )
            with self._lock:
                self._books.current[donor_id] = entry
                return DonorHandle(donor_id, generation, slots.numel(), entry.nbytes, entry.tier, entry.arrives)

    def has_room_for(self, device: torch.device) -> bool:
        """Whether any budget takes KV of this device; with none, no donor is wanted, and `capture` would refuse all."""
        tiers = MEMORY if device.type == self._device_type else ("host",)
        return any(self._books.budget[tier] for tier in tiers)

    def has_room_on_device(self, layout: Layout, tokens: int) -> bool:
        """Whether a capture of so many tokens stays on the device and moves no other donor: such copies are quick."""
        if layout.device.type == "cpu" or layout.device.type != self._device_type:
            return False
        shape = (layout.layers, tokens, layout.kv_heads, layout.head_dim)
        nbytes = count_bytes(self.memory.list_shapes("device", shape, layout.dtype))
        with self._lock:
            return self._books.used["device"] + nbytes <= self._books.budget["device"]

    def reserve(self, device: torch.device) -> None:
        """Takes the budgets' memory at once; see `DonorMemory.reserve`."""
        self.memory.reserve(device, self._books.budget)

    def give_device(self, device: torch.device, nbytes: int) -> None:
        """Let donors have so much of a GPU's memory from now on; without it, where the GPU has not so much left."""
        with self._mover:
            self.memory.reserve(device, {"device": nbytes, "host": 0})
            with self._lock:
                self._books.budget["device"] = nbytes if "device" in self.memory.arenas else 0

    @property
    def budgets(self) -> dict[str, int]:
        """Bytes by tier."""
        return dict(self._books.budget)

    def drop_all(self) -> None:
        """Let every donor go."""
        with self._telling(), self._lock:
            for donor_id in list(self._books.current):
                self._books.retire(donor_id)

    def acquire(self, donor_id: str, generation: int) -> DonorTensors | None:
        """Holds the donor's KV until `release`; None when it is gone, was replaced, or is not in memory yet.

        Reads no file: a donor on the disk is read by a thread from now on, and so is one of the directory that nobody
        has verified yet; `is_rising` tells.
        """
        if self._published is not None and self._published.names(donor_id, generation):
            return self._acquire_published(self._published, donor_id, generation)
        with self._telling():
            with self._lock:
                to_move, held = self._take_hold(donor_id, generation)
            if to_move is None:
                return held
            with self._mover:
                with self._lock:
                    entry, held = self._take_hold(donor_id, generation)
                    if entry is None:
                        return held
                    entry.moving = True
                risen = False
                try:
                    risen = self._rise(entry)
                finally:
                    with self._lock:
                        self._books.settle(entry, risen, "budget")
                        is_here = risen and not entry.retired and entry.parts is not None
                        held = self._books.hold(entry if is_here else None)
                return held

    def _take_hold(self, donor_id: str, generation: int) -> tuple[Entry | None, DonorTensors | None]:
        """The donor's tensors, held, or the entry that the mover has to look at first; the books are locked."""
        entry = self._books.find(donor_id, generation)
        if entry is not None and (entry.rising or entry.tier == "disk") and not entry.moving:
            self._start_rise(entry)
            return None, None
        if entry is not None and self._books.should_rise(entry):
            return entry, None
        return None, self._books.hold(entry)

    def is_rising(self, donor_id: str, generation: int) -> bool:
        """Whether a thread reads this donor right now, so that a later `acquire` may find it."""
        if self._published is not None and self._published.names(donor_id, generation):
            return self._published.is_rising(donor_id)
        with self._lock:
            entry = self._books.find(donor_id, generation)
            return entry is not None and entry.rising

    def await_rise(self, donor_id: str, generation: int, timeout_s: float) -> bool:
        """Wait until a donor has been read, for so long at most; whether it is still read."""
        ends = time.monotonic() + timeout_s
        while self.is_rising(donor_id, generation) and (left := ends - time.monotonic()) > 0:
            with self._lock:
                self._risen.wait(min(left, 0.01))  # a donor of the directory is verified without a word to us
        return self.is_rising(donor_id, generation)

    def flush(self) -> None:
        """Wait until the threads have read, written and removed what there is now; for tests and measurements."""
        self._reader.flush()
        with self._telling():
            self._writer.flush()
        self._writer.flush()

    def release(self, tensors: DonorTensors) -> None:
        """Ends one hold; the last one lets go of a donor that was replaced or dropped meanwhile."""
        if self._published is not None and self._published.release(tensors):
            return
        with self._telling(), self._lock:
            self._books.let_go(tensors)

    def drop(self, donor_id: str) -> bool:
        """Forgets a donor without telling; False when it was not there."""
        with self._telling(), self._lock:
            return self._books.retire(donor_id)

    def publish(self, donor_id: str, generation: int, key: str, tokens_digest: str) -> int:
        """Write a donor of this engine into the directory; returns the file's bytes, 0 when it left memory before.

        Waits for its copy to the host and for the file. Raises OSError (no space left), or StoreError.
        """
        if self._published is None:
            raise StoreError("this engine has no donor directory", hint="set donor_directory")
        with self._lock:
            entry = self._books.find(donor_id, generation)
            in_memory = entry is not None and not entry.moving and entry.parts is not None
            held = self._books.hold(entry, is_use=False) if in_memory else None  # where it is: publishing moves nothing
            arrives = entry.arrives if entry is not None else None
        if held is None:
            return 0
        try:
            if arrives is not None:
                arrives.synchronize()
            return self._published.directory.write(key, tokens_digest, self.memory.pack(held.parts), held.rope)
        finally:
            self.release(held)

    def keep(self, donor_id: str, generation: int, seconds: float) -> None:
        """For so long a donor leaves its tier after the others of its tenant (see `EvictionOrder.keep`)."""
        with self._lock:
            if (entry := self._books.find(donor_id, generation)) is not None:
                self._books.keep(entry, time.monotonic() + seconds)

    def name_weights(self, digest: str) -> None:
        """The model has other weights: of the directory only donors of the same are taken, and published."""
        if self._published is not None:
            self._published.directory.name_weights(digest)

    def holds(self, donor_id: str, generation: int) -> bool:
        """Whether `acquire` would look for it; whether its file is whole is found out only there."""
        if self._published is not None and self._published.names(donor_id, generation):
            return True
        with self._lock:
            return self._books.find(donor_id, generation) is not None

    @property
    def used_bytes(self) -> dict[str, int]:
        """Bytes by tier, held and retired copies included."""
        with self._lock:
            return dict(self._books.used)

    @property
    def holders(self) -> int:
        """How many `acquire` calls were not released yet."""
        mapped = 0 if self._published is None else self._published.holders
        with self._lock:
            return mapped + sum(entry.refs for entry in self._books.held.values())

    def __len__(self) -> int:
        return len(self._books.current)

    def close(self) -> None:
        """Lets go of everything and removes the files."""
        self._reader.close()
        self._writer.close()
        with self._mover:
            with self._lock:
                self._books.clear()
            if self._disk is not None:
                self._disk.close()
            if self._published is not None:
                self._published.directory.close()

    def check(self) -> None:
        """Raises StoreError when the books do not agree with what is there, once the threads have nothing to do."""
        self.flush()
        with self._mover:
            on_disk = None if self._disk is None else self._disk.files()
            with self._lock:
                self._books.check(on_disk)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Afterwards, without any lock: callbacks come, which may call back into us; the writer looks at the disk.

        Never in the threads that read and write: callbacks come in the thread of whoever calls us.
        """
        try:
            yield
        finally:
            with self._lock:
                gone, self._books.gone = self._books.gone, []
                failures, self._failures = self._failures, []
                ask, self._tends = self._disk is not None and not self._tends, self._disk is not None
            if ask and not self._writer.submit(self._tend_disk):
                self._tends = False
            for tell in failures:
                tell()
            if self._on_evicted is not None:
                for donor_id, generation, reason in gone:
                    self._on_evicted(donor_id, generation, reason)

    # -- by the mover, without the books -------------------------------------------------------------------------

    def _take_memory(self, entry: Entry, layout: Layout, tokens: int) -> bool:
        """Memory for a capture, of the first tier that has room; donors move out of it before there is a copy."""
        shape = (layout.layers, tokens, layout.kv_heads, layout.head_dim)
        for tier in ("device", "host"):
            shapes = self.memory.list_shapes(tier, shape, layout.dtype)
            entry.tier, entry.nbytes = tier, count_bytes(shapes)
            if tier == "device" and (entry.device is None or entry.nbytes > self._books.budget["device"]):
                continue
            if tier == "host":
                self.memory.refuse_backlog()
            self._make_room(tier, entry.nbytes, entry.tenant)
            entry.parts = self._take(tier, shapes, entry)
            if entry.parts is not None:
                return True
        return False

    def _take(self, tier: str, shapes: Shapes, entry: Entry) -> dict[str, Tensor] | None:
        """Memory of a tier for an entry's tensors; more donors move out where what is free is in no piece."""
        free = -1
        while True:
            try:
                parts = self.memory.take(tier, shapes, entry.device if tier == "device" else None)
            except (MemoryError, RuntimeError):  # torch reports a failed allocation as either
                return None
            before, free = free, self.memory.count_free(tier)
            if parts is not None:
                return parts
            if free <= before:  # somebody still reads what has gone: no use in sending more after it
                return None
            if not self._make_room(tier, count_bytes(shapes), entry.tenant, at_least=1):
                return None

    def _settle(self, entry: Entry, first: int) -> bool:
        """Puts an unlisted entry into the first tier of memory from ``first`` on that takes it; its tensors move."""
        return any(self._place(entry, tier) for tier in MEMORY[first:])

    def _make_room(self, tier: str, nbytes: int, tenant: str, *, at_least: int = 0) -> bool:
        """Moves donors out until ``nbytes`` of ``tenant`` fit; moves nothing when others must stay."""
        with self._lock:
            victims = self._books.victims(tier, nbytes, tenant, at_least=at_least)
            for entry in victims or ():
                entry.moving = True
                self._books.take_out(entry)
        try:
            for entry in victims or ():
                sunk = self._settle(entry, MEMORY.index(tier) + 1)
                with self._lock:
                    self._books.settle(entry, sunk or self._books.leave_to_disk(entry), "budget")
        finally:  # those that a failure left on the way have no place any more
            with self._lock:
                for entry in victims or ():
                    if entry.moving:
                        self._books.settle(entry, False, "budget")
        return victims is not None

    def _place(self, entry: Entry, tier: str) -> bool:
        """Brings the tensors of an unlisted entry into ``tier`` and lists it; False when that has no room for them."""
        shapes = self.memory.list_moved(entry, tier)
        parts, nbytes, arrives = entry.tensors, count_bytes(shapes), entry.arrives
        if (tier == "device" and entry.device is None) or not self._make_room(tier, nbytes, entry.tenant):
            return False
        if entry.tier != tier:
            taken = self._take(tier, shapes, entry)
            if taken is None:
                return False
            try:
                parts, arrives = taken, self.memory.move(entry, taken)
            except (MemoryError, RuntimeError):  # packing takes memory too
                return False
        with self._lock:
            entry.parts, entry.arrives, entry.nbytes = parts, arrives, nbytes
            self._books.add(entry, tier)
        return True

    def _rise(self, entry: Entry) -> bool:
        """Moves a donor from the host to the device before it is used, where there is room."""
        with self._lock:
            self._books.take_out(entry)  # its own place is free for what sinks to make room for it
        if self._place(entry, "device"):
            return True
        if not self._make_room("host", entry.nbytes, entry.tenant):
            with self._lock:
                return self._books.leave_to_disk(entry)
        with self._lock:
            self._books.add(entry, "host")
        return True

    def _acquire_published(self, published: PublishedDonors, donor_id: str, generation: int) -> DonorTensors | None:
        try:
            return published.acquire(donor_id, self._reader)
        except StoreError as error:
            log.info("%s", error)
            if self._on_evicted is not None:
                self._on_evicted(donor_id, generation, "published")
            return None

    # -- by the threads that write and read files ------------------------------------------------------------------

    def _tend_disk(self) -> None:
        """Remove files that nobody needs, then write donors that have none, until there is nothing to do."""
        assert self._disk is not None, "only then it is submitted"
        while True:
            with self._lock:
                self._tends = False
                entry = self._books.choose_unwritten()
                victims = [] if entry is None else self._books.victims("disk", entry.nbytes, entry.tenant)
                for leaver in victims or ():
                    self._books.tell_later(leaver, "budget")
                    self._books.discard(leaver)
                held = None if victims is None else self._books.hold(entry, is_use=False)
                arrives = None if entry is None else entry.arrives
                waste, self._books.waste = self._books.waste, []
            left = [file for file in waste if not self._disk.remove(file)]
            with self._lock:
                self._books.waste += left  # tried again the next time
            if entry is None or held is None:
                return
            self._write(self._disk, entry, held, arrives)

    def _write(self, disk: DiskTier, entry: Entry, held: DonorTensors, arrives: Arrival | None) -> None:
        file: KvFile | None = None
        try:
            if arrives is not None:
                arrives.synchronize()
            file = disk.write(self.memory.pack(held.parts), entry.about)
        except OSError as error:
            self._tell_disk_failure(disk.folder, error)
        finally:
            with self._lock:
                fits = file is not None and self._books.used["disk"] + file.nbytes <= self._books.budget["disk"]
                entry.unwritable = not fits
                if file is not None and fits and not entry.retired:
                    self._books.add_file(entry, file)
                elif file is not None:
                    self._books.waste.append(file)
                self._books.let_go(held)

    def _tell_disk_failure(self, folder: Path, error: OSError) -> None:
        self._lost_to_disk += 1
        if self._clock() - self._told_of_disk < TOLD_EVERY_S:
            return
        lost, self._lost_to_disk, self._told_of_disk = self._lost_to_disk, 0, self._clock()
        message = f"{lost} donors not kept: {folder.parent} cannot be written to: {error.strerror or error}"
        with self._lock:
            self._failures.append(partial(self._on_disk_failure, message))

    def _start_rise(self, entry: Entry) -> None:
        """Have a donor on the disk read, unless it is already; the books are locked."""
        if not entry.rising and self._reader.submit(partial(self._read, entry)):
            entry.rising = True
            entry.refs += 1
            self._books.order["disk"].touch(id(entry))

    def _read(self, entry: Entry) -> None:
        """Read a donor from the disk into memory; one that is damaged is gone, one that finds no room stays there."""
        assert self._disk is not None
        assert entry.file is not None
        parts: dict[str, Tensor] | None = None
        try:
            parts = self._disk.load(entry.file, entry.about, partial(self._take_for_file, entry))
        except StoreError as error:
            log.warning("%s", error)
            with self._lock:
                self._books.tell_later(entry, "corrupt")
                entry.retired = True
        finally:
            with self._lock:
                entry.rising, entry.refs, entry.parts = False, entry.refs - 1, parts
                if parts is None and not entry.retired:
                    self._books.take_out(entry)
                    self._books.leave_to_disk(entry)
                elif entry.retired:
                    self._books.discard(entry)
                self._risen.notify_all()

    def _take_for_file(self, entry: Entry, shapes: Shapes) -> dict[str, Tensor] | None:
        """Memory for a donor that is read: of the host, or of the device where donors have none there."""
        tier = "host" if self._books.budget["host"] else "device"
        with self._mover:
            nbytes = count_bytes(shapes)
            if not self._make_room(tier, nbytes, entry.tenant):
                return None
            parts = self._take(tier, shapes, entry)
            if parts is not None:
                with self._lock:
                    entry.nbytes = nbytes
                    self._books.add(entry, tier)
            return parts


def _warn(error: BaseException) -> None:
    log.warning("the eviction policy failed, donors leave by age from now on: %s: %s", type(error).__name__, error)
