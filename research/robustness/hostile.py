"""Claim: one tenant's hostile requests neither change nor hold up another tenant's answers, and cost no memory.

    semblend models pull smollm2-135m
    PYTHONPATH=src:bench python bench/hostile.py                          # every attack on this checkout
    PYTHONPATH=src:bench python bench/hostile.py --before ../old --quick  # and on another one, for comparison
    PYTHONPATH=src:bench python bench/hostile.py silent_sockets drip      # some of them
    PYTHONPATH=src:bench python bench/hostile.py --neighbours --before ../old --out bench/results/neighbours.json

Each attack meets a real `semblend serve` of its own, with 1,024 file descriptors, while another tenant asks greedy
questions whose answers on the quiet server are known. Attacks of the review in docs/research/robustness.md.

With ``--neighbours`` the question is how long an answer of four tokens takes, alone and beside work that is allowed:
long prompts, many answers with log probabilities, streams and reads whose clients do not read.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import random
import resource
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import _report  # first: it holds the numeric libraries to one thread
from _hostile_server import ADMIN, ATTACKER, PATIENCE_S, VICTIM, Heard, Server, Victim, ask, probe_health
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


# -- neighbours: what they do goes on until it is cancelled ------------------------------------------------------------


async def nobody(port: int) -> None:
    """Nobody else asks."""
    del port
    await asyncio.Event().wait()


async def four_long_prompts(port: int) -> None:
    """Four prompts at a time that fill most of the context, each of them new."""
    seeds = itertools.count()

    async def ask_on() -> None:
        while True:
            body = {"prompt": write_text(next(seeds), 5_500), "max_tokens": 1, "temperature": 0}
            await ask(port, "/v1/completions", json.dumps(body).encode(), ATTACKER, patience_s=600)

    await asyncio.gather(*(ask_on() for _ in range(4)))


async def answers_with_logprobs(port: int) -> None:
    """Four requests at a time for eight long answers each, with log probabilities."""
    body = {"prompt": "Tell me of the harbour.", "max_tokens": 200, "n": 8, "logprobs": 5, "temperature": 1.0}

    async def ask_on() -> None:
        while True:
            await ask(port, "/v1/completions", json.dumps(body).encode(), ATTACKER, patience_s=600)

    await asyncio.gather(*(ask_on() for _ in range(4)))


async def hundred_unread_streams(port: int) -> None:
    """A hundred streams of long answers whose clients read nothing."""
    body = json.dumps({"prompt": "hi", "max_tokens": 2_000, "stream": True, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {ATTACKER}\r\n"
    await send_unread(port, 100, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body, 1)


async def pipelined_openapi(port: int) -> None:
    """A stranger with 64 connections that ask for /openapi.json again and again, and read nothing."""
    await send_unread(port, 64, b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 400)


async def pipelined_live(port: int) -> None:
    """A tenant with 64 connections that ask for /api/live again and again, and read nothing."""
    head = f"GET /api/live HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {ATTACKER}\r\n\r\n"
    await send_unread(port, 64, head.encode(), 400)


async def send_unread(port: int, count: int, request: bytes, times: int) -> None:
    """Send a request so often over each of so many connections, without reading."""

    async def send_on() -> None:
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                reader._transport.pause_reading()  # type: ignore[attr-defined]
                writer.write(request * times)
                await asyncio.sleep(1.0 if times > 1 else 600.0)  # what is pipelined is sent anew every second
                writer.transport.abort()
            await asyncio.sleep(0.05)

    await asyncio.gather(*(send_on() for _ in range(count)))


NEIGHBOURS = (
    nobody, four_long_prompts, answers_with_logprobs, hundred_unread_streams, pipelined_openapi, pipelined_live,
)  # fmt: skip


async def time_answers(server: Server, neighbour: Callable[[int], Awaitable[None]], count: int) -> list[float]:
    """Seconds that answers of four tokens take another tenant beside a neighbour."""
    body = {"prompt": "", "max_tokens": 4, "temperature": 0, "ignore_eos": True}

    async def time_one(seed: int) -> float:
        asked = json.dumps(body | {"prompt": write_text(seed, 12)}).encode()
        heard = await ask(server.port, "/v1/completions", asked, VICTIM, patience_s=120)
        return heard.total_s if heard.status == 200 else math.inf

    for seed in range(30):  # something for /api/live to show
        await send(server.port, {"prompt": write_text(seed, 8), "max_tokens": 1})
    await time_one(0)
    working = asyncio.ensure_future(neighbour(server.port))
    await asyncio.sleep(3)
    seconds = []
    for seed in range(1, count + 1):
        seconds.append(await time_one(seed))
        await asyncio.sleep(0.2)
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    return seconds


async def time_lone(server: Server, count: int) -> list[float]:
    """Seconds to the first token of long prompts, with nobody else there."""
    seconds = []
    for seed in range(count):
        body = {"prompt": write_text(9000 + seed, 2_500), "max_tokens": 1, "temperature": 0}
        seconds.append((await ask(server.port, "/v1/completions", json.dumps(body).encode(), VICTIM)).total_s)
    return seconds[1:]


def measure_neighbours(report: Report, args: argparse.Namespace) -> None:
    """Rounds of both servers by turns, so that what else the machine does meets both."""
    checkouts = {name: path for name, path in (("before", args.before), ("after", REPO)) if path is not None}
    wanted = [one for one in NEIGHBOURS if not args.attacks or one.__name__ in args.attacks]
    seconds: dict[tuple[str, str], list[float]] = {}
    for round_number in range(1 if args.quick else args.rounds):
        for neighbour in wanted:
            for name, checkout in checkouts.items():
                with Server(checkout, args.model, FILES) as server:
                    found = asyncio.run(time_answers(server, neighbour, 4 if args.quick else args.answers))
                seconds.setdefault((neighbour.__name__, name), []).extend(found)
                middle = percentile(sorted(found), 50)
                progress(f"round {round_number + 1}, {neighbour.__name__}, {name}: {middle:.2f} s")
        for name, checkout in checkouts.items():
            if not args.attacks:
                with Server(checkout, args.model, FILES) as server:
                    seconds.setdefault(("a long prompt alone", name), []).extend(asyncio.run(time_lone(server, 4)))
    alone = {name: percentile(sorted(seconds.get(("nobody", name), [math.nan])), 50) for name in checkouts}
    rows = []
    for (neighbour_name, name), found in seconds.items():
        low, middle, high = (percentile(sorted(found), percent) for percent in (10, 50, 90))
        is_lone = neighbour_name == "a long prompt alone"
        ratio = None if is_lone else round(middle / alone[name], 1)
        rows.append(
            [neighbour_name, name, len(found), *(round(one, 2) for one in (low, middle, high, max(found))), ratio]
        )
    columns = ["beside", "server", "n", "p10 s", "median s", "p90 s", "longest s", "times alone"]
    report.table("An answer of four tokens", columns, rows)
    report.note("a long prompt alone: time to the answer of one token, 2,500 words, nobody else there")


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
    names = [attack.__name__ for attack in (*ATTACKS, *NEIGHBOURS)]
    parser.add_argument("attacks", nargs="*", metavar="attack", help=f"any of {', '.join(names)}; default all")
    parser.add_argument("--before", type=Path, default=None, help="another checkout, to be attacked in the same run")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--neighbours", action="store_true", help="answers of four tokens beside what is allowed")
    parser.add_argument("--rounds", type=int, default=2, help="of --neighbours")
    parser.add_argument("--answers", type=int, default=12, help="of four tokens, in each round of --neighbours")
    parser.add_argument("--asks", type=int, default=40, help="questions of the victim for each attack, at least")
    _report.add_common_arguments(parser, "hostile")
    args = parser.parse_args()
    if unknown := set(args.attacks) - set(names):
        parser.error(f"unknown attack {sorted(unknown)[0]!r} (hint: one of {', '.join(names)})")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 8192), most))  # ours, for 1,100 sockets
    report = Report("hostile", args)
    if args.neighbours:
        measure_neighbours(report, args)
        report.write(args.out)
        return 0
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
