"""One round: a real `semblend serve` under load, a signal at a random moment, and what its clients and its disk saw."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATIENCE_S = 120.0
TOKENS = 24
CLIENTS = 4
WAYS = ("SIGTERM", "kill -9")
DONOR_BYTES = 500_000_000
"""Room for every donor of a round: one that has to leave memory before its file is whole is gone, and rightly so."""
RUNNING = re.compile(r"stopping: (\d+) requests")
WORDS = ("harbour", "ferry", "ledger", "copper", "winter", "signal", "garden", "letter", "valley", "river", "museum")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request: when and how its answer ended.

    ``whole``: all tokens and a proper end. ``told``: an error status, or an error event and a proper end. ``cut``: an
    answer without an end. ``nothing``: not a byte. ``wrong``: it looks whole and is not.
    """

    ended: float
    end: str


@dataclass(slots=True)
class Round:
    """What one server's life showed."""

    number: int
    how: str
    started_s: float = 0.0
    donors_at_start: int = 0
    ended_s: float = 0.0
    exit_code: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    left_on_disk: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Servant:
    """A `semblend serve` process on a folder that outlives it: a store of donors, and donor KV on disk."""

    def __init__(self, folder: Path, model: str, drain_s: float) -> None:
        self.folder = folder
        self.store, self.kv = folder / "donors.db", folder / "kv"
        environment = os.environ | {"SEMBLEND_STORE": str(self.store), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "semblend.cli.main", "serve", "--model", model, "--port", "0"]
        command += ["--donor-dir", str(self.kv), "--donor-bytes", str(DONOR_BYTES), "--drain-seconds", str(drain_s)]
        self._log = (folder / "stderr").open("ab")
        self._log_start = self._log.tell()
        begun = time.monotonic()
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=self._log, text=True)
        assert self.process.stdout is not None
        address = self.process.stdout.readline().strip()
        if not address.startswith("http"):
            raise RuntimeError((folder / "stderr").read_text(encoding="utf-8")[-2000:])
        self.started_s = time.monotonic() - begun
        self.port = int(address.rpartition(":")[2])

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=PATIENCE_S) as answer:
            return json.load(answer)

    def count_running(self) -> int:
        """How many requests the server had when the signal came, by its own words."""
        lines = (self.folder / "stderr").read_text(encoding="utf-8")[self._log_start :]
        found = RUNNING.findall(lines)
        return int(found[-1]) if found else 0

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self._log.close()


class Client(threading.Thread):
    """Asks one question after the other until nobody answers any more."""

    def __init__(self, port: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.exchanges: list[Exchange] = []
        self._port = port
        self._chance = random.Random(seed)
        self._left = threading.Event()

    def leave(self) -> None:
        self._left.set()

    def run(self) -> None:
        while not self._left.is_set():
            end = self._ask()
            self.exchanges.append(Exchange(time.monotonic(), end))
            if end in ("nothing", "cut"):
                return

    def _ask(self) -> str:
        stream = self._chance.random() < 0.6
        body: dict[str, Any] = {
            "prompt": " ".join(self._chance.choice(WORDS) for _ in range(100)),
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        raw = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        answer = b""
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=PATIENCE_S) as wire:
                wire.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
                while part := wire.recv(65536):
                    answer += part
        except OSError:
            pass  # what came until then tells how it ended
        return judge(answer, stream)


def judge(answer: bytes, stream: bool) -> str:
    """How an answer ended, by nothing but its bytes."""
    if not answer:
        return "nothing"
    head, found, body = answer.partition(b"\r\n\r\n")
    if not found:
        return "cut"
    if b"chunked" in head.lower():
        if not body.endswith(b"0\r\n\r\n"):
            return "cut"
        body = _join_chunks(body)
    else:
        length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":-1")
        if len(body) != int(length.partition(b":")[2]):
            return "cut"
    try:
        return _judge_whole(int(head.split()[1]), body, stream)
    except (ValueError, KeyError, IndexError, TypeError):
        return "wrong"


