"""The step behind an edited one: go on with KV that was moved and repaired, or move and repair for the new prompt?

    PYTHONPATH=src:bench python research/quality/next_turn.py MODEL.gguf SCRIPTS.json.gz ROWS.jsonl [--budget-s S]
    PYTHONPATH=src:bench python research/quality/next_turn.py --tables ROWS.jsonl …
    PYTHONPATH=src:bench python research/quality/next_turn.py --plans SCRIPTS.json.gz

Scripts are those of `lib.agent_scripts`, with four steps: an agent's prompt (the donor), the next one with an edited
history, and the one after it, which begins with all of the edited one. `go on` keeps the edited step's slots
(`at-once-10`) and computes what is new behind them; `anew` plans the prompt for itself from the same donor, by the
same recipe; `fast, go on` is `go on` behind KV that was moved, with heads of spans computed and no repair. Each
against a cold prefill: divergence along cold's own greedy answer, agreement of the most likely token, word F1 of
greedy answers. `rerun` is cold again, in chunks. One row a case, as it comes; a second run goes on. Intervals:
bootstrap over runs.

What the repair of an edited history computes again goes by layer 1, which sees nothing of what comes later: where the
next plan moves the same tokens, both ways make the same KV. `--plans` counts how often it does, without a model.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.agent_scripts import Script, read_scripts
from lib.histories import BLOCK_TOKENS, EDITS, count_common
from lib.quality_cases import Case
from lib.quality_lab import Lab, Prepared, Recipe, recipes, word_f1
from torch import Tensor

from semblend import Prompt, ReusePlan, SemBlend, SemBlendConfig
from semblend.engine.model.model import DecoderModel
from semblend.engine.model.tokenizer import ModelTokenizer
from semblend.materialize.blend.passes import first_rows
from semblend.materialize.blend.quality import QualitySettings
from semblend.materialize.donors.tiers import DonorKv
from semblend.materialize.gate.thresholds import DEFAULT, PlanShape
from semblend.plan.selection import leave_out_repetitions, list_reused_positions

REPAIRED, FAST = "at-once-10", "fast"
ANSWER_TOKENS = 16
RERUN_CHUNK = 512
ROOM_TOKENS = 120_000
"""Of the pool: donors stay in it, because runs of one benchmark begin alike."""
DRAWS = 10_000
ARMS = ("rerun", "go on", "anew", "fast, go on")

Row = dict[str, Any]


def choose_scripts(scripts: Iterable[Script], length: int, longest: int, kinds_of_a_run: int) -> Iterator[Script]:
    """Run by run, because its kinds have one donor; kinds take turns, and every fourth run is handed over too."""
    runs: dict[str, dict[str, Script]] = {}
    for one in scripts:
        if one.length == length and one.kind in EDITS and max(len(step.ids) for step in one.steps[1:]) <= longest:
            runs.setdefault(one.name.split("/")[1], {})[one.kind] = one
    edits = [kind for kind in EDITS if kind != "handed_over"]
    for number, found in enumerate(runs.values()):
        turn = edits[number % len(edits) :] + edits[: number % len(edits)]
        yield from islice((found[kind] for kind in turn if kind in found), kinds_of_a_run)
        if number % 4 == 3 and "handed_over" in found:
            yield found["handed_over"]


def plan_case(script: Script, donor: Sequence[int], tokens: Sequence[int]) -> Case:
    """As `lib.quality_cases.make_history`, of tokens."""
    exact = min(count_common(donor, tokens), len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    with SemBlend(SemBlendConfig(embedder="none")) as semblend:
        semblend.register(Prompt(list(donor)), donor_id="0")
        plan = semblend.lookup(Prompt(list(tokens)), exact_tokens=exact)
    return Case(
        script.name, script.kind, script.dataset, script.name.split("/")[1], tuple(tokens), (tuple(donor),),
        plan.spans if isinstance(plan, ReusePlan) else (), answer_tokens=ANSWER_TOKENS, exact_tokens=exact,
    )  # fmt: skip


class NextTurn(Lab):
    """Two steps of a script in one pool; the donor of a run is computed once."""

    def __init__(self, model: DecoderModel, tokenizer: ModelTokenizer) -> None:
        super().__init__(model, tokenizer, (), 0)
        self.pool = model.new_pool(ROOM_TOKENS)
        self._recipes: dict[str, Recipe] = {one.name: one for one in recipes(DEFAULT)}
        self._donors: dict[tuple[int, ...], Tensor] = {}
        self._kv: tuple[tuple[int, ...], DonorKv] | None = None
        self._rerun_of = ""

    def measure(self, script: Script) -> Row:
        blocks: list[int] = []
        try:
            return self._measure(script, blocks)
        finally:
            self.pool.free(blocks)

    def _measure(self, script: Script, blocks: list[int]) -> Row:
        _, donor, edited, after = (step.ids for step in script.steps)
        assert after[: len(edited)] == edited
        now, then = plan_case(script, donor, edited), plan_case(script, donor, after)
        kv = self._capture(now)
        self._begin_as(now)
        cold, repaired, fast = (self._prefilled("cold", now, now.tokens, blocks),
                                *(self._serve(name, now, kv, blocks) for name in (REPAIRED, FAST)))  # fmt: skip
        at_edit = self._compare([cold, repaired, fast], now)
        made = [self._go_on(one, name, then, blocks)
                for one, name in ((cold, "cold"), (repaired, "go on"), (fast, "fast, go on"))]  # fmt: skip
        self._begin_as(then)
        made.append(self._serve(REPAIRED, then, kv, blocks, "anew"))
        if self._rerun_of != now.cluster:  # one of a run says enough
            self._rerun_of = now.cluster
            made.append(self._prefilled("rerun", then, then.tokens, blocks, RERUN_CHUNK))
        return {
            "case": script.name, "kind": script.kind, "dataset": script.dataset, "run": now.cluster,
            "donor_tokens": len(donor), "edited_tokens": len(edited), "next_tokens": len(after),
            "exact": [now.exact_tokens, then.exact_tokens], "edited": at_edit, "next": self._compare(made, then),
        }  # fmt: skip

    def _capture(self, case: Case) -> DonorKv:
        donor = case.donors[0]
        if donor not in self._donors:
            alike = max(self._donors, key=lambda other: count_common(other, donor), default=())
            self._prefix_tokens = alike
            self._prefix = self._donors.get(alike, self._prefix[:0])
            self._donors[donor] = self._prefilled("donor", case, donor, []).slots[: len(donor)]
        if self._kv is None or self._kv[0] != donor:
            kv = DonorKv(1 << 62, 1 << 62)
            kv.capture("0", 0, self.pool.layout, self._donors[donor])
            self._kv = donor, kv
        return self._kv[1]

    def _begin_as(self, case: Case) -> None:
        """The prefix cache holds what is exact."""
        self._prefix = self._donors[case.donors[0]][: case.exact_tokens]
        self._prefix_tokens = case.tokens[: case.exact_tokens]

    def _serve(self, recipe: str, case: Case, kv: DonorKv, blocks: list[int], name: str = "") -> Prepared:
        plan = ReusePlan(case.spans, len(case.tokens), case.exact_tokens)
        (made,) = self._prepare(self._recipes[recipe], case, plan, kv, blocks)
        made.name = name or recipe
        return made

    def _go_on(self, before: Prepared, name: str, case: Case, blocks: list[int]) -> Prepared:
        tokens = len(case.tokens)
        slots = torch.cat([before.slots[: before.tokens], self._room(case, blocks, tokens - before.tokens)])
        logits = self._prefill(case.tokens, slots, exact=before.tokens)
        return Prepared(name, slots, logits, 0.0, tokens, before.blended, before.declined)

    def _compare(self, made: Sequence[Prepared], case: Case) -> dict[str, Row]:
        """Each against the first, which is cold."""
        answers = self._answers(made, case)
        forced = self._forced(made, answers[0] or [next(iter(self.stop))])
        texts = [self.tokenizer.decode(answer) for answer in answers]
        found: dict[str, Row] = {}
        for i, one in enumerate(made):
            kl = (forced[0].exp() * (forced[0] - forced[i])).sum(-1).clamp_min(0)
            found[one.name] = {
                "kl": float(kl.mean()), "kl_first": float(kl[0]), "f1": word_f1(texts[i], texts[0]),
                "top1": float((forced[i].argmax(-1) == forced[0].argmax(-1)).float().mean()),
                "changed": answers[i] != answers[0], "answer": len(answers[i]), "declined": one.declined,
                "passes": [[p.name, p.rows, p.layers] for p in one.blended.passes] if one.blended else None,
                "reused": one.blended.reused_tokens if one.blended else 0,
                "recomputed": one.blended.recomputed_tokens if one.blended else 0,
            }  # fmt: skip
        return found


# -- Plans, without a model -------------------------------------------------------------------------------------------


def list_moved(case: Case) -> tuple[bool, list[int], list[int]]:
    """Whether the plan is an edited history's, what it moves, and what of that the first pass does not compute."""
    plan = leave_out_repetitions(ReusePlan(case.spans, len(case.tokens), case.exact_tokens))
    moved = list_reused_positions(plan.spans)
    first = first_rows(len(case.tokens), case.exact_tokens, plan.spans, QualitySettings())
    return PlanShape.of(plan).is_edited, moved.tolist(), np.setdiff1d(moved, first).tolist()


