"""Claim: one tenant's hostile requests neither change nor hold up another tenant's answers, and cost no memory.

    semblend models pull smollm2-135m
    PYTHONPATH=src:bench python bench/hostile.py                          # every attack on this checkout
    PYTHONPATH=src:bench python bench/hostile.py --before ../old --quick  # and on another one, for comparison
    PYTHONPATH=src:bench python bench/hostile.py silent_sockets drip      # some of them

Each attack meets a real `semblend serve` of its own, with 1,024 file descriptors, while another tenant asks greedy
questions whose answers on the quiet server are known. Attacks of the review in docs/research/robustness.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import _report  # first: it holds the numeric libraries to one thread
from _hostile_server import ADMIN, ATTACKER, PATIENCE_S, Heard, Server, Victim, ask, probe_health
from _report import REPO, Report, percentile, progress

FILES = 1024
WORDS = (
    "harbour", "ferry", "ledger", "copper", "winter", "signal", "garden", "engine", "letter", "valley", "river",
    "museum", "captain", "orchard", "bridge", "window", "market", "station", "teacher", "mountain", "paper",
)  # fmt: skip
Attack = Callable[[int], Awaitable[list[Heard]]]


def write_text(seed: int, words: int) -> str:
    chance = random.Random(seed)
    return " ".join(chance.choice(WORDS) for _ in range(words))


async def send(port: int, body: Any, path: str = "/v1/completions", key: str = ATTACKER) -> Heard:
    return await ask(port, path, body if isinstance(body, bytes) else json.dumps(body).encode(), key)


# -- the attacks: each returns what the server said to the attacker ---------------------------------------------------


async def alone(port: int) -> list[Heard]:
    """Nobody else asks."""
    del port
    await asyncio.sleep(1)
    return []


async def tiny_temperature(port: int) -> list[Heard]:
    """Softmax of infinities for one row of the batch."""
    body = {"prompt": "hi", "max_tokens": 4, "temperature": 1e-38}
    return [await send(port, body) for _ in range(8)]


async def tiny_penalty(port: int) -> list[Heard]:
    """The same through the repetition penalty."""
    body = {"prompt": "hi", "max_tokens": 4, "repetition_penalty": 1e-38}
    return [await send(port, body) for _ in range(8)]


async def digits_16mb(port: int) -> list[Heard]:
    """A prompt of 16 MB of digits, and the client waits for the answer."""
    return [await send(port, {"prompt": "7" * 16_000_000, "max_tokens": 1})]


async def digits_16mb_gone(port: int) -> list[Heard]:
    """The same three times, and the client leaves at once."""
    body = json.dumps({"prompt": "7" * 16_000_000, "max_tokens": 1}).encode()
    return list(await asyncio.gather(*(ask(port, "/v1/completions", body, ATTACKER, patience_s=2.0) for _ in range(3))))


async def digits_900k_gone(port: int) -> list[Heard]:
    """Below most limits of size: 900,000 digits are as many tokens."""
    body = json.dumps({"prompt": "7" * 900_000, "max_tokens": 1}).encode()
    return list(await asyncio.gather(*(ask(port, "/v1/completions", body, ATTACKER, patience_s=2.0) for _ in range(8))))


async def ids_15mb(port: int) -> list[Heard]:
    """A prompt of five million token ids: five million objects of the JSON parser."""
    return [await send(port, b'{"max_tokens":1,"prompt":[' + b"7," * 7_000_000 + b"7]}")]


async def stop_ids(port: int) -> list[Heard]:
    """A million stop tokens, to be compared with every token of the answer."""
    body = b'{"prompt":"hi","max_tokens":64,"stop_token_ids":[' + b"49000," * 1_000_000 + b"49001]}"
    return list(await asyncio.gather(*(send(port, body) for _ in range(4))))


async def nested(port: int) -> list[Heard]:
    """JSON as deep as the interpreter's stack, and a little deeper."""
    depths = (*range(950, 962), 100_000)
    return [await send(port, b'{"prompt":' + b"[" * depth + b"]" * depth + b"}") for depth in depths]


async def long_number(port: int) -> list[Heard]:
    """4,301 digits where a number is read, which Python refuses to convert."""
    query = await ask(port, "/api/live?after=" + "9" * 4_301, None, ATTACKER)
    return [query, await send(port, b'{"prompt":"hi","max_tokens":' + b"9" * 4_301 + b"}")]


async def silent_sockets(port: int) -> list[Heard]:
    """1,100 connections that say nothing, held for 15 seconds."""
    return await hold(port, 1_100, b"", 15.0)


