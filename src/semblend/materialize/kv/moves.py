"""What splice carries: a donor's tensors, and where a run of its tokens goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from semblend.materialize.kv.eight_bits import SCALES, unpack_rows
from semblend.materialize.kv.rope import RopeSpec


@dataclass(frozen=True, slots=True, eq=False)
class DonorTensors:
    """Keys and values of a donor's tokens, ``[layers, n, kv_heads, head_dim]`` each; row i is the donor's token i.

    ``rope`` is the rotation that the keys have, where it was recorded. A donor at 8 bits holds whole numbers and their
    scales (`semblend.materialize.kv.eight_bits`). Read the tensors, never write them.
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
