"""Is what earlier questions attended to enough to choose the tokens of a repair, so that one pass will do?

    python research/one_pass/later_questions.py MODEL.gguf --data DATA --rows ROWS.jsonl --documents 20 --tokens 1000
    python research/one_pass/later_questions.py MODEL.gguf --cases CASES.pkl.gz --rows ROWS.jsonl --device cuda
    python research/one_pass/later_questions.py MODEL.gguf --data DATA --write-cases CASES.pkl.gz --tokens 4000 --joined 24000

Documents with several questions (bench/lib/quality_cases.py, `one_document` and `edits`), one donor each. Every question is
answered cold; by `fast`; by a look and a repair of 10 % (`two passes`: a blender that has seen nothing before); and by a
blender that has seen the questions before it (`one pass`, from the second question on); and with 20 % after a look. The gate
accepts everything; what it expects by the default dial stands in the rows. With `--joined` a prompt holds so many tokens of
several documents, in the donor's order, and asks about the first one: is the dial right about longer prompts than its own? Divergence: mean KL over cold's greedy answer, teacher forced.
`--write-cases` makes the prompts for a machine without the data. Rows go out as they come; a second run skips what is there.
"""

from __future__ import annotations

import argparse
import gzip
import json
import pickle
import sys
import time
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import numpy as np
import torch
from lib.quality_cases import Case, cases, choose_chat_form

from semblend.engine.model.model import DecoderModel, PooledModel
from semblend.engine.model.tokenizer import ModelTokenizer
from semblend.materialize.blend.blender import Blender
from semblend.materialize.blend.quality import Blended, Placed, QualitySettings
from semblend.materialize.calibrate import answer_greedily, capture_donor, compute_divergence, compute_log_probabilities
from semblend.materialize.donors.tiers import DonorKv
from semblend.materialize.gate.thresholds import DEFAULT, DialTable, PassageOrder
from semblend.plan.reuse_plan import ReusePlan

EXPECTS = DEFAULT.dial


def accept(percent: int) -> QualitySettings:
    """A repair of so much, whatever it shows."""
    dial = DialTable(dict.fromkeys(PassageOrder, {percent: 0.0}), dict.fromkeys((10, 20, 40), (0.0, 0.0, 0.0, 0.0, -20.0)))
    return QualitySettings(thresholds=replace(DEFAULT, dial=dial), most_work=10.0)


def make_cases(model: str, data: str, documents: int, tokens: int) -> list[Case]:
    tokenizer = ModelTokenizer.load(model)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False)

    many = cases(
        Path(data), encode, scenarios=("one_document", "edits"), prompts=5 * documents, tokens=tokens, seed=11,
        form=choose_chat_form(encode),
    )  # fmt: skip
    return sorted(many, key=lambda case: (case.cluster, case.scenario, case.case_id))


def join_documents(found: list[Case], tokens: int) -> list[Case]:
    """The documents of other cases behind each one's own, until a prompt is so long."""
    found = [case for case in found if case.scenario == "one_document"]
    texts = {case.cluster: case.tokens[case.spans[0].target_start : case.spans[0].target_end] for case in found}
    order, joined = list(texts), []
    for case in found:
        (span,), at = case.spans, order.index(case.cluster)
        text = [token for name in (*order[at:], *order[:at]) for token in texts[name]][:tokens]
        before, after = case.donors[0][: span.donor_start], case.tokens[: span.target_start]
        joined.append(replace(
            case, case_id=f"joined/{case.case_id}", scenario="joined", donors=((*before, *text),),
            tokens=(*after, *text, *case.tokens[span.target_end :]), spans=(replace(span, length=len(text)),),
        ))  # fmt: skip
    return joined


