"""Rotary position embedding, and the one thing we add to it: moving a cached key to another position.

A rotary model turns pair ``i`` of a key by ``position * inv_freq[i]`` before caching it. Turning it further by
``shift * inv_freq[i]`` therefore gives, exactly, the key of the same hidden state ``shift`` positions later. Angles
are computed in double precision and the turn in single precision or better: in half precision a shift of 200,000
would already be off by whole turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semblend.errors import InputError
from semblend.materialize.kv.rope_config import (
    Style,
    family_of,
    frequencies,
    head_dim,
    refusal,
    rope_parameters,
    rotary_dim,
)

__all__ = ["RopeSpec", "refusal"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The rotation of one model: frequencies after scaling, which dimensions form a pair, and how many rotate.

    ``attention_factor`` multiplies rotated queries and keys when they are computed (YaRN). A cached key has it
    already, so ``relocate`` leaves it alone. ``dynamic`` says that the frequencies depend on the prompt's length: then
    keys may move only between prompts of equal ``inv_freq``.

    >>> RopeSpec.plain(head_dim=4, theta=10_000.0).inv_freq
    (1.0, 0.01)
    """

    head_dim: int
    rotary_dim: int
    style: Style
    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0
    dynamic: bool = False

    def __post_init__(self) -> None:
        if self.style not in ("half", "interleaved"):
            raise InputError(f"rotary style {self.style!r} is not known", hint="use 'half' or 'interleaved'")
        if not 2 <= self.rotary_dim <= self.head_dim or self.rotary_dim != 2 * len(self.inv_freq):
            raise InputError(
                f"{len(self.inv_freq)} frequencies, {self.rotary_dim} rotary dimensions and head size {self.head_dim} "
                "do not fit together",
                hint="rotary_dim is twice the number of frequencies and at most head_dim",
            )

    @classmethod
    def plain(cls, head_dim: int, theta: float = 10_000.0, style: Style = "half") -> RopeSpec:
        """The original rotation over the whole head, without scaling."""
        return cls(head_dim, head_dim, style, tuple(theta ** (-i / head_dim) for i in range(0, head_dim, 2)))

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], seq_len: int | None = None) -> RopeSpec:
        """Reads a ``config.json``; ``seq_len`` is the prompt's length, which only dynamic scaling needs.

        This says how keys are rotated, not whether they may be moved: that is ``refusal``.
        """
        inv_freq, attention_factor = frequencies(config, seq_len)
        return cls(
            head_dim=head_dim(config),
            rotary_dim=rotary_dim(config),
            style=family_of(config).style,
            inv_freq=inv_freq,
            attention_factor=attention_factor,
            dynamic=rope_parameters(config)["rope_type"] == "dynamic",
        )

    def cos_sin(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Cosines and sines of ``positions[...]``, each ``[..., rotary_dim / 2]``, attention factor included."""
        cos, sin = self._turn(positions)
        return (cos * self.attention_factor).to(dtype), (sin * self.attention_factor).to(dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates queries or keys ``x[..., heads, head_dim]`` when they are computed; ``cos_sin`` gives the rest."""
        self._check(x)
        return self._apply(x, cos.unsqueeze(-2), sin.unsqueeze(-2))

    def relocate(self, k: Tensor, shift: Tensor | int) -> Tensor:
        """Keys ``k[..., head_dim]`` computed at p become those at p + shift; always a new tensor.

        ``shift`` is one number, or a tensor that broadcasts over ``k.shape[:-1]`` (``shift[:, None]`` for
        ``k[n, heads, head_dim]``). A shift of 0 returns the key bit for bit.
        """
        self._check(k)
        if isinstance(shift, int):
            if shift == 0:
                return k.clone()
            shift = torch.tensor(shift, device=k.device)
        if shift.is_floating_point() or shift.dtype == torch.bool:
            raise InputError("a shift counts positions and must be an integer", hint="cast it to torch.int64")
        cos, sin = self._turn(shift.to(k.device))
        wide = torch.promote_types(k.dtype, torch.float32)
        moved = self._apply(k, cos.to(wide), sin.to(wide))
        return torch.where((shift == 0).to(k.device).unsqueeze(-1), k, moved)

    def relocation_table(self, shifts: Sequence[int]) -> np.ndarray:
        """Cosines, then sines, of whole moves: ``[2, len(shifts), rotary_dim / 2]`` in single precision."""
        angles = np.multiply.outer(np.asarray(shifts, dtype=np.float64), np.asarray(self.inv_freq))
        return np.stack((np.cos(angles), np.sin(angles))).astype(np.float32)

    def cannot_follow(self, donor: RopeSpec | None) -> str | None:
        """Why keys computed with ``donor``'s rotation cannot be relocated under this one; None when they can.

        ``None`` as donor means that its rotation was not recorded, which is fine while frequencies never change.
        """
        if donor is None:
            return "dynamic frequencies need the donor's own rotation to compare with" if self.dynamic else None
        if donor.inv_freq != self.inv_freq:
            return "donor and target were computed with different rotary frequencies"
        if (donor.style, donor.head_dim, donor.attention_factor) != (self.style, self.head_dim, self.attention_factor):
            return "donor and target rotate in different ways"
        return None

    def _check(self, x: Tensor) -> None:
        if x.shape[-1] != self.head_dim:
            raise InputError(f"heads of {x.shape[-1]} dimensions, not {self.head_dim}", hint="is it the same model?")
        if not x.is_floating_point() or x.dtype.itemsize < 2:
            raise InputError(f"keys of type {x.dtype} cannot be rotated", hint="use float32, float16 or bfloat16")

    def _turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.to(torch.float64).unsqueeze(-1) * _frequency_tensor(self.inv_freq, positions.device)
        return angles.cos(), angles.sin()

    def _apply(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = self.rotary_dim // 2
        wide = x[..., : self.rotary_dim].to(torch.promote_types(x.dtype, torch.float32))
        if self.style == "half":
            first, second = wide[..., :half], wide[..., half:]
        else:
            first, second = wide[..., 0::2], wide[..., 1::2]
        turned = first * cos - second * sin, second * cos + first * sin
        joined = torch.cat(turned, dim=-1) if self.style == "half" else torch.stack(turned, dim=-1).flatten(-2)
        rest = x[..., self.rotary_dim :].expand(*joined.shape[:-1], -1)
        return torch.cat((joined.to(x.dtype), rest), dim=-1)


@lru_cache(maxsize=64)
def _frequency_tensor(inv_freq: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(inv_freq, dtype=torch.float64, device=device)
