"""What reuse does to answers: recipes against a cold prefill, on a real model and real texts.

    python bench/quality.py --model SmolLM2-135M-Instruct.Q4_1.gguf --data-dir DATA --documents 4 --tokens 700
    python bench/quality.py --model qwen2.5-coder-1.5b.gguf --device cuda --dtype bfloat16 --documents 30 --tokens 5000

Every case is prepared by every recipe from the same donors. Against cold: divergence of the first token and of the next
16 (cold's own greedy answer, teacher forced), agreement of the most likely token, word F1 of the greedy answers, and
whether a planted code is answered. FLOPs are a share of the cold prefill's, all passes and the observation counted.
Rows go to --jsonl as they come; a second run skips the cases that are there. Intervals: bootstrap over documents.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import _report  # first: it sets the number of threads
import numpy as np
import torch
from _quality_cases import SCENARIOS, Case, cases
from torch import Tensor

from semblend.engine.model import Model
from semblend.engine.paged_kv import KvPool
from semblend.engine.rows import Rows
from semblend.engine.tokenizer import ModelTokenizer
from semblend.materialize.blend import Blender
from semblend.materialize.donor_kv import DonorKv
from semblend.materialize.layout import KvLayout
from semblend.materialize.probe import QUESTION_ROWS, next_token_kl
from semblend.materialize.quality import Blended, Pass, Placed, QualitySettings, Step
from semblend.materialize.splice import Move, splice
from semblend.materialize.thresholds import STEPS, Thresholds, thresholds_for
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan
from semblend.plan.selection import reused_positions

ANSWER = 16
ALWAYS, NEVER = Thresholds(1e9, 1e9, 1e9), Thresholds(0.0, 0.0, 0.0)
HARM = 0.02


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a prompt is prepared. ``one_pass``: a baseline that needs no look first, so it is charged for one pass."""

    name: str
    settings: QualitySettings
    alone: bool = False
    unmoved: bool = False
    one_pass: bool = False


def _fast(first: int, seam: int) -> QualitySettings:
    return QualitySettings(mode="fast", first_seam_tokens=first, seam_tokens=seam, question_tokens=1)


def _fixed(percent: int, rule: str, seams: bool = True) -> QualitySettings:
    bare = {} if seams else {"first_seam_tokens": 0, "seam_tokens": 0}
    return QualitySettings(thresholds=ALWAYS, steps=(Step(percent, rule),), **bare)


def recipes(thresholds: Thresholds) -> tuple[Recipe, ...]:
    balanced = QualitySettings(thresholds=thresholds)
    return (
        Recipe("no correction", _fast(0, 0), unmoved=True),
        Recipe("relocate", _fast(0, 0)),
        Recipe("c16", _fast(16, 16)),
        Recipe("fast", QualitySettings(mode="fast")),
        Recipe("EPIC-16", _fast(16, 16), alone=True),
        Recipe("CacheBlend-15", _fixed(15, "cacheblend", seams=False), one_pass=True),
        Recipe("random-10", _fixed(10, "at_random", seams=False), one_pass=True),
        *(Recipe(f"attended-{p}", _fixed(p, "attended")) for p in STEPS),
        *(Recipe(f"product-{p}", _fixed(p, "attended_and_deviating")) for p in (20, 40)),
        Recipe("balanced", balanced),
        Recipe("balanced, no refresh", replace(balanced, refresh=False)),
        Recipe("gate", replace(balanced, thresholds=NEVER)),  # to rank its signals; ends in a cold prefill
    )


@dataclass(slots=True)
class Prepared:
    """One recipe's KV, with room for the answer behind it."""

    name: str
    slots: Tensor
    logits: Tensor
    flops: float
    blended: Blended | None = None
    pairs: tuple[tuple[int, float, float], ...] = ()


