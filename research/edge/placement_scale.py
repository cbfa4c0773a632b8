"""Placement at scale: 1,000 replicas, a million documents, real arrivals; our router's own code, engines simulated.

    nice python bench/placement_scale.py --out bench/results/placement_scale.json        # 15 minutes, one core

Two streams. *Documents*: when requests come and how long prompts and answers are is Azure's conversation trace of 2023;
a thousand copies of its hour run at once, each begun at another moment. What they ask about are documents out of a
million, by Zipf's law, each behind one of 200 instructions, so that equal passages stand at different places.
*Conversations*: Mooncake's trace with its own block hashes, arrivals and lengths, in as many copies as the fleet needs;
copies share nothing.

Routing is `semantickv.routing.router.Router`, with every decision, start, first byte and end. An engine is an LRU of
what it has computed, in tokens, and a clock: one prompt at a time is prefilled, at a fixed rate for what it does not
hold; answers are decoded side by side at a fixed rate. Reuse is taken from the engine's LRU, not from what the router
believes. Not simulated: batches, blocks pinned by running requests, replicas that fail.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import heapq
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from _report import Report, add_common_arguments, data_dir, percentile, progress

from semantickv.edge.addresses import EngineAddress
from semantickv.edge.pool import ConnectionPool
from semantickv.routing.fingerprint import PromptPieces
from semantickv.routing.locality import ReplicaMemory
from semantickv.routing.replica import Replica
from semantickv.routing.router import EngineReuse, RouteDecision, Router, RouteRequest

POLICIES = ("random", "least_loaded", "prefix_hash", "semantic_locality")
PIECE_TOKENS = 64
BLOCK_TOKENS = 512
INSTRUCTIONS = 200
ZIPF = 0.9
_MASK, _MIX = (1 << 64) - 1, 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it comes, what it asks, how long its answer is; ``document`` is -1 where there is none."""

    at_s: float
    pieces: PromptPieces
    answer_tokens: int
    document: int = -1


@dataclass(frozen=True)
class Outcome:
    """What one policy did with one stream, in its second half: the first fills the caches."""

    stream: str
    policy: str
    requests: int
    hit_share: float
    copies: float
    busiest_requests: float
    busiest_tokens: float
    wait_p50_s: float
    wait_p99_s: float
    decide_p50_us: float
    decide_p99_us: float
    book_p50_us: float
    took_s: float


