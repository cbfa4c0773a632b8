"""Whether one tenant's waiting time through the router tells that another tenant has sent the same document.

    python bench/edge_timing.py        # 3 minutes

Pairs of worlds, in random order: in one of them B sends a document, in the other B sends another one of the same
length; then A sends the first document, under a key of its own. A's times of both worlds are compared: the AUC is the
chance that a time of one world is longer than a time of the other, .5 if they tell nothing. The control is A and B with
one key: the router knows the document then, and the score in A's headers says so. Engines have no cache and answer at
once: what an engine's own cache tells is the engine's, and a salt for each key keeps that apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import _report  # first: it holds the numeric libraries to one thread
from _forwarders import find_ports, own_routers, running

HERE = Path(__file__).parent
PROMPT_BYTES = 33_000  # 8k tokens of English
ENGINES = 4
POLICIES = ("cache_aware", "semantic_locality")
RESAMPLES = 2000


class Client:
    """One tenant's connection."""

    def __init__(self, port: int, key: str) -> None:
        self.port, self.key = port, key

    async def open(self) -> None:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)

    async def ask(self, document: str) -> tuple[float, float]:
        """Send a document; return the milliseconds to the whole answer, and the score that the headers show."""
        body = json.dumps({"model": "m", "prompt": document, "max_tokens": 1}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self.key}\r\n"
        began = time.perf_counter()
        self.writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        found = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        await self.reader.readexactly(int(found.partition(b"content-length:")[2].split(b"\r\n")[0]))
        took_ms = 1000 * (time.perf_counter() - began)
        return took_ms, float(found.partition(b"x-semantic-score:")[2].split(b"\r\n")[0])


def write_document(seed: str) -> str:
    chance = random.Random(seed)
    words = ("river", "stone", "cloud", "engine", "paper", "market")
    return " ".join(chance.choice(words) + str(chance.randrange(999)) for _ in range(6000))[:PROMPT_BYTES]


async def run_pairs(port: int, pairs: int, *, one_key: bool, seed: int) -> tuple[list[float], list[float], float]:
    """A's times where B sent the same document, where B sent another one, and the mean score in the first world."""
    name = f"{seed} {port} {one_key}"
    victim, spy = Client(port, f"b {name}"), Client(port, f"{'b' if one_key else 'a'} {name}")
    await asyncio.gather(victim.open(), spy.open())
    same, other, scores = [], [], []
    worlds = [(pair, is_same) for pair in range(pairs) for is_same in (True, False)]
    random.Random(name).shuffle(worlds)
    for pair, is_same in worlds:
        document = write_document(f"{name} {pair} {is_same}")
        await victim.ask(document if is_same else write_document(f"{name} {pair} another"))
        await asyncio.sleep(0.005)
        took_ms, score = await spy.ask(document)
        (same if is_same else other).append(took_ms)
        if is_same:
            scores.append(score)
    return same, other, sum(scores) / len(scores)


def compute_auc(one: list[float], two: list[float]) -> float:
    """The chance that a value of ``one`` is above a value of ``two``; ties count half.

    >>> compute_auc([1.0, 3.0], [2.0, 2.0])
    0.5
    """
    ranked = sorted([(value, 0) for value in one] + [(value, 1) for value in two])
    above = ties = 0.0
    seen = 0
    at = 0
    while at < len(ranked):
        end = at
        while end < len(ranked) and ranked[end][0] == ranked[at][0]:
            end += 1
        ones = sum(1 for _, which in ranked[at:end] if which == 0)
        twos = end - at - ones
        above += ones * seen
        ties += ones * twos
        seen += twos
        at = end
    return (above + ties / 2) / (len(one) * len(two))


def describe(name: str, same: list[float], other: list[float], score: float, seed: int) -> list[object]:
    """One row: medians, the AUC with a bootstrap interval, the score that A saw."""
    chance = random.Random(seed)
    again = sorted(
        compute_auc(chance.choices(same, k=len(same)), chance.choices(other, k=len(other))) for _ in range(RESAMPLES)
    )
    low, high = (_report.percentile(again, at) for at in (2.5, 97.5))
    medians = [_report.percentile(sorted(values), 50) for values in (same, other)]
    return [name, len(same), *medians, compute_auc(same, other), f"{low:.3f} to {high:.3f}", score]


COLUMNS = ["router, keys", "pairs", "p50 ms, same", "p50 ms, another", "AUC", "95 %", "score A saw"]


def run(args: argparse.Namespace, report: _report.Report, folder: Path) -> None:
    pairs = 20 if args.quick else args.pairs
    rows = []
    with ExitStack() as stack:
        ports = find_ports(ENGINES)
        engine = [sys.executable, str(HERE / "_edge_engine.py"), *map(str, ports)]
        stack.enter_context(running("engines", engine, ports[0], folder / "engine.log"))
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        for forwarder in own_routers(POLICIES):
            port = find_ports(1)[0]
            stack.enter_context(running(forwarder.name, forwarder.fill(port, urls, folder), port, folder / "log"))
            for one_key in (False, True):
                _report.progress(f"{forwarder.name}, {'one key' if one_key else 'two keys'} …")
                asyncio.run(run_pairs(port, 10, one_key=one_key, seed=args.seed + 1))
                same, other, score = asyncio.run(run_pairs(port, pairs, one_key=one_key, seed=args.seed))
                name = f"{forwarder.name.removeprefix('semantickv router ')}, {'one key' if one_key else 'two keys'}"
                rows.append(describe(name, same, other, score, args.seed))
    report.table("What A's waiting time tells of what B sent", COLUMNS, rows)
    report.note(
        f"{ENGINES} engines without a cache; prompts of 8k tokens; A asks 5 ms after B's answer; {RESAMPLES} resamples"
    )
    report.note("one key is the control: A and B are one tenant there, and the score says that the document is known")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "edge_timing")
    parser.add_argument("--pairs", type=int, default=400)
    args = parser.parse_args()
    return _report.run_in_folder("edge_timing", args, run)


if __name__ == "__main__":
    sys.exit(main())
