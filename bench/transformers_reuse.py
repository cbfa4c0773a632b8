"""Time to the first token around `generate()` of transformers: plain, and through `TransformersReuse`.

    python bench/transformers_reuse.py                         # shape of SmolLM2-135M, random weights
    python bench/transformers_reuse.py --model FOLDER          # a model of yours
    python bench/transformers_reuse.py --quick

Each round has a new document. Arms run one after the other in every round, so that a busy machine slows all of them.
CPU time is that of one thread; it counts what the process worked, not how long it waited for a core.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import lib.reporting as reporting  # first: it holds the numeric libraries to one thread
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from semblend.integration.transformers.reuse import TransformersReuse

SHAPE = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "eos_token_id": None,
}  # fmt: skip
ARMS = (
    "plain generate()",
    "ours, nothing shared",
    "ours, the same instruction",
    "ours, another instruction, fast",
    "ours, another instruction, balanced",
)


def load_model(name: str) -> Any:
    torch.manual_seed(0)
    if name:
        return AutoModelForCausalLM.from_pretrained(name).eval()
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE)).eval()


def make_prompts(tokens: int, vocabulary: int, draw: random.Random) -> list[torch.Tensor]:
    """One document under three instructions; the second prompt differs from the first in its question alone."""
    document = [draw.randrange(100, vocabulary) for _ in range(tokens)]
    instructions = [[draw.randrange(100, vocabulary) for _ in range(count)] for count in (12, 15, 19)]
    questions = [[draw.randrange(100, vocabulary) for _ in range(16)] for _ in range(4)]
    parts = [(0, 0), (0, 1), (1, 2), (2, 3)]
    return [torch.tensor([[*instructions[i], *document, *questions[q]]]) for i, q in parts]


def measure(work: Callable[[], Any]) -> tuple[float, float, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    answer = work()
    return (time.perf_counter() - wall) * 1000, (time.process_time() - cpu) * 1000, answer


def run_round(model: Any, reuse: TransformersReuse, prompts: list[torch.Tensor]) -> list[list[Any]]:
    """Wall ms, CPU ms and the receipt's tokens of each arm."""
    first, repeated, moved, repaired = prompts
    plain = {"max_new_tokens": 1, "do_sample": False}
    reuse.clear()
    calls: list[Callable[[], Any]] = [
        lambda: model.generate(first, attention_mask=torch.ones_like(first), **plain),
        lambda: reuse.generate(first, **plain),
        lambda: reuse.generate(repeated, **plain),
        lambda: reuse.generate(moved, quality="fast", **plain),
        lambda: reuse.generate(repaired, quality="balanced", **plain),
    ]
    rows = []
    for call in calls:
        wall, cpu, answer = measure(call)
        receipt = getattr(answer, "receipt", None)
        rows.append([wall, cpu, dict(receipt.tokens) if receipt else {"prefill": first.shape[1]}])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="folder or name of a model (default: random weights)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048], help="lengths of the document")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="a small run that only shows that everything works")
    parser.add_argument("--out", default="bench/results/transformers_reuse.json", help="JSON result; '' writes none")
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.rounds = [256], 1
    report = reporting.Report("transformers_reuse", args)
    model, draw = load_model(args.model), random.Random(args.seed)
    rows = []
    with TransformersReuse(model) as reuse:
        reuse.generate(make_prompts(64, model.config.vocab_size, draw)[0], max_new_tokens=1, do_sample=False)  # warm
        for tokens in args.tokens:
            rounds = []
            for number in range(args.rounds):
                rounds.append(run_round(model, reuse, make_prompts(tokens, model.config.vocab_size, draw)))
                reporting.progress(f"{tokens} tokens, round {number + 1} of {args.rounds}")
            rows += summarize(tokens, rounds)
    names = ["document", "arm", "CPU ms p50", "min", "max", "wall ms p50", "plain / this", "not computed", "computed"]
    report.table("Time to the first token around generate(), one prompt after the other", names, rows)
    report.note("plain / this: median over rounds of plain CPU time over this arm's, both of one round")
    report.note("not computed: tokens of the prompt that were taken from a donor or a prefix, from the last receipt")
    if not args.model:
        report.note("random weights: what balanced recomputes on a real model is another number")
    report.write(args.out)
    return 0


def summarize(tokens: int, rounds: list[list[list[Any]]]) -> list[list[Any]]:
    rows = []
    for at, arm in enumerate(ARMS):
        wall, cpu = ([one[at][column] for one in rounds] for column in (0, 1))
        ratio = statistics.median(one[0][1] / one[at][1] for one in rounds)
        kinds = rounds[-1][at][2]
        kept = kinds.get("exact", 0) + kinds.get("reused", 0)
        rows.append([
            tokens, arm, statistics.median(cpu), min(cpu), max(cpu), statistics.median(wall), ratio, kept,
            kinds.get("prefill", 0) + kinds.get("recomputed", 0),
        ])  # fmt: skip
    return rows


if __name__ == "__main__":
    sys.exit(main())
