"""A blender that tells, after every pass, what could be seen of the damage that is left: candidates for the gate.

Nothing here costs a pass of its own: all of it lies in what the passes of `balanced` compute anyway.

    kl_last      how far this pass moved the distribution after the prompt's last token
    kl_tail      the same, averaged over the last 16 tokens of the prompt; kl_tail_max: the largest of them
    exposure     attention that the question pays to tokens which still are a donor's
    repaired_dev how far the donor's KV of the tokens just repaired was from the computed one, all layers, by attention
    residual     exposure x repaired_dev: the damage that is left if the rest deviates as the repaired did
    tail_dev     how far this pass moved the KV of the prompt's last tokens, all layers; tail_dev_late: last third
    entropy, margin   of the distribution after the last token
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semblend.materialize.blend.blender import Blender, Repair
from semblend.materialize.blend.passes import PassRunner
from semblend.materialize.blend.quality import Pass, Step
from semblend.materialize.contract import Layout, Observer, Rows

TAIL = 16


class _Deviation(Observer):
    """Relative change of K and V of every row that a pass writes, by layer; passes on what another observer wants."""

    def __init__(self, inner: Observer | None) -> None:
        self.inner = Observer() if inner is None else inner
        self.chunks: list[list[Tensor]] = []

    def before_write(self, layer: int, k: Tensor, v: Tensor, rows: Rows, layout: Layout) -> None:
        self.inner.before_write(layer, k, v, rows, layout)
        found = torch.zeros(len(k), device=k.device)
        for computed, held in zip((k, v), layout.gather(layer, rows.slots), strict=True):
            was = held.float()
            found += (computed.float() - was).square().sum((1, 2)) / was.square().sum((1, 2)).clamp_min(1e-6)
        if layer == 0:
            self.chunks.append([])
        self.chunks[-1].append(found.clamp_max(4.0).sqrt())

    def on_layer(self, layer: int, q: Tensor, rows: Rows, layout: Layout) -> None:
        self.inner.on_layer(layer, q, rows, layout)

    @property
    def by_layer(self) -> Tensor:
        """[layers, rows]"""
        return torch.cat([torch.stack(chunk) for chunk in self.chunks], dim=1)


class WatchedPasses(PassRunner):
    """Calls ``tell(name, signals, logits)`` after each pass that waits; ``signals`` is empty after the first."""

    tell: Callable[[str, dict[str, float], Tensor], None]
    so_far: tuple[Pass, ...] = ()

    def compute(self, state: Any, name: str, rows: Any, observer: Any, *, check: bool = False) -> float:
        stale, mass, before = state.stale, state.mass, state.tail
        look = _Deviation(observer)
        moved = super().compute(state, name, rows, look, check=check)
        signals: dict[str, float] = {}
        if before is not None and mass is not None:
            signals = self._signals(state, rows, stale, mass, before, look.by_layer)
        self.so_far = tuple(state.passes)
        self.tell(name, signals, state.tail)
        return moved

    def _signals(self, prompt: Any, rows: Any, stale: Any, mass: Any, before: Tensor, dev: Tensor) -> dict[str, float]:
        p, q = prompt.tail.double().log_softmax(-1), before.double().log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1).clamp_min(0)
        top = p[-1].exp().topk(2).values
        per_row = dev.mean(0).cpu().numpy()
        new = np.isin(rows, stale)
        weight = mass[rows[new]]
        left = float(mass[prompt.stale].sum())
        repaired = float((per_row[new] * weight).sum() / max(weight.sum(), 1e-12)) if new.any() else 0.0
        late = dev[-len(dev) // 3 :, -TAIL:]
        return {
            "kl_last": float(kl[-1]), "kl_tail": float(kl.mean()), "kl_tail_max": float(kl.max()),
            "kl_tail_4": float(kl[-4:].mean()), "exposure": left, "mass_repaired": float(weight.sum()),
            "repaired_dev": repaired, "residual": left * repaired, "tail_dev": float(dev[:, -TAIL:].mean()),
            "tail_dev_late": float(late.mean()), "last_dev": float(dev[:, -1].mean()),
            "entropy": float(-(p[-1].exp() * p[-1]).sum()), "margin": float(top[0] - top[1]),
            "stale_share": len(prompt.stale) / len(prompt.tokens), **self._layer_1(prompt, stale, mass),
        }  # fmt: skip

    def _layer_1(self, prompt: Any, stale: Any, mass: Any) -> dict[str, float]:
        """Layer-1 deviation of what was a donor's before this pass, by attention; of the most attended alone, too."""
        if prompt.deviation is None:
            return {}
        weight, dev = mass[stale], prompt.deviation[stale]
        top = np.argsort(-weight)[:256]
        return {
            "dev_1": float((dev * weight).sum() / max(weight.sum(), 1e-12)),
            "dev_1_top": float((dev[top] * weight[top]).sum() / max(weight[top].sum(), 1e-12)),
            "dev_1_plain": float(dev.mean()),
        }


