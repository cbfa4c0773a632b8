"""Many HTTP clients at once, some of which hang up whenever they like: the second half of `soak.py`.

Clients speak HTTP over plain sockets, so that they can leave in the middle of a request, of a line, of an answer.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

WAYS = ("reads to the end", "leaves before asking", "leaves in its question", "leaves in line", "leaves in the answer")
MOST_TRIES = 4


@dataclass(slots=True)
class Storm:
    """What clients saw; ``wrong`` names what must not happen. None of them waits longer than ``patience_s``."""

    patience_s: float
    statuses: Counter[str] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    retried: int = 0
    without_retry_after: int = 0
    first_byte_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@contextmanager
def served(app: Any) -> Iterator[tuple[str, int]]:
    """The app on a free port of this machine, in a thread of its own."""
    import uvicorn

    sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", proxy_headers=False, ws="none", lifespan="off"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), daemon=True)
    thread.start()
    try:
        yield "127.0.0.1", sock.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(300)
        sock.close()


def question(prompt: str | list[int], max_tokens: int, *, stream: bool, seed: int = 0, **more: Any) -> bytes:
    """A POST of /v1/completions as it goes over the wire."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": stream, "seed": seed, **more}
    sent = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(sent)}\r\n\r\n"
    )
    return head.encode() + sent


async def answer_of(host: str, port: int, sent: bytes, patience_s: float) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one whole exchange; TimeoutError where it takes longer than ``patience_s``."""
    async with asyncio.timeout(patience_s):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(sent)
            await writer.drain()
            return _parsed(await reader.read())
        finally:
            writer.close()


def text_of(body: bytes) -> str:
    """The answer's text, whole or streamed."""
    if body.startswith(b"{"):
        return str(json.loads(body)["choices"][0]["text"])
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event).get("choices", ()))


async def storm(
    host: str, port: int, ask: Callable[[random.Random], list[int]], clients: int, seed: int, *, tokens: int,
    patience_s: float,
) -> Storm:  # fmt: skip
    """``clients`` at once, each with a question of ``ask`` and a way of its own to end."""
    seen = Storm(patience_s)
    chances = [random.Random(seed * 100_003 + number) for number in range(clients)]
    await asyncio.gather(*(_client(host, port, ask(chance), chance, tokens, seen) for chance in chances))
    return seen


async def _client(host: str, port: int, prompt: list[int], chance: random.Random, tokens: int, seen: Storm) -> None:
    way = chance.choices(WAYS, [5, 1, 1, 1, 2])[0]
    seen.ways[way] += 1
    stream = chance.random() < 0.7 or way == "leaves in the answer"
    sent = question(prompt, chance.randint(1, tokens), stream=stream, n=chance.choice([1, 1, 1, 2]))
    try:
        if way == "reads to the end":
            await _patient(host, port, sent, chance, seen)
        else:
            await _leaving(host, port, sent, way, chance, seen)
    except TimeoutError:  # one of the errors of the operating system, too
        seen.wrong.append("no answer came")
    except OSError as error:
        seen.wrong.append(f"the server broke a connection: {type(error).__name__}")


async def _patient(host: str, port: int, sent: bytes, chance: random.Random, seen: Storm) -> None:
    """Comes again when it is told to, as a good client does."""
    for attempt in range(MOST_TRIES):
        started = time.perf_counter()
        status, headers, body = await answer_of(host, port, sent, seen.patience_s)
        seen.statuses[str(status)] += 1
        if status != 429:
            break
        if "retry-after" not in headers:
            seen.without_retry_after += 1
        if attempt + 1 < MOST_TRIES:
            seen.retried += 1
            await asyncio.sleep(float(headers.get("retry-after", 1)) * chance.uniform(0.2, 1.5))
    if status == 200:
        seen.first_byte_s.append(time.perf_counter() - started)
        if not body.startswith(b"{") and not body.rstrip().endswith(b"data: [DONE]"):
            seen.wrong.append("a stream ended without its last word")
    elif status != 429:
        seen.wrong.append(f"status {status}: {body[:200]!r}")


async def _leaving(host: str, port: int, sent: bytes, way: str, chance: random.Random, seen: Storm) -> None:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        if way == "leaves in its question":
            writer.write(sent[: chance.randrange(1, len(sent))])
            await writer.drain()
        elif way != "leaves before asking":
            writer.write(sent)
            await writer.drain()
        if way == "leaves in the answer":
            async with asyncio.timeout(seen.patience_s):
                got = await reader.read(chance.randrange(1, 2000))
            seen.statuses[got[9:12].decode() + " left" if got else "cut"] += 1
        else:
            await asyncio.sleep(chance.uniform(0, 0.3))
    finally:
        if chance.random() < 0.5:  # a reset instead of a polite end
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        writer.close()


def _parsed(raw: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = raw.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        raise ConnectionError("no HTTP answer")
    lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    if headers.get("transfer-encoding") == "chunked":
        body = b"".join(_chunks(body))
    return int(lines[0].split()[1]), headers, body


def _chunks(body: bytes) -> Iterator[bytes]:
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            return
        yield rest[:length]
        body = rest[length + 2 :]


def until(holds: Callable[[], bool], seconds: float) -> bool:
    """Waits for a fact in another thread."""
    patience, end = threading.Event(), time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        patience.wait(0.01)
    return holds()


def quiet(app: Any, engine: Any) -> bool:
    """No place at the gate is taken, nobody waits, and the engine works for nobody."""
    gate = app.state.service.admission
    return (gate.running, gate.waiting, engine.has_work) == (0, 0, False)