async def drip(port: int) -> list[Heard]:
    """1,100 connections that send a request line and then a header byte now and again."""
    return await hold(port, 1_100, b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ", 15.0, drop=b"a")


async def hold(port: int, count: int, opening: bytes, seconds: float, drop: bytes = b"") -> list[Heard]:
    writers = []
    for _ in range(count):
        try:
            async with asyncio.timeout(2):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
        except (OSError, TimeoutError):
            continue
        writer.write(opening)
        writers.append(writer)
    for _ in range(int(seconds)):
        await asyncio.sleep(1)
        for writer in writers:
            if drop and not writer.is_closing():
                writer.write(drop)
    for writer in writers:
        writer.close()
    return []


async def flood(port: int) -> list[Heard]:
    """120 long prompts at once, all of them new: more than the line holds."""
    bodies = [{"prompt": write_text(seed, 500), "max_tokens": 24, "temperature": 0} for seed in range(120)]
    return list(await asyncio.gather(*(send(port, body) for body in bodies)))


async def never_reads(port: int) -> list[Heard]:
    """Twenty streams of long answers whose clients read nothing, held for 15 seconds."""
    body = json.dumps({"prompt": "hi", "max_tokens": 2_000, "stream": True, "ignore_eos": True, "n": 4}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {ATTACKER}\r\n"
    return await hold(port, 20, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body, 15.0)


ATTACKS: tuple[Attack, ...] = (
    alone, tiny_temperature, tiny_penalty, digits_16mb, digits_16mb_gone, digits_900k_gone, ids_15mb, stop_ids, nested,
    long_number, silent_sockets, drip, flood, never_reads,
)  # fmt: skip

COLUMNS = (
    "attack", "victim asked", "wrong or failed", "first token p50 ms", "p99 ms", "longest /health ms", "MB more",
    "most files", "log kB", "said to the attacker", "longest ms", "alive after",
)  # fmt: skip


async def measure(attack: Attack, server: Server, asks: int) -> list[Any]:
    """One row of the table: the victim before, during and after one attack."""
    victim = Victim(server.port, [write_text(1000 + seed, 90) for seed in range(4)])
    await victim.learn()
    server.mark()
    log_before = server.log_bytes
    health: list[float] = []
    ended = asyncio.Event()
    asking = asyncio.create_task(victim.ask_until(ended, asks))
    probing = asyncio.create_task(probe_health(server.port, ended, health))
    await asyncio.sleep(0.5)
    said = await attack(server.port)
    ended.set()
    await asyncio.gather(asking, probing)
    for line in victim.wrong[:2]:
        progress(f"  the victim saw {line}")
    firsts = sorted(victim.first_s)
    alive = server.alive and (await ask(server.port, "/health", None, "")).status == 200
    statuses = Counter(str(heard.status or "left") for heard in said)
    return [
        attack.__name__,
        victim.asked,
        len(victim.wrong),
        1e3 * percentile(firsts, 50) if firsts else None,
        1e3 * percentile(firsts, 99) if firsts else None,
        1e3 * max(health, default=PATIENCE_S),
        (server.peak_bytes - server.start_bytes) / 1e6,
        server.most_files,
        (server.log_bytes - log_before) / 1e3,
        ", ".join(f"{status} × {count}" for status, count in sorted(statuses.items())),
        1e3 * max((heard.total_s for heard in said), default=0.0),
        alive,
    ]


async def look_around(server: Server) -> list[list[Any]]:
    """What a stranger and a tenant are told, and whether text in a message becomes control tokens."""
    rows: list[list[Any]] = []
    for path in ("/metrics", "/api/live", "/api/donors", "/api/stats"):
        heard = [await ask(server.port, path, None, key) for key in ("", ATTACKER, ADMIN)]
        rows.append([path, *(one.status for one in heard)])
    counts = []
    for mark in ("<|im_end|>", "<|im_start|>"):
        body = {"messages": [{"role": "user", "content": mark * 64}], "max_tokens": 1}
        heard = (await send(server.port, body, "/v1/chat/completions")).text
        counts.append(json.loads(heard.partition("\r\n\r\n")[2])["usage"]["prompt_tokens"])
    rows.append(["tokens of a chat message of 64 end marks, of 64 start marks", None, str(counts), None])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [attack.__name__ for attack in ATTACKS]
    parser.add_argument("attacks", nargs="*", metavar="attack", help=f"any of {', '.join(names)}; default all")
    parser.add_argument("--before", type=Path, default=None, help="another checkout, to be attacked in the same run")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--asks", type=int, default=40, help="questions of the victim for each attack, at least")
    _report.add_common_arguments(parser, "hostile")
    args = parser.parse_args()
    if unknown := set(args.attacks) - set(names):
        parser.error(f"unknown attack {sorted(unknown)[0]!r} (hint: one of {', '.join(names)})")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 8192), most))  # ours, for 1,100 sockets
    report = Report("hostile", args)
    asks = 8 if args.quick else args.asks
    wrong = 0
    for name, checkout in (("before", args.before), ("after", REPO)):
        if checkout is None:
            continue
        rows = []
        for attack in ATTACKS:
            if args.attacks and attack.__name__ not in args.attacks:
                continue
            with Server(checkout, args.model, FILES) as server:
                rows.append(asyncio.run(measure(attack, server, asks)))
                progress(f"{name}: {rows[-1]}")
        report.table(f"Attacks, {name}", COLUMNS, rows)
        with Server(checkout, args.model, FILES) as server:
            shown = asyncio.run(look_around(server))
        report.table(f"What is told, {name}", ["asked", "no key", "a tenant's key", "the admin's key"], shown)
        if name == "after":
            wrong = sum(row[2] for row in rows) + sum(not row[-1] for row in rows)
    report.note("victim: another tenant's greedy answers of 12 tokens to prompts of about 120, each computed cold")
    report.note(f"first token: until the first byte of the answer; {FILES:,} file descriptors; 2 threads compute")
    report.write(args.out)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
