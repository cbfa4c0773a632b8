"""What do a graph and quantisation cost in recall, and what do they save in bytes and milliseconds?

    python bench/vector_index.py [--vectors 2000,20000] [--dimension 384]

Vectors lie in clusters of about twenty, as donors do: many prompts, few subjects. Recall@5 is against brute force.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import _report  # first: it holds the numeric libraries to one thread
import numpy as np

from semblend.discover.vector_index import BruteForceIndex, UsearchIndex, VectorIndex, add_all

QUERIES = 200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "vector_index")
    parser.add_argument("--vectors", default="2000,20000", help="index sizes, comma-separated")
    parser.add_argument("--dimension", type=int, default=384)
    args = parser.parse_args()
    if args.quick:
        args.vectors = "2000"
    report = _report.Report("vector_index", args)
    rows = [row for count in map(int, args.vectors.split(",")) for row in measure_all(count, args.dimension)]
    report.table("Indexes of vectors, CPU time", list(rows[0]), [list(row.values()) for row in rows])
    report.write(args.out)
    return 0


def measure_all(count: int, dimension: int) -> list[dict[str, Any]]:
    vectors, queries = clustered(count, dimension, seed=1), clustered(QUERIES, dimension, seed=2, like=count)
    kinds: dict[str, Callable[[], VectorIndex]] = {
        "brute force": lambda: BruteForceIndex(dimension),
        "usearch f32": lambda: UsearchIndex(dimension, "f32"),
        "usearch f16": lambda: UsearchIndex(dimension, "f16"),
        "usearch i8": lambda: UsearchIndex(dimension, "i8"),
    }
    truth = [set(np.argsort(-(vectors @ query), kind="stable")[:5].tolist()) for query in queries]
    return [measure(name, make(), vectors, queries, truth) for name, make in kinds.items()]


def measure(
    name: str, index: VectorIndex, vectors: np.ndarray, queries: np.ndarray, truth: list[set[int]]
) -> dict[str, Any]:
    print(f"{name}: {len(vectors)} vectors", file=sys.stderr)
    start = time.process_time()
    add_all(index, range(len(vectors)), vectors)
    filled = time.process_time()
    found = [index.search(query, 5) for query in queries]
    searched = time.process_time()
    return {
        "index": name,
        "vectors": len(vectors),
        "dimension": vectors.shape[1],
        "bytes_per_vector": held_bytes(index) / len(vectors),
        "add_ms": (filled - start) * 1000.0 / len(vectors),
        "search_ms": (searched - filled) * 1000.0 / len(queries),
        "recall_at_5": float(np.mean([len(set(f[0].tolist()) & t) / 5 for f, t in zip(found, truth, strict=True)])),
        "worst_cosine_error": max(
            float(np.abs(vectors[keys] @ query - cosines).max())
            for (keys, cosines), query in zip(found, queries, strict=True)
        ),
    }


def held_bytes(index: VectorIndex) -> int:
    """Bytes in use. usearch reserves whole arenas, so its serialized form says better what a vector costs."""
    if isinstance(index, UsearchIndex):
        return int(index._index.serialized_length)
    return len(index) * (index._rows.itemsize * index._rows.shape[1] + 8) if isinstance(index, BruteForceIndex) else 0


def clustered(count: int, dimension: int, seed: int, like: int | None = None) -> np.ndarray:
    clusters = (like or count) // 20
    centres = np.random.default_rng(99).normal(size=(clusters, dimension))
    rng = np.random.default_rng(seed)
    rows = centres[rng.integers(0, clusters, count)] + 0.5 * rng.normal(size=(count, dimension))
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), dtype=np.float32)


if __name__ == "__main__":
    sys.exit(main())