def show_plans(scripts: Iterable[Script]) -> None:
    """By length and kind: how many plans of the next prompt move what the edited prompt's plan moves, and no more."""
    found: dict[tuple[int, str], list[tuple[bool, bool, bool]]] = {}
    for script in scripts:
        if script.kind in EDITS:
            _, donor, edited, after = (step.ids for step in script.steps)
            now, then = (list_moved(plan_case(script, donor, tokens)) for tokens in (edited, after))
            found.setdefault((script.length, script.kind), []).append((now == then, now[0], then[0]))
    print(f"{'':22}{'n':>4}{'same':>6}{'edited history':>16}{'and next':>10}")
    for (length, kind), each in sorted(found.items()):
        same, first, after = (sum(column) for column in zip(*each, strict=True))
        print(f"{length:<8}{kind:14}{len(each):>4}{same:>6}{first:>16}{after:>10}")


# -- Tables ------------------------------------------------------------------------------------------------------------


def read_rows(paths: Iterable[str | Path]) -> list[Row]:
    """The last row of every case; a line that a kill cut off is left out."""
    rows: dict[tuple[str, str], Row] = {}
    for path in paths:
        for line in Path(path).read_text().splitlines() if Path(path).exists() else ():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            rows[row["model"], row["case"]] = row
    return list(rows.values())


