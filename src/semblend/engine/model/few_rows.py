"""The forward pass of a few rows on a CPU: the same layers as `DecoderModel.forward`, through compiled kernels.

A decode step of one answer or of several is a few rows, and so is what is left of a prompt behind an exact hit. Torch
spends more than half of such a pass between its operations. `FewRows` runs it in seven calls a layer; the torch pass
is its twin and its fallback: for more rows, another dtype or device, an observer, or where numba cannot be loaded.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from semblend.engine.model.paged_kv import KvPool
from semblend.engine.model.rows import RowBatch
from semblend.engine.model.spec import ModelSpec
from semblend.engine.model.weights import Weights

log = logging.getLogger("semblend.engine")
Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

MOST_ROWS = 16
"""A pass of up to so many rows goes through the kernels; their time grows with the rows, that of torch hardly does."""
_one_pass = threading.Lock()  # numba's simplest thread pool serves one caller at a time and ends the process for two


@dataclass(frozen=True, slots=True)
class Contexts:
    """Where each row's keys lie, as `kernels.attend` wants it."""

    slots: Integers
    lengths: Integers
    tasks: Integers

    @classmethod
    def of(cls, rows: RowBatch, split: int) -> Contexts:
        parts = [segment.context[: segment.reach].numpy() for segment in rows.segments]
        starts = np.cumsum([0, *(len(part) for part in parts[:-1])])
        lengths = rows.host_positions.numpy() + 1
        splits = -(-lengths // split)
        before = np.repeat(np.cumsum(splits) - splits, splits)
        tasks = np.repeat(np.arange(len(lengths)), splits), (np.arange(len(before)) - before) * split
        return cls(
            parts[0] if len(parts) == 1 else np.concatenate(parts),
            np.stack((np.repeat(starts, [len(segment) for segment in rows.segments]), lengths), axis=1),
            np.stack(tasks, axis=1),
        )


class FewRows:
    """A model's weights as the kernels read them: views of the same memory."""

    def __init__(self, spec: ModelSpec, weights: Weights, kernels: ModuleType) -> None:
        self._spec = spec
        self._kernels: Any = kernels
        self._eps = np.float32(spec.norm_eps)
        self._layers = [
            {field.name: _as_array(getattr(layer, field.name)) for field in fields(layer)} for layer in weights.layers
        ]
        self._norm, self._head = _as_array(weights.norm), _as_array(weights.head)

    @classmethod
    def of(cls, spec: ModelSpec, weights: Weights) -> FewRows | None:
        """None where the torch pass has to do everything."""
        table = weights.embedding
        rope = spec.rope
        if table.device.type != "cpu" or table.dtype != torch.float32:
            return None
        if rope.style != "half" or rope.rotary_dim != rope.head_dim:
            return None
        try:
            kernels = importlib.import_module("semblend.engine.model.kernels")
        except ImportError:  # numba follows new Python versions with a delay
            log.info("numba cannot be loaded: few rows are computed by torch")
            return None
        return cls(spec, weights, kernels)

    def forward(self, hidden: Tensor, rows: RowBatch, pool: KvPool, cos: Tensor, sin: Tensor) -> Tensor:
        """Run embedded rows through every layer, in place; ``cos`` and ``sin`` are ``[n, head_dim]``, as in `Turn`."""
        spec, eps, kernels = self._spec, self._eps, self._kernels
        stream, slots = hidden.numpy(), rows.slots.numpy()
        cosines, sines = cos.numpy(), sin.numpy()
        keys, values = pool.k.numpy(), pool.v.numpy()
        contexts = Contexts.of(rows, kernels.SPLIT_KEYS)
        n, width = len(stream), spec.heads * spec.head_dim
        qkv = np.empty((n, width + 2 * spec.kv_heads * spec.head_dim), np.float32)
        seen, opened = np.empty((n, width), np.float32), np.empty((n, spec.intermediate), np.float32)
        with _use_threads_of_torch(kernels.numba):
            for k, v, w in zip(keys, values, self._layers, strict=True):
                kernels.project(stream, w["attention_norm"], eps, w["qkv"], w["qkv_bias"], qkv)
                kernels.turn(qkv, spec.heads, spec.kv_heads, cosines, sines, w["q_norm"], w["k_norm"], eps)
                kernels.write(qkv, spec.heads, k, v, slots)
                kernels.attend(qkv, spec.heads, k, v, contexts.slots, contexts.lengths, contexts.tasks, seen)
                kernels.add_product(seen, w["output"], stream)
                kernels.gate(stream, w["mlp_norm"], eps, w["gate_up"], opened)
                kernels.add_product(opened, w["down"], stream)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits ``[m, hidden] -> [m, vocab]``."""
        out = np.empty((len(hidden), len(self._head)), np.float32)
        with _use_threads_of_torch(self._kernels.numba):
            self._kernels.project(hidden.contiguous().numpy(), self._norm, self._eps, self._head, _NOTHING, out)
        return torch.from_numpy(out)


@contextmanager
def _use_threads_of_torch(numba: Any) -> Iterator[None]:
    """The kernels compute with as many threads as torch does, one pass at a time, and torch with as many as before.

    Where numba takes OpenMP (x86), its first launch sets the number of threads of this thread to the machine's cores,
    and torch reads the same number: a pass of 64 rows with one thread took .53 s of CPU time before, 1.8 s behind it.
    """
    with _one_pass:
        threads = torch.get_num_threads()
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        try:
            yield
        finally:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


_NOTHING: Floats = np.empty(0, np.float32)


def _as_array(tensor: Tensor | None) -> Floats:
    return _NOTHING if tensor is None else tensor.contiguous().numpy()
