"""What splice carries: a donor's tensors, and where a run of its tokens goes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from semblend.materialize.kv.rope import RopeSpec


@dataclass(frozen=True, slots=True, eq=False)
class DonorTensors:
    """Keys and values of a donor's tokens, ``[layers, n, kv_heads, head_dim]`` each; row i is the donor's token i.

    ``rope`` is the rotation that the keys have, where it was recorded. Read the tensors, never write them.
    """

    k: Tensor
    v: Tensor
    donor_id: str = ""
    generation: int = 0
    rope: RopeSpec | None = None

    @property
    def tokens(self) -> int:
        return int(self.k.shape[1])


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
