"""The memory that donors lie in, and the copies into it: from an engine's cache, and from one tier to the next.

From a GPU to the host copies are queued on a stream of their own and nobody waits for them. With ``bits=8`` whatever
leaves the device is packed on its way (`semblend.materialize.kv.moves`).
"""

from __future__ import annotations

import logging
import math
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from semblend.errors import CapacityError, InputError, StoreError
from semblend.materialize.donors.store import KvFile
from semblend.materialize.kv.layout import Layout, copy_to_device
from semblend.materialize.kv.moves import Shapes, packed_shapes
from semblend.materialize.kv.rope import RopeSpec
from semblend.materialize.kv.splice import gather, gather_packed, pack_donor


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
    rising: bool = False  # read from the disk, by a thread that counts as a holder
    unwritable: bool = False  # the disk did not take it
    told: bool = False  # its end was reported
    kept_until: float = -math.inf  # by the monotonic clock: a conversation goes on from it

    @property
    def key(self) -> int:
        """The number under which the eviction policy knows it."""
        return hash((self.donor_id, self.generation))

    @property
    def about(self) -> dict[str, Any]:
        return {"donor_id": self.donor_id, "generation": self.generation}

    def count_bytes(self, tier: str) -> int:
        """What it takes of a tier where it lies."""
        return self.file.nbytes if tier == "disk" and self.file is not None else self.nbytes

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


# -- Memory that is taken once, and the stream that fills it: what makes a copy of a donor cost nobody time.
#
# A copy between accelerator and host runs beside computation only if the host's memory is page-locked; locking pages
# is slow, and so is asking an accelerator for memory. So donors' memory is taken once, as an arena, and given out in
# pieces. All copies of donors are queued on one stream of their own, in order: a piece that is given out again is
# written after whatever wrote it before.


log = logging.getLogger("semblend.materialize")
_ALIGNMENT = 256


