"""Where vLLM's attention backend really keeps the key and value of a token. Measured, not assumed.

The shape that a backend registers says little: on a CPU keys are stored transposed inside a block, with AMX in tiles.
So the backend's own writer fills one scratch block with numbered keys and values, once, and what lies where
afterwards is the layout. Most are strided views, which our splice kernel takes as they are; the rest go by an index.

A cache of 8-bit floats is laid out in bytes; what they mean is told in `quantised`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from semblend.errors import InputError
from semblend.materialize.kv.layout import KvLayout, Layout

Writer = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""``(keys, values, cache, slots)``: the backend's own way to write ``[n, kv_heads, head_dim]`` into a layer's cache."""

_BASE = 128  # digits that bfloat16 holds exactly
_NARROW_BASE = 8  # digits that also float8_e5m2 does
_NARROW_STEP = 0.125  # above a digit: a writer that cuts off what does not fit finds the same digit as one that rounds


@dataclass(frozen=True, eq=False)
class StridedLayout(KvLayout):
    """Views whose head dimensions need not be adjacent: fine for reading, not for the splice kernel of a GPU.

    Writing goes by the backend, which knows how to do it fast.
    """

    caches: tuple[Tensor, ...] = ()
    write: Writer | None = None

    def __post_init__(self) -> None:
        """Made by `probe_layout` from one kind of cache; nothing to check."""

    @property
    def views(self) -> KvLayout | None:
        return None  # our kernels want a head's dimensions side by side

    def scatter(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        if self.write is None:
            super().scatter(layer, slots, k, v)
        else:
            self.write(k.contiguous(), v.contiguous(), self.caches[layer], slots.long())


@dataclass(frozen=True, slots=True, eq=False)
class IndexedLayout:
    """Caches ``[blocks, ...]`` and, for keys and values, the place of every (token, head, dimension) in a block."""

    caches: tuple[Tensor, ...]
    places: tuple[Tensor, Tensor]
    write: Writer | None

    @property
    def layers(self) -> int:
        return len(self.caches)

    @property
    def block_tokens(self) -> int:
        return int(self.places[0].shape[0])

    @property
    def slots(self) -> int:
        return int(self.caches[0].shape[0]) * self.block_tokens

    @property
    def kv_heads(self) -> int:
        return int(self.places[0].shape[1])

    @property
    def head_dim(self) -> int:
        return int(self.places[0].shape[2])

    @property
    def dtype(self) -> torch.dtype:
        return self.caches[0].dtype

    @property
    def device(self) -> torch.device:
        return self.caches[0].device

    @property
    def views(self) -> KvLayout | None:
        return None

    def keys(self, layer: int, slots: Tensor) -> Tensor:
        return self._read(layer, slots, self.places[0])

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (self._read(layer, slots, places) for places in self.places)
        return k, v

    def _read(self, layer: int, slots: Tensor, places: Tensor) -> Tensor:
        blocks, offsets = self._at(slots)
        return self._flat(layer)[blocks[:, None, None], places[offsets]]

    def scatter(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        if self.write is not None:
            self.write(k.contiguous(), v.contiguous(), self.caches[layer], slots.long())
            return
        blocks, offsets = self._at(slots)
        for part, places in zip((k, v), self.places, strict=True):
            self._flat(layer)[blocks[:, None, None], places[offsets]] = part

    def _flat(self, layer: int) -> Tensor:
        return self.caches[layer].view(self.caches[layer].shape[0], -1)

    def _at(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        slots = slots.to(self.device)
        return slots // self.block_tokens, slots % self.block_tokens


@dataclass(frozen=True, slots=True)
class Digits:
    """Digits of the numbers that a probe writes, in a type and a base in which they are exact.

    ``narrow``: they are divided by scales and rounded, in whatever way, to that type of 8 bits.
    """

    dtype: torch.dtype
    narrow: torch.dtype | None = None
    scales: tuple[float, float] = (1.0, 1.0)

    def encode(self, digits: Tensor) -> list[Tensor]:
        step = _NARROW_STEP if self.narrow else 0.0
        parts = zip(digits.chunk(2), self.scales, strict=True)
        return [((part + step) * scale).to(self.dtype) for part, scale in parts]

    def read(self, written: Tensor) -> Tensor:
        """What was written, -1 where nothing was."""
        return written.view(self.narrow or written.dtype).flatten().double().nan_to_num(nan=-1.0).floor().long()


def probe_layout(
    caches: Sequence[Tensor],
    block_tokens: int,
    kv_heads: int,
    head_dim: int,
    write: Writer,
    digits: Digits | None = None,
) -> Layout:
    """The layout of these caches, one tensor a layer, all alike.

    ``digits``: that of bytes, where ``write`` takes wide numbers and rounds them. Bytes are not written by it again.
    """
    first = caches[0]
    for cache in caches:
        if (cache.shape, cache.stride(), cache.dtype) != (first.shape, first.stride(), first.dtype):
            raise InputError("layers keep their KV in different shapes", hint="one kind of full attention is supported")
    if digits is None and first.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise InputError(f"KV of type {first.dtype} cannot be moved", hint="do not quantise the KV cache")
    places = _places(first, (block_tokens, kv_heads, head_dim), write, digits or Digits(first.dtype))
    offsets = [_memory_offset(first, place) for place in places]
    k_steps, v_steps = (_strides(offset) for offset in offsets)
    if k_steps and v_steps and (k_steps == v_steps or first.device.type == "cpu" or digits is not None):
        k, v = (
            tuple(_view(cache, offset, steps) for cache in caches)
            for offset, steps in zip(offsets, (k_steps, v_steps), strict=True)
        )
        if digits is None and k_steps == v_steps and k_steps[2] == 1:
            return KvLayout(k, v)
        return StridedLayout(k, v, tuple(caches), write if digits is None else None)
    if not first[0].is_contiguous():
        raise InputError("blocks of the KV cache are neither strided nor contiguous", hint="report the backend's name")
    return IndexedLayout(tuple(caches), (places[0], places[1]), write if digits is None else None)


def _places(cache: Tensor, shape: tuple[int, int, int], write: Writer, digits: Digits) -> list[Tensor]:
    """For keys and values: which element of a flattened block holds (token, head, dimension)."""
    count = shape[0] * shape[1] * shape[2]
    scratch = torch.empty_strided((1, *cache.shape[1:]), cache.stride(), dtype=cache.dtype, device=cache.device)
    numbers = torch.arange(2 * count, device=cache.device)
    slots = torch.arange(shape[0], dtype=torch.int64, device=cache.device)
    found, value = torch.zeros(scratch.numel(), dtype=torch.int64, device=cache.device), 1
    base = _NARROW_BASE if digits.narrow else _BASE
    nothing = int(torch.tensor([-1.0]).to(digits.narrow).view(torch.uint8)) if digits.narrow else -1
    while value < len(numbers):
        k, v = digits.encode(numbers // value % base)
        scratch.fill_(nothing)
        write(k.view(shape), v.view(shape), scratch, slots)
        read = digits.read(scratch)
        found, value = found + read * value, value * base
    written = (read >= 0).nonzero().flatten()
    if not torch.equal(found[written].sort().values, numbers):
        raise InputError("the attention backend changes or drops KV when it stores it", hint="reuse is not possible")
    place = torch.empty_like(numbers)
    place[found[written]] = written
    return [part.view(shape).contiguous() for part in (place[:count], place[count:])]


def _view(cache: Tensor, offset: Tensor, steps: tuple[int, int, int]) -> Tensor:
    """``[blocks, block_tokens, kv_heads, head_dim]`` over the cache's own memory."""
    start = cache.storage_offset() + int(offset[0, 0, 0])
    return cache.as_strided((len(cache), *offset.shape), (cache.stride(0), *steps), start)


def _memory_offset(cache: Tensor, place: Tensor) -> Tensor:
    """From the element of a block to its distance in memory from the block's start."""
    offset, left = torch.zeros_like(place), place
    for size, step in reversed(list(zip(cache.shape[1:], cache.stride()[1:], strict=True))):
        offset, left = offset + left % size * step, left // size
    return offset


def _strides(offset: Tensor) -> tuple[int, int, int] | None:
    """The steps by token, head and dimension, where the same step holds everywhere."""
    origin = offset[0, 0, 0]
    steps = []
    for axis in range(3):
        step = int(offset.select(axis, 1)[0, 0] - origin) if offset.shape[axis] > 1 else 1
        steps.append(step)
    axes = torch.meshgrid(*(torch.arange(n, device=offset.device) for n in offset.shape), indexing="ij")
    line = origin + sum(step * axis for step, axis in zip(steps, axes, strict=True))
    return (steps[0], steps[1], steps[2]) if torch.equal(line, offset) else None