class Lab:
    """A model with a pool, and cases run through it."""

    def __init__(self, model: Model, tokenizer: ModelTokenizer, chosen: Sequence[Recipe], longest: int) -> None:
        self.model, self.tokenizer, self.recipes = model, tokenizer, chosen
        self.pool: KvPool = model.new_pool((len(chosen) + 3) * (longest + 64))
        self.stop = set(model.spec.eos_ids)

    def run(self, case: Case) -> list[dict[str, Any]]:
        """One record for each recipe, cold first."""
        blocks: list[int] = []
        try:
            return self._run(case, blocks)
        finally:
            self.pool.free(blocks)

    def _run(self, case: Case, blocks: list[int]) -> list[dict[str, Any]]:
        length = len(case.tokens)
        cold = Prepared("cold", self._slots(length + ANSWER, blocks), torch.empty(0), 1.0)
        cold.logits = self._prefill(case.tokens, cold.slots)
        made = [cold]
        for alone in (False, True):
            donors, spans = case.alone if alone else (case.donors, case.spans)
            if any(recipe.alone == alone for recipe in self.recipes):
                kv = self._captured(donors)
                plan = ReusePlan(spans, length)
                made += [self._prepare(r, case, plan, kv, cold, blocks) for r in self.recipes if r.alone == alone]
        answers = self._answers(made, length)
        reference = answers[0] or [next(iter(self.stop))]
        forced = self._forced(made, length, reference)
        return [self._record(case, one, answers, i, forced) for i, one in enumerate(made)]

    def _slots(self, tokens: int, blocks: list[int]) -> Tensor:
        mine = self.pool.allocate(self.pool.blocks_for(tokens))
        blocks += mine
        return self.pool.slots_of(mine, 0, tokens)

    def _prefill(self, tokens: Sequence[int], slots: Tensor) -> Tensor:
        at = torch.arange(len(tokens), device=slots.device)
        hidden = self.model.forward(Rows.of(torch.tensor(tokens, device=slots.device), at, slots), self.pool)
        return self.model.logits(hidden[-1:])[0]

    def _captured(self, donors: Sequence[Sequence[int]]) -> DonorKv:
        kv = DonorKv(1 << 62, 1 << 62)
        for number, donor in enumerate(donors):
            blocks: list[int] = []
            slots = self._slots(len(donor), blocks)
            self._prefill(donor, slots)
            kv.capture(str(number), 0, self.pool, slots)
            self.pool.free(blocks)
        return kv

    def _prepare(
        self, recipe: Recipe, case: Case, plan: ReusePlan, kv: DonorKv, cold: Prepared, blocks: list[int]
    ) -> Prepared:
        slots = self._slots(len(case.tokens) + ANSWER, blocks)
        if recipe.unmoved:
            return self._unmoved(recipe, case, plan, kv, slots)
        blender = Blender(self.model, self.pool, kv, recipe.settings, rows_of=Rows.of)
        pairs: list[tuple[int, float, float]] = []

        def seen(one: Pass, logits: Tensor) -> None:
            if one.kl is not None and one.name.startswith("repair"):
                pairs.append((int(one.name.split()[1]), one.kl, next_token_kl(cold.logits, logits)))

        done = blender.prepare(Placed(case.tokens, slots), plan, on_pass=seen)
        if isinstance(done, Decline) and done.reason is DeclineReason.BELOW_BREAK_EVEN:
            return Prepared(recipe.name, slots, self._prefill(case.tokens, slots), 1.0)
        if not isinstance(done, Blended):
            raise SystemExit(f"{case.case_id}: {recipe.name} declined: {done.reason}: {done.detail}")
        flops = self._flops(recipe, done, len(case.tokens))
        return Prepared(recipe.name, slots, done.logits_last, flops, done, tuple(pairs))

    def _unmoved(self, recipe: Recipe, case: Case, plan: ReusePlan, kv: DonorKv, slots: Tensor) -> Prepared:
        """The control: donor KV where it is wanted, keys as they were."""
        layout = KvLayout.ours(self.pool.k, self.pool.v)
        for span in plan.spans:
            held = kv.acquire(span.donor_id, span.generation)
            assert held is not None
            move = Move(held, span.donor_start, span.length, slots[span.target_start : span.target_end], 0)
            splice([move], layout, self.model.spec.rope)
            kv.release(held)
        gaps = np.setdiff1d(np.arange(len(case.tokens)), reused_positions(plan.spans))
        at = torch.from_numpy(gaps).to(slots.device)
        tokens = torch.tensor(case.tokens, device=slots.device)[at]
        hidden = self.model.forward(Rows.of(tokens, at, slots), self.pool)
        flops = self._pass_flops(len(gaps), int((gaps + 1).sum())) / self._cold_flops(len(case.tokens))
        return Prepared(recipe.name, slots, self.model.logits(hidden[-1:])[0], flops)

    def _pass_flops(self, rows: int, keys: int, layers: float | None = None) -> float:
        spec = self.model.spec
        weights = spec.hidden * spec.head_dim * 2 * (spec.heads + spec.kv_heads) + 3 * spec.hidden * spec.intermediate
        return (spec.layers if layers is None else layers) * (
            2 * rows * weights + 4 * spec.heads * spec.head_dim * keys
        )

    def _cold_flops(self, tokens: int) -> float:
        return self._pass_flops(tokens, tokens * (tokens + 1) // 2)

    def _flops(self, recipe: Recipe, done: Blended, tokens: int) -> float:
        total, spec = 0.0, self.model.spec
        for number, one in enumerate(done.passes):
            if recipe.one_pass and one.name == "fast":
                continue
            # the deviation pass ends after the projections of layer 1, about a fifth of a layer
            total += self._pass_flops(one.rows, one.keys, 1.2 if one.name == "deviation" else None)
            observed = recipe.settings.mode == "balanced" and not recipe.one_pass and number < len(done.passes) - 1
            if observed and one.name != "deviation":
                total += 2 * spec.layers * spec.heads * spec.head_dim * min(QUESTION_ROWS, one.rows) * tokens
        return total / self._cold_flops(tokens)

    def _answers(self, made: Sequence[Prepared], length: int) -> list[list[int]]:
        """Greedy answers of all recipes, decoded together."""
        current = torch.stack([one.logits for one in made]).argmax(-1)
        said = [current]
        for step in range(ANSWER - 1):
            at = [length + step]
            rows = Rows.join([Rows.of(current[i : i + 1], at, one.slots) for i, one in enumerate(made)])
            current = self.model.logits(self.model.forward(rows, self.pool)).argmax(-1)
            said.append(current)
        lines = torch.stack(said, 1).tolist()
        return [line[: next((i for i, token in enumerate(line) if token in self.stop), None)] for line in lines]

    def _forced(self, made: Sequence[Prepared], length: int, answer: list[int]) -> Tensor:
        """Log-probabilities [recipes, tokens of the answer, vocabulary] along one answer."""
        at = list(range(length, length + len(answer)))
        kept = []
        for one in made:
            hidden = self.model.forward(Rows.of(answer, at, one.slots), self.pool)
            kept.append(torch.cat([one.logits[None], self.model.logits(hidden[:-1])]).log_softmax(-1))
        return torch.stack(kept)

    def _record(self, case: Case, one: Prepared, answers: list[list[int]], i: int, forced: Tensor) -> dict[str, Any]:
        kl = (forced[0].exp() * (forced[0] - forced[i])).sum(-1).clamp_min(0)
        text, reference = (self.tokenizer.decode(answers[j]) for j in (i, 0))
        done = one.blended
        return {
            "case": case.case_id, "scenario": case.scenario, "cluster": case.cluster, "recipe": one.name,
            "tokens": len(case.tokens), "spans": len(case.spans), "flops": one.flops,
            "kl_first": float(kl[0]), "kl": float(kl.mean()),
            "top1": float((forced[i].argmax(-1) == forced[0].argmax(-1)).float().mean()),
            "f1": word_f1(text, reference), "answer": text,
            "fact": (case.code in text) if case.asks_fact else None,
            "donor_fact": (case.donor_code in text) if case.asks_fact and case.donor_code else None,
            "risk": done.risk if done else None, "decision": done.decision if done else None,
            "escalations": done.escalations if done else None, "canary": done.canary if done else None,
            "reused": done.reused_tokens / len(case.tokens) if done else None, "pairs": list(one.pairs),
        }  # fmt: skip


def word_f1(text: str, reference: str) -> float:
    """Overlap of words, as question answering scores it.

    >>> word_f1("the red house", "a red roof")
    0.5
    """
    ours, theirs = (re.sub(r"\b(a|an|the)\b|[^\w\s]", " ", t.lower()).split() for t in (text, reference))
    if not ours or not theirs:
        return float(ours == theirs)
    return 2 * sum((Counter(ours) & Counter(theirs)).values()) / (len(ours) + len(theirs))


def interval(rows: Sequence[dict[str, Any]], value: str, draws: int = 1000) -> tuple[float, float, float]:
    """Mean and 95 % interval, documents drawn with replacement."""
    clusters: dict[str, list[float]] = {}
    for row in rows:
        clusters.setdefault(row["cluster"], []).append(row[value])
    sums = np.array([(sum(kept), len(kept)) for kept in clusters.values()])
    rng = np.random.default_rng(0)
    drawn = sums[rng.integers(0, len(sums), (draws, len(sums)))].sum(1)
    low, high = np.percentile(drawn[:, 0] / drawn[:, 1], (2.5, 97.5))
    return float(sums[:, 0].sum() / sums[:, 1].sum()), float(low), float(high)


def show(report: _report.Report, rows: Sequence[dict[str, Any]]) -> None:
    def ranged(chosen: Sequence[dict[str, Any]], value: str) -> str:
        return "{:.4g} [{:.3g}, {:.3g}]".format(*interval(chosen, value))

    for scenario in dict.fromkeys(row["scenario"] for row in rows):
        lines = []
        for recipe in dict.fromkeys(row["recipe"] for row in rows):
            kept = [row for row in rows if (row["scenario"], row["recipe"]) == (scenario, recipe)]
            if not kept or recipe == "gate":
                continue
            facts = [row["fact"] for row in kept if row["fact"] is not None]
            wrong = [row["donor_fact"] for row in kept if row["donor_fact"] is not None]
            lines.append([
                recipe, len(kept), interval(kept, "flops")[0], ranged(kept, "kl_first"), ranged(kept, "kl"),
                interval(kept, "top1")[0], ranged(kept, "f1"), f"{sum(facts)}/{len(facts)}",
                f"{sum(wrong)}/{len(wrong)}" if wrong else "-",
                sum(row["decision"] == "prefill" for row in kept),
            ])  # fmt: skip
        columns = ["recipe", "n", "FLOPs", "KL first", "KL answer", "top-1", "F1 vs cold", "facts", "donor's fact",
                   "prefilled"]  # fmt: skip
        report.table(f"{scenario} (n documents: {len({r['cluster'] for r in rows if r['scenario'] == scenario})})",
                     columns, lines)  # fmt: skip
    gate(report, rows)


def gate(report: _report.Report, rows: Sequence[dict[str, Any]]) -> None:
    """How well the signal ranks the true damage of what would be served, and how often it calls damage safe."""
    lines = []
    for step in STEPS:
        pairs = np.array([p[1:] for r in rows if r["recipe"] == "gate" for p in r["pairs"] if p[0] == step])
        if len(pairs) > 2:
            ranks = [np.argsort(np.argsort(pairs[:, i])) for i in (0, 1)]
            for threshold in (0.005, 0.01, 0.02):
                passing = pairs[:, 0] <= threshold
                bad = float((pairs[passing, 1] > HARM).mean()) if passing.any() else None
                lines.append([step, len(pairs), float(np.corrcoef(*ranks)[0, 1]), threshold, int(passing.sum()), bad])
    report.table(f"gate: KL between passes against true first-token KL (damage: > {HARM})",
                 ["step %", "n", "Spearman", "threshold", "pass", "damaged of those"], lines)  # fmt: skip


def default_model() -> str:
    folder = Path.home() / ".cache" / "semblend" / "models"
    found = sorted(folder.rglob("*[sS]mol[lL][mM]2*.gguf"))
    return str(found[0]) if found else ""


def done_cases(path: Path, wanted: set[str], model: str) -> tuple[list[dict[str, Any]], set[str]]:
    """Rows of this model, each once, and its cases that have every recipe; a line cut off by a kill is left out."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if row.get("model") == model:
            rows[row["case"], row["recipe"]] = row
    have: dict[str, set[str]] = {}
    for case, recipe in rows:
        have.setdefault(case, set()).add(recipe)
    finished = {case for case, names in have.items() if names >= wanted}
    return [row for row in rows.values() if row["case"] in finished], finished


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    _report.add_common_arguments(parser, "quality")
    parser.add_argument("--model", default=default_model(), help="GGUF file or folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None, help="float32, bfloat16 or float16; default: float32 on a CPU")
    parser.add_argument("--documents", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of document in a prompt")
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=SCENARIOS)
    parser.add_argument("--questions", default="both", choices=("both", "fact", "text", "alternate"))
    parser.add_argument("--recipes", nargs="+", default=None, help="names; default: all")
    parser.add_argument("--jsonl", default="bench/results/quality.jsonl", help="rows; a second run goes on from them")
    parser.add_argument("--budget-s", type=float, default=0.0, help="begin no case after this long; 0: no limit")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if not args.model:
        _report.fail("no model found", hint="pass --model, or `semblend models pull smollm2-135m`")
    torch.set_num_threads(args.threads)
    run(args)


def run(args: argparse.Namespace) -> None:
    report, begun = _report.Report("quality", args), time.perf_counter()
    if args.quick:
        args.documents, args.tokens = 1, 300
    dtype = getattr(torch, args.dtype) if args.dtype else None
    model, tokenizer = Model.load(args.model, args.device, dtype), ModelTokenizer.load(args.model)
    every = recipes(thresholds_for(Path(args.model).name))
    chosen = [r for r in every if args.recipes is None or r.name in args.recipes]
    path = Path(args.jsonl)
    name = f"{Path(args.model).name} {model.dtype}"
    rows, finished = done_cases(path, {"cold", *(r.name for r in chosen)}, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    lab = Lab(model, tokenizer, chosen, longest=int(args.tokens * 2) + 400)
    encode: Callable[[str], list[int]] = lambda text: tokenizer.encode(text, add_special=False)  # noqa: E731
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        path.write_bytes(path.read_bytes() + b"\n")  # a kill cut the last line off: let it spoil no other
    with path.open("a", encoding="utf-8") as out:
        for case in cases(_report.data_dir(args), encode, count=args.documents, tokens=args.tokens,
                          scenarios=args.scenarios, seed=args.seed, questions=args.questions):  # fmt: skip
            if case.case_id in finished:
                continue
            if args.budget_s and time.perf_counter() - begun > args.budget_s:
                report.note("stopped by --budget-s; run again to go on")
                break
            found = [{"model": name, **row} for row in lab.run(case)]
            rows += found
            out.write("".join(json.dumps(row) + "\n" for row in found))
            out.flush()
            _report.progress(f"{time.perf_counter() - begun:6.0f} s  {case.case_id}  {len(case.tokens)} tokens")
    show(report, rows)
    report.note(f"{Path(args.model).name}, {args.device}, {model.dtype}; teacher forced over {ANSWER} tokens")
    report.write(args.out)


if __name__ == "__main__":
    main()
