"""A real `semblend serve` process of any checkout, and an honest tenant that asks it the same questions again."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

KEYS = ("acme=sk-acme", "bolt=sk-bolt")
ATTACKER, VICTIM, ADMIN = "sk-acme", "sk-bolt", "sk-root"
PATIENCE_S = 60.0
MAIN = """
import sys
try:
    from semblend.cli.main import main
except ImportError:  # a checkout of before November 2026
    from semblend.cli import main
sys.exit(main())
"""


class Server:
    """`semblend serve` with two tenants and an admin, under a limit of open files; memory and files are watched."""

    def __init__(self, checkout: Path, model: str, files: int, *flags: str, threads: int = 2) -> None:
        self._checkout, self._model, self._files, self._flags = checkout, model, files, flags
        self._threads = threads
        self.port = 0
        self.peak_bytes = self.start_bytes = 0
        self.most_files = 0
        self._ended = threading.Event()

    def __enter__(self) -> Server:
        environment = os.environ | {"PYTHONPATH": str(self._checkout / "src"), "OMP_NUM_THREADS": str(self._threads)}
        command = [sys.executable, "-c", MAIN]
        command += ["serve", "--model", self._model, "--port", "0", "--admin-key", ADMIN, *self._flags]
        command += [word for key in KEYS for word in ("--api-key", key)]
        self._log = tempfile.NamedTemporaryFile(prefix="hostile-", suffix=".log")
        self._process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=self._log, text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (self._files, self._files)),
        )  # fmt: skip
        assert self._process.stdout is not None
        address = self._process.stdout.readline().strip()
        if not address.startswith("http"):
            raise RuntimeError(Path(self._log.name).read_text(encoding="utf-8")[-2000:])
        self.port = int(address.rpartition(":")[2])
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def log_bytes(self) -> int:
        return Path(self._log.name).stat().st_size

    def mark(self) -> None:
        """Count memory from here on: what the model takes is not the attack's."""
        self.start_bytes = self.peak_bytes = self._resident()
        self.most_files = 0

    def _watch(self) -> None:
        while not self._ended.wait(0.02) and self.alive:
            self.peak_bytes = max(self.peak_bytes, self._resident())
            try:
                self.most_files = max(self.most_files, len(os.listdir(f"/proc/{self._process.pid}/fd")))
            except OSError:
                return

    def _resident(self) -> int:
        try:
            pages = int(Path(f"/proc/{self._process.pid}/statm").read_text(encoding="ascii").split()[1])
        except (OSError, IndexError):
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class Heard:
    """One answer over a plain socket. ``status`` 0: no answer came, and ``text`` says why."""

    status: int
    text: str
    first_s: float
    total_s: float


async def ask(port: int, path: str, body: bytes | None, key: str, *, patience_s: float = PATIENCE_S) -> Heard:
    """One request on a connection of its own, read to its end."""
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    head += f"Authorization: Bearer {key}\r\n" if key else ""
    head += "" if body is None else f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    started = time.perf_counter()
    writer: asyncio.StreamWriter | None = None
    parts: list[bytes] = []
    first = 0.0
    try:
        async with asyncio.timeout(patience_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head.encode() + b"\r\n" + (body or b""))
            try:
                await writer.drain()
            except OSError:
                pass  # it answered before it had read everything, and closed: the answer may still be there
            while part := await reader.read(65_536):
                first = first or time.perf_counter() - started
                parts.append(part)
    except (OSError, TimeoutError) as error:
        if not parts:
            return Heard(0, type(error).__name__, 0.0, time.perf_counter() - started)
    finally:
        if writer is not None:
            writer.close()
    heard = b"".join(parts)
    status = int(heard.split(b" ", 2)[1]) if heard.startswith(b"HTTP/") else 0
    return Heard(status, heard.decode("utf-8", "replace"), first, time.perf_counter() - started)


@dataclass(slots=True)
class Victim:
    """Asks greedy questions one after the other and compares every answer with the one it got on the quiet server."""

    port: int
    prompts: list[str]
    expected: dict[int, str] = field(default_factory=dict)
    first_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    asked: int = 0

    async def learn(self) -> None:
        """The answers of the quiet server."""
        for number in range(len(self.prompts)):
            status, answer, _ = await self._ask(number, "learn")
            if status != 200:
                raise RuntimeError(f"the quiet server answered {status}: {answer[:300]}")
            self.expected[number] = answer

    async def ask_until(self, ended: asyncio.Event, at_least: int) -> None:
        """Ask until the attack is over, and ``at_least`` so often."""
        while not ended.is_set() or self.asked < at_least:
            number = self.asked % len(self.prompts)
            status, answer, heard = await self._ask(number, f"ask-{self.asked}")
            self.asked += 1
            if status != 200 or answer != self.expected[number]:
                self.wrong.append(f"{status}: {answer[:200]!r}")
            else:
                self.first_s.append(heard.first_s)
                self.total_s.append(heard.total_s)

    async def _ask(self, number: int, salt: str) -> tuple[int, str, Heard]:
        body = {"prompt": self.prompts[number], "max_tokens": 12, "temperature": 0, "stream": True, "cache_salt": salt}
        heard = await ask(self.port, "/v1/completions", json.dumps(body).encode(), VICTIM)
        events = [line[6:] for line in heard.text.splitlines() if line.startswith("data: {")]
        if heard.status != 200:
            return heard.status, heard.text[-300:], heard
        texts = (choice.get("text", "") for event in events for choice in json.loads(event).get("choices", ()))
        ended = "data: [DONE]" in heard.text and not any('"error"' in event for event in events)
        return (200 if ended else 0), "".join(texts), heard


async def probe_health(port: int, ended: asyncio.Event, seconds: list[float]) -> None:
    """How long the server takes for its lightest answer, again and again: what it shows is a stalled event loop."""
    while not ended.is_set():
        heard = await ask(port, "/health", None, "")
        seconds.append(heard.total_s if heard.status == 200 else PATIENCE_S)
        await asyncio.sleep(0.1)