def mix(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def make_pieces(values: list[int], tokens: int) -> PromptPieces:
    """Pieces of ``tokens`` tokens with these contents."""
    hashes, chains, chain = [], [], 0
    for value in values:
        one = mix(value & _MASK)
        chain = ((chain ^ one) * _MIX + 1) & _MASK
        hashes.append(one)
        chains.append(chain)
    return PromptPieces(tuple(hashes), tuple(chains), (tokens,) * len(hashes), (1.0,) * len(hashes))


def read_azure(data: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Arrival times in seconds, prompt lengths and answer lengths of Azure's hour."""
    with gzip.open(data / "traces" / "azure_llm_2023_conv.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    times = np.array([np.datetime64(row["TIMESTAMP"][:26]) for row in rows])
    at_s = (times - times[0]) / np.timedelta64(1, "s")
    return at_s, *(np.array([int(row[name]) for row in rows]) for name in ("ContextTokens", "GeneratedTokens"))


def ask_about_documents(data: Path, requests: int, copies: int, documents: int, seed: int) -> Iterator[Arrival]:
    """Azure's arrivals and lengths, over documents by popularity."""
    at_s, prompts, answers = read_azure(data)
    chance, hour = np.random.default_rng(seed), float(at_s[-1])
    shifts = chance.uniform(0, hour, copies)
    window_s = requests / (len(at_s) * copies / hour)
    picked: list[tuple[float, int]] = []
    for shift in shifts:
        first, last = np.searchsorted(at_s, (shift, min(hour, shift + window_s)))
        picked += [(float(at_s[n] - shift), int(n)) for n in range(first, last)]
    picked.sort()
    weights = np.cumsum(np.arange(1, documents + 1, dtype=np.float64) ** -ZIPF)
    drawn = np.searchsorted(weights, chance.uniform(0, weights[-1], len(picked)))
    for number, ((when, row), document) in enumerate(zip(picked, drawn.tolist(), strict=True)):
        length = int(
            prompts[mix(document) % len(prompts)]
        )  # a document is as long as some real prompt, always the same
        instruction = mix(number ^ seed << 20) % INSTRUCTIONS
        values = [1_000_000_007 * (instruction + 1), 1_000_000_007 * (instruction + 1) + 1]
        values += [(document + 1) << 24 | part for part in range(max(1, length // PIECE_TOKENS))]
        values.append(1 << 62 | number)  # the question: nobody has asked it before
        yield Arrival(when, make_pieces(values, PIECE_TOKENS), int(answers[row]), document)


def go_on_talking(data: Path, requests: int) -> Iterator[Arrival]:
    """Mooncake's conversations, in copies that share nothing, each begun a little later."""
    with gzip.open(data / "traces" / "mooncake_conversation_first_half.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    copies = max(1, requests // len(rows))
    listed = [
        (row["timestamp"] / 1000 + 0.37 * copy, copy, number)
        for copy in range(copies)
        for number, row in enumerate(rows)
    ]
    listed.sort()
    for when, copy, number in listed:
        row = rows[number]
        values = [(copy + 1) << 40 | block for block in row["hash_ids"]]
        yield Arrival(when, make_pieces(values, BLOCK_TOKENS), row["output_length"])


class Fleet:
    """Replicas behind one router, and what their engines really hold."""

    def __init__(self, policy: str, args: argparse.Namespace, reuse: EngineReuse) -> None:
        pool = ConnectionPool(EngineAddress("http", "nowhere", 1))  # never connected
        tracked = args.tracked_tokens
        replicas = [Replica(f"r{n}", pool, ReplicaMemory(tracked)) for n in range(args.replicas)]
        self.chance = random.Random(args.seed) if policy == "random" else None
        self.router = Router(replicas, "least_loaded" if policy == "random" else policy, reuse=reuse)
        self.caches = [ReplicaMemory(args.cache_tokens) for _ in replicas]
        self.row_of = {replica.id: row for row, replica in enumerate(replicas)}
        self.free_at = [0.0] * args.replicas
        self.spans, self.args = reuse is EngineReuse.SPANS, args
        self.ends: list[tuple[float, int, RouteDecision]] = []

    def choose(self, request: RouteRequest) -> RouteDecision:
        if self.chance is None:
            found = self.router.choose(request)
            assert isinstance(found, RouteDecision)
            return found
        drawn = self.router.replicas[self.chance.randrange(len(self.router.replicas))]
        found = Router([drawn], "round_robin").choose(request)
        assert isinstance(found, RouteDecision)
        return found

    def serve(self, row: int, arrival: Arrival) -> tuple[int, float, float]:
        """Tokens that the engine reuses, the time of its first token, the time of its last."""
        cache = self.caches[row]
        held = cache.match(arrival.pieces)
        reused = max(held.prefix_tokens, held.any_tokens) if self.spans else held.prefix_tokens
        cache.note(arrival.pieces)
        begins = max(arrival.at_s, self.free_at[row])
        first = begins + (arrival.pieces.total_tokens - reused) / self.args.prefill_tokens_per_s
        self.free_at[row] = first
        return reused, first, first + arrival.answer_tokens / self.args.decode_tokens_per_s

    def let_go(self, until: float) -> None:
        while self.ends and self.ends[0][0] <= until:
            _, _, decision = heapq.heappop(self.ends)
            self.router.end(decision, None, had_first_byte=False)


def run_policy(name: str, policy: str, arrivals: list[Arrival], fleet: Fleet) -> Outcome:
    """Send a stream through one policy."""
    args = fleet.args
    half, began = len(arrivals) // 2, time.perf_counter()
    decide, book, waits = [], [], []
    reused_tokens = total_tokens = 0
    requests, tokens = [0] * args.replicas, [0] * args.replicas
    homes: dict[int, set[int]] = {}
    for number, arrival in enumerate(arrivals):
        fleet.let_go(arrival.at_s)
        request = RouteRequest(pieces=arrival.pieces)
        clock = time.process_time_ns()
        decision = fleet.choose(request)
        decided = time.process_time_ns()
        fleet.router.start(decision, request)
        if fleet.router.needs_pieces:
            fleet.router.remember(decision, request)
        booked = time.process_time_ns()
        row = fleet.row_of[decision.replica.id]
        reused, first, last = fleet.serve(row, arrival)
        heapq.heappush(fleet.ends, (last, number, decision))
        if number < half:
            continue
        decide.append((decided - clock) / 1e3)
        book.append((booked - decided) / 1e3)
        waits.append(first - arrival.at_s)
        reused_tokens, total_tokens = reused_tokens + reused, total_tokens + arrival.pieces.total_tokens
        requests[row] += 1
        tokens[row] += arrival.pieces.total_tokens - reused
        if arrival.document >= 0:
            homes.setdefault(arrival.document, set()).add(row)
    counted = len(waits)
    asked_again = [len(rows) for rows in homes.values() if len(rows) > 0]
    return Outcome(
        name, policy, counted, reused_tokens / total_tokens,
        sum(asked_again) / len(asked_again) if asked_again else 0.0,
        max(requests) * args.replicas / counted, max(tokens) * args.replicas / max(1, sum(tokens)),
        percentile(sorted(waits), 50), percentile(sorted(waits), 99), percentile(sorted(decide), 50),
        percentile(sorted(decide), 99), percentile(sorted(book), 50), time.perf_counter() - began,
    )  # fmt: skip


def read_rss_bytes() -> int:
    """Resident memory of this process now; the largest ever would be that of the process that started it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fill_memory(replicas: int, tracked_tokens: int) -> dict[str, float]:
    """What a router takes whose memories are full, each with pieces of its own; for a process of its own."""
    pool = ConnectionPool(EngineAddress("http", "nowhere", 1))
    before = read_rss_bytes()
    router = Router([Replica(f"r{n}", pool, ReplicaMemory(tracked_tokens)) for n in range(replicas)])
    pieces_each = tracked_tokens // PIECE_TOKENS
    for row, replica in enumerate(router.replicas):
        for start in range(0, pieces_each, 128):
            values = [row << 32 | start + n for n in range(min(128, pieces_each - start))]
            replica.memory.note(make_pieces(values, PIECE_TOKENS))
    taken = read_rss_bytes() - before
    tokens = sum(replica.memory.tokens for replica in router.replicas)
    return {"bytes": taken, "tokens": tokens, "bytes_per_token": taken / tokens}


def measure_memory(replicas: int, tracked_tokens: int) -> dict[str, float]:
    """`fill_memory` in a fresh process."""
    command = [sys.executable, __file__, "--fill", str(replicas), str(tracked_tokens)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def run(args: argparse.Namespace, report: Report) -> None:
    data = data_dir(args)
    streams = {
        "documents": (
            list(ask_about_documents(data, args.requests, args.replicas, args.documents, args.seed)),
            EngineReuse.SPANS,
        ),
        "conversations": (list(go_on_talking(data, args.requests)), EngineReuse.PREFIX),
    }
    outcomes: list[Outcome] = []
    for name, (arrivals, reuse) in streams.items():
        window = arrivals[-1].at_s - arrivals[0].at_s
        mean = sum(one.pieces.total_tokens for one in arrivals) / len(arrivals)
        report.note(f"{name}: {len(arrivals)} requests in {window:.0f} s of the trace's time, {mean:.0f} tokens each")
        for policy in POLICIES:
            outcomes.append(run_policy(name, policy, arrivals, Fleet(policy, args, reuse)))
            last = outcomes[-1]
            progress(f"{name}, {policy}: hits {last.hit_share:.3f}, {last.decide_p50_us:.0f} µs, {last.took_s:.0f} s")
    for name in streams:
        report.table(f"Placement of {name} over {args.replicas} replicas", COLUMNS, [
            [one.policy, one.hit_share, one.copies, one.busiest_requests, one.busiest_tokens, one.wait_p50_s,
             one.wait_p99_s, one.decide_p50_us, one.decide_p99_us, one.book_p50_us]
            for one in outcomes if one.stream == name
        ])  # fmt: skip
    sizes = [(replicas, args.tracked_tokens) for replicas in (args.replicas // 10, args.replicas)]
    rows = []
    for replicas, tokens in sizes:
        found = measure_memory(replicas, tokens)
        rows.append([replicas, int(found["tokens"]), found["bytes"] / 2**20, found["bytes_per_token"]])
    report.table("Memory of a router whose memories are full", ["replicas", "tokens", "MiB", "bytes a token"], rows)
    report.add("outcomes", [asdict(one) for one in outcomes])
    report.note("counted in the second half of each stream; hits: share of prompt tokens that the engine really held")
    report.note("copies: replicas that a document was computed on; busiest: the busiest replica over the mean")
    report.note("waits are simulated; decision times are CPU time of this machine, which was busy with other work")


COLUMNS = [
    "policy", "hits", "copies", "busiest, requests", "busiest, tokens", "first token p50 s", "first token p99 s",
    "decision p50 µs", "decision p99 µs", "start and remember p50 µs",
]  # fmt: skip


def main() -> int:
    if sys.argv[1:2] == ["--fill"]:
        print(json.dumps(fill_memory(int(sys.argv[2]), int(sys.argv[3]))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser, "placement_scale")
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--requests", type=int, default=100_000, help="of each stream, about")
    parser.add_argument("--cache-tokens", type=int, default=400_000, help="that an engine holds")
    parser.add_argument("--tracked-tokens", type=int, default=400_000, help="that the router remembers of a replica")
    parser.add_argument("--prefill-tokens-per-s", type=float, default=10_000.0)
    parser.add_argument("--decode-tokens-per-s", type=float, default=50.0)
    args = parser.parse_args()
    if args.quick:
        args.replicas, args.documents, args.requests = 100, 20_000, 4_000
    report = Report("placement_scale", args)
    run(args, report)
    report.write(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
