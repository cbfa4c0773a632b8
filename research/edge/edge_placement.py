"""Where routers send requests: block hits, copies, load and added time of ours and of peers, on the same streams.

    python bench/edge_placement.py --peers-bin ~/peers/bin        # 40 minutes for 5 seeds

Four engines that model a prefix cache (bench/_placement_engine.py says what they model and what not) stand behind one
router at a time, started anew for every stream and seed. 16 clients ask, each its next question as soon as it has its
answer. On prefix streams the engines reuse equal beginnings; on shifted streams they reuse equal passages wherever
they stand. One engine with all the memory and four times the speed shows what could be had.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import _report  # first: it holds the numeric libraries to one thread
from _forwarders import Forwarder, find_ports, own_routers, peer_routers, running
from _placement_streams import Ask, Stream, make_streams

HERE = Path(__file__).parent
ENGINES = 4
CLIENTS = 16
CEILING = "one engine, all the memory"
STUDENT_95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}


@dataclass(frozen=True)
class Outcome:
    """What one router did with one stream. Shares of tokens; ``added_ms`` beyond what the engine itself took."""

    router: str
    stream: str
    seed: int
    requests: int
    errors: int
    prefix_hits: float
    passage_hits: float
    computed_tokens: int
    copies: float
    busiest_requests: float
    busiest_tokens: float
    added_p50_ms: float
    added_p99_ms: float
    took_s: float


@dataclass(frozen=True)
class Answered:
    """One request that was answered: by which engine, what it reused, and how long everything took."""

    ask: Ask
    told: dict[str, float]
    total_ms: float


async def send_stream(port: int, stream: Stream) -> tuple[list[Answered], int]:
    """Send a stream from `CLIENTS` clients; return what was answered and how many requests were not."""
    todo, answered, errors = list(reversed(stream.sessions)), [], 0

    async def work() -> None:
        nonlocal errors
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while todo:
            for ask in todo.pop():
                began = time.perf_counter()
                try:
                    writer.write(write_request(ask))
                    told = await read_told(reader)
                except (OSError, ValueError, KeyError, asyncio.IncompleteReadError):
                    errors += 1
                    writer.close()
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                    break
                answered.append(Answered(ask, told, 1000 * (time.perf_counter() - began)))
        writer.close()

    await asyncio.gather(*(work() for _ in range(CLIENTS)))
    return answered, errors


def write_request(ask: Ask) -> bytes:
    messages = [{"role": role, "content": text} for role, text in ask.messages]
    body = json.dumps({"model": "m", "messages": messages, "max_tokens": 1}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Authorization: Bearer k\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def read_told(reader: asyncio.StreamReader) -> dict[str, float]:
    """Read an answer; what the engine tells stands in the message's content."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"chunked" in head:
        body = b""
        while (size := int(await reader.readline(), 16)) != 0:
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    else:
        body = await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))
    if b" 200 " not in head[:16]:
        raise ValueError(body[:200])
    told: dict[str, float] = json.loads(json.loads(body)["choices"][0]["message"]["content"])
    return told


def score(router: str, stream: Stream, seed: int, answered: list[Answered], errors: int, took_s: float) -> Outcome:
    """Count what one run did."""
    told = [one.told for one in answered]
    total = sum(one["tokens"] for one in told)
    requests = Counter(one["engine"] for one in told)
    tokens: Counter[float] = Counter()
    homes: dict[int, set[float]] = defaultdict(set)
    asked: Counter[int] = Counter()
    for one in answered:
        tokens[one.told["engine"]] += int(one.told["computed"])
        for document in one.ask.documents:
            homes[document].add(one.told["engine"])
            asked[document] += 1
    again = [len(homes[document]) for document, count in asked.items() if count >= 2]
    added = sorted(one.total_ms - one.told["wait_ms"] for one in answered)
    engines = 1 if router == CEILING else ENGINES
    return Outcome(
        router=router, stream=stream.name, seed=seed, requests=len(answered), errors=errors,
        prefix_hits=sum(one["prefix"] for one in told) / total,
        passage_hits=sum(one["passages"] for one in told) / max(1, sum(one["in_passages"] for one in told)),
        computed_tokens=int(sum(one["computed"] for one in told)),
        copies=statistics.mean(again) if again else 0.0,
        busiest_requests=max(requests.values()) * engines / sum(requests.values()),
        busiest_tokens=max(tokens.values()) * engines / max(1, sum(tokens.values())),
        added_p50_ms=_report.percentile(added, 50), added_p99_ms=_report.percentile(added, 99), took_s=took_s,
    )  # fmt: skip


