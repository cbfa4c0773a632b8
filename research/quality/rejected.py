"""Claim: from the second prompt of a kind on, a prompt that the quality gate refuses costs what a cold one costs.

    python bench/rejected.py --threads 2 --scenarios short --prompts 12
    python bench/rejected.py --tables-only

Every prompt is answered three times, in an order that changes: without reuse (cold), beginning every plan (before), and
with the memory of what became of earlier plans of each kind (now). The prompts that hold its text are answered first,
and are donors then. TTFT is the engine's own, from submission to the first token, and
is divided by cold's for the same prompt. First sight is the first prompt of its kind; begun again are later prompts
of a kind that is not begun otherwise. Lost: prompts that were served before and are not begun now. Random weights
(--model shape:...) show speed only: --refuse says that their gate refuses everything, and where.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import _rejected_cases
import _report  # first: it sets the number of threads
import torch
from _ttft_cells import load

from semblend import Prompt, SemBlend, SemBlendConfig
from semblend.engine.core.assemble import assemble
from semblend.engine.core.engine import Engine
from semblend.engine.model.model import DecoderModel
from semblend.engine.model.pooled_model import PooledModel
from semblend.engine.model.tokenizer import ModelTokenizer
from semblend.materialize.blend.pass_cost import MANY_ROWS, measure_pass_rows
from semblend.materialize.blend.quality import QualitySettings
from semblend.materialize.gate.chosen_table import choose_table
from semblend.materialize.gate.outcome_memory import OutcomeMemory
from semblend.materialize.gate.plan_shape import PlanShape
from semblend.materialize.gate.thresholds import Thresholds
from semblend.models import resolve
from semblend.plan.reuse_plan import Decline, ReusePlan
from semblend.prompt import Namespace
from semblend.wire.request import Request
from semblend.wire.sampling import Sampling

SCENARIOS = ("short", "reordered", "several", "summarization", "one_document", "edits", "code")
ARMS = ("cold", "before", "now")
REFUSALS = {"at the glance": Thresholds(0, 0, 0, begin_prefill=0.0), "after repairs": Thresholds(0, 0, 0)}


class Forgetful(OutcomeMemory):
    """Begins every plan, as the engine did before it had a memory."""

    def decline_in_vain(self, plan: ReusePlan, namespace: Namespace) -> Decline | None:
        del plan, namespace
        return None


@dataclass(slots=True)
class Answer:
    """One prompt in one engine."""

    ttft_ms: float
    cpu_ms: float
    reused_tokens: int
    reason: str
    detail: str
    kind: str = ""
    begun: bool = False


class Bench:
    """One engine in which a prompt is answered cold, as before, and as now."""

    def __init__(self, args: argparse.Namespace, model: DecoderModel) -> None:
        many = MANY_ROWS[model.device.type]
        pool = model.new_pool(2 * many)
        slots = pool.slots_of(pool.allocate(pool.blocks_for(many)), 0, many)
        measure_pass_rows(PooledModel(model, pool), slots)  # the first passes of a process are slow
        self.pass_rows = measure_pass_rows(PooledModel(model, pool), slots)
        base = QualitySettings(thresholds=REFUSALS[args.refuse] if args.refuse else choose_table(args.model).thresholds)
        self.settings = {"cold": base, "before": base, "now": replace(base, pass_rows=self.pass_rows)}
        library = SemBlend(SemBlendConfig(embedder="none", metrics=False))
        library.warm_up()
        self.engine: Engine = assemble(
            model, pool_tokens=6 * args.tokens + 2000, semblend=library, quality=base, donor_host_bytes=16 << 30
        )
        expected = base.thresholds.expected_costs
        self.outcomes = {"cold": Forgetful(), "before": Forgetful(), "now": OutcomeMemory(expected)}
        self.number = 0
        self.offered: ReusePlan | None = None
        self.begun = False
        judge = self.engine.reuse._decline_not_worth_it

        def watch(sequence: Any, plan: ReusePlan) -> Decline | None:
            declined = judge(sequence, plan)
            self.offered, self.begun = plan, declined is None
            return declined

        self.engine.reuse._decline_not_worth_it = watch  # type: ignore[method-assign]

    def keep(self, ids: Sequence[int]) -> None:
        """Answer a prompt cold and keep it as a donor."""
        self._ask(ids, "exact", keep_donors=True)

    def ask(self, arm: str, ids: Sequence[int]) -> Answer:
        """Answer a prompt in one of the three ways; it is no donor for the others."""
        self.engine.reuse.outcomes = self.outcomes[arm]
        blender: Any = self.engine.reuse._blender
        blender.settings = self.settings[arm]
        return self._ask(ids, "exact" if arm == "cold" else "balanced", keep_donors=False)

    def _ask(self, ids: Sequence[int], quality: str, *, keep_donors: bool) -> Answer:
        self.number += 1
        self.offered, self.begun = None, False
        self.engine.reset_prefix_cache()
        self.engine.reuse._config = replace(self.engine.config, keep_donors=keep_donors)
        request = Request(f"r{self.number}", Prompt(ids), Sampling(temperature=0.0, max_tokens=1), quality=quality)
        cpu = time.process_time()
        (done,) = self.engine.generate([request])
        cpu_ms, receipt = (time.process_time() - cpu) * 1e3, done.receipt
        if receipt is None or receipt.ttft_ms is None:
            raise RuntimeError(f"request {request.request_id} ended without a receipt")
        kind = PlanShape.of(self.offered).kind if self.offered is not None else ""
        reason = "" if receipt.reason is None else str(receipt.reason)
        return Answer(receipt.ttft_ms, cpu_ms, receipt.reused_tokens, reason, receipt.detail, kind, self.begun)

    def compare(self, number: int, tokens: Sequence[int], donors: Sequence[Sequence[int]]) -> dict[str, Any]:
        """One prompt in all three ways, taking turns in going first."""
        for donor in donors:
            self.keep(donor)
        found = {arm: self.ask(arm, tokens) for arm in ARMS[number % 3 :] + ARMS[: number % 3]}
        self.engine.reuse.forget_donors()
        cold = found.pop("cold")
        row: dict[str, Any] = {"tokens": len(tokens), "cold_ms": cold.ttft_ms}
        for arm, one in found.items():
            row[arm] = asdict(one) | {"ratio": one.ttft_ms / cold.ttft_ms, "cpu_ratio": one.cpu_ms / cold.cpu_ms}
        return row


def make_encoder(name: str) -> Callable[[str], list[int]]:
    tokenizer = ModelTokenizer.load(resolve(name))
    return lambda text: tokenizer.encode(text, add_special=False)


def measure(args: argparse.Namespace, rows_file: Path) -> None:
    """Appends a row for each prompt as it comes."""
    model = load(args.model, args.device)
    bench, began = Bench(args, model), time.perf_counter()
    rows_file.parent.mkdir(parents=True, exist_ok=True)
    for scenario in args.scenarios:
        wanted = {"prompts": args.prompts, "tokens": args.tokens, "seed": args.seed}
        if args.model.startswith("shape:"):
            drawn = _rejected_cases.draw_random(scenario, model.spec.vocab, **wanted)
        else:
            drawn = _rejected_cases.draw(scenario, _report.data_dir(args), make_encoder(args.model), **wanted)
        for number, (tokens, donors) in enumerate(drawn):
            if args.budget_s and time.perf_counter() - began > args.budget_s:
                _report.progress("stopped by --budget-s")
                return
            name = f"{scenario}, {args.refuse}" if args.refuse else scenario
            row = {"scenario": name, "pass_rows": bench.pass_rows, **bench.compare(number, tokens, donors)}
            with rows_file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
            told = ", ".join(f"{arm} {row[arm]['ratio']:.2f} {row[arm]['reason']}" for arm in ("before", "now"))
            _report.progress(f"{scenario} {number}: cold {row['cold_ms']:.0f} ms, {told}")


def show(report: _report.Report, rows: list[dict[str, Any]]) -> None:
    seen: set[str] = set()
    for row in rows:
        kind = row["before"]["kind"]
        row["first_sight"] = bool(kind) and kind not in seen
        seen.add(kind)
        for arm in ("before", "now"):  # a plan whose two passes cost too much is declined before the first
            row[arm]["begun"] &= row[arm]["reason"] != "below_break_even"
        row["refused"] = row["before"]["begun"] and not row["before"]["reused_tokens"]
        row["retry"] = row["refused"] and row["now"]["begun"] and not row["first_sight"]
    refused = [row for row in rows if row["refused"]]
    lines = []
    for scenario in dict.fromkeys(row["scenario"] for row in refused):
        mine = [row for row in refused if row["scenario"] == scenario]
        later = [row for row in mine if not row["first_sight"]]
        for title, kept in (("first sight", [r for r in mine if r["first_sight"]]), ("later", later)):
            if kept:
                lines.append([scenario, title, len(kept), sum(r["retry"] for r in kept), *spread(kept, "before"),
                              *spread(kept, "now")])  # fmt: skip
    later = [row for row in refused if not row["first_sight"]]
    if later:
        lines.append(["all", "later", len(later), sum(r["retry"] for r in later), *spread(later, "before"),
                      *spread(later, "now")])  # fmt: skip
    report.table(
        "Prompts that the gate refuses: TTFT over cold of the same prompt",
        ["prompts", "seen", "n", "begun again", "before, mean", "median", "now, mean", "median"],
        lines,
    )
    lines = []
    for scenario in dict.fromkeys(row["scenario"] for row in rows):
        mine = [row for row in rows if row["scenario"] == scenario]
        served = [row for row in mine if row["before"]["reused_tokens"]]
        lost = [row for row in served if not row["now"]["reused_tokens"]]
        lines.append([scenario, len(mine), statistics.median(r["tokens"] for r in mine), len(served),
                      sum(r["refused"] for r in mine), sum(bool(r["now"]["reused_tokens"]) for r in mine), len(lost),
                      spread(mine, "before")[0], spread(mine, "now")[0]])  # fmt: skip
    report.table(
        "All prompts: what is served, and mean TTFT over cold",
        ["prompts", "n", "tokens", "served before", "refused before", "served now", "lost", "TTFT before", "TTFT now"],
        lines,
    )


def spread(rows: list[dict[str, Any]], arm: str) -> tuple[float, float]:
    ratios = [row[arm]["ratio"] for row in rows]
    return statistics.mean(ratios), statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "rejected")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--refuse", choices=sorted(REFUSALS), default="", help="refuse every prompt, and where")
    parser.add_argument("--prompts", type=int, default=12, help="of each scenario")
    parser.add_argument("--tokens", type=int, default=700, help="of a document; passages make twice as many")
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=SCENARIOS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--jsonl", default="bench/results/rejected.jsonl", help="rows; a second run adds to them")
    parser.add_argument("--budget-s", type=float, default=0.0, help="begin no prompt after this long; 0: no limit")
    parser.add_argument("--tables-only", action="store_true", help="run nothing, read the rows")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.tokens = 3, 400
    torch.set_num_threads(args.threads)
    report = _report.Report("rejected", args)
    if not args.tables_only:
        measure(args, Path(args.jsonl))
    rows = [json.loads(line) for line in Path(args.jsonl).read_text(encoding="utf-8").splitlines()]
    show(report, rows)
    report.note(f"a pass costs {statistics.median(row['pass_rows'] for row in rows)} rows beside its own")
    report.note(f"{args.model} on {args.device}, {args.threads} threads")
    report.write(args.out)


if __name__ == "__main__":
    main()
