"""Llama, Qwen2 and Qwen3 as one plain function over rows and a paged KV pool.

The three families differ in two places: Qwen2 adds a bias to q, k and v, Qwen3 normalises q and k.

A few rows on a GPU cost what their kernel launches cost, so a layer is written in few operations: q and k turn
together, and a residual is added by the matrix product that precedes it.
"""

from __future__ import annotations

import importlib
import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, silu

from semblend.engine.model.attention import RowBatch, attend, shows_weights
from semblend.engine.model.paged_kv import KvPool
from semblend.engine.model.spec import ModelSpec
from semblend.engine.model.weights import LayerWeights, Weights, load_weights
from semblend.materialize.contract import Capabilities, KvLayout, Observer, Rows, StopPass
from semblend.materialize.kv.rope import RopeSpec

# -- The forward pass of a few rows on a CPU: the same layers as `DecoderModel.forward`, through compiled kernels.
#
# A decode step of one answer or of several is a few rows, and so is what is left of a prompt behind an exact hit.
# Torch spends more than half of such a pass between its operations. `SmallBatch` runs it in seven calls a layer; the
# torch pass is its twin and its fallback: for more rows, another dtype or device, an observer, or where numba cannot
# be loaded.


log = logging.getLogger("semblend.engine")
Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

MAX_SMALL_ROWS = 16
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


class SmallBatch:
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
    def of(cls, spec: ModelSpec, weights: Weights) -> SmallBatch | None:
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


