"""What the proxy and the router add to a request with an 8k-token prompt, beside peer routers: time, CPU, saturation.

    python bench/edge.py --peers-bin ~/peers/bin        # 6 minutes

All forwarders run at once, and each gets a few requests in turn, round after round, the bare engine among them: what
else happens on the machine meets all of them alike. "Added" is the median over rounds of the difference between a
forwarder's median and the engine's of the same round. Engine, forwarder and load are a process each, so on two cores
the requests a second say how forwarders compare, not what either could reach alone. Peers that are not found are left
out, and the notes say so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import _report  # first: it holds the numeric libraries to one thread
from _forwarders import Running, find_ports, own_proxies, own_routers, peer_routers, running

HERE = Path(__file__).parent
PROMPT_BYTES = 33_000  # 8k tokens of English
DOCUMENTS = 12
ENGINE = "the engine alone"
LOADS = {"JSON": (False, 1), "stream": (True, 1), "JSON at 16": (False, 16)}
"""Name → whether answers are streams, and how many requests at once."""


@dataclass
class Samples:
    """What one load found, round by round: milliseconds of each request, CPU a request, requests a second."""

    total_ms: list[list[float]] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    errors: int = 0


def make_requests(count: int, *, stream: bool, seed: int) -> list[bytes]:
    """Requests over a few documents, each with a question of its own behind it, as bytes on the wire."""
    chance = random.Random(seed)
    words = ["river", "stone", "cloud", "engine", "paper", "market", "tax", "law", "cell", "gene", "the", "of", "and"]
    documents = []
    for _ in range(DOCUMENTS):
        text = ""
        while len(text) < PROMPT_BYTES:
            text += " ".join(chance.choice(words) + str(chance.randrange(99)) for _ in range(200)) + ".\n"
        documents.append(text[:PROMPT_BYTES])
    made = []
    for number in range(count):
        prompt = f"{chance.choice(documents)}\nQuestion {number}: {chance.random()}?"
        body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 16, "stream": stream}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAuthorization: Bearer k\r\n"
        )
        made.append(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return made


async def send_all(port: int, requests: list[bytes], concurrency: int) -> tuple[list[float], int, float]:
    """Send requests over ``concurrency`` connections; return their times in ms, errors, and seconds in all."""
    todo, totals, errors = list(reversed(requests)), [], 0

    async def work() -> None:
        nonlocal errors
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while todo:
            began = time.perf_counter()
            writer.write(todo.pop())
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            errors += b" 200 " not in head[:16]
            if b"chunked" in head:
                while (size := int(await reader.readline(), 16)) != 0:
                    await reader.readexactly(size + 2)
                await reader.readline()
            else:
                await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))
            totals.append(1000 * (time.perf_counter() - began))
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return totals, errors, time.perf_counter() - began


def measure(server: Running, requests: list[bytes], concurrency: int, into: Samples) -> None:
    """Send one round's requests and note what they took."""
    before = server.read_cpu_s()
    totals, errors, took_s = asyncio.run(send_all(server.port, requests, concurrency))
    into.cpu_ms.append(1000 * (server.read_cpu_s() - before) / len(requests))
    into.total_ms.append(totals)
    into.rate.append(len(requests) / took_s)
    into.errors += errors


def run(args: argparse.Namespace, report: _report.Report, folder: Path) -> None:
    peers, missing = peer_routers(args.peers_bin)
    rounds, batch = (3, 8) if args.quick else (args.rounds, 24)
    found: dict[str, dict[str, Samples]] = defaultdict(lambda: {name: Samples() for name in LOADS})
    with ExitStack() as stack:
        ports = find_ports(2)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        engine = [sys.executable, str(HERE / "_edge_engine.py"), *map(str, ports)]
        servers = [stack.enter_context(running(ENGINE, engine, ports[0], folder / "engine.log"))]
        for forwarder in [*own_proxies(), *own_routers(), *peers]:
            port = find_ports(1)[0]
            _report.progress(f"starting {forwarder.name} …")
            try:
                command = forwarder.fill(port, urls, folder)
                servers.append(stack.enter_context(running(forwarder.name, command, port, folder / "log")))
            except RuntimeError as error:
                report.note(f"{forwarder.name} was left out: {error}")
        time.sleep(3.0)  # peers ask their engines' health before they send anything there
        requests = {s: make_requests(max(64, 2 * batch), stream=s, seed=args.seed) for s in (False, True)}
        for server in servers:
            asyncio.run(send_all(server.port, requests[False], 4))
        for number in range(rounds):
            _report.progress(f"round {number + 1} of {rounds}")
            for name, (stream, concurrency) in LOADS.items():
                chosen = random.Random(number).sample(requests[stream], batch * (2 if concurrency > 1 else 1))
                for server in random.Random(number).sample(servers, len(servers)):
                    measure(server, chosen, concurrency, found[server.name][name])
    rows = [describe(server.name, found[server.name], found[ENGINE]) for server in servers]
    report.table("What a forwarder adds to a request with an 8k-token prompt", COLUMNS, rows)
    report.note(
        f"{rounds} rounds of {batch} requests one at a time, {2 * batch} at 16; {DOCUMENTS} documents, two engines"
    )
    report.note(
        "added: median over rounds of the forwarder's median less the engine's; in brackets quartiles of rounds"
    )
    report.note("CPU: of the forwarder's processes, all threads; with traces, of the process that writes them too")
    if missing:
        report.note("not found and left out: " + ", ".join(missing))


COLUMNS = [
    "forwarder", "added JSON ms", "quartiles", "added stream ms", "quartiles ", "p99 JSON ms", "p99 stream ms",
    "CPU ms JSON", "CPU ms stream", "CPU ms at 16", "requests/s at 16", "errors",
]  # fmt: skip


def describe(name: str, found: dict[str, Samples], bare: dict[str, Samples]) -> list[object]:
    """One row of the table."""
    added = {load: sorted(_subtract(found[load], bare[load])) for load in ("JSON", "stream")}
    tails = [_report.percentile(sorted(chain.from_iterable(found[load].total_ms)), 99) for load in added]
    cells: list[object] = [name]
    for values in added.values():
        low, middle, high = (_report.percentile(values, at) for at in (25, 50, 75))
        cells += [middle, f"{low:.2f} to {high:.2f}"]
    cells += tails
    cells += [_median(found[load].cpu_ms) for load in LOADS]
    return [*cells, _median(found["JSON at 16"].rate), sum(one.errors for one in found.values())]


def _subtract(one: Samples, bare: Samples) -> list[float]:
    return [_median(a) - _median(b) for a, b in zip(one.total_ms, bare.total_ms, strict=True)]


def _median(values: list[float]) -> float:
    return _report.percentile(sorted(values), 50)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "edge")
    parser.add_argument("--peers-bin", metavar="DIR", help="folder with vllm-router, smg and sglang-router")
    parser.add_argument("--rounds", type=int, default=25)
    args = parser.parse_args()
    return _report.run_in_folder("edge", args, run)


if __name__ == "__main__":
    sys.exit(main())
