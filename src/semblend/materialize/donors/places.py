"""Where donors lie, decided when an engine starts, by what is free then; what is set always wins.

host     a quarter of the memory that is free, for each rank its part, at most 16 GiB: page-locked memory is missing
         elsewhere, and locking it takes the start about a second for every 4 GiB
device   what the engine has left over and would not miss: decided when it has taken its KV cache and warmed up. Its
         own share of the device stays its own, used or not: activations come back. Of the rest at most a half, at
         most a twentieth of the device (a second engine may want to start beside the first), and 2 GiB stay free
"""

from __future__ import annotations

import os
from pathlib import Path

from semblend.config import GIB

AUTO = -1
"""A budget that is decided at the start."""
HOST_PART, MOST_HOST, UNKNOWN_HOST = 4, 16 * GIB, 4 * GIB
DEVICE_PART, DEVICE_MARGIN, LEAST_DEVICE = 20, 2 * GIB, GIB
STEP = GIB // 4
"""Budgets are multiples of this, so that ranks that look a moment apart decide alike."""
DOCUMENT_TOKENS = 8192
NO_LIMIT = 1 << 60
"""As a kernel's first control groups write it."""


def choose_host_bytes(available: int | None, ranks: int = 1) -> int:
    """Host memory for the donors of one of ``ranks`` that share it, in bytes; 4 GiB where the system does not say.

    >>> [choose_host_bytes(free * GIB) / GIB for free in (2, 10, 512)], choose_host_bytes(64 * GIB, ranks=8) / GIB
    ([0.5, 2.5, 16.0], 2.0)
    """
    if available is None:
        return UNKNOWN_HOST
    return min(MOST_HOST, _round_down(available // HOST_PART // ranks))


def choose_device_bytes(free: int, total: int, engine_share: float) -> int:
    """Device memory for donors, in bytes, where the engine may use ``engine_share`` of it; 0 where little is left.

    >>> [choose_device_bytes(free * GIB, total * GIB, 0.9) / GIB for free, total in ((14, 140), (8, 80), (2, 24))]
    [7.0, 4.0, 0.0]
    >>> choose_device_bytes(60 * GIB, 80 * GIB, 0.9) / GIB, choose_device_bytes(44 * GIB, 80 * GIB, 0.45) / GIB
    (4.0, 4.0)
    """
    spare = min(free, total - int(total * engine_share))  # what of its share the engine does not use yet is not spare
    chosen = _round_down(max(0, min(spare - DEVICE_MARGIN, spare // 2, total // DEVICE_PART)))
    return chosen if chosen >= LEAST_DEVICE else 0


def describe_places(device_bytes: int, host_bytes: int, device_token: float, host_token: float) -> str:
    """One line: how much lies where, and how many documents that is, with so many bytes a token.

    >>> describe_places(2 * GIB, 16 * GIB, 57344, 57344)
    '2.0 GiB on the device (4 documents of 8,192 tokens), 16.0 GiB on the host (36)'
    """
    counts = [
        int(budget / (token * DOCUMENT_TOKENS))
        for budget, token in ((device_bytes, device_token), (host_bytes, host_token))
    ]
    host = f"{host_bytes / GIB:.1f} GiB on the host"
    documents = f"documents of {DOCUMENT_TOKENS:,} tokens)"
    if not device_bytes:
        return f"{host} ({counts[1]:,} {documents}, none on the device"
    return f"{device_bytes / GIB:.1f} GiB on the device ({counts[0]:,} {documents}, {host} ({counts[1]:,})"


def read_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int | None, int | None]:
    """Bytes of memory in all, and those that a program could still have; None where the system does not say.

    A container's limit counts: what it holds of files can be had again.
    """
    total = available = None
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total = page * os.sysconf("SC_PHYS_PAGES")
        available = page * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf, macOS not every name
        pass
    available = _read_numbers(Path("/proc/meminfo"), 1024).get("MemAvailable:", available)
    for limit, used, stat, files in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        try:
            most = int((cgroup / limit).read_text(encoding="ascii"))
            held = int((cgroup / used).read_text(encoding="ascii"))
        except (OSError, ValueError):  # no such file, or no limit: "max"
            continue
        if most >= NO_LIMIT:
            continue
        left = max(0, most - held + _read_numbers(cgroup / stat, 1).get(files, 0))
        total = most if total is None else min(total, most)
        available = left if available is None else min(available, left)
    return total, available


def _read_numbers(path: Path, unit: int) -> dict[str, int]:
    """Lines of a name and a number; nothing where they cannot be read."""
    try:
        rows = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
        return {row[0]: int(row[1]) * unit for row in rows if len(row) > 1 and row[1].isdigit()}
    except (OSError, ValueError):
        return {}


def _round_down(nbytes: int) -> int:
    return nbytes // STEP * STEP
