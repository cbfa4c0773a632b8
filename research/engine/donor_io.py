"""What donors on a disk and in a shared directory cost the thread that computes, in milliseconds.

    python research/engine/donor_io.py --folder /tmp/donor-io --out research/engine/results/donor_io.json

A donor of 4,096 tokens of Qwen2.5-7B (224 MiB) is captured where host memory holds two, and taken back from the disk.
A directory whose budget is used up lets a donor of 704 MiB go, and 16 records of 131,072 tokens come from a neighbour.
2026-11-18, two busy cores, before and after in turns: a capture into full memory 662 and 294 ms, a donor from the disk
944 and 0.4 (and 0.6 s in the background), room for a donor in the directory 49 and 3, the longest poll 69 and 0.3.
Runs on versions with and without background work: what they do not have is left out. Medians of `--runs`.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from semblend.materialize.contract import KvLayout
from semblend.materialize.donors.directory import SharedDonors
from semblend.materialize.donors.directory_kv import DirectoryKv, KvSignature
from semblend.materialize.donors.store import PrivateFolder
from semblend.materialize.donors.tiers import DonorKv
from semblend.prompt import Namespace, Prompt

LAYERS, HEADS, DIM, TOKENS = 28, 4, 128, 4096
DONOR_BYTES = 2 * LAYERS * HEADS * DIM * TOKENS * 2


def clock(work):
    started = time.perf_counter()
    found = work()
    return (time.perf_counter() - started) * 1e3, found


def settle(kv):
    if hasattr(kv, "flush"):
        kv.flush()


def measure_disk(folder, layout):
    slots, times = torch.arange(TOKENS), {}
    kv = DonorKv(0, int(2.2 * DONOR_BYTES), folder, budget_disk_bytes=8 * DONOR_BYTES)

    def capture(name):
        return clock(lambda: kv.capture(name, 1, layout, slots))[0]

    capture("a")
    times["capture, memory has room"] = capture("b")
    settle(kv)
    times["capture, memory is full"] = capture("c")  # "a" leaves host memory
    if hasattr(kv, "flush"):
        times["capture, memory is full, the writer is busy"] = capture("d")
        settle(kv)
    took, held = clock(lambda: kv.acquire("a", 1))
    times["acquire from disk"] = took
    if held is None:
        times["until it is in host memory, in the background"] = took + clock(kv.flush)[0]
        times["acquire then"], held = clock(lambda: kv.acquire("a", 1))
    assert held is not None, "the donor came back"
    kv.release(held)
    times["drop a donor that has a file"] = clock(lambda: kv.drop("b"))[0]
    kv.close()
    return times


def measure_directory(path):
    namespace, times = Namespace(model="m"), {}
    shared = SharedDonors(str(path), 1 << 30, namespace, token_bytes=(704 << 20) / 4096, every_s=0.05)
    prompt = Prompt(np.arange(4096, dtype=np.int32), namespace=namespace)
    order = shared.publish("a", 1, prompt)
    (Path(path) / f"{order.key}.0of1.kv").write_bytes(b"\1" * (704 << 20))
    times["make room: 704 MiB go"] = clock(lambda: shared.publish("b", 1, prompt))[0]

    other = SharedDonors(str(path), 1 << 30, namespace, token_bytes=1.0, every_s=0.05)
    signature = KvSignature("w", "float32", 1, 1, 2, 16, None)
    kv = DirectoryKv(PrivateFolder(path), signature)
    for number in range(16):
        tokens = np.full(131_072, number, np.int32)
        record = other.publish(f"n{number}", 1, Prompt(tokens, namespace=namespace))
        kv.write(record.key, record.tokens_digest, dict.fromkeys("kv", torch.ones(1, 1, 1, 2)), None)
    polls, came, deadline = [], 0, time.monotonic() + 30
    while came < 16 and time.monotonic() < deadline:
        took, changes = clock(shared.poll)
        polls.append(took)
        came += len(changes.came)
        time.sleep(0.01)
    assert came == 16, came
    times["the longest poll: 16 records of 131,072 tokens"] = max(polls)
    kv.close()
    other.close()
    shared.close()
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: a temporary folder")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--label", default="")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    pool = torch.randn(2, LAYERS, TOKENS, HEADS, DIM).to(torch.bfloat16)
    layout, rows = KvLayout.of_pool(*pool), {}
    for _ in range(given.runs):
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            measured = measure_disk(Path(folder) / "disk", layout) | measure_directory(Path(folder) / "directory")
        for name, ms in measured.items():
            rows.setdefault(name, []).append(ms)
    medians = {
        name: {"median_ms": round(statistics.median(ms), 2), "max_ms": round(max(ms), 2)} for name, ms in rows.items()
    }
    result = {
        "label": given.label,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "runs": given.runs,
    }
    result |= {"day": time.strftime("%Y-%m-%d"), "donor_bytes": DONOR_BYTES, "times": medians}
    print(json.dumps(result, indent=1))
    if given.out is not None:
        known = json.loads(given.out.read_text()) if given.out.exists() else []
        given.out.write_text(json.dumps([*known, result], indent=1) + "\n")


if __name__ == "__main__":
    main()