class Arrival(Protocol):
    """A copy on its way: a CUDA event, as far as we use one."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def wait(self) -> None: ...


class Arena:
    """One piece of memory, given out first-fit; a piece comes back when the tensor itself is gone, views or not.

    >>> arena = Arena(torch.empty(1024, dtype=torch.uint8))
    >>> a, b = arena.take((64,), torch.float32), arena.take((300,), torch.int16)
    >>> arena.take((64,), torch.float32) is None, arena.free_bytes
    (True, 0)
    >>> del a
    >>> arena.take((8, 8), torch.float32).shape
    torch.Size([8, 8])
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._free = [(0, memory.numel() // _ALIGNMENT * _ALIGNMENT)]  # (start, end), ascending, never adjacent
        self._back: deque[tuple[int, int]] = deque()  # pieces that came back, in whichever thread let go of them

    @property
    def free_bytes(self) -> int:
        self._merge()
        return sum(end - start for start, end in self._free)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """None where no hole is large enough."""
        wanted = torch.Size(shape).numel() * dtype.itemsize
        room = -(-wanted // _ALIGNMENT) * _ALIGNMENT
        self._merge()
        for index, (start, end) in enumerate(self._free):
            if end - start >= room:
                self._free[index : index + 1] = [(start + room, end)] if end - start > room else []
                piece = self._memory[start : start + wanted].view(dtype).view(shape)
                weakref.finalize(piece, self._back.append, (start, start + room)).atexit = False
                return piece
        return None

    def _merge(self) -> None:
        """Only here and in `take` the list of holes changes: by one thread at a time, the mover."""
        if not self._back:
            return
        while self._back:
            insort(self._free, self._back.popleft())
        merged: list[tuple[int, int]] = []
        for low, high in self._free:
            if merged and merged[-1][1] == low:
                merged[-1] = (merged[-1][0], high)
            else:
                merged.append((low, high))
        self._free = merged


def device_memory(nbytes: int, device: torch.device) -> Tensor | None:
    """A piece of the accelerator's memory; None where it has not so much left."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        log.warning("no %d bytes of %s are left for donors: leave room for them beside the KV cache", nbytes, device)
        return None


def page_locked(nbytes: int, device: torch.device | None = None) -> Tensor | None:
    """Host memory that CUDA copies to and from without help; None where the system refuses so much."""
    del device  # every GPU of the process may use it
    try:
        cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        memory = torch.empty(nbytes, dtype=torch.uint8)
        code = int(cuda.cudaHostRegister(memory.data_ptr(), nbytes, 0))
    except (RuntimeError, MemoryError) as error:
        log.warning("%d bytes of host memory for donors: %s", nbytes, error)
        return None
    if code != 0:
        log.warning(
            "CUDA does not lock %d bytes of host memory (error %d): copies of donors will be slower", nbytes, code
        )
        return None
    weakref.finalize(memory, cuda.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory


class Courier:
    """Queues copies off one accelerator, in order, beside what computes there; says when each has arrived."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._under_way: list[tuple[Arrival, int]] = []

    @property
    def backlog_bytes(self) -> int:
        """Bytes that have not arrived yet."""
        self._under_way = [(arrival, nbytes) for arrival, nbytes in self._under_way if not arrival.query()]
        return sum(nbytes for _, nbytes in self._under_way)

    def finish(self) -> None:
        """Wait until everything has arrived."""
        self._stream.synchronize()

    def queue(self, nbytes: int, copies: Callable[[], None], read: Sequence[Tensor] = ()) -> Arrival:
        """``copies`` runs now and only queues; what was computed before this call is what it reads.

        The memory of ``read`` is not given to others before the copies are over, whoever lets go of the tensors.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        context: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        with context:
            copies()
            for tensor in read:
                tensor.record_stream(self._stream)
            arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrival.record(self._stream)
        self._under_way.append((arrival, nbytes))
        return arrival


MAX_BACKLOG = 6 << 30
"""Bytes under way to the host, about 120 ms of a fast bus: a donor that comes on top of more than that is not kept."""


class DonorMemory:
    """Buffers of donors, and the copies that fill them. One thread at a time, the mover of `DonorKv`."""

    def __init__(self, bits: int = 16) -> None:
        if bits not in (8, 16):
            raise InputError(f"donors at {bits} bits", hint="16, or 8 for half the memory")
        self.packs = bits == 8
        self.arenas: dict[str, Arena] = {}
        self.courier: Courier | None = None
        self._pinned = torch.cuda.is_available()

    def reserve(self, device: torch.device, budget: Mapping[str, int]) -> None:
        """Takes the budgets' memory at once, so that no capture waits for an allocator. Only for a GPU's donors.

        What the system refuses is allocated donor by donor, as without this call.
        """
        if device.type != "cuda":
            return
        for tier, reserved in (("device", device_memory), ("host", page_locked)):
            memory = reserved(budget[tier], device) if budget[tier] and tier not in self.arenas else None
            if memory is not None:
                self.arenas[tier] = Arena(memory)

    def list_shapes(self, tier: str, shape: tuple[int, ...], dtype: torch.dtype) -> Shapes:
        """The tensors of a donor with keys of this shape, when it is copied into a tier."""
        if self.packs and tier != "device":
            return packed_shapes(*shape)
        return dict.fromkeys(("k", "v"), (shape, dtype))

    def list_moved(self, entry: Entry, tier: str) -> Shapes:
        """The tensors that an entry will have in a tier: what leaves the device is packed, what is packed stays so."""
        if "k_scale" in entry.tensors:
            return {name: (tuple(part.shape), part.dtype) for name, part in entry.tensors.items()}
        k = entry.tensors["k"]
        return self.list_shapes(tier, tuple(k.shape), k.dtype)

    def take(self, tier: str, shapes: Shapes, device: torch.device | None = None) -> dict[str, Tensor] | None:
        """Memory for these tensors; None where a tier whose memory was taken at once has no hole for them now.

        Nothing is allocated beside such memory: to lock pages takes a tenth of a second, in the step of a request.
        """
        made: dict[str, Tensor] = {}
        for name, (shape, dtype) in shapes.items():
            if tier in self.arenas:
                found = self.arenas[tier].take(shape, dtype)
            else:
                found = torch.empty(shape, dtype=dtype, device=device, pin_memory=self._pinned and tier == "host")
            if found is None:
                return None
            made[name] = found
        return made

    def count_free(self, tier: str) -> int:
        """Bytes of memory taken at once that are free now, in however many holes."""
        return self.arenas[tier].free_bytes if tier in self.arenas else 0

    def fill(self, entry: Entry, layout: Layout, slots: Tensor) -> None:
        """Copies the engine's cache into the entry's tensors."""
        index, parts = copy_to_device(slots, layout.device), entry.tensors

        def copy() -> None:
            if "k_scale" in parts:
                gather_packed(layout, index, parts)
            else:
                gather(layout, index, parts["k"], parts["v"])

        entry.arrives = self.queue(layout.device, entry.nbytes, copy, index, *parts.values())

    def move(self, entry: Entry, out: dict[str, Tensor]) -> Arrival | None:
        """Copies the entry's tensors into those of another tier; returns when they arrive, None where they have."""
        parts = entry.tensors
        if out["k"].device.type != "cpu":
            entry.wait_for_copy()
        packs = "k_scale" in out and "k_scale" not in parts

        def copy() -> None:
            if packs:
                pack_donor(parts, out)
                return
            for name, part in parts.items():
                out[name].copy_(part, non_blocking=True)

        device = next((one.device for one in (out["k"], parts["k"]) if one.device.type != "cpu"), out["k"].device)
        if device.type == "cpu" and self.courier is not None:
            self.courier.finish()  # of the piece that is written now: who had it before may have been on its way
        arrives = self.queue(device, entry.nbytes, copy, *parts.values(), *out.values())
        if arrives is not None and out["k"].device.type != "cpu":
            arrives.synchronize()  # the host's memory is somebody else's after this
            return None
        return arrives

    def pack(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as files hold them, on the host where they have to be packed."""
        if not self.packs or "k_scale" in parts:
            return parts
        out = {name: torch.empty(shape, dtype=kind) for name, (shape, kind) in packed_shapes(*parts["k"].shape).items()}
        pack_donor({name: part.cpu() for name, part in parts.items()}, out)
        return out

    def queue(self, source: torch.device, nbytes: int, copies: Callable[[], None], *used: Tensor) -> Arrival | None:
        """Copies: queued off a GPU, done at once elsewhere. Memory of ``used`` stays theirs until they are over."""
        if source.type != "cuda":
            copies()
            return None
        if self.courier is None:
            self.courier = Courier(source)
        return self.courier.queue(nbytes, copies, [tensor for tensor in used if tensor.device.type == "cuda"])

    def refuse_backlog(self) -> None:
        """Raises `CapacityError` while too much is on its way to the host."""
        backlog = 0 if self.courier is None else self.courier.backlog_bytes
        if backlog > MAX_BACKLOG:
            raise CapacityError(
                f"{backlog} bytes of donors are still on their way to the host",
                hint="give donors a budget on the device",
            )