def bootstrap(rows: Sequence[Row], value: Callable[[Sequence[Row]], float]) -> tuple[float, float]:
    """The middle 95 % of a value over draws of whole runs."""
    runs: dict[str, list[Row]] = {}
    for row in rows:
        runs.setdefault(row["run"], []).append(row)
    groups, rng = list(runs.values()), np.random.default_rng(0)
    draws = rng.integers(len(groups), size=(DRAWS, len(groups)))
    drawn = [value([row for i in draw for row in groups[i]]) for draw in draws]
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(low), float(high)


def mean_kl(rows: Sequence[Row], step: str, arm: str) -> float:
    return float(np.mean([row[step][arm]["kl"] for row in rows]))


def mean_difference(rows: Sequence[Row], one: str, other: str) -> float:
    return mean_kl(rows, "next", one) - mean_kl(rows, "next", other)


def grow(rows: Sequence[Row], arm: str, before: str) -> float:
    return mean_kl(rows, "next", arm) / mean_kl(rows, "edited", before)


def show(title: str, rows: Sequence[Row]) -> None:
    runs = len({row["run"] for row in rows})
    print(f"\n{title}: {len(rows)} cases of {runs} runs")
    print(f"{'':22}{'n':>4}{'mean KL':>10}{'median':>10}{'largest':>10}{'top-1':>8}{'F1':>7}{'changed':>9}")
    for step, arm in (*(("next", arm) for arm in ARMS), ("edited", REPAIRED), ("edited", FAST)):
        found = [row[step][arm] for row in rows if arm in row[step]]
        if found:
            kl, top1, f1, changed = (np.array([one[name] for one in found]) for name in ("kl", "top1", "f1", "changed"))
            print(f"{step + ', ' + arm:22}{len(kl):>4}{kl.mean():>10.5f}{np.median(kl):>10.5f}{kl.max():>10.4f}"
                  f"{top1.mean():>8.3f}{f1.mean():>7.3f}{changed.mean():>9.2f}")  # fmt: skip
    if runs < 2:
        return
    for one, other in (("go on", "anew"), ("fast, go on", "go on"), ("fast, go on", "anew")):
        low, high = bootstrap(rows, partial(mean_difference, one=one, other=other))
        larger = sum(row["next"][one]["kl"] > row["next"][other]["kl"] for row in rows)
        print(f"{one} - {other}: {mean_difference(rows, one, other):+.5f} [{low:+.5f}, {high:+.5f}], "
              f"larger in {larger} of {len(rows)}")  # fmt: skip
    for arm, before in (("go on", REPAIRED), ("anew", REPAIRED), ("fast, go on", FAST)):
        ratio = partial(grow, arm=arm, before=before)
        low, high = bootstrap(rows, ratio)
        print(f"next, {arm} / edited, {before}: {ratio(rows):.2f} [{low:.2f}, {high:.2f}]")


