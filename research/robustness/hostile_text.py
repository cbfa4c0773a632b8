"""Claim: a text costs the server what fits its context and no more, and a neighbour's small call does not wait for it.

    semblend models pull smollm2-135m
    PYTHONPATH=src:bench python bench/hostile_text.py                    # every text against this checkout
    PYTHONPATH=src:bench python bench/hostile_text.py --before ../old    # and against another one

Each text is sent to a real `semblend serve`, four copies at once, by clients that wait and then by clients that leave
after a tenth of a second. Meanwhile another tenant asks for one token again and again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import _report  # first: it holds the numeric libraries to one thread
from _hostile_server import ATTACKER, PATIENCE_S, VICTIM, Heard, Server, ask, probe_health
from _report import REPO, Report, progress

FILES = 1024
FITS = 660_000  # SmolLM2: 8,192 tokens of 81 characters are 663,552
LEFT_AFTER_S = 0.1
QUICK = ["digits", "hashes, then digits", "control tokens"]
CHATS = ("digits", "ordinary words", "control tokens")


def make_texts() -> dict[str, str]:
    chance = random.Random(7)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [letters[a : a + 2 + b] for a in range(20) for b in range(4)]
    return {
        "16 MB of digits": "0123456789" * 1_600_000,
        "digits": "0123456789" * (FITS // 10),
        "ordinary words": " ".join(chance.choice(words) for _ in range(FITS // 5))[:FITS],
        "one word of one letter": "a" * FITS,
        "one word of random letters": "".join(chance.choice(letters) for _ in range(FITS)),
        "emoji with joiners": "\U0001f469\u200d\U0001f467" * (FITS // 3),
        "zero-width blanks": "\u200b" * FITS,
        "line breaks": "\n" * FITS,
        "blanks": " " * FITS,
        "hashes, 64 to a token": "#" * FITS,
        "hashes, then digits": "#" * (FITS // 2) + "7" * (FITS // 2),
        "one letter, many accents": "a" + "\u0301" * FITS,
        "Hangul in pieces": "\u1112\u1161\u11ab" * (FITS // 3),
        "control tokens": "<|im_start|>" * (FITS // 12),
        "almost control tokens": "<|im_start|" * (FITS // 11),
    }


def make_body(text: str, chat: bool) -> bytes:
    if not chat:
        return json.dumps({"prompt": text, "max_tokens": 1}).encode()
    size = max(len(text) // 4096, 1)
    parts = [text[at : at + size] for at in range(0, size * 4096, size)]
    messages = [{"role": ("user", "assistant")[at % 2], "content": part} for at, part in enumerate(parts)]
    return json.dumps({"messages": messages, "max_tokens": 1}).encode()


async def ask_for_one_token(port: int, ended: asyncio.Event, seconds: list[float]) -> None:
    number = 0
    while not ended.is_set():
        number += 1
        body = json.dumps({"prompt": f"Number {number} is", "max_tokens": 1, "temperature": 0}).encode()
        heard = await ask(port, "/v1/completions", body, VICTIM)
        seconds.append(heard.total_s if heard.status == 200 else PATIENCE_S)


async def measure(name: str, text: str, server: Server, chat: bool) -> list[Any]:
    """One row: what the attacker heard, and what the neighbour and the event loop felt."""
    path, body = "/v1/chat/completions" if chat else "/v1/completions", make_body(text, chat)
    await ask(server.port, "/v1/completions", b'{"prompt": "warm", "max_tokens": 1}', VICTIM)
    server.mark()
    ended = asyncio.Event()
    neighbour: list[float] = []
    health: list[float] = []
    beside = [
        asyncio.create_task(ask_for_one_token(server.port, ended, neighbour)),
        asyncio.create_task(probe_health(server.port, ended, health)),
    ]
    await asyncio.sleep(0.3)
    said: list[Heard] = list(await asyncio.gather(*(ask(server.port, path, body, ATTACKER) for _ in range(4))))
    leaving = (ask(server.port, path, body, ATTACKER, patience_s=LEFT_AFTER_S) for _ in range(4))
    await asyncio.gather(*leaving)
    await asyncio.sleep(0.5)
    ended.set()
    await asyncio.gather(*beside)
    statuses = Counter(str(heard.status or "left") for heard in said)
    return [
        f"{name}, as 4,096 messages" if chat else name,
        len(text),
        ", ".join(f"{status} × {count}" for status, count in sorted(statuses.items())),
        1e3 * max(heard.total_s for heard in said),
        1e3 * max(neighbour, default=0.0),
        1e3 * max(health, default=0.0),
        (server.peak_bytes - server.start_bytes) / 1e6,
    ]


COLUMNS = (
    "text", "characters", "said to the attacker", "its longest ms", "neighbour's longest call ms", "longest /health ms",
    "MB more",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", metavar="text", help="some of the texts; default all")
    parser.add_argument("--before", type=Path, default=None, help="another checkout, to be attacked in the same run")
    parser.add_argument("--model", default="smollm2-135m")
    _report.add_common_arguments(parser, "hostile_text")
    args = parser.parse_args()
    report = Report("hostile_text", args)
    texts = make_texts()
    chosen = args.texts or (QUICK if args.quick else list(texts))
    if unknown := set(chosen) - set(texts):
        parser.error(f"unknown text {min(unknown)!r} (hint: one of {', '.join(texts)})")
    texts = {name: texts[name] for name in chosen}
    for name, checkout in (("before", args.before), ("after", REPO)):
        if checkout is None:
            continue
        with Server(checkout, args.model, FILES) as server:
            rows = []
            for one, chat in [*((one, False) for one in texts), *((one, True) for one in CHATS if one in texts)]:
                rows.append(asyncio.run(measure(one, texts[one], server, chat)))
                progress(f"{name}: {rows[-1]}")
        report.table(f"Texts, {name}", COLUMNS, rows)
    report.note("neighbour: another tenant's calls for one token, one after the other")
    report.write(args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
