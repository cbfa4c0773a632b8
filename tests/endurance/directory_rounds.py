"""Engines of one machine that share a donor directory, as processes: they publish, read each other's, and are killed.

A donor's KV follows from its tokens, so whoever reads one can tell whether it is right, byte for byte.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from semblend import Namespace, Prompt
from semblend.errors import StoreError
from semblend.materialize.donors.directory import DirectoryWatch, DirectoryWriter, is_part
from semblend.materialize.donors.directory_kv import DirectoryKv, KvSignature
from semblend.materialize.donors.store import PrivateFolder
from semblend.materialize.kv.moves import DonorTensors

LAYERS, HEADS, DIM, RANKS = 2, 2, 16, 2
ENGINE = Namespace(model="m")
BUDGET_BYTES = 3 << 20
MOST_TOKENS = 1500


def make_parts(tokens: np.ndarray, rank: int) -> dict[str, torch.Tensor]:
    """The KV that one rank has of a prompt: noise that its tokens decide."""
    noise = np.random.default_rng([rank, len(tokens), int(tokens[0]), int(tokens.sum())])
    shape = (LAYERS, len(tokens), HEADS, DIM)
    return {name: torch.from_numpy(noise.standard_normal(shape, dtype=np.float32)) for name in ("k", "v")}


def open_ranks(folder: PrivateFolder) -> list[DirectoryKv]:
    """The directory as each rank of one engine sees it."""
    return [
        DirectoryKv(folder, KvSignature("w", "float32", LAYERS, HEADS, DIM, 16, None, rank, RANKS))
        for rank in range(RANKS)
    ]


def publish_one(writer: DirectoryWriter, ranks: list[DirectoryKv], chance: random.Random, salt: str = "") -> str | None:
    """Publish a donor of random tokens; its key, None where it does not fit."""
    tokens = np.array([chance.randrange(1000) for _ in range(chance.randrange(1, MOST_TOKENS))], dtype=np.int32)
    parts = [make_parts(tokens, rank) for rank in range(RANKS)]
    nbytes = sum(part.nbytes + 4096 for rank in parts for part in rank.values())
    prompt = Prompt(tokens, namespace=Namespace(model="m", salt=salt))
    record = writer.publish(prompt, f"r{chance.randrange(1 << 30)}", nbytes)
    if record is None:
        return None
    for rank, kv in enumerate(ranks):
        kv.write(record.key, record.tokens_digest, parts[rank], None)
    return record.key


def is_right(tokens: np.ndarray, rank: int, found: DonorTensors) -> bool:
    wanted = make_parts(tokens, rank)
    return torch.equal(found.k, wanted["k"]) and torch.equal(found.v, wanted["v"])


def publish_forever(path: str, seed: int) -> None:
    """What a process does until it is killed; says on stdout when it has begun."""
    chance = random.Random(seed)
    folder = PrivateFolder(path)
    writer, ranks = DirectoryWriter(folder, BUDGET_BYTES, ranks=RANKS), open_ranks(folder)
    publish_one(writer, ranks, chance)
    print("ready", flush=True)
    while True:
        publish_one(writer, ranks, chance)
        writer.look_over()


@dataclass(slots=True)
class DirectoryRound:
    """What one kill led to."""

    number: int
    killed_after_s: float
    read: int = 0
    gone: int = 0
    wrong: list[str] = field(default_factory=list)
    bytes_after: int = 0
    left_behind: int = 0


class DirectoryReader:
    """An engine that finds and reads whatever the others publish, and compares every byte."""

    def __init__(self, folder: PrivateFolder) -> None:
        self._watch = DirectoryWatch(folder, ENGINE, ranks=RANKS, every_s=0.0, at_once=1 << 20)
        self._ranks = open_ranks(folder)
        self._known: dict[str, np.ndarray] = {}

    def read_all(self, into: DirectoryRound) -> None:
        changes = self._watch.poll()
        for key in changes.went:
            self._known.pop(key, None)
        self._known |= {record.key: record.tokens for record in changes.came}
        for key, tokens in list(self._known.items()):
            for rank, kv in enumerate(self._ranks):
                try:
                    found = kv.open(key)
                except StoreError as error:
                    into.gone += 1
                    if "is gone" not in str(error):
                        into.wrong.append(str(error))
                    continue
                into.read += 1
                if not is_right(tokens, rank, found):
                    into.wrong.append(f"{key} rank {rank} holds other bytes")


def count_bytes(path: Path) -> tuple[int, int]:
    """Bytes of donors in the folder, and how many files are not whole."""
    names = os.listdir(path)
    total = 0
    for name in names:
        try:
            total += os.lstat(path / name).st_size
        except FileNotFoundError:
            continue
    return total, sum(is_part(name) for name in names)


def start_engines(path: Path, *seeds: int) -> list[subprocess.Popen[str]]:
    """Processes that publish without end; returns once each has published its first donor."""
    command = [sys.executable, str(Path(__file__).resolve()), str(path)]
    engines = [subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, text=True) for seed in seeds]
    for engine in engines:
        assert engine.stdout is not None
        if engine.stdout.readline().strip() != "ready":
            raise SystemExit("an engine did not start")
    return engines


def kill_engine(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def run_rounds(path: Path, count: int, *, seed: int) -> list[DirectoryRound]:
    """Kill ``count`` engines one after the other at random moments, while a neighbour reads; then start a next one."""
    chance = random.Random(seed)
    folder = PrivateFolder(path)
    reader = DirectoryReader(folder)
    rounds = []
    for number in range(1, count + 1):
        engines = start_engines(path, *(chance.randrange(1 << 30) for _ in range(2)))
        one = DirectoryRound(number, chance.uniform(0, 0.5))
        ends = time.monotonic() + one.killed_after_s
        while time.monotonic() < ends:
            reader.read_all(one)
        for engine in engines:
            kill_engine(engine)
        reader.read_all(one)
        following = DirectoryWriter(folder, BUDGET_BYTES, ranks=RANKS)  # the next start
        one.bytes_after, one.left_behind = count_bytes(path)
        reader.read_all(one)
        following.close()
        rounds.append(one)
    folder.close()
    return rounds


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("seed", type=int)
    given = parser.parse_args()
    publish_forever(given.path, given.seed)
