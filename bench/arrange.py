"""How much an exact prefix cache serves when passages that commute are arranged: hits, ceiling, time.

    python bench/arrange.py --trace CHECKOUT [--contextpilot CHECKOUT] --out bench/results/arrange.json

``--trace`` is a clone of github.com/glbyktjys/NonPrefix_LMCacheDataset (a bare one will do), ``--contextpilot`` a
checkout of github.com/EfficientContext/ContextPilot. Both are read and never written. Sizes are in words.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lib.orders import SIMPLE, Outcome, arrange, find_optimum, follow, measure_ceiling, replay
from lib.reporting import REPO, Report, add_common_arguments, data_dir, percentile, progress
from lib.streams import PromptStream, make_random_streams, read_streams

from semblend.arrange import Arranger, OrderLimits

PARTS = ("hits", "bounded", "optimum", "contextpilot", "time")
CACHES = (4, 16, 64)
"""Sizes of bounded caches, in prompts of the stream's mean size."""


def main() -> None:
    args = parse_arguments()
    report = Report("arrange", args)
    trace = Path(args.trace) if args.trace else None
    streams = [*read_streams(data_dir(args), trace, args.seed), *make_random_streams(args.seed)]
    if args.only:
        streams = [stream for stream in streams if args.only in stream.name]
    describe(report, streams)
    if "hits" in args.parts:
        compare_unbounded(report, streams)
        report.write(args.out)  # after every part: a run that is cut short leaves what it has
    if "bounded" in args.parts:
        compare_bounded(report, streams)
        report.write(args.out)
    if "optimum" in args.parts:
        compare_with_optimum(report, args.seed)
        report.write(args.out)
    if "contextpilot" in args.parts and args.contextpilot:
        compare_with_contextpilot(report, streams, Path(args.contextpilot))
        report.write(args.out)
    if "time" in args.parts:
        measure_time(report, args.seed)
    report.write(args.out)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser, "arrange")
    parser.add_argument("--trace", default="", help="clone of the public non-prefix trace; without it two streams less")
    parser.add_argument("--contextpilot", default="", help="checkout of ContextPilot to run beside")
    parser.add_argument("--only", default="", help="streams whose name has this in it")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="tables to make (default: all)")
    return parser.parse_args()


def describe(report: Report, streams: list[PromptStream]) -> None:
    rows = []
    for stream in streams:
        counts = [len(prompt) for prompt in stream.prompts]
        rows.append([stream.name, len(stream.prompts), len(stream.texts), sum(counts) / len(counts), mean_size(stream)])
    report.table("Streams", ["stream", "prompts", "passages", "passages a prompt", "words a prompt"], rows)


def mean_size(stream: PromptStream) -> float:
    """Words of a prompt."""
    return sum(stream.sizes[passage] for prompt in stream.prompts for passage in prompt) / len(stream.prompts)


def compare_unbounded(report: Report, streams: list[PromptStream]) -> None:
    """Hits with a cache that forgets nothing, and what is left for reuse at any offset."""
    rows, behind, times = [], [], []
    for stream in streams:
        progress(f"{stream.name}: no limit")
        ceiling = measure_ceiling(stream)
        found = {name: replay(stream, make(stream), look_behind=True) for name, make in SIMPLE.items()}
        found["arranged"] = replay(stream, arrange(stream), look_behind=True)
        ours = found["arranged"]
        ratios = [one.hit_ratio for one in found.values()]
        rows.append([stream.name, *ratios, ceiling, ours.hit_ratio / ceiling])
        behind.append([stream.name, *(share_in_order(found[name]) for name in found)])
        times.append([stream.name, *spread_us(ours.seconds)])
    names = [*SIMPLE, "arranged"]
    report.table("Exact hits, no limit", ["stream", *names, "any-offset ceiling", "arranged / ceiling"], rows)
    report.table("Exact, or else in one earlier prompt's order", ["stream", *names], behind)
    report.table("CPU time of arrange and record, µs", ["stream", "p50", "p99", "most"], times)
    report.note("share of all document words; blocks of 16 words; ceiling: words of passages that were sent before")


def share_in_order(outcome: Outcome) -> float:
    return (outcome.exact + outcome.in_order) / outcome.asked


def spread_us(seconds: list[float]) -> list[float]:
    ordered = sorted(second * 1e6 for second in seconds)
    return [percentile(ordered, 50), percentile(ordered, 99), ordered[-1]]


def compare_bounded(report: Report, streams: list[PromptStream]) -> None:
    """Hits with caches that hold a few prompts."""
    names = [*SIMPLE, "arranged, size not told", "arranged"]
    rows = []
    for stream in streams:
        for prompts in CACHES:
            progress(f"{stream.name}: a cache of {prompts} prompts")
            capacity = int(prompts * mean_size(stream))
            found = [replay(stream, make(stream), capacity).hit_ratio for make in SIMPLE.values()]
            found.append(replay(stream, arrange(stream), capacity).hit_ratio)
            found.append(replay(stream, arrange(stream, capacity), capacity).hit_ratio)
            rows.append([stream.name, prompts, *found, measure_ceiling(stream, capacity)])
    report.table("Exact hits, bounded caches", ["stream", "cache (prompts)", *names, "any-offset ceiling"], rows)
    report.note("block LRU; `greedy, one step` does not know what was evicted")