def has_same_plan(row: Row) -> bool:
    """Whether the next prompt's plan repaired what the edited one's did, by the number of tokens."""
    ours, theirs = (row["next"][arm] for arm in ("go on", "anew"))
    return (ours["reused"], ours["recomputed"]) == (theirs["reused"], theirs["recomputed"])


def is_at_once(row: Row) -> bool:
    """Whether the edited step was repaired in one pass, without a look at the question."""
    passes = row["edited"][REPAIRED]["passes"]
    return bool(passes) and passes[0][0] == "deviation"


def show_all(rows: Sequence[Row]) -> None:
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        at_once = [row for row in mine if is_at_once(row)]
        parts = {
            "all": mine,
            "edited path": at_once,
            "edited path, next plan moves the same": [row for row in at_once if has_same_plan(row)],
            "edited path, next plan moves something else": [row for row in at_once if not has_same_plan(row)],
            "repaired by the question's attention": [row for row in mine if not is_at_once(row)],
        }
        for title, part in parts.items():
            if part:
                show(f"{model}, {title}", part)
        for kind in EDITS:
            if found := [row for row in mine if row["kind"] == kind]:
                show(f"{model}, {kind}", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", metavar="FILE", help="model, scripts and rows; else rows, or scripts")
    parser.add_argument("--tables", action="store_true", help="run nothing, read rows")
    parser.add_argument("--plans", action="store_true", help="run no model, compare the plans of scripts")
    parser.add_argument("--length", type=int, default=4096, help="of scripts, as they were made")
    parser.add_argument("--longest", type=int, default=3500, help="tokens of any prompt")
    parser.add_argument("--kinds", type=int, default=3, help="of one run, at most")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="these scripts, in this order")
    parser.add_argument("--budget-s", type=float, default=1500.0, help="begin no case after this long")
    args = parser.parse_args()
    if args.tables:
        show_all(read_rows(args.files))
        return
    if args.plans:
        show_plans(read_scripts(Path(args.files[0])))
        return
    begun = time.perf_counter()
    torch.set_num_threads(1)
    model_path, scripts, rows = args.files
    model = DecoderModel.load(model_path, "cpu")
    lab = NextTurn(model, ModelTokenizer.load(model_path))
    name = f"{Path(model_path).name} {model.dtype}"
    finished = {row["case"] for row in read_rows([rows]) if row["model"] == name}
    with open(rows, "a", encoding="utf-8") as file, torch.inference_mode():
        found = read_scripts(Path(scripts))
        named = {script.name: script for script in found}
        chosen = [named[one] for one in args.only] or choose_scripts(found, args.length, args.longest, args.kinds)
        for script in chosen:
            if script.name in finished:
                continue
            if time.perf_counter() - begun > args.budget_s:
                break
            since = time.perf_counter()
            row = {"model": name, **lab.measure(script), "wall_s": round(time.perf_counter() - since, 1)}
            file.write(json.dumps(row) + "\n")
            file.flush()
            kls = {arm: round(one["kl"], 5) for arm, one in row["next"].items()}
            print(script.name, row["next_tokens"], row["wall_s"], kls, flush=True)
    show_all(read_rows([rows]))


if __name__ == "__main__":
    main()
