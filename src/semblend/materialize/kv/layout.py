"""Where the key and value of a token lie in an engine's tensors.

Engines agree on the meaning of a slot (a row of the KV pool, ``block * block_tokens + offset``) and on nothing else:

=================================== ============================================
ours                                two tensors ``[layers, slots, heads, d]``
vLLM, keys before values            per layer ``[2, blocks, block, heads, d]``
vLLM, keys beside values            per layer ``[blocks, 2, block, heads, d]``
SGLang                              per layer two of ``[slots, heads, d]``
=================================== ============================================

All of them become one view per layer, ``[blocks, block_tokens, heads, d]``, with strides (a pool without blocks has
blocks of one token). The strides carry permuted layouts too, as long as a head's dimensions stay adjacent. Nothing is
copied: what is scattered through the layout is in the engine's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from semblend.errors import InputError

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Layout(Protocol):
    """Keys and values of an engine's cache by slot, ``[n, kv_heads, head_dim]``; `KvLayout` is one.

    What `keys` and `gather` return may be a view of the cache: read it before anything is written there.
    """

    @property
    def layers(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def views(self) -> KvLayout | None:
        """The same cache as strided views that our kernels can read and write; None where only its owner can."""

    def keys(self, layer: int, slots: Tensor) -> Tensor:
        """What queries meet: the keys, or the whole vectors where there are latents (`LatentLayout`)."""

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]: ...
    def scatter(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None: ...


@dataclass(frozen=True, eq=False)
class KvLayout:
    """Views of every layer's keys and values, ``[blocks, block_tokens, kv_heads, head_dim]``, all alike.

    >>> pool = torch.zeros(2, 2, 8, 3, 4)  # k and v of 2 layers, 8 slots, 3 heads of 4 dimensions
    >>> KvLayout.of_pool(pool[0], pool[1])
    KvLayout(layers=2, slots=8, kv_heads=3, head_dim=4, block_tokens=1, torch.float32 on cpu)
    """

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        if not self.k or len(self.k) != len(self.v):
            raise InputError(f"{len(self.k)} key and {len(self.v)} value layers", hint="give one of each per layer")
        first = self.k[0]
        if first.dim() != 4 or 0 in first.shape:
            raise InputError(
                f"KV of shape {list(first.shape)}", hint="expected [blocks, block_tokens, heads, head_dim]"
            )
        if first.dtype not in DTYPES:
            raise InputError(
                f"KV of type {first.dtype} cannot be spliced", hint="float32, float16 or bfloat16; not quantised"
            )
        if first.stride(3) != 1:
            raise InputError("a head's dimensions are not adjacent in memory", hint="use a layout with d innermost")
        for tensor in (*self.k, *self.v):
            alike = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            if alike != (first.shape, first.stride(), first.dtype, first.device):
                raise InputError("layers differ in shape, strides, type or device", hint="give one kind of cache")

    @classmethod
    def of_pool(cls, pool_k: Tensor, pool_v: Tensor) -> KvLayout:
        """The embedded engine's pool: ``[layers, slots, kv_heads, head_dim]`` for keys, the same for values."""
        return cls.of_rows(pool_k.unbind(0), pool_v.unbind(0))

    @classmethod
    def of_rows(cls, k_buffers: Sequence[Tensor], v_buffers: Sequence[Tensor]) -> KvLayout:
        """A cache without blocks: per layer ``[slots, kv_heads, head_dim]``, as SGLang's token-to-KV pool."""
        return cls(_rows(k_buffers), _rows(v_buffers))

    @property
    def layers(self) -> int:
        return len(self.k)

    @property
    def block_tokens(self) -> int:
        return self.k[0].shape[1]

    @property
    def slots(self) -> int:
        return self.k[0].shape[0] * self.k[0].shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k[0].shape[2]

    @property
    def head_dim(self) -> int:
        return self.k[0].shape[3]

    @property
    def dtype(self) -> torch.dtype:
        return self.k[0].dtype

    @property
    def device(self) -> torch.device:
        return self.k[0].device

    @cached_property
    def layer_starts(self) -> np.ndarray:
        """How many elements after the first layer's keys each layer's keys and values start: ``[layers, 2]``.

        The tensors may be allocated apart; a kernel that knows these distances reaches all of them in one launch.
        """
        size, anchor = self.dtype.itemsize, self.k[0].data_ptr()
        pairs = zip(self.k, self.v, strict=True)
        return np.array([[(tensor.data_ptr() - anchor) // size for tensor in pair] for pair in pairs], dtype=np.int64)

    @property
    def views(self) -> KvLayout | None:
        return self

    def keys(self, layer: int, slots: Tensor) -> Tensor:
        """The keys in ``slots``, ``[n, kv_heads, head_dim]``; a view where the slots lie side by side."""
        return _read(self.k[layer], slots)

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values in ``slots``, each ``[n, kv_heads, head_dim]``; views where the slots lie side by side."""
        return _read(self.k[layer], slots), _read(self.v[layer], slots)

    def scatter(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Writes keys and values ``[n, kv_heads, head_dim]`` into ``slots``."""
        at = self._places(slots)
        self.k[layer][at] = k
        self.v[layer][at] = v

    def _places(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        slots = slots.to(self.device)
        return slots // self.block_tokens, slots % self.block_tokens

    def __repr__(self) -> str:
        return (
            f"KvLayout(layers={self.layers}, slots={self.slots}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, "
            f"block_tokens={self.block_tokens}, {self.dtype} on {self.device})"
        )


@dataclass(frozen=True, eq=False, repr=False)
class LatentLayout(KvLayout):
    """Latents (MLA): a token has one vector; ``v`` is its first half, and ``k`` the second, whose end is rotated.

    Donors hold the halves as they hold keys and values. Queries of such a model are as wide as both of them.
    """

    def keys(self, layer: int, slots: Tensor) -> Tensor:
        """What queries meet: the whole vectors in ``slots``, ``[n, 1, 2 * head_dim]``."""
        return torch.cat((_read(self.v[layer], slots), _read(self.k[layer], slots)), dim=-1)


@dataclass(frozen=True, eq=False, repr=False)
class UnlikeLayout:
    """Layers with heads of unlike number or size: each is read and written as it is, and donors hold of every layer one
    row as wide as the widest (`fold`).

    ``parts``: of each layer, a layout that has it, and its number there.
    """

    parts: tuple[tuple[Layout, int], ...]
    views: ClassVar[None] = None  # our kernels want layers alike

    @property
    def layers(self) -> int:
        return len(self.parts)

    @property
    def slots(self) -> int:
        return self.parts[0][0].slots

    @property
    def kv_heads(self) -> int:
        return 1

    @cached_property
    def head_dim(self) -> int:
        return max(part.kv_heads * part.head_dim for part, _ in self.parts)

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0][0].dtype

    @property
    def device(self) -> torch.device:
        return self.parts[0][0].device

    def keys(self, layer: int, slots: Tensor) -> Tensor:
        part, number = self.parts[layer]
        return part.keys(number, slots)

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        part, number = self.parts[layer]
        return part.gather(number, slots)

    def scatter(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        part, number = self.parts[layer]
        part.scatter(number, slots, k, v)

    def __repr__(self) -> str:
        return f"UnlikeLayout({self.layers} layers, rows of up to {self.head_dim}, {self.dtype} on {self.device})"


def fold(layout: Layout, x: Tensor) -> Tensor:
    """Rows of a layer, ``[n, heads, size]``, as donors hold them: ``[n, kv_heads, head_dim]`` of the layout."""
    if not isinstance(layout, UnlikeLayout):
        return x
    return torch.nn.functional.pad(x.flatten(1), (0, layout.head_dim - x[0].numel())).unsqueeze(1)


def unfold(layout: Layout, layer: int, x: Tensor) -> Tensor:
    """Rows of a layer as the layer has them; what `fold` was given."""
    if not isinstance(layout, UnlikeLayout):
        return x
    part, _ = layout.parts[layer]
    return x[:, 0, : part.kv_heads * part.head_dim].reshape(-1, part.kv_heads, part.head_dim)


def _read(pages: Tensor, slots: Tensor) -> Tensor:
    """Rows of ``pages`` ``[blocks, block_tokens, kv_heads, head_dim]``, in the cheapest way.

    A CPU copies page by page several times faster than row by row, and need not copy what lies side by side. A GPU does
    not care, and asking it where slots lie costs a wait.
    """
    slots = slots.to(pages.device)
    size = pages.shape[1]
    on_cpu = slots.device.type == "cpu" and len(slots) > 0
    if size == 1:
        rows = pages[:, 0]
        if on_cpu and (first := _first_of_run(slots)) is not None:
            return rows[first : first + len(slots)]
        return rows.index_select(0, slots)
    if on_cpu and (blocks := _whole_blocks(slots, size)) is not None:
        return pages.index_select(0, blocks).flatten(0, 1)[: len(slots)]
    return pages[slots // size, slots % size]


def _first_of_run(slots: Tensor) -> int | None:
    """The first slot where all of them ascend one by one; None where they do not."""
    first = int(slots[0])
    if int(slots[-1]) - first != len(slots) - 1:
        return None
    return first if bool((slots[1:] - slots[:-1] == 1).all()) else None


def _whole_blocks(slots: Tensor, block_tokens: int) -> Tensor | None:
    """The blocks, where the slots are all of theirs in order (but for the end of the last); None where they are not."""
    if len(slots) < block_tokens:
        return None
    blocks = slots[::block_tokens] // block_tokens
    expected = (blocks[:, None] * block_tokens + torch.arange(block_tokens)).flatten()[: len(slots)]
    return blocks if torch.equal(expected, slots) else None


def _rows(buffers: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Pools of single rows as blocks of one token."""
    kept = tuple(buffers)
    for buffer in kept:
        if buffer.dim() != 3:
            raise InputError(f"a layer of shape {list(buffer.shape)}", hint="expected [slots, kv_heads, head_dim]")
    return tuple(buffer.unsqueeze(1) for buffer in kept)


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """A small host tensor on ``device``; a GPU gets it in its stream's order, and nobody waits for it."""
    if device.type != "cuda" or values.device.type == "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Makes a function that does again what it was given, into the same memory, and returns a copy of its answer."""


def record_launches(work: Callable[[], Tensor], pool: Any = None) -> Callable[[], Tensor]:
    """All that ``work`` queues on a GPU, as one launch (`Record`); what it reads is kept with it.

    ``work`` reads and writes the same memory each time and waits for nothing. ``pool``: memory for what it makes, which
    recordings share that never run side by side. Raises where it cannot be recorded. `torch.cuda.graph` is not used,
    because it gives back memory that others have put aside with the allocator.
    """
    work()  # compiles what has to be compiled
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        # Other threads of the engine may use the GPU meanwhile: their calls are none of the recording's business.
        recorded.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            answer = work()
        finally:
            recorded.capture_end()
    torch.cuda.current_stream().wait_stream(stream)

    def repeat(_kept: Callable[[], Tensor] = work) -> Tensor:  # with the tensors that the recording reads
        recorded.replay()
        return answer.clone()

    return repeat
