"""Claim: reusable spans are found in well under a millisecond among 10,000 donors of 8,192 tokens.

    python bench/speed.py                     # all of it, about four minutes, 2 GiB of memory
    python bench/speed.py --quick             # 500 donors, no real text

One thread. Every lookup is ``sb.lookup(Prompt(array))`` with a numpy array, so checking and copying the ids counts.
Wall time and CPU time of the same calls are given side by side: on a busy machine the second is the one to compare.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import lib.reporting as reporting  # first: it holds the numeric libraries to one thread
import numpy as np
from lib.real_texts import articles, leval, longbench, qmsum, rag

from semblend import Prompt, ReusePlan, SemBlend, SemBlendConfig
from semblend.text.tokenization import load_tokenizer

LENGTH = 8192
VOCABULARY = 150_000
GIB = 1 << 30
MakeDonor = Callable[[int], np.ndarray]

TARGETS = {
    "reusable": "p50 <= 0.5 ms",
    "several donors": "p50 <= 0.5 ms",
    "mixed": "p50 <= 0.5 ms",
    "nothing": "p50 <= 1 ms",
    "131,072 tokens": "p50 <= 15 ms",
}


@dataclass
class Timed:
    """Milliseconds, wall and CPU, of the same calls."""

    wall: list[float]
    cpu: list[float]

    def row(self) -> list[float]:
        cpu = float(np.mean(self.cpu))
        return [*(float(np.percentile(self.wall, q)) for q in (50, 95, 99)), max(self.wall), cpu]


COLUMNS = ["p50 ms", "p95 ms", "p99 ms", "max ms", "mean CPU ms"]


def timed(calls: Iterator[Callable[[], object]]) -> Timed:
    result = Timed([], [])
    gc.disable()
    for call in calls:
        cpu, wall = time.process_time(), time.perf_counter()
        call()
        result.wall.append((time.perf_counter() - wall) * 1e3)
        result.cpu.append((time.process_time() - cpu) * 1e3)
    gc.enable()
    return result


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def random_donor(i: int) -> np.ndarray:
    return np.random.default_rng(i).integers(0, VOCABULARY, LENGTH).astype(np.int32)


class Prompts:
    """Prompts over donors that can be made again from their number."""

    def __init__(
        self, donors: int, make: MakeDonor, fresh: Callable[[np.random.Generator, int], np.ndarray], seed: int = 12345
    ) -> None:
        self.donors, self.make, self.fresh = donors, make, fresh
        self.rng = np.random.default_rng(seed)

    def reusable(self, length: int) -> np.ndarray:
        """One donor behind another instruction."""
        return np.concatenate([self.fresh(self.rng, 40), self._donor()])[:length]

    def several(self, length: int) -> np.ndarray:
        return self._spliced(length, share=1.0)

    def mixed(self, length: int) -> np.ndarray:
        return self._spliced(length, share=0.5)

    def nothing(self, length: int) -> np.ndarray:
        return self.fresh(self.rng, length)

    def _donor(self) -> np.ndarray:
        return self.make(int(self.rng.integers(self.donors)))

    def _spliced(self, length: int, share: float) -> np.ndarray:
        parts: list[np.ndarray] = []
        while sum(map(len, parts)) < length:
            if self.rng.random() < share:
                donor, size = self._donor(), int(self.rng.integers(300, 1200))
                start = int(self.rng.integers(max(1, len(donor) - size)))
                parts.append(donor[start : start + size])
            else:
                parts.append(self.fresh(self.rng, int(self.rng.integers(50, 400))))
        return np.concatenate(parts)[:length]


def lookups(sb: SemBlend, prompts: list[np.ndarray]) -> Timed:
    return timed((lambda ids=ids: sb.lookup(Prompt(ids))) for ids in prompts)


def recovered(sb: SemBlend, prompts: list[np.ndarray]) -> float:
    decisions = [sb.lookup(Prompt(ids)) for ids in prompts]
    reused = sum(d.reused_tokens for d in decisions if isinstance(d, ReusePlan))
    return reused / sum(map(len, prompts))


def scale(report: reporting.Report, name: str, donors: int, make: MakeDonor, prompts: Prompts, repeat: int) -> None:
    """Fill a store, measure lookups, then adding to a full store and its memory."""
    sb = SemBlend(SemBlendConfig(embedder="none", max_donors=donors, max_bytes=4 * GIB))
    sb.warm_up()
    gc.collect()
    before = resident_bytes()

    def register(i: int) -> Callable[[], object]:
        ids = make(i)
        return lambda: sb.register(Prompt(ids), donor_id=f"donor-{i}")

    filling = timed(register(i) for i in range(donors))
    tokens = sb.stats().tokens
    per_token = (resident_bytes() - before) / tokens
    cases = {
        "reusable": [prompts.reusable(LENGTH) for _ in range(repeat)],
        "several donors": [prompts.several(LENGTH) for _ in range(repeat)],
        "mixed": [prompts.mixed(LENGTH) for _ in range(repeat)],
        "nothing": [prompts.nothing(LENGTH) for _ in range(repeat)],
    }
    rows = [
        [f"{case}, 8,192 tokens", *lookups(sb, made).row(), recovered(sb, made[:50]), TARGETS[case]]
        for case, made in cases.items()
    ]
    for case in ("several", "mixed", "nothing"):
        made = [getattr(prompts, case)(131_072) for _ in range(max(repeat // 10, 5))]
        target = TARGETS["131,072 tokens"]
        rows.append([f"{case}, 131,072 tokens", *lookups(sb, made).row(), recovered(sb, made[:5]), target])
    rows.append([f"register {LENGTH} tokens", *filling.row(), None, "<= 3 ms"])
    adding = timed(register(donors + i) for i in range(repeat))
    rows.append(["register into the full store", *adding.row(), None, "<= 5 ms"])
    report.table(f"{name}: {donors:,} donors, {tokens:,} tokens", ["what", *COLUMNS, "share reused", "target"], rows)
    report.note(
        f"{name}: {per_token:.2f} bytes per donor token (target <= 12), the growth of the process's resident memory "
        f"while registering; {before >> 20} MiB were resident before the first donor"
    )
    sb.close()


def donor_counts(report: reporting.Report, counts: list[int], repeat: int) -> None:
    """The same kind of prompt as donors grow a hundredfold; donors of 512 tokens.

    All stores live at once. First they take turns, so that they see the same machine and none keeps the caches to
    itself, as beside a working engine; then each is asked alone, when a small store profits from warm caches.
    """

    def make(i: int) -> np.ndarray:
        return random_donor(i)[:512]

    stores: dict[int, SemBlend] = {}
    for count in counts:
        stores[count] = SemBlend(SemBlendConfig(embedder="none", max_donors=count, max_bytes=GIB))
        for i in range(count):
            stores[count].register(Prompt(make(i)), donor_id=f"donor-{i}")
    rows: list[list[object]] = []
    for case in ("several", "mixed", "nothing"):
        asked = {count: Prompts(count, make, fresh_random) for count in counts}
        made = {count: [getattr(asked[count], case)(LENGTH) for _ in range(repeat)] for count in counts}
        turns = {count: Timed([], []) for count in counts}
        for n in range(repeat):
            for count, sb in stores.items():
                once = lookups(sb, [made[count][n]])
                turns[count].wall += once.wall
                turns[count].cpu += once.cpu
        alone = {count: lookups(sb, made[count]).row()[0] for count, sb in stores.items()}
        base = turns[counts[0]].row()
        for count in counts:
            row = turns[count].row()
            rows.append([case, count, row[0], row[-1], row[0] / base[0], alone[count], alone[count] / alone[counts[0]]])
    report.table(
        "Lookup of 8,192 tokens by number of donors (512 tokens each)",
        ["what", "donors", "p50 ms", "mean CPU ms", "to fewest", "alone p50 ms", "alone, to fewest"],
        rows,
    )
    report.note("target: p50 at 100,000 donors <= 2 times p50 at 1,000")


def fresh_random(rng: np.random.Generator, length: int) -> np.ndarray:
    return rng.integers(0, VOCABULARY, length).astype(np.int32)


def real_donors(folder: Path, tokenizer: str) -> tuple[MakeDonor, Callable[[np.random.Generator, int], np.ndarray]]:
    """Donors of 8,192 tokens made of real passages, so that each passage stands in many donors at other places.

    Fresh text is real too: the last fifth of the passages, which no donor has.
    """
    encode = load_tokenizer(tokenizer).encode
    documents = [
        *longbench(folder),
        *leval(folder),
        *qmsum(folder),
        *articles(folder),
        *rag(folder, "hotpotqa_distractor"),
    ]
    passages = [ids for ids in (np.asarray(encode(d.text)) for d in documents) if len(ids) >= 64]
    pieces = [ids[at : at + 700] for ids in passages for at in range(0, len(ids), 700)]
    order = np.random.default_rng(7).permutation(len(pieces))
    kept, spare = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]

    def make(i: int) -> np.ndarray:
        rng = np.random.default_rng(i)
        chosen = [pieces[j] for j in rng.choice(kept, 40)]
        return np.concatenate(chosen)[:LENGTH].astype(np.int32)

    def fresh(rng: np.random.Generator, length: int) -> np.ndarray:
        chosen: list[np.ndarray] = []
        while sum(map(len, chosen)) < length:
            chosen.append(pieces[int(rng.choice(spare))])
        return np.concatenate(chosen)[:length].astype(np.int32)

    return make, fresh


def persistent(report: reporting.Report, donors: int, repeat: int) -> None:
    """What a store file costs: every registration is a transaction."""
    with tempfile.TemporaryDirectory() as folder:
        config = SemBlendConfig(embedder="none", max_donors=donors, store=f"{folder}/donors")
        with SemBlend(config) as sb:
            sb.warm_up()

            def register(i: int) -> Callable[[], object]:
                ids = random_donor(i)
                return lambda: sb.register(Prompt(ids), donor_id=f"donor-{i}")

            rows: list[list[object]] = [["register", *timed(register(i) for i in range(donors)).row()]]
            rows.append(["register, store full", *timed(register(donors + i) for i in range(repeat)).row()])
            rows.append(["save() a snapshot", *timed(iter([lambda: sb.save(f"{folder}/snapshot")])).row()])
        opening = timed(iter([lambda: SemBlend(config).close()]))
        rows.append(["open", *opening.row()])
    report.table(f"With a store file, {donors:,} donors of 8,192 tokens", ["what", *COLUMNS], rows)


START = """
import time; t = time.perf_counter()
import semblend; imported = time.perf_counter() - t
sb = semblend.SemBlend(semblend.SemBlendConfig(embedder="none")); made = time.perf_counter() - t - imported
sb.register(semblend.Prompt(range(1000)), donor_id="a"); first = time.perf_counter()
sb.lookup(semblend.Prompt(range(1000))); print(imported, made, first - t - imported - made, time.perf_counter() - first)
"""


def starting(report: reporting.Report) -> None:
    rows = []
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, check=True)
        rows.append([float(word) * 1e3 for word in done.stdout.split()])
    median = np.median(np.array(rows), axis=0)
    names = ["import semblend", "SemBlend()", "first register (loads kernels)", "first lookup"]
    targets = ["< 300 ms", "", "", ""]
    report.table(
        "Start-up, median of 5 new processes, kernels in the on-disk cache",
        ["what", "ms", "target"],
        [[name, float(ms), target] for name, ms, target in zip(names, median, targets, strict=True)],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reporting.add_common_arguments(parser, "speed")
    parser.add_argument("--donors", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=300, help="lookups a row")
    args = parser.parse_args()
    counts = [1_000, 10_000, 100_000]
    if args.quick:
        args.donors, args.repeat, counts = 500, 50, [100, 1000]
    report = reporting.Report("speed", args)
    starting(report)
    scale(
        report,
        "random tokens",
        args.donors,
        random_donor,
        Prompts(args.donors, random_donor, fresh_random),
        args.repeat,
    )
    if not args.quick:
        make, fresh = real_donors(reporting.data_dir(args), args.tokenizer)
        scale(report, "real text", args.donors, make, Prompts(args.donors, make, fresh), args.repeat)
    donor_counts(report, counts, args.repeat)
    persistent(report, 200 if args.quick else 2000, args.repeat)
    report.write(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