def _judge_whole(status: int, body: bytes, stream: bool) -> str:
    if status != 200:
        return "told" if json.loads(body)["error"]["hint"] else "wrong"
    if not stream:
        reply = json.loads(body)
        right = reply["usage"]["completion_tokens"] == TOKENS and reply["choices"][0]["finish_reason"] == "length"
        return "whole" if right else "wrong"
    blocks = body.decode().split("\n\n")
    if blocks[-2:] != ["data: [DONE]", ""]:
        return "wrong"
    last = json.loads(blocks[-3].removeprefix("data: "))
    if "error" in last:
        return "told"
    return "whole" if last["usage"]["completion_tokens"] == TOKENS else "wrong"


def _join_chunks(body: bytes) -> bytes:
    joined = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        if int(size, 16) == 0:
            return joined
        joined, body = joined + body[: int(size, 16)], body[int(size, 16) + 2 :]


def run_round(folder: Path, number: int, how: str, *, model: str, seed: int, least_donors: int) -> Round:
    """Start, load, signal, look. ``least_donors`` must be in the store that the last round left."""
    chance = random.Random(seed)
    drain_s = chance.choice([0, 0.5, 20])
    servant = Servant(folder, model, drain_s)
    result = Round(number, how, servant.started_s, servant.get("/api/donors")["count"])
    if result.donors_at_start < least_donors:
        result.problems.append(f"{result.donors_at_start} donors of {least_donors} were found again")
    if len(list(servant.kv.iterdir())) != 1:
        result.problems.append("donor KV of a dead process was not removed at the start")
    clients = [Client(servant.port, chance.randrange(1 << 30)) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    while not any(client.exchanges for client in clients):
        time.sleep(0.01)
    time.sleep(chance.uniform(0, 2))
    signalled = time.monotonic()
    result.exit_code = servant.end(signal.SIGKILL if how == "kill -9" else signal.SIGTERM)
    result.ended_s = time.monotonic() - signalled
    for client in clients:
        client.leave()
        client.join(PATIENCE_S)
    _judge_round(result, servant, [one for client in clients for one in client.exchanges], signalled, drain_s)
    return result


def _judge_round(result: Round, servant: Servant, exchanges: list[Exchange], signalled: float, drain_s: float) -> None:
    result.ends = Counter(one.end for one in exchanges)
    result.left_on_disk = sorted(path.name for path in servant.kv.iterdir())
    result.left_on_disk += sorted(path.name for path in servant.folder.glob("donors.db?*"))
    early = sum(one.end in ("nothing", "cut") for one in exchanges if one.ended < signalled)
    if early:
        result.problems.append(f"{early} answers broke before the signal")
    if result.ends["wrong"]:
        result.problems.append(f"{result.ends['wrong']} answers look whole and are not")
    if list(servant.folder.glob("*set-aside*")):
        result.problems.append("the store was damaged")
    if result.how == "kill -9":
        return
    answered = sum(one.end in ("whole", "told") for one in exchanges if one.ended >= signalled)
    if answered < servant.count_running() or result.ends["cut"]:
        lost = servant.count_running() - answered
        result.problems.append(f"{result.ends['cut']} answers were cut, {lost} accepted requests not answered")
    if result.exit_code:
        result.problems.append(f"exit code {result.exit_code}")
    if result.left_on_disk:
        result.problems.append(f"left on disk: {', '.join(result.left_on_disk)}")
    if result.ended_s > drain_s + 60:
        result.problems.append(f"it took {result.ended_s:.1f} s to end")


def run_rounds(folder: Path, count: int, *, model: str, seed: int) -> list[Round]:
    """``count`` rounds of each way, in a random order, one after the other in one folder."""
    chance = random.Random(seed)
    order = [way for way in WAYS for _ in range(count)]
    chance.shuffle(order)
    rounds: list[Round] = []
    least = 0
    for number, way in enumerate(order, 1):
        done = run_round(folder, number, way, model=model, seed=chance.randrange(1 << 30), least_donors=least)
        # Each answer left its prompt as a donor; one that a client had just read when the process died perhaps not.
        least = done.donors_at_start + max(0, done.ends["whole"] - CLIENTS * (way == "kill -9"))
        rounds.append(done)
    return rounds
