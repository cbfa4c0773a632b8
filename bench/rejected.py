"""Claim: from the second prompt of a kind on, a prompt that the quality gate refuses costs what a cold one costs.

    python bench/rejected.py --threads 2

Every prompt is answered three times, in an order that changes: by an engine without reuse (cold), by one that begins
every plan (before), and by one that remembers what became of earlier plans of each kind (now). The prompts that hold
its text are answered first, and are donors then. TTFT is the engine's own, from submission to the first token, and
is divided by cold's for the same prompt. First sight is the first prompt of its kind; retries are later prompts of a
kind that is not begun otherwise. Lost reuse: prompts that were served before and are not begun now.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _rejected_cases
import _report  # first: it sets the number of threads
import torch

from semblend import Prompt, SemBlend, SemBlendConfig
from semblend.engine.core.assemble import assemble
from semblend.engine.core.config import EngineConfig
from semblend.engine.core.engine import Engine
from semblend.engine.model.model import DecoderModel
from semblend.engine.model.pooled_model import PooledModel
from semblend.engine.model.tokenizer import ModelTokenizer
from semblend.materialize.blend.pass_cost import measure_pass_rows
from semblend.materialize.blend.quality import QualitySettings
from semblend.materialize.gate.outcome_memory import OutcomeMemory
from semblend.materialize.gate.plan_shape import PlanShape
from semblend.materialize.gate.thresholds import thresholds_for
from semblend.models import resolve
from semblend.plan.reuse_plan import Decline, ReusePlan
from semblend.prompt import Namespace
from semblend.wire.request import Request
from semblend.wire.sampling import Sampling

SCENARIOS = ("short", "reordered", "several", "summarization", "one_document", "edits", "code")
ARMS = ("cold", "before", "now")


class Forgetful(OutcomeMemory):
    """Begins every plan, as the engine did before it had a memory."""

    def decline_in_vain(self, plan: ReusePlan, namespace: Namespace) -> Decline | None:
        del plan, namespace
        return None


@dataclass(slots=True)
class Answer:
    """One prompt in one engine."""

    ttft_ms: float
    reused_tokens: int
    reason: str
    detail: str
    kind: str = ""
    begun: bool = False


class Arm:
    """One engine; it tells the kind of each plan that it was offered, and whether it was begun."""

    def __init__(self, name: str, model: DecoderModel, longest: int, quality: QualitySettings) -> None:
        self.name, self.number = name, 0
        engine_config = EngineConfig(quality="exact" if name == "cold" else "balanced", keep_donors=name != "cold")
        library = SemBlend(SemBlendConfig(embedder="none", metrics=False))
        library.warm_up()
        self.engine: Engine = assemble(
            model, pool_tokens=4 * longest, config=engine_config, semblend=library, quality=quality
        )
        if name == "before":
            self.engine.reuse.outcomes = Forgetful()
        self.offered: ReusePlan | None = None
        judge = self.engine.reuse._decline_not_worth_it
        self.begun = False

        def watch(sequence: Any, plan: ReusePlan) -> Decline | None:
            declined = judge(sequence, plan)
            self.offered, self.begun = plan, declined is None
            return declined

        self.engine.reuse._decline_not_worth_it = watch  # type: ignore[method-assign]

    def ask(self, ids: Sequence[int], quality: str | None = None) -> Answer:
        self.number += 1
        self.offered, self.begun = None, False
        self.engine.reset_prefix_cache()
        request = Request(f"r{self.number}", Prompt(ids), Sampling(temperature=0.0, max_tokens=1), quality=quality)
        (done,) = self.engine.generate([request])
        receipt = done.receipt
        if receipt is None or receipt.ttft_ms is None:
            raise RuntimeError(f"request {request.request_id} ended without a receipt")
        kind = PlanShape.of(self.offered).kind if self.offered is not None else ""
        reason = "" if receipt.reason is None else str(receipt.reason)
        return Answer(receipt.ttft_ms, receipt.reused_tokens, reason, receipt.detail, kind, self.begun)

    def forget(self) -> None:
        """Donors of an earlier prompt must not be found by the next one."""
        self.engine.reuse.forget_donors()


def measure(args: argparse.Namespace, model: DecoderModel, encode: Any) -> tuple[list[dict[str, Any]], int]:
    pool = model.new_pool(256)
    pass_rows = measure_pass_rows(PooledModel(model, pool), pool.slots_of(pool.allocate(8), 0, 128))
    longest = 2 * args.tokens + 600
    base = QualitySettings(thresholds=thresholds_for(args.model))
    now = QualitySettings(thresholds=thresholds_for(args.model), pass_rows=pass_rows)
    arms = {name: Arm(name, model, longest, now if name == "now" else base) for name in ARMS}
    rows: list[dict[str, Any]] = []
    folder = _report.data_dir(args)
    for scenario in args.scenarios:
        count = args.prompts if scenario in ("short", "reordered", "several") else max(1, args.prompts // 2)
        drawn = _rejected_cases.draw(scenario, folder, encode, prompts=count, tokens=args.tokens, seed=args.seed)
        for number, (tokens, donors) in enumerate(drawn):
            for name in ("before", "now"):
                for donor in donors:
                    arms[name].ask(donor, "exact")
            order = ARMS[number % 3 :] + ARMS[: number % 3]
            found = {name: arms[name].ask(tokens) for name in order}
            for name in ("before", "now"):
                arms[name].forget()
            row: dict[str, Any] = {"scenario": scenario, "tokens": len(tokens), "cold_ms": found["cold"].ttft_ms}
            for name in ("before", "now"):
                one = found[name]
                row[name] = {
                    "ratio": one.ttft_ms / found["cold"].ttft_ms, "reused": one.reused_tokens, "reason": one.reason,
                    "detail": one.detail, "kind": one.kind, "begun": one.begun,
                }  # fmt: skip
            rows.append(row)
            told = ", ".join(f"{name} {row[name]['ratio']:.2f} {row[name]['reason']}" for name in ("before", "now"))
            _report.progress(f"{scenario} {number}: cold {row['cold_ms']:.0f} ms, {told}")
    return rows, pass_rows


def show(report: _report.Report, rows: list[dict[str, Any]]) -> None:
    seen: set[str] = set()
    for row in rows:
        kind = row["before"]["kind"]
        row["first_sight"] = bool(kind) and kind not in seen
        seen.add(kind)
        row["refused"] = row["before"]["begun"] and not row["before"]["reused"]
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
        served = [row for row in mine if row["before"]["reused"]]
        lost = [row for row in served if not row["now"]["reused"]]
        lines.append([scenario, len(mine), statistics.median(r["tokens"] for r in mine), len(served),
                      sum(r["refused"] for r in mine), sum(bool(r["now"]["reused"]) for r in mine), len(lost),
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
    parser.add_argument("--dtype", default=None, help="float32, bfloat16 or float16; default: float32 on a CPU")
    parser.add_argument("--prompts", type=int, default=12, help="of each scenario that is refused; half of the others")
    parser.add_argument("--tokens", type=int, default=700, help="of a document; passages make twice as many")
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=SCENARIOS)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.tokens = 3, 400
    torch.set_num_threads(args.threads)
    report = _report.Report("rejected", args)
    path = Path(args.model) if Path(args.model).exists() else resolve(args.model)
    model = DecoderModel.load(path, args.device, getattr(torch, args.dtype) if args.dtype else None)
    tokenizer = ModelTokenizer.load(path)
    rows, pass_rows = measure(args, model, lambda text: tokenizer.encode(text, add_special=False))
    show(report, rows)
    report.note(f"a pass costs {pass_rows} rows beside its own")
    report.note(f"{args.model} on {args.device}, {args.threads} threads")
    report.add("rows", rows)
    report.write(args.out)


if __name__ == "__main__":
    main()