def run_one(router: Forwarder | None, stream: Stream, seed: int, args: argparse.Namespace, folder: Path) -> Outcome:
    """Start engines and one router, send one stream, count."""
    shares = 1 if router is None else ENGINES
    with ExitStack() as stack:
        ports = find_ports(shares)
        numbers = [str(args.cache_tokens * ENGINES // shares), str(args.us_per_token * shares / ENGINES)]
        reuse = "spans" if stream.is_shifted else "prefix"
        command = [sys.executable, str(HERE / "_placement_engine.py"), *numbers, reuse, *map(str, ports)]
        stack.enter_context(running("engines", command, ports[0], folder / "engines.log"))
        port, name = ports[0], CEILING
        if router is not None:
            port, name = find_ports(1)[0], router.name
            command = router.fill(port, [f"http://127.0.0.1:{one}" for one in ports], folder)
            stack.enter_context(running(name, command, port, folder / "router.log", {"SEMANTICKV_ENGINE_REUSE": reuse}))
        warm = Stream("warm-up", False, tuple((Ask((("user", f"warm-up {number}"),), ()),) for number in range(8)))
        deadline = time.monotonic() + 60
        while asyncio.run(send_stream(port, warm))[1] and time.monotonic() < deadline:
            time.sleep(0.5)
        began = time.perf_counter()
        answered, errors = asyncio.run(send_stream(port, stream))
        return score(name, stream, seed, answered, errors, time.perf_counter() - began)


def run(args: argparse.Namespace, report: _report.Report, folder: Path) -> None:
    peers, missing = peer_routers(args.peers_bin, ("cache_aware",))
    routers: list[Forwarder | None] = [None, *own_routers(), *peers]
    outcomes: list[Outcome] = []
    for seed in range(args.seed, args.seed + args.seeds):
        for stream in make_streams(_report.data_dir(args), seed, args.requests):
            for router in routers:
                try:
                    outcomes.append(run_one(router, stream, seed, args, folder))
                except RuntimeError as error:
                    report.note(f"{router and router.name}, {stream.name}, seed {seed} was left out: {error}")
                    continue
                last = outcomes[-1]
                _report.progress(
                    f"seed {seed}, {stream.name}, {last.router}: prefix {last.prefix_hits:.3f}, passages "
                    f"{last.passage_hits:.3f}, copies {last.copies:.2f}, busiest {last.busiest_requests:.2f}"
                )
    for name in dict.fromkeys(one.stream for one in outcomes):
        of_stream = [one for one in outcomes if one.stream == name]
        names = dict.fromkeys(one.router for one in of_stream)
        report.table(f"Placement: {name}", COLUMNS, [describe([o for o in of_stream if o.router == n]) for n in names])
    report.add("outcomes", [asdict(one) for one in outcomes])
    report.note(
        f"{args.seeds} seeds, means with 95 % intervals (Student); {CLIENTS} clients at once, {ENGINES} engines"
    )
    report.note(f"a cache of {args.cache_tokens} tokens each, {args.us_per_token:g} µs for each token computed")
    report.note("prefix, passages: share of tokens that the serving engine held, as beginning or in passages anywhere")
    report.note("copies: engines that saw a document, of documents asked for twice or more; busiest: over the mean")
    if missing:
        report.note("not found and left out: " + ", ".join(missing))


COLUMNS = [
    "router", "prefix hits", "passage hits", "tokens computed", "copies", "busiest, requests", "busiest, tokens",
    "added p50 ms", "added p99 ms", "errors",
]  # fmt: skip


def describe(outcomes: list[Outcome]) -> list[object]:
    """One row: means over seeds, with intervals where they matter."""

    def interval(name: str) -> str:
        values = [getattr(one, name) for one in outcomes]
        mean = statistics.mean(values)
        if len(values) < 2:
            return f"{mean:.3f}"
        factor = STUDENT_95.get(len(values), 1.96)
        return f"{mean:.3f} ± {factor * statistics.stdev(values) / math.sqrt(len(values)):.3f}"

    def mean(name: str) -> float:
        return statistics.mean(getattr(one, name) for one in outcomes)

    return [
        outcomes[0].router, interval("prefix_hits"), interval("passage_hits"), round(mean("computed_tokens")),
        interval("copies"), interval("busiest_requests"), interval("busiest_tokens"), mean("added_p50_ms"),
        mean("added_p99_ms"), sum(one.errors for one in outcomes),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "edge_placement")
    parser.add_argument("--peers-bin", metavar="DIR", help="folder with vllm-router, smg and sglang-router")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200, help="of each stream")
    parser.add_argument("--cache-tokens", type=int, default=40_000, help="of each engine")
    parser.add_argument("--us-per-token", type=float, default=50.0, help="to compute one, on one engine")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.requests = 1, 60
    return _report.run_in_folder("edge_placement", args, run)


if __name__ == "__main__":
    sys.exit(main())
