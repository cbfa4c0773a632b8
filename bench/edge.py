"""What the proxy and the router add to a request with an 8k-token prompt, beside peer routers: time, CPU, saturation.

    python bench/edge.py --peers-bin ~/peers/bin

Engine, forwarder and load are a process each on one machine, so on two cores the requests a second say how forwarders
compare, not what either could reach alone. Peers that are not found are left out, and the table says so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import _report  # first: it holds the numeric libraries to one thread

HERE = Path(__file__).parent
PROMPT_BYTES = 33_000  # 8k tokens of English
DOCUMENTS = 12
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Forwarder:
    """Something between a client and the engines; ``command`` has {port}, {metrics} and {urls} to fill in."""

    name: str
    command: tuple[str, ...]
    environ: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Sample:
    """What one load found: milliseconds of each request, of each first byte, and CPU of the forwarder."""

    total_ms: list[float]
    first_ms: list[float]
    cpu_ms: float
    requests_per_s: float
    errors: int


def own_forwarders() -> list[Forwarder]:
    """The proxy and the router, as their commands start them."""
    semantickv = (sys.executable, "-m", "semantickv")
    proxy = (*semantickv, "proxy", "--port", "{port}", "--upstream", "{first_url}")
    router = (*semantickv, "router", "--no-trace", "--port", "{port}", "--replicas", "{comma_urls}", "--policy")
    return [
        Forwarder("semantickv proxy, no traces", (*proxy, "--no-trace")),
        Forwarder("semantickv proxy, traces", (*proxy, "--output-dir", "{folder}")),
        *(
            Forwarder(f"semantickv router {p}", (*router, p))
            for p in ("round_robin", "cache_aware", "semantic_locality")
        ),
    ]


def peer_forwarders(folder: str | None) -> tuple[list[Forwarder], list[str]]:
    """The peers found in a folder of commands, and the names of those that are not there."""
    common = ("--host", "127.0.0.1", "--port", "{port}", "--prometheus-port", "{metrics}", "--worker-urls", "{urls}")
    wanted = {"vllm-router": (), "smg": ("launch",), "sglang-router": ("launch",)}
    found, missing = [], []
    for name, words in wanted.items():
        command = shutil.which(name, path=folder) if folder else shutil.which(name)
        if command is None:
            missing.append(name)
            continue
        found += [
            Forwarder(f"{name} {policy}", (command, *words, *common, "--policy", policy))
            for policy in ("round_robin", "cache_aware")
        ]
    return found, missing


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


async def send_all(port: int, requests: list[bytes], concurrency: int) -> tuple[list[float], list[float], int, float]:
    """Send requests over ``concurrency`` connections; return both kinds of times in ms, errors, and seconds in all."""
    todo, totals, firsts, errors = list(reversed(requests)), [], [], 0

    async def work() -> None:
        nonlocal errors
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while todo:
            began = time.perf_counter()
            writer.write(todo.pop())
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            firsts.append(1000 * (time.perf_counter() - began))
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
    return totals, firsts, errors, time.perf_counter() - began


def measure(port: int, pid: int, requests: list[bytes], concurrency: int) -> Sample:
    """Send requests, after a few to warm up, and count the forwarder's CPU."""
    asyncio.run(send_all(port, requests[: 4 * concurrency + 16], concurrency))
    before = read_cpu_s(pid)
    totals, firsts, errors, took_s = asyncio.run(send_all(port, requests, concurrency))
    cpu_ms = 1000 * (read_cpu_s(pid) - before) / len(requests)
    return Sample(totals, firsts, cpu_ms, len(requests) / took_s, errors)


def read_cpu_s(pid: int) -> float:
    """CPU seconds of a process and its children, all threads."""
    total = 0.0
    for one in (pid, *list_children(pid)):
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / CLOCK_TICKS
    return total


def list_children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def find_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


@contextmanager
def running(command: list[str], port: int, folder: Path, environ: dict[str, str]) -> Iterator[int]:
    """Run a server until the block ends; wait until it answers a completion."""
    with (folder / "forwarder.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
    try:
        for _ in range(400):
            if process.poll() is not None:
                raise RuntimeError(f"{command[0]} ended with {process.returncode}")
            try:
                request = make_requests(1, stream=False, seed=0)
                if asyncio.run(asyncio.wait_for(send_all(port, request, 1), 2))[2] == 0:
                    break
            except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
                pass
            time.sleep(0.1)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


def run(args: argparse.Namespace, report: _report.Report, folder: Path) -> None:
    engine_ports = find_ports(2)
    urls = [f"http://127.0.0.1:{port}" for port in engine_ports]
    peers, missing = peer_forwarders(args.peers_bin)
    count, many = (60, 120) if args.quick else (300, 800)
    loads = [(stream, 1, count) for stream in (False, True)] + [(False, 16, many)]
    requests = {stream: make_requests(max(count, many), stream=stream, seed=args.seed) for stream in (False, True)}
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_report.REPO / "src"), os.environ.get("PYTHONPATH", "")]),
    }
    engine = subprocess.Popen([sys.executable, str(HERE / "_edge_engine.py"), *map(str, engine_ports)], env=environ)
    rows = []
    try:
        time.sleep(1.0)
        found = [measure(engine_ports[0], engine.pid, requests[s][:n], c) for s, c, n in loads]
        bare = found
        rows.append(describe("the engine alone", found, bare))
        for forwarder in [*own_forwarders(), *peers]:
            port, metrics = find_ports(2)
            words = {"port": str(port), "metrics": str(metrics), "first_url": urls[0], "comma_urls": ",".join(urls)}
            command = []
            for word in forwarder.command:
                command += urls if word == "{urls}" else [word.format(**words, folder=folder)]
            _report.progress(f"{forwarder.name} …")
            try:
                with running(command, port, folder, environ) as pid:
                    found = [measure(port, pid, requests[s][:n], c) for s, c, n in loads]
            except (RuntimeError, OSError, asyncio.IncompleteReadError, ValueError) as error:
                report.note(f"{forwarder.name} was left out: {error}")
                continue
            rows.append(describe(forwarder.name, found, bare))
    finally:
        engine.terminate()
        engine.wait(10)
    report.table("What a forwarder adds to a request with an 8k-token prompt", COLUMNS, rows)
    report.note(f"{count} requests one at a time, {many} at concurrency 16; {DOCUMENTS} documents, two engines")
    report.note("added: median of the whole request less the engine's own; CPU: of the forwarder's processes")
    if missing:
        report.note("not found and left out: " + ", ".join(missing))


COLUMNS = [
    "forwarder", "added JSON ms", "p99 JSON ms", "added stream ms", "p99 stream ms", "CPU ms JSON", "CPU ms stream",
    "requests/s at 16", "errors",
]  # fmt: skip


def describe(name: str, found: list[Sample], bare: list[Sample]) -> list[object]:
    """One row of the table."""
    json_one, stream_one, json_many = found
    added = [_median(a.total_ms) - _median(b.total_ms) for a, b in zip(found, bare, strict=True)]
    tails = [_report.percentile(sorted(sample.total_ms), 99) for sample in found]
    return [
        name, added[0], tails[0], added[1], tails[1], json_one.cpu_ms, stream_one.cpu_ms, json_many.requests_per_s,
        sum(sample.errors for sample in found),
    ]  # fmt: skip


def _median(values: list[float]) -> float:
    return _report.percentile(sorted(values), 50)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "edge")
    parser.add_argument("--peers-bin", metavar="DIR", help="folder with vllm-router, smg and sglang-router")
    args = parser.parse_args()
    report = _report.Report("edge", args)
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        run(args, report, Path(folder))
    report.write(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
