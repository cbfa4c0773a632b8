"""Memory that is taken once, and the stream that fills it: what makes a copy of a donor cost nobody time.

A copy between accelerator and host runs beside computation only if the host's memory is page-locked; locking pages is
slow, and so is asking an accelerator for memory. So donors' memory is taken once, as an arena, and given out in pieces.
All copies of donors are queued on one stream of their own, in order: a piece that is given out again is written after
whatever wrote it before.
"""

from __future__ import annotations

import logging
import weakref
from bisect import insort
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

log = logging.getLogger("semblend.materialize")
_ALIGNMENT = 256


class Arrival(Protocol):
    """A copy on its way: a CUDA event, as far as we use one."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def wait(self) -> None: ...


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """A small host tensor on ``device``; a GPU gets it in its stream's order, and nobody waits for it."""
    if device.type != "cuda" or values.device.type == "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


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

    @property
    def free_bytes(self) -> int:
        return sum(end - start for start, end in self._free)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """None where no hole is large enough."""
        wanted = dtype.itemsize
        for size in shape:
            wanted *= size
        room = -(-wanted // _ALIGNMENT) * _ALIGNMENT
        for index, (start, end) in enumerate(self._free):
            if end - start >= room:
                self._free[index : index + 1] = [(start + room, end)] if end - start > room else []
                piece = self._memory[start : start + wanted].view(dtype).view(shape)
                weakref.finalize(piece, self._back, start, start + room).atexit = False
                return piece
        return None

    def _back(self, start: int, end: int) -> None:
        insort(self._free, (start, end))
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
