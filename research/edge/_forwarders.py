"""Proxies and routers as processes, ours and peers', for benchmarks of the edge: commands, ports, CPU, memory."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import _report

OWN_POLICIES = ("round_robin", "cache_aware", "semantic_locality")
PEER_POLICIES = ("round_robin", "cache_aware")
PEERS = {"vllm-router": (), "smg": ("launch",), "sglang-router": ("launch",)}
ENVIRON = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_report.REPO / "src"), os.environ.get("PYTHONPATH", "")])}


@dataclass(frozen=True)
class Forwarder:
    """Something between a client and the engines; ``command`` has {port}, {metrics}, {urls} and more to fill in."""

    name: str
    command: tuple[str, ...]

    def fill(self, port: int, urls: Sequence[str], folder: Path) -> list[str]:
        """The command for these ports and engines."""
        words = {"port": port, "metrics": find_ports(1)[0], "folder": folder}
        filled = []
        for word in self.command:
            known = word.format(**words, first_url=urls[0], comma_urls=",".join(urls), urls="{urls}")
            filled += urls if known == "{urls}" else [known]
        return filled


@dataclass(frozen=True)
class Running:
    """A process that serves."""

    name: str
    port: int
    pid: int

    def read_cpu_s(self) -> float:
        """CPU seconds of the process and its children, all threads: from the kernel's clocks, in nanoseconds."""
        return sum(map(_read_cpu_s, (self.pid, *_list_children(self.pid))))

    def read_rss_mib(self) -> float:
        """Resident memory of the process, in MiB."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
        return 0.0


def own_proxies() -> list[Forwarder]:
    """The telemetry proxy without and with traces."""
    proxy = (sys.executable, "-m", "semantickv", "proxy", "--port", "{port}", "--upstream", "{first_url}")
    return [
        Forwarder("semantickv proxy, no traces", (*proxy, "--no-trace")),
        Forwarder("semantickv proxy, traces", (*proxy, "--output-dir", "{folder}")),
    ]


def own_routers(policies: Sequence[str] = OWN_POLICIES) -> list[Forwarder]:
    """The router with each of some policies, as its command starts it."""
    words = ("router", "--no-trace", "--port", "{port}", "--replicas", "{comma_urls}", "--policy")
    return [
        Forwarder(f"semantickv router {one}", (sys.executable, "-m", "semantickv", *words, one)) for one in policies
    ]


def peer_routers(folder: str | None, policies: Sequence[str] = PEER_POLICIES) -> tuple[list[Forwarder], list[str]]:
    """The peers found in a folder of commands, and the names of those that are not there."""
    common = ("--host", "127.0.0.1", "--port", "{port}", "--prometheus-port", "{metrics}", "--worker-urls", "{urls}")
    found, missing = [], []
    for name, words in PEERS.items():
        command = shutil.which(name, path=folder) if folder else shutil.which(name)
        if command is None:
            missing.append(name)
            continue
        found += [Forwarder(f"{name} {one}", (command, *words, *common, "--policy", one)) for one in policies]
    return found, missing


def find_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


@contextmanager
def running(
    name: str, command: Sequence[str], port: int, log: Path, settings: Mapping[str, str] | None = None
) -> Iterator[Running]:
    """Run a server until the block ends; wait until it listens."""
    with log.open("ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**ENVIRON, **(settings or {})})
    try:
        wait_until_open(port, process)
        yield Running(name, port, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_open(port: int, process: subprocess.Popen[bytes], within_s: float = 90.0) -> None:
    """Wait until somebody listens; RuntimeError if the process ends or time runs out."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"it ended with {process.returncode}")
        try:
            socket.create_connection(("127.0.0.1", port), 0.5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"nobody listened after {within_s:g} s")


def _read_cpu_s(pid: int) -> float:
    try:
        return time.clock_gettime((~pid << 3) | 2)  # the clock of another process: clock_getcpuclockid(3)
    except OSError:
        return 0.0


def _list_children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