@dataclass(frozen=True, slots=True)
class Turn:
    """The rotary embedding of one pass's rows: what `RopeSpec.rotate` computes, in fewer operations.

    Where the first half of a head turns against the second, ``x * cos + halves of x swapped * sin`` is the whole turn,
    the sines of the first half negated. Other rotations go the plain way.
    """

    rope: RopeSpec
    cos: Tensor
    sin: Tensor
    swaps: bool

    @classmethod
    def of(cls, rope: RopeSpec, positions: Tensor) -> Turn:
        cos, sin = rope.cos_sin(positions)  # float32: a turn in less would be off
        if rope.style != "half" or rope.rotary_dim != rope.head_dim:
            return cls(rope, cos, sin, swaps=False)
        return cls(rope, torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None], swaps=True)

    def __call__(self, x: Tensor) -> Tensor:
        """Queries or keys ``x[n, heads, head_dim]`` at their rows' positions; always a new tensor."""
        if not self.swaps:
            return self.rope.rotate(x, self.cos, self.sin)
        # x may be half precision; the cosines and sines are not, so products and sums are made in float32.
        return (x * self.cos).addcmul_(x.roll(x.shape[-1] // 2, -1), self.sin).to(x.dtype)


class DecoderModel:
    """Weights and a shape, on one device, in one dtype."""

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self.spec = spec
        self.weights = weights
        self._small_batch = SmallBatch.of(spec, weights)

    @classmethod
    def load(
        cls, path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
    ) -> DecoderModel:
        """A safetensors folder, a GGUF file, or the name of a model in the local Hugging Face cache."""
        return cls(*load_weights(path, device, dtype))

    @classmethod
    def random(
        cls,
        spec: ModelSpec,
        seed: int = 0,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> DecoderModel:
        """Weights from a seed, the same on every device: for tests and for measuring speed."""
        return cls(spec, _random_weights(spec, seed, device, dtype))

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    def new_pool(self, tokens: int) -> KvPool:
        """A pool for this model that holds ``tokens`` tokens."""
        return KvPool.for_model(self.spec, tokens=tokens, device=self.device, dtype=self.dtype)

    def warm_up(self) -> None:
        """Compute one row in a pool of its own: compiled kernels are compiled or loaded now, not in a request."""
        pool = self.new_pool(1)
        rows = Rows.of([0], [0], pool.slots_of(pool.allocate(1), 0, 1))
        self.logits(self.forward(rows, pool))

    @torch.inference_mode()
    def forward(
        self,
        rows: Rows | RowBatch,
        pool: KvPool,
        observer: Observer | None = None,
        *,
        stop: Callable[[], bool] | None = None,
    ) -> Tensor:
        """Run the rows through every layer, filling their slots of the pool. An observer sees one prompt's rows.

        Returns the residual stream after the last layer, ``[n, hidden]``; `logits` does the final norm, so
        that rows which nobody asks about do not pay for it. ``stop`` is asked before each layer: `StopPass` where it
        says so, and the rows have no KV then.
        """
        spec, weights = self.spec, self.weights
        rows = RowBatch.of(rows) if isinstance(rows, Rows) else rows
        hidden = embedding(rows.tokens, weights.embedding)
        turn = Turn.of(spec.rope, rows.positions)
        if observer is None and self._small_batch is not None and len(hidden) <= MAX_SMALL_ROWS:
            try:
                return self._small_batch.forward(hidden, rows, pool, turn.cos[:, 0], turn.sin[:, 0])
            except Exception:  # numba may refuse to compile or to start threads: torch computes the same
                log.warning("compiled kernels failed, torch computes from now on", exc_info=True)
                self._small_batch = None
                return self.forward(rows, pool)
        for layer, w in enumerate(weights.layers):
            if stop is not None and stop():
                raise StopPass
            q, k, v = self._project(w, self._norm(hidden, w.attention_norm), turn)
            if observer is not None:
                observer.before_write(layer, k, v, rows.parts[0], pool.layout)
            pool.write(layer, rows.slots, k, v)
            hidden.addmm_(self._attend(layer, q, rows, pool, observer), w.output.t())
            gate, up = linear(self._norm(hidden, w.mlp_norm), w.gate_up).chunk(2, dim=-1)
            hidden.addmm_(silu(gate).mul_(up), w.down.t())
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits of chosen rows, ``[m, hidden] -> [m, vocab]``, float32."""
        if self._small_batch is not None and len(hidden) <= MAX_SMALL_ROWS:
            try:
                return self._small_batch.logits(hidden)
            except Exception:
                log.warning("compiled kernels failed, torch computes from now on", exc_info=True)
                self._small_batch = None
        return linear(self._norm(hidden, self.weights.norm), self.weights.head).float()

    def _project(self, w: LayerWeights, x: Tensor, turn: Turn) -> tuple[Tensor, Tensor, Tensor]:
        spec = self.spec
        heads = linear(x, w.qkv, w.qkv_bias).view(len(x), -1, spec.head_dim)
        turning, v = heads[:, : -spec.kv_heads], heads[:, -spec.kv_heads :]
        if w.q_norm is not None and w.k_norm is not None:
            q, k = turning[:, : spec.heads], turning[:, spec.heads :]
            return turn(self._norm(q, w.q_norm)), turn(self._norm(k, w.k_norm)), v
        turned = turn(turning)
        return turned[:, : spec.heads], turned[:, spec.heads :], v

    def _attend(self, layer: int, q: Tensor, rows: RowBatch, pool: KvPool, observer: Observer | None) -> Tensor:
        if observer is None:
            return attend(q, layer, rows, pool)
        (part,) = rows.parts
        if observer.reads_weights and shows_weights(q, rows):  # what attention computes, nobody need compute again
            return attend(q, layer, rows, pool, lambda weights, start: observer.on_weights(weights, start, part))
        observer.on_layer(layer, q, part, pool.layout)
        return attend(q, layer, rows, pool)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, list(weight.shape), weight, self.spec.norm_eps)  # sums in float32 whatever the dtype


def _random_weights(spec: ModelSpec, seed: int, device: str | torch.device, dtype: torch.dtype) -> Weights:
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / math.sqrt(shape[-1])).to(device, dtype)

    def norm(width: int) -> Tensor:
        return (1.0 + 0.1 * torch.randn(width, generator=generator)).to(device, dtype)

    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    layers = tuple(
        LayerWeights(
            attention_norm=norm(spec.hidden),
            qkv=matrix(q_rows + 2 * kv_rows, spec.hidden),
            qkv_bias=matrix(q_rows + 2 * kv_rows) if spec.qkv_bias else None,
            q_norm=norm(spec.head_dim) if spec.qk_norm else None,
            k_norm=norm(spec.head_dim) if spec.qk_norm else None,
            output=matrix(spec.hidden, q_rows),
            mlp_norm=norm(spec.hidden),
            gate_up=matrix(2 * spec.intermediate, spec.hidden),
            down=matrix(spec.hidden, spec.intermediate),
        )
        for _ in range(spec.layers)
    )
    table = torch.randn(spec.vocab, spec.hidden, generator=generator).to(device, dtype)
    head = table if spec.tied_embeddings else matrix(spec.vocab, spec.hidden)
    return Weights(table, layers, norm(spec.hidden), head)


# -- The embedded model over its pool, as `semblend.materialize.contract` wants a model.


@dataclass(frozen=True, slots=True, eq=False)
class PooledModel:
    """A model and the pool it computes in; translates and does not think."""

    model: DecoderModel
    pool: KvPool
    capabilities: ClassVar[Capabilities] = Capabilities(native_spans=True)

    @property
    def layout(self) -> KvLayout:
        return self.pool.layout

    @property
    def rope(self) -> RopeSpec:
        return self.model.spec.rope

    @property
    def device(self) -> torch.device:
        return self.pool.device

    def forward(self, rows: Rows, observer: Observer | None = None) -> Tensor:
        return self.model.forward(rows, self.pool, observer)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)

    def agree(self, values: Tensor, how: str) -> Tensor:
        del how  # there is one rank
        return values
