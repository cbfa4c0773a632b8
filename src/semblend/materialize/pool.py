"""The pool of KV blocks that calibration computes in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Pool(Protocol):
    """Hands out blocks of the cache that the model computes in."""

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def blocks_for(self, tokens: int) -> int: ...
    def allocate(self, n_blocks: int) -> list[int]: ...
    def free(self, blocks: Sequence[int]) -> None: ...
    def slots_of(self, blocks: Sequence[int], start: int, end: int) -> Tensor: ...
