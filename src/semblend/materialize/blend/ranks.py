"""Ranks that compute one model together, each with its own heads, and must decide alike."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from semblend.errors import RankError
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

    def largest(self, values: Tensor) -> Tensor:
        """The largest of the ranks' numbers, each by itself, still on the device; what is no number is infinite."""
        return self._agree(values.nan_to_num(nan=math.inf, posinf=math.inf), "max") if self.several else values

    def raise_if_several(self, error: Exception) -> None:
        """Raise `RankError` where other ranks wait for this one in what they compute together; else do nothing."""
        if isinstance(error, RankError):
            raise error
        if self.several:
            self._fail(error)

    def _agree(self, values: Tensor, how: str) -> Tensor:
        if not self.several:
            return values
        try:
            return self._model.agree(values, how)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> NoReturn:
        here, cause = self._model.capabilities, f"{type(error).__name__}: {error}".splitlines()[0]
        name = f"one of {here.ranks} ranks" if here.rank is None else f"rank {here.rank} of {here.ranks}"
        raise RankError(
            f"{name} failed while all of them computed reused KV: {cause}",
            hint="the ranks no longer agree, so the engine stops: start it again; without SemBlend if it comes back",
        ) from error
