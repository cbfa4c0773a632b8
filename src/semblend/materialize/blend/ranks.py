"""Ranks that compute one model together, each with its own heads, and must decide alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from semblend.materialize.blend.blend_state import array_of

Agree = Callable[[Tensor, str], Tensor]
"""``(values, "mean" | "max") -> the same on every rank``; every rank calls it as often as every other."""


class Ranks:
    """Whatever decides what is computed next passes through here, so that it is one number for all.

    Without ``agree`` there is one rank, and everything is as it sees it.
    """

    def __init__(self, agree: Agree | None, device: torch.device) -> None:
        self._agree, self._device = agree, device

    @property
    def several(self) -> bool:
        return self._agree is not None

    def seen(self, values: Tensor | None) -> npt.NDArray[np.floating[Any]]:
        """What an observer has seen, by all ranks together."""
        return array_of(values if values is None or self._agree is None else self._agree(values, "mean"))

    def number(self, value: float) -> float:
        """The mean of what the ranks have measured."""
        if self._agree is None:
            return value
        return float(self._agree(torch.tensor([value], device=self._device), "mean"))

    def worst(self, value: Tensor) -> Tensor:
        """The largest, still on the device."""
        return value if self._agree is None else self._agree(value.reshape(1), "max")[0]
