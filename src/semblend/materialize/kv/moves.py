"""What splice carries: a donor's tensors, at 16 or at 8 bits, and where a run of its tokens goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from semblend.materialize.kv.rope import RopeSpec

# -- Donor KV at 8 bits: half the memory and half the bytes over a bus, for a small error.
#
# Keys and values are stored as whole numbers from -127 to 127 with a scale beside them. Some dimensions of a head
# are much larger than others, the same ones for all tokens, so there is a scale for each dimension of a head over a
# group of 64 tokens. Scales are bfloat16, rounded up, so that nothing is cut off.
# `docs/research/decisions/moving-kv.md` has the measurement.


LARGEST = 127
_ROUND_UP = 1 + 2.0**-7  # a bfloat16 is at most this much below the number it was made from


@dataclass(frozen=True, slots=True)
class Scales:
    """How scales are shared: by ``group_tokens`` tokens of one head and, unless ``by_dimension``, by its dimensions."""

    group_tokens: int
    by_dimension: bool

    def shape(self, layers: int, tokens: int, heads: int, head_dim: int) -> tuple[int, int, int, int]:
        """Of the scales of a tensor ``[layers, tokens, heads, head_dim]``."""
        return layers, -(-tokens // self.group_tokens), heads, head_dim if self.by_dimension else 1


SCALES: dict[str, Scales] = {"k": Scales(64, by_dimension=True), "v": Scales(64, by_dimension=True)}
"""Of keys and of values. They are part of the format of donor files: whoever changes them changes its magic."""


Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and type of a donor's tensors, by name."""


def count_bytes(shapes: Shapes) -> int:
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes.values())


def packed_shapes(layers: int, tokens: int, heads: int, head_dim: int) -> Shapes:
    """The four tensors that hold a donor at 8 bits.

    >>> count_bytes(packed_shapes(1, 64, 1, 64)) / (2 * 64 * 64 * 2)  # of what it takes at 16
    0.515625
    """
    whole = (layers, tokens, heads, head_dim)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = dict.fromkeys(SCALES, (whole, torch.int8))
    for name, scales in SCALES.items():
        shapes[f"{name}_scale"] = (scales.shape(*whole), torch.bfloat16)
    return shapes


def pack(x: Tensor, scales: Scales) -> tuple[Tensor, Tensor]:
    """``[n, heads, head_dim]`` as whole numbers and their scales, on the device of ``x``."""
    n, heads, head_dim = x.shape
    groups = -(-n // scales.group_tokens)
    wide = x.float()
    if (missing := groups * scales.group_tokens - n) > 0:
        wide = torch.cat((wide, wide.new_zeros(missing, heads, head_dim)))
    grouped = wide.view(groups, scales.group_tokens, heads, head_dim)
    largest = grouped.abs().amax(dim=1 if scales.by_dimension else (1, 3), keepdim=True)
    scale = (largest * (_ROUND_UP / LARGEST)).to(torch.bfloat16)
    step = scale.float().clamp_min(torch.finfo(torch.float32).tiny)
    numbers = (grouped / step).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
    return numbers.view(-1, heads, head_dim)[:n], scale.squeeze(1)


def unpack_rows(numbers: Tensor, scale: Tensor, rows: slice, group_tokens: int) -> Tensor:
    """Rows of one layer, ``[n, heads, head_dim]`` in float32; ``numbers`` and ``scale`` hold the whole layer."""
    groups = torch.arange(rows.start, rows.stop, device=scale.device) // group_tokens
    return numbers[rows].float() * scale[groups].float()


@dataclass(frozen=True, slots=True, eq=False)
class DonorTensors:
    """Keys and values of a donor's tokens, ``[layers, n, kv_heads, head_dim]`` each; row i is the donor's token i.

    ``rope`` is the rotation that the keys have, where it was recorded. A donor at 8 bits holds whole numbers and their
    scales (`semblend.materialize.kv.moves`). Read the tensors, never write them.
    """

    k: Tensor
    v: Tensor
    donor_id: str = ""
    generation: int = 0
    rope: RopeSpec | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @classmethod
    def of_parts(
        cls, parts: Mapping[str, Tensor], donor_id: str = "", generation: int = 0, rope: RopeSpec | None = None
    ) -> DonorTensors:
        """A donor from its tensors by name, as `parts` gives them."""
        return cls(
            parts["k"],
            parts["v"],
            donor_id,
            generation,
            rope,
            k_scale=parts.get("k_scale"),
            v_scale=parts.get("v_scale"),
        )

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors by name."""
        named = {"k": self.k, "v": self.v, "k_scale": self.k_scale, "v_scale": self.v_scale}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def packed(self) -> bool:
        """Whether it is held at 8 bits."""
        return self.k_scale is not None

    @property
    def tokens(self) -> int:
        return int(self.k.shape[1])

    def read_rows(self, name: str, layer: int, rows: slice) -> Tensor:
        """Keys (``k``) or values (``v``) of some rows of a layer, ``[n, kv_heads, head_dim]``.

        From 8 bits they come in single precision, so that they are rounded once, when they are written.
        """
        numbers = self.parts[name]
        scale = self.parts.get(f"{name}_scale")
        if scale is None:
            return numbers[layer, rows]
        return unpack_rows(numbers[layer], scale[layer], rows, SCALES[name].group_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """``length`` tokens of a donor, from ``donor_start``, go to ``target_slots``, ``shift`` positions further.

    ``donor_rope`` is the rotation that the donor was computed with, the donor's own word where it is None; models with
    dynamic frequencies need it. Target slots of all moves of a call are different from each other: nobody promises
    which of two writes wins.
    """

    donor: DonorTensors
    donor_start: int
    length: int
    target_slots: Tensor
    shift: int
    donor_rope: RopeSpec | None = None

    @property
    def rope(self) -> RopeSpec | None:
        """The rotation of the donor's keys, as far as it is known."""
        return self.donor_rope or self.donor.rope
