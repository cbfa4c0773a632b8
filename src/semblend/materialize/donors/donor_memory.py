"""The memory that donors lie in, and the copies into it: from an engine's cache, and from one tier to the next.

From a GPU to the host copies are queued on a stream of their own and nobody waits for them; see `host_memory`. With
``bits=8`` whatever leaves the device is packed on its way (`semblend.materialize.kv.eight_bits`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from semblend.errors import CapacityError, InputError
from semblend.materialize.donors.tier_index import Entry
from semblend.materialize.kv.eight_bits import count_packed_bytes, packed_shapes
from semblend.materialize.kv.gather import gather, gather_packed, pack_donor
from semblend.materialize.kv.host_memory import Arena, Arrival, Courier, copy_to_device, device_memory, page_locked
from semblend.materialize.kv.layout import Layout

MOST_BACKLOG = 6 << 30
"""Bytes under way to the host, about 120 ms of a fast bus: a donor that comes on top of more than that is not kept."""

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


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
        if device.type != "cuda" or self.arenas:
            return
        for tier, reserved in (("device", device_memory), ("host", page_locked)):
            memory = reserved(budget[tier], device) if budget[tier] else None
            if memory is not None:
                self.arenas[tier] = Arena(memory)

    def count_bytes(self, tier: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """What a donor with keys of this shape takes in a tier when it is copied there."""
        if self.packs and tier != "device":
            return count_packed_bytes(*shape)
        return 2 * torch.Size(shape).numel() * dtype.itemsize

    def measure(self, entry: Entry, tier: str) -> int:
        """Bytes that an entry will have in a tier: what leaves the device is packed, what is packed stays so."""
        k = entry.tensors["k"]
        return entry.nbytes if "k_scale" in entry.tensors else self.count_bytes(tier, tuple(k.shape), k.dtype)

    def fill(self, entry: Entry, layout: Layout, slots: Tensor) -> None:
        """Fills the entry from the engine's cache; in host memory where the device has none left."""
        source = layout.device
        shape = (layout.layers, slots.numel(), layout.kv_heads, layout.head_dim)
        wide = dict.fromkeys(("k", "v"), (shape, layout.dtype))
        if entry.tier == "device":
            try:
                entry.parts = self._allocate("device", wide, source)
            except torch.OutOfMemoryError:  # the pool and the weights leave less than the budget says
                entry.tier, entry.nbytes = "host", self.count_bytes("host", shape, layout.dtype)
        if entry.tier == "host":
            self._refuse_backlog()
            try:
                entry.parts = self._allocate("host", packed_shapes(*shape) if self.packs else wide)
            except (MemoryError, RuntimeError) as error:
                raise CapacityError(
                    f"no memory to copy donor {entry.donor_id!r}", hint="lower the donor budgets"
                ) from error
        index, parts = copy_to_device(slots, source), entry.tensors

        def copy() -> None:
            if "k_scale" in parts:
                gather_packed(layout, index, parts)
            else:
                gather(layout, index, parts["k"], parts["v"])

        entry.arrives = self.queue(source, entry.nbytes, copy, index, *parts.values())

    def move(self, entry: Entry, target: torch.device) -> tuple[dict[str, Tensor], Arrival | None]:
        """Copies of the entry's tensors for another tier, and when they arrive."""
        parts = entry.tensors
        if target.type != "cpu":
            entry.wait_for_copy()
            return {name: part.to(target) for name, part in parts.items()}, None
        packs = self.packs and "k_scale" not in parts
        same = {name: (tuple(part.shape), part.dtype) for name, part in parts.items()}
        out = self._allocate("host", packed_shapes(*parts["k"].shape) if packs else same)

        def sink() -> None:
            if packs:
                pack_donor(parts, out)
                return
            for name, part in parts.items():
                out[name].copy_(part, non_blocking=True)

        return out, self.queue(parts["k"].device, entry.nbytes, sink, *parts.values())

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

    def _refuse_backlog(self) -> None:
        backlog = 0 if self.courier is None else self.courier.backlog_bytes
        if backlog > MOST_BACKLOG:
            raise CapacityError(
                f"{backlog} bytes of donors are still on their way to the host",
                hint="give donors a budget on the device",
            )

    def _allocate(self, tier: str, shapes: Shapes, device: torch.device | None = None) -> dict[str, Tensor]:
        arena = self.arenas.get(tier)
        made = {}
        for name, (shape, dtype) in shapes.items():
            found = None if arena is None else arena.take(shape, dtype)
            if found is None:
                found = torch.empty(shape, dtype=dtype, device=device, pin_memory=self._pinned and tier == "host")
            made[name] = found
        return made
