"""Claim: no body that is accepted or refused keeps the server's event loop from other requests for long.

    PYTHONPATH=src:bench python bench/bodies.py             # every case
    PYTHONPATH=src:bench python bench/bodies.py --quick     # one repeat each

A task on the server's loop wakes every 5 ms; the stall is the longest time between two wakes while one hostile body is
answered by the app over the fake engine (no sockets: what is measured is reading, counting, parsing and checking).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import _report  # noqa: F401  (first: it holds the numeric libraries to one thread)
from _report import Report, progress

TICK_S = 0.005
TARGET_MS = 50.0
PATH = "/v1/completions"


def repeat(unit: bytes, size: int) -> bytes:
    return unit * (size // len(unit))


def count_up(size: int) -> bytes:
    return b",".join(b'"%d":0' % number for number in range(size // 11))


CASES: dict[str, Callable[[int], bytes]] = {
    "digits in a prompt": lambda size: b'{"prompt":"' + repeat(b"7", size) + b'"}',
    "\\u escapes in a prompt": lambda size: b'{"prompt":"' + repeat(rb"\u00e9", size) + b'"}',
    "\\n in a prompt": lambda size: b'{"prompt":"' + repeat(rb"\n", size) + b'"}',
    '\\" in a prompt': lambda size: b'{"prompt":"' + repeat(rb"\"", size) + b'"}',
    "UTF-8 in a prompt": lambda size: b'{"prompt":"' + repeat("é".encode(), size) + b'"}',
    "token ids": lambda size: b'{"prompt":[' + repeat(b"1,", size) + b"1]}",
    "as many token ids as a list may hold": lambda _: b'{"prompt":[' + b"1234567," * 131_071 + b"1]}",
    "64 lists of 2,047 ids": lambda _: json.dumps({"prompt": [[1234567] * 2047] * 64}).encode(),
    "lists of one id": lambda size: b'{"prompt":[' + repeat(b"[1],", size) + b"[1]]}",
    "prompts of one letter": lambda size: b'{"prompt":[' + repeat(b'"a",', size) + b'"a"]}',
    "4,096 messages": lambda _: json.dumps(
        {"messages": [{"role": "user", "content": [{"text": "a" * 200}]}] * 4096}
    ).encode(),
    "stop_token_ids": lambda size: b'{"prompt":"x","stop_token_ids":[' + repeat(b"1,", size) + b"1]}",
    "logit_bias": lambda size: b'{"prompt":"x","logit_bias":{' + count_up(size) + b"}}",
    "logit_bias, 60,000 entries": lambda _: b'{"prompt":"x","logit_bias":{' + count_up(660_000) + b"}}",
    "unknown keys": lambda size: b'{"prompt":"x",' + count_up(size) + b"}",
    "unknown keys of ours, 60,000": lambda _: b'{"prompt":"x","semblend":{' + count_up(660_000) + b"}}",
    "one key again and again": lambda size: b'{"prompt":"x",' + repeat(b'"stop":[],', size) + b'"n":1}',
    "one long key": lambda size: b'{"prompt":"x","' + repeat(b"k", size) + b'":1}',
    "an unknown list of {}": lambda size: b'{"prompt":"x","x":[' + repeat(b"{},", size) + b"0]}",
    "one long integer": lambda size: b'{"prompt":"x","seed":' + repeat(b"9", size) + b"}",
    "integers of 4,000 digits": lambda size: b'{"prompt":"x","x":[' + repeat(b"9" * 4000 + b",", size) + b"0]}",
    "integers of 64 digits": lambda size: b'{"prompt":"x","x":[' + repeat(b"9" * 64 + b",", size) + b"0]}",
    "floats of 64 digits": lambda size: b'{"prompt":"x","x":[' + repeat(b"0." + b"9" * 62 + b",", size) + b"0]}",
    "nested lists": lambda size: repeat(b"[", size),
    "quotes": lambda size: repeat(b'"', size),
    "backslashes": lambda size: b'{"prompt":"' + repeat(b"\\", size) + b'"}',
    "blanks": lambda size: repeat(b" ", size) + b'{"prompt":"x"}',
    "NaN at the end": lambda size: b'{"prompt":"' + repeat(b"7", size) + b'","n":NaN}',
    "a 16 MiB prompt, by its length": lambda _: b'{"prompt":"' + repeat(b"7", 16 << 20) + b'"}',
}


async def measure_stall(http: Any, body: bytes, path: str) -> tuple[float, float, int]:
    """The longest gap between two wakes in ms, the time to the answer in ms, and the answer's status."""
    gaps = [0.0]

    async def tick() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            gaps.append(now - last - TICK_S)
            last = now

    pieces = [body[at : at + 65_536] for at in range(0, len(body), 65_536)]

    async def send() -> Any:
        for piece in pieces:
            yield piece
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(4 * TICK_S)
    started = time.perf_counter()
    answer = await http.post(path, content=send(), headers={"content-length": str(len(body))})
    took = time.perf_counter() - started
    await asyncio.sleep(2 * TICK_S)
    ticking.cancel()
    return 1000 * max(gaps), 1000 * took, answer.status_code


async def run(report: Report, repeats: int) -> bool:
    import httpx

    from semblend.config import SemBlendConfig
    from semblend.engine.server.config import ServeConfig
    from semblend.engine.server.fake_engine import FakeEngine
    from semblend.engine.server.limits import MOST_BODY_BYTES
    from semblend.engine.server.routes import create_app
    from semblend.facade import SemBlend

    fake = FakeEngine(SemBlend(SemBlendConfig(embedder="none")), max_context=1 << 17)
    fake.longest_token_chars = 1  # long texts are refused: its tokenizer, plain Python, must not be what is measured
    app = create_app(fake, ServeConfig(max_body_bytes=MOST_BODY_BYTES))
    size = app.state.service.body_limit - 4096
    rows = []
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server", timeout=120) as http:
        for name, make in CASES.items():
            body = make(size)
            path = "/v1/chat/completions" if b'"messages"' in body[:20] else PATH
            tries = sorted([await measure_stall(http, body, path) for _ in range(repeats)])
            stall, took, status = tries[len(tries) // 2]
            progress(f"{name}: {stall:.1f} ms")
            rows.append(
                [name, round(len(body) / 2**20, 2), status, *(round(ms, 1) for ms in (stall, tries[-1][0], took))]
            )
    columns = ["body", "MiB", "status", "stall, median ms", "stall, longest ms", "answered after, median ms"]
    report.table(f"Bodies up to the highest default limit of {app.state.service.body_limit:,} bytes", columns, rows)
    worst = max(row[4] for row in rows)
    report.note(f"{repeats} tries each; the longest stall of all is {worst} ms, the target {TARGET_MS} ms")
    return bool(worst <= TARGET_MS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", default="bench/results/bodies.json", help="JSON result file; '' writes none")
    args = parser.parse_args()
    report = Report("bodies", args)
    met = asyncio.run(run(report, 1 if args.quick else 5))
    report.write(args.out)
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
