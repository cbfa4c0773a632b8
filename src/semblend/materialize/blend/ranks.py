"""Ranks that compute one model together, each with its own heads, and must decide alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from semblend.materialize.blend.blend_state import Refused
from semblend.materialize.contract import Model
from semblend.plan.reuse_plan import DeclineReason


class Ranks:
    """Whatever decides what is computed next passes through here, so that it is one number for all ranks of a model.

    With one rank everything is as that rank sees it.
    """

    def __init__(self, model: Model) -> None:
        self._model = model

    @property
    def several(self) -> bool:
        return self._model.capabilities.ranks > 1

    def read(self, values: Tensor | None) -> npt.NDArray[np.floating[Any]]:
        """What an observer has seen, the mean of all ranks, on the host."""
        if values is None:
            raise Refused(DeclineReason.ERROR, "the observer saw nothing")
        found: npt.NDArray[np.floating[Any]] = self._agree(values, "mean").float().cpu().numpy()
        return found

    def mean(self, value: float) -> float:
        """The mean of what the ranks have measured."""
        if not self.several:
            return value
        return float(self._agree(torch.tensor([value], device=self._model.device), "mean"))

    def largest(self, value: Tensor) -> Tensor:
        """The largest of the ranks' numbers, still on the device."""
        return self._agree(value.reshape(1), "max")[0] if self.several else value

    def _agree(self, values: Tensor, how: str) -> Tensor:
        return self._model.agree(values, how) if self.several else values