def compare_with_optimum(report: Report, seed: int) -> None:
    """Small streams, beside the best that any orders reach when the future is known."""
    rows = []
    for count, top, of in ((6, 3, 5), (8, 3, 6), (4, 4, 6)):
        rng = random.Random(seed)
        totals = dict.fromkeys([*SIMPLE, "arranged", "optimum"], 0)
        for _ in range(20):
            prompts = tuple(tuple(rng.sample(range(of), top)) for _ in range(count))
            texts = tuple(f"{number} " + "word " * 15 for number in range(of))
            stream = PromptStream("small", texts, prompts)
            for name, make in SIMPLE.items():
                totals[name] += replay(stream, make(stream)).exact // 16
            totals["arranged"] += replay(stream, arrange(stream)).exact // 16
            totals["optimum"] += find_optimum(prompts)
        asked = 20 * count * top
        rows.append([f"{count} prompts of {top} of {of}", *(total / asked for total in totals.values())])
    report.table("Small streams, 20 each: hits beside the optimum", ["stream", *SIMPLE, "arranged", "optimum"], rows)


def compare_with_contextpilot(report: Report, streams: list[PromptStream], checkout: Path) -> None:
    """The same streams ordered by ContextPilot, in a process of its own."""
    rows = []
    adapter = REPO / "bench" / "lib" / "peer_adapters" / "contextpilot_042.py"
    for stream in streams:
        progress(f"{stream.name}: ContextPilot")
        with tempfile.TemporaryDirectory() as folder:
            asked, answer = Path(folder, "asked.json"), Path(folder, "answer.json")
            asked.write_text(json.dumps([list(prompt) for prompt in stream.prompts]))
            command = [sys.executable, str(adapter), "--checkout", str(checkout), "--asked", str(asked)]
            done = subprocess.run([*command, "--out", str(answer)], check=False, capture_output=True, text=True)
            if done.returncode:
                report.note(f"{stream.name}: ContextPilot ended with {done.stderr.strip().splitlines()[-1:]}")
                continue
            told = json.loads(answer.read_text())
        theirs = replay(stream, follow(told["orders"]), look_behind=True)
        ours = replay(stream, arrange(stream), look_behind=True)
        pairs = [(one.hit_ratio, share_in_order(one)) for one in (theirs, ours)]
        rows.append([stream.name, *pairs[0], *pairs[1], *spread_us(told["seconds"])[:2], *spread_us(ours.seconds)[:2]])
    columns = ["their exact", "their exact or in order", "our exact", "our exact or in order"]
    report.table(
        "Beside ContextPilot 0.4.2, one prompt after the other",
        ["stream", *columns, "their p50 µs", "their p99 µs", "our p50 µs", "our p99 µs"],
        rows,
    )
    report.note("ContextPilot's own tables are of batches that it also puts in another order; ours answer as they come")


def measure_time(report: Report, seed: int) -> None:
    """CPU time of one `arrange`, by passages and by what is remembered; passages of 1,600 characters."""
    rows = []
    for count, remembered, keeps in (
        (10, 20_000, [OrderLimits()]),
        (10, 200_000, [OrderLimits(), OrderLimits(within=4)]),
        (50, 200_000, [OrderLimits(), OrderLimits(within=10), OrderLimits(first=2, last=2)]),
    ):
        progress(f"time with {remembered} passages remembered, {count} asked")
        rng = random.Random(seed)
        arranger = Arranger(most_passages=remembered)
        corpus = [f"{number} " + "words of a passage, " * 80 for number in range(2000)]
        weights = [1 / rank for rank in range(1, len(corpus) + 1)]
        for _ in range(remembered // count):
            arranger.record(arranger.arrange(draw(rng, corpus, weights, count)))
        for keep in keeps:
            seconds = []
            for _ in range(300):
                passages = draw(rng, corpus, weights, count)
                started = time.thread_time()
                arranger.arrange(passages, keep=keep)
                seconds.append(time.thread_time() - started)
            rows.append([count, remembered, describe_keep(keep), *spread_us(seconds)])
    report.table("CPU time of one arrange, µs", ["passages", "remembered", "keep", "p50", "p99", "most"], rows)


def draw(rng: random.Random, corpus: list[str], weights: list[float], count: int) -> list[str]:
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn.update(dict.fromkeys(rng.choices(corpus, weights, k=count)))
    return list(drawn)[:count]


def describe_keep(keep: OrderLimits) -> str:
    told = [f"{name}={value}" for name in ("first", "last", "within") if (value := getattr(keep, name))]
    return ", ".join(told) or "free"


if __name__ == "__main__":
    main()
