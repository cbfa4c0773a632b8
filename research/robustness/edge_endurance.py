"""Does the router hold a thousand streams at once, and is its memory flat over 100,000 requests?

    python bench/edge_endurance.py                       # 20 minutes; --requests 20000 for a fifth of it

One router (semantic_locality) over two engines, 8k-token prompts over 400 documents that change as the run goes on.
First 1,000 streams are opened side by side, and all of them are open before the first one goes on; then the requests,
16 at a time, with resident memory read after every twentieth of them. The router remembers 2 million tokens of each
engine and 10,000 records: memory grows until those are full, and must not grow after that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import _report  # first: it holds the numeric libraries to one thread
from _forwarders import find_ports, own_routers, running
from edge import PROMPT_BYTES, send_all

HERE = Path(__file__).parent
STREAMS = 1000
STEPS = 20
WORDS = ("river", "stone", "cloud", "engine", "paper", "market", "tax", "law", "cell", "gene", "the", "of", "and")


def make_requests(count: int, seed: int) -> Iterator[bytes]:
    """Requests over documents of which one in four is new, each with a question of its own behind it."""
    chance = random.Random(seed)
    documents: list[str] = []
    for number in range(count):
        if len(documents) < 40 or chance.random() < 0.25:
            words = " ".join(chance.choice(WORDS) + str(chance.randrange(9999)) for _ in range(PROMPT_BYTES // 9))
            documents.append(words)
            del documents[:-400]
        body = json.dumps({"model": "m", "prompt": f"{chance.choice(documents)}\nQuestion {number}?"}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        key = f"Authorization: Bearer key-{number % 7}\r\nContent-Length: {len(body)}\r\n\r\n"
        yield (head + key).encode() + body


async def hold_streams(port: int, count: int) -> tuple[int, int, float]:
    """Open streams side by side; return how many were open at once, how many ended whole, and the seconds it took."""
    body = b'{"model": "m", "prompt": "Hold on.", "stream": true, "hold": true}'
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    open_now, whole = 0, 0
    all_open = asyncio.Event()

    async def work() -> None:
        nonlocal open_now, whole
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        await reader.readuntil(b"data: ")
        open_now += 1
        if open_now == count:
            all_open.set()
        rest = await reader.readuntil(b"0\r\n\r\n")
        whole += rest.count(b"[DONE]")  # not in one line with await: both sides would be read before it
        writer.close()

    began = time.perf_counter()
    await asyncio.wait_for(asyncio.gather(*(work() for _ in range(count))), 300)
    return open_now, whole, time.perf_counter() - began


def run(args: argparse.Namespace, report: _report.Report, folder: Path) -> None:
    with ExitStack() as stack:
        ports = find_ports(3)
        engine = [sys.executable, str(HERE / "_edge_engine.py"), *map(str, ports[:2])]
        stack.enter_context(running("engine", engine, ports[0], folder / "engine.log"))
        router = own_routers(["semantic_locality"])[0]
        command = router.fill(ports[2], [f"http://127.0.0.1:{port}" for port in ports[:2]], folder)
        server = stack.enter_context(running(router.name, command, ports[2], folder / "router.log"))
        held, whole, took_s = asyncio.run(hold_streams(server.port, STREAMS))
        report.table(
            "Streams at once", ["opened", "ended whole", "seconds", "MiB after"],
            [[held, whole, took_s, server.read_rss_mib()]],
        )  # fmt: skip
        rows, requests, step = [], make_requests(args.requests, args.seed), args.requests // STEPS
        for number in range(1, STEPS + 1):
            before = server.read_cpu_s()
            batch = [next(requests) for _ in range(step)]
            try:
                totals, errors, took_s = asyncio.run(send_all(server.port, batch, 16))
            except KeyboardInterrupt:
                report.note(f"ended by hand after {(number - 1) * step} of {args.requests} requests")
                break
            totals.sort()
            cpu_ms = 1000 * (server.read_cpu_s() - before) / step
            rows.append([
                number * step, errors, server.read_rss_mib(), cpu_ms, step / took_s,
                _report.percentile(totals, 50), _report.percentile(totals, 99),
            ])  # fmt: skip
            _report.progress(f"{number * step}: {rows[-1][2]:.0f} MiB, {cpu_ms:.2f} ms CPU, {step / took_s:.0f}/s")
    columns = ["requests", "errors", "MiB", "CPU ms a request", "requests/s", "p50 ms", "p99 ms"]
    report.table("Memory and time over requests with 8k-token prompts, 16 at a time", columns, rows)
    half = [row[2] for row in rows[len(rows) // 2 :]] or [0.0]
    report.note(f"second half: {min(half):.0f} to {max(half):.0f} MiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "edge_endurance")
    parser.add_argument("--requests", type=int, default=100_000)
    args = parser.parse_args()
    if args.quick:
        args.requests = 1000
    return _report.run_in_folder("edge_endurance", args, run)


if __name__ == "__main__":
    sys.exit(main())