class Lab:
    def __init__(self, model: DecoderModel, longest: int) -> None:
        self.stop = model.spec.eos_ids
        self.pool = model.new_pool(2 * (longest + 64))
        self.model = PooledModel(model, self.pool)

    def measure(self, asked: list[Case]) -> list[dict[str, Any]]:
        """The questions to one document, one after the other."""
        # Each prompt of `edits` has a donor of its own text: only those of one document can be asked again.
        donor_kv = DonorKv(0, 1 << 40)
        capture_donor(self.model, donor_kv, "0", asked[0].donors[0], self.pool)
        settings = accept(10)
        seen = Blender(self.model, donor_kv, settings)
        rows = []
        for number, case in enumerate(asked):
            rows += self._ask(case, number, donor_kv, seen, settings)
        return rows

    def _ask(
        self, case: Case, number: int, donor_kv: DonorKv, seen: Blender, settings: QualitySettings
    ) -> list[dict[str, Any]]:
        length, blocks = len(case.tokens), self.pool.allocate(self.pool.blocks_for(len(case.tokens) + case.answer_tokens))
        slots = self.pool.slots_of(blocks, 0, length + case.answer_tokens)
        target, plan = Placed(list(case.tokens), slots[:length]), ReusePlan(case.spans, length)

        def follow(done: Blended) -> torch.Tensor:
            return compute_log_probabilities(self.model, length, done.logits_last, slots, answer)

        try:
            cold = Blender(self.model, donor_kv, replace(settings, mode="exact")).prepare(target, plan)
            answer = answer_greedily(self.model, length, cold.logits_last, slots, case.answer_tokens, self.stop)
            true, rows = follow(cold), []
            ways = {
                "fast": Blender(self.model, donor_kv, replace(settings, mode="fast", deep_tolerance=0.0)),
                "two passes": Blender(self.model, donor_kv, settings),
                "one pass": seen,
                "20 %": Blender(self.model, donor_kv, accept(20)),
            }
            for way, blender in ways.items():
                done = blender.prepare(target, plan)
                if not isinstance(done, Blended):
                    raise SystemExit(f"{case.case_id} was declined: {done}")
                if way == "one pass" and number == 0:
                    continue  # it had to look
                ours = follow(done)
                seen_there, percent = done.features, 20 if way == "20 %" else 10
                expected = None if seen_there is None else EXPECTS.expect_by_repair(PassageOrder.IN_ORDER, percent, seen_there)
                rows.append({
                    "case": case.case_id, "scenario": case.scenario, "cluster": case.cluster, "tokens": length, "question": number,
                    "way": way, "passes": [one.name for one in done.passes], "kl": compute_divergence(true, ours),
                    "top1": float((ours.argmax(-1) == true.argmax(-1)).float().mean()), "work": done.work, "expected": expected,
                    "features": None if seen_there is None else asdict(seen_there),
                })  # fmt: skip
            return rows
        finally:
            self.pool.free(blocks)


def show(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    later = {row["case"] for row in rows if row["way"] == "one pass"}
    rng = np.random.default_rng(0)
    print("way          n  documents  KL mean [95 %]            max     of a prefill  would be served  false safes  top-1")
    for way in ("fast", "two passes", "one pass", "20 %"):
        mine = [row for row in rows if row["way"] == way and row["case"] in later]
        documents = [list(some) for _, some in groupby(sorted(mine, key=lambda r: r["cluster"]), key=lambda r: r["cluster"])]
        means = [np.mean([r["kl"] for i in rng.integers(len(documents), size=len(documents)) for r in documents[i]]) for _ in range(2000)]
        low, high = np.quantile(means, (0.025, 0.975))
        taken = [row for row in mine if row["expected"] is None or row["expected"] <= 0.02]
        print(f"{way:11} {len(mine):3} {len(documents):6}     {np.mean([r['kl'] for r in mine]):.4f} [{low:.4f}, {high:.4f}]"
              f"  {max(r['kl'] for r in mine):.3f}  {np.mean([r['work'] for r in mine]):.3f}         {len(taken) / len(mine):.2f}"
              f"             {sum(r['kl'] > 0.1 for r in taken)}            {np.mean([r['top1'] for r in mine]):.3f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data")
    parser.add_argument("--cases")
    parser.add_argument("--write-cases")
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--documents", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--joined", type=int, default=0, help="tokens of several documents in one prompt")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget-s", type=float, default=1e9)
    args = parser.parse_args()
    begun = time.perf_counter()
    if args.cases:
        with gzip.open(args.cases) as file:
            found = pickle.load(file)
    else:
        found = make_cases(args.model, args.data, args.documents, args.tokens)
        found = join_documents(found, args.joined) if args.joined else found
    if args.write_cases:
        with gzip.open(args.write_cases, "wb") as file:
            pickle.dump(found, file)
        return
    model = DecoderModel.load(args.model, args.device, torch.bfloat16 if args.device == "cuda" else torch.float32)
    lab = Lab(model, max(len(one.tokens) + len(one.donors[0]) for one in found))
    done = {json.loads(line)["case"] for line in args.rows.read_text().splitlines()} if args.rows.exists() else set()
    documents = [list(some) for _, some in groupby(found, key=lambda case: (case.scenario, case.cluster, case.donors))]
    with args.rows.open("a") as out:
        for asked in sorted(documents, key=len, reverse=True):
            if len(asked) < 2 or asked[0].case_id in done or time.perf_counter() - begun > args.budget_s:
                continue
            for row in lab.measure(asked):
                out.write(json.dumps(row) + "\n")
            out.flush()
            print(f"{time.perf_counter() - begun:6.0f} s  {asked[0].case_id}: {len(asked)} questions", file=sys.stderr, flush=True)
    show(args.rows)


if __name__ == "__main__":
    main()
