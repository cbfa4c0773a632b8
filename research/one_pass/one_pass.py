"""Which tokens should one pass repair? Rules that need no first look at the whole model, against today's two passes.

    python research/one_pass/one_pass.py MODEL.gguf CASES.pkl.gz ROWS.jsonl --device cuda --budget-s 420

Every rule chooses a share of the reused tokens; one pass then computes the new tokens, the heads of spans, the prompt's
end and the chosen tokens together, over KV that was just relocated. Rules:

    attended       what the question attends to in all layers, seen in a pass of its own (today)
    attended@k     the same in the first k layers: that pass ends after k layers
    donor_q        attention of the donor's own last 16 tokens, kept with the donor when it was captured
    donor_all      attention of all later tokens of the donor (mean), kept with the donor
    deviation      layer-1 deviation of all reused tokens (CacheBlend)
    a x b          the product of two scores
    random         a control

Rows hold the divergence from cold (mean KL over cold's greedy answer, teacher forced), the share of FLOPs, and what that
one pass shows: candidates for a gate that looks inside it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semblend.engine.model.model import DecoderModel
from semblend.engine.model.model import PooledModel
from semblend.engine.model.attention import RowBatch
from semblend.engine.model.spec import ModelSpec
from semblend.materialize.blend.first_pass import first_rows
from semblend.materialize.blend.quality import QualitySettings
from semblend.materialize.contract import Observer, Rows, StopPass
from semblend.materialize.gate.observers import KvDeviation, add_attention, compute_deviation, count_question_rows
from semblend.materialize.kv.moves import DonorTensors, Move
from semblend.materialize.kv.rope import RopeSpec
from semblend.materialize.kv.splice import splice
from semblend.span import Span

EARLY = (2, 4, 8, 14)
PERCENTS = (10, 20)
LOOK_AT = (1, 2, 4, 8, 14)
"""Shares of depth at which the one pass is looked at, as layers of 28."""


class Watch(Observer):
    """Of one pass: the question's attention by layer, and how far rows' KV was from what the pass writes, by layer."""

    reads_weights = False

    def __init__(self, question_rows: int = 16) -> None:
        self.most, self.mass, self.deviation, self.tail = question_rows, [], [], []

    def before_write(self, layer: int, k: Tensor, v: Tensor, rows: Rows, layout: Any) -> None:
        self.deviation.append(compute_deviation(k, v, layout.gather(layer, rows.slots)))

    def on_layer(self, layer: int, q: Tensor, rows: Rows, layout: Any) -> None:
        asking = count_question_rows(rows.host_positions, self.most)
        found = torch.zeros(len(rows.context), device=q.device)
        add_attention(found, q[-asking:], layout.keys(layer, rows.context[: rows.reach]))
        self.mass.append(found)


class ColumnMass(Observer):
    """Attention that every position gets from all later ones, mean over them, layers and heads; and from the last 16."""

    reads_weights = False

    def __init__(self) -> None:
        self.all: Tensor | None = None
        self.last: Tensor | None = None

    def on_layer(self, layer: int, q: Tensor, rows: Rows, layout: Any) -> None:
        k, (count, heads, width) = layout.keys(layer, rows.context), q.shape
        if self.all is None:
            self.all, self.last = torch.zeros(count, device=q.device), torch.zeros(count, device=q.device)
        keys = k.permute(1, 2, 0)
        for start in range(0, count, 256):
            part = q[start : start + 256]
            asked = part.view(len(part), k.shape[1], -1, width).permute(1, 2, 0, 3).reshape(k.shape[1], -1, width)
            reach = start + len(part)
            scores = torch.bmm(asked, keys[..., :reach]).float().mul_(width**-0.5).view(heads, len(part), reach)
            at = torch.arange(start, reach, device=q.device)
            ahead = torch.arange(reach, device=q.device)[None] > at[:, None]
            weights = scores.masked_fill_(ahead, -torch.inf).softmax(-1)
            later = weights * (
                torch.arange(reach, device=q.device)[None] + 16 < at[:, None]
            )  # its neighbours are no news
            self.all[:reach] += later.sum((0, 1)) / heads
            if reach == count:
                self.last[:reach] += weights[:, -16:].sum((0, 1)) / heads

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        count = len(self.all)
        later = torch.arange(count - 1, -1, -1, device=self.all.device).clamp_min(16)
        return (self.all / later).cpu().numpy(), self.last.cpu().numpy()


class Bench:
    def __init__(self, model: DecoderModel, longest: int) -> None:
        self.model = model
        # cold, relocated, first, looks, one for each rule and percent
        self.pool = model.new_pool(40 * (longest + 128))
        self.pooled = PooledModel(model, self.pool)
        self.layers = model.spec.layers

    def slots(self, tokens: int, blocks: list[int]) -> Tensor:
        mine = self.pool.allocate(self.pool.blocks_for(tokens))
        blocks += mine
        return self.pool.slots_of(mine, 0, tokens)

    def compute(self, tokens: Tensor, at: np.ndarray, slots: Tensor, observer: Observer | None = None) -> Tensor | None:
        where = torch.from_numpy(np.asarray(at, np.int64))
        rows = Rows.of(tokens[where], where, slots)
        try:
            return self.model.forward(rows, self.pool, observer)
        except StopPass:
            return None

    def flops(self, rows: int, keys: int, layers: float) -> float:
        spec = self.model.spec
        weights = spec.hidden * spec.head_dim * 2 * (spec.heads + spec.kv_heads) + 3 * spec.hidden * spec.intermediate
        return layers * (2 * rows * weights + 4 * spec.heads * spec.head_dim * keys)

    def run(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        blocks: list[int] = []
        try:
            return self._run(case, blocks)
        finally:
            self.pool.free(blocks)

    def _run(self, case: dict[str, Any], blocks: list[int]) -> list[dict[str, Any]]:
        tokens = torch.tensor(case["tokens"])
        count, room = len(tokens), len(tokens) + 40
        spans = [Span(d, start, target, length) for d, start, target, length in case["spans"]]
        exact = 0
        donors, scores = {}, {"donor_all": np.zeros(count), "donor_q": np.zeros(count)}
        for number, ids in enumerate(case["donors"]):
            mine: list[int] = []
            place = self.slots(len(ids), mine)
            look = ColumnMass()
            self.compute(torch.tensor(ids), np.arange(len(ids)), place, look)
            k, v = (part[:, place].clone() for part in (self.pool.k, self.pool.v))
            donors[str(number)] = DonorTensors(k, v, str(number), 0, self.model.spec.rope)
            everybody, last = look.read()
            for span in spans:
                if span.donor_id == str(number):
                    at, there = slice(span.target_start, span.target_end), slice(span.donor_start, span.donor_end)
                    scores["donor_all"][at], scores["donor_q"][at] = everybody[there], last[there]
            self.pool.free(mine)
        if spans and spans[0].target_start == spans[0].donor_start == 0:  # an exact prefix is exact
            exact = min(spans[0].length, count - 16)
            spans = [s for s in spans if s.target_start >= exact]
            prefix = donors["0"]
        cold = self.slots(room, blocks)
        hidden = self.compute(tokens, np.arange(count), cold)
        cold_logits = self.model.logits(hidden[-1:])[0]
        relocated = self.slots(room, blocks)
        if exact:
            for part, mine in zip((self.pool.k, self.pool.v), (prefix.k, prefix.v), strict=True):
                part[:, relocated[:exact]] = mine[:, :exact]
        splice([Move(donors[s.donor_id], s.donor_start, s.length, relocated[s.target_start : s.target_end], s.shift)
                for s in spans], self.pool.layout, self.model.spec.rope)  # fmt: skip
        first = first_rows(count, exact, spans, QualitySettings())
        reused = np.concatenate([np.arange(s.target_start, s.target_end) for s in spans]) if spans else np.zeros(0, int)
        stale = np.setdiff1d(reused, first)
        if len(stale) < 64:
            return []

        def fresh() -> Tensor:
            place = self.slots(room, blocks)
            for part in (self.pool.k, self.pool.v):
                part[:, place[:count]] = part[:, relocated[:count]]
            return place

        look = Watch()
        fast = fresh()
        hidden = self.compute(tokens, first, fast, look)
        fast_logits = self.model.logits(hidden[-1:])[0]
        by_layer = torch.stack(look.mass).cumsum(0).cpu().numpy()[:, :count]
        scores["attended"] = by_layer[-1]
        for k in EARLY:
            scores[f"attended@{k}"] = by_layer[max(1, k * self.layers // 28) - 1]
        deviation = KvDeviation(layer=1)
        self.compute(tokens, stale, fresh(), deviation)
        scores["deviation"] = np.zeros(count)
        scores["deviation"][stale] = deviation.relative.float().cpu().numpy()
        rng = np.random.default_rng(abs(hash(case["case"])) % 2**32)
        scores["random"] = rng.random(count)
        for name in ("attended", "attended@4", "attended@8", "attended@14", "donor_all"):
            scores[f"{name} x deviation"] = scores[name] * scores["deviation"]
        scores["donor_all x attended@4"] = np.sqrt(scores["donor_all"] * scores["attended@4"])

        whole = self.flops(count - exact, sum(range(exact + 1, count + 1)), self.layers)
        made: list[dict[str, Any]] = [
            {"rule": "cold", "slots": cold, "logits": cold_logits, "flops": 1.0},
            {"rule": "fast", "slots": fast, "logits": fast_logits, "percent": 0,
             "flops": self.flops(len(first), int((first + 1).sum()), self.layers) / whole},
        ]  # fmt: skip
        for percent in PERCENTS:
            for rule, values in scores.items():
                if percent == 20 and rule in ("donor_q", "attended@2", "attended@14 x deviation", "random"):
                    continue
                wanted = max(1, round(percent / 100 * len(reused)))
                chosen = stale[np.argsort(-values[stale], kind="stable")[:wanted]]
                rows = np.union1d(first, chosen)
                place, look = fresh(), Watch()
                hidden = self.compute(tokens, rows, place, look)
                logits = self.model.logits(hidden[-1:])[0]
                cost = self.flops(len(rows), int((rows + 1).sum()), self.layers)
                if rule.startswith("attended"):
                    depth = self.layers if "@" not in rule else int(rule.split("@")[1].split()[0]) * self.layers // 28
                    cost += self.flops(len(first), int((first + 1).sum()), depth)
                if "attended@4" in rule and rule.startswith("donor"):
                    cost += self.flops(len(first), int((first + 1).sum()), 4 * self.layers // 28)
                if "deviation" in rule:
                    cost += self.flops(len(stale), int((stale + 1).sum()), 1.2)
                made.append({"rule": rule, "percent": percent, "slots": place, "logits": logits, "flops": cost / whole,
                             "signals": self._read_signals(look, rows, chosen, stale, values, logits, fast_logits)})  # fmt: skip
        return self._compare(case, made, count, exact, len(reused))

    def _read_signals(
        self, look: Watch, rows: np.ndarray, chosen: np.ndarray, stale: np.ndarray, values: np.ndarray,
        logits: Tensor, before: Tensor,
    ) -> dict[str, float]:  # fmt: skip
        deviation = torch.stack(look.deviation).cpu().numpy()  # [layers, rows]
        mass = torch.stack(look.mass).cpu().numpy()  # [layers, positions]
        new, left = np.isin(rows, chosen), np.setdiff1d(stale, chosen)
        p, q = logits.double().log_softmax(-1), before.double().log_softmax(-1)
        top = p.exp().topk(2).values
        found = {
            "kl_last": float((p.exp() * (p - q)).sum().clamp_min(0)), "entropy": float(-(p.exp() * p).sum()),
            "margin": float(top[0] - top[1]), "stale_share": len(left) / len(rows),
        }  # fmt: skip
        for k in (*LOOK_AT, 28):
            depth = max(1, k * self.layers // 28)
            weight = mass[:depth].sum(0)[rows[new]] + 1e-12
            near = deviation[1 : depth + 1, new] if depth < self.layers else deviation[1:, new]
            found[f"repaired_dev@{k}"] = float((near.mean(0) * weight).sum() / weight.sum())
            found[f"last_dev@{k}"] = float(near[-1].mean())
            found[f"exposure@{k}"] = float(mass[:depth, left].sum() / depth)
            found[f"repaired_mass@{k}"] = float(mass[:depth][:, rows[new]].sum() / depth)
        return found

    def _compare(
        self, case: dict[str, Any], made: list[dict[str, Any]], count: int, exact: int, reused: int
    ) -> list[dict[str, Any]]:
        answer = [int(made[0]["logits"].argmax())]
        for step in range(case["answer_tokens"] - 1):
            hidden = self.compute_one(answer[-1], count + step, made[0]["slots"])
            answer.append(int(self.model.logits(hidden)[0].argmax()))
            if answer[-1] in self.model.spec.eos_ids:
                break
        at = list(range(count, count + len(answer)))
        forced = []
        for start in range(0, len(made), 8):
            some = made[start : start + 8]
            hidden = self.model.forward(RowBatch.of([Rows.of(answer, at, one["slots"]) for one in some]), self.pool)
            for number, one in enumerate(some):
                mine = hidden[number * len(answer) : (number + 1) * len(answer) - 1]
                forced.append(torch.cat([one["logits"][None], self.model.logits(mine)]).log_softmax(-1))
        rows = []
        for one, found in zip(made, forced, strict=True):
            kl = (forced[0].exp() * (forced[0] - found)).sum(-1).clamp_min(0)
            rows.append(
                {
                    "case": case["case"], "scenario": case["scenario"], "cluster": case["cluster"], "tokens": count,
                    "exact": exact, "reused": reused, "rule": one["rule"], "percent": one.get("percent"),
                    "flops": one["flops"], "kl": float(kl.mean()), "kl_first": float(kl[0]),
                    "top1": float((found.argmax(-1) == forced[0].argmax(-1)).float().mean()),
                    "signals": one.get("signals", {}),
                }
            )  # fmt: skip
        return rows

    def compute_one(self, token: int, at: int, slots: Tensor) -> Tensor:
        return self.model.forward(Rows.of([token], [at], slots), self.pool)


def make_tiny() -> DecoderModel:
    rope = RopeSpec.plain(head_dim=16, theta=10_000.0)
    return DecoderModel.random(ModelSpec("qwen2", 4, 64, 128, 4, 2, 16, 151936, 1e-6, rope, True, True, False, 32768, (2,),
                                         "float32"))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("cases")
    parser.add_argument("rows")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget-s", type=float, default=1e9)
    parser.add_argument("--tiny", action="store_true", help="random weights of a tiny shape: shows that it runs")
    args = parser.parse_args()
    begun = time.perf_counter()
    with gzip.open(args.cases) as file:
        cases = pickle.load(file)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = make_tiny() if args.tiny else DecoderModel.load(args.model, args.device, dtype)
    bench = Bench(model, max(len(c["tokens"]) for c in cases))
    print(f"loaded after {time.perf_counter() - begun:.0f} s", flush=True)
    done = set()
    if Path(args.rows).exists():
        done = {json.loads(line)["case"] for line in Path(args.rows).read_text().splitlines()}
    with Path(args.rows).open("a") as out:
        for number, case in enumerate(cases):
            if case["case"] in done or time.perf_counter() - begun > args.budget_s:
                continue
            rows = bench.run(case)
            out.write("".join(json.dumps(row) + "\n" for row in rows))
            out.flush()
            if number % 10 == 0:
                print(f"{time.perf_counter() - begun:6.0f} s  {number} {case['case']}", flush=True)


if __name__ == "__main__":
    main()