class WatchedBlender(Blender):
    """A blender whose passes are watched."""

    repair_type: type[Repair] = Repair

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.watched = self._passes = WatchedPasses(self.model, self.settings, self._ranks)
        self._repair = self.repair_type(self._passes)


class OracleRepair(Repair):
    """Knows the cold KV, and ranks by the true deviation of all layers: how good could a choice of tokens be."""

    cold_slots: Tensor

    def _measure_deviation(self, state: Any, *, squared: bool) -> Any:  # noqa: ARG002
        at = torch.from_numpy(state.stale).to(state.context.device)
        found, layout = torch.zeros(len(at), device=at.device), self._passes.model.layout
        for layer in range(layout.layers):
            pairs = zip(*(layout.gather(layer, slots[at]) for slots in (self.cold_slots, state.context)), strict=True)
            for true, held in ((a.float(), b.float()) for a, b in pairs):
                found += ((true - held).square().sum((1, 2)) / true.square().sum((1, 2)).clamp_min(1e-6)).sqrt()
        values = np.zeros(len(state.tokens))
        values[state.stale] = found.cpu().numpy()
        return values


class OracleBlender(WatchedBlender):
    """A blender that repairs by the true deviation; tell ``oracle`` where the cold KV lies."""

    repair_type = OracleRepair

    @property
    def oracle(self) -> OracleRepair:
        assert isinstance(self._repair, OracleRepair)
        return self._repair


class RolloutRepair(Repair):
    """Repairs 10 %, adds what those tokens attend to themselves to what the question attends to, and chooses anew."""

    def repair(self, state: Any) -> str:
        first = self._choose_tokens(state, Step(10, "attended"))
        look = _Rollout(state.mass)
        self._passes.compute(state, "repair 10 %", self._add_affected(state, first), look)
        state.mass = state.mass + look.mass.cpu().numpy()
        state.computed[np.intersect1d(first, state.reused)] = False
        chosen = self._choose_tokens(state, self._settings.steps[-1])
        self._passes.compute(state, "repair 40 %", self._add_affected(state, chosen), None)
        return "accepted"


class RolloutBlender(WatchedBlender):
    """A blender that repairs by a rollout of attention."""

    repair_type = RolloutRepair


class _Rollout(Observer):
    """Attention of all rows of a pass, each weighing what the question pays to it."""

    def __init__(self, mass: Any) -> None:
        self.weights = torch.from_numpy(np.asarray(mass, dtype=np.float32))
        self.mass = torch.zeros(len(mass))

    def on_layer(self, layer: int, q: Tensor, rows: Rows, layout: Layout) -> None:
        context = rows.context
        if layer == 0:
            self.weights, self.mass = self.weights.to(q.device), self.mass.to(q.device)
        k = layout.keys(layer, context)
        group = q.shape[1] // k.shape[1]
        weight = self.weights[rows.positions]
        hidden = torch.arange(len(context), device=q.device) > rows.positions[:, None]
        for head in range(q.shape[1]):
            scores = (q[:, head] @ k[:, head // group].T).float() * q.shape[2] ** -0.5
            self.mass += weight @ scores.masked_fill(hidden, -torch.inf).softmax(-1) / q.shape[1]
