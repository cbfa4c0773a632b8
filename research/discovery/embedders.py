"""Do `minilm` and `onnx_gpu` give the same vectors, and what does each cost?

    python bench/embedders.py                                   # here: minilm alone, one minute
    python bench/embedders.py --embedders minilm onnx_gpu       # on a GPU, with onnxruntime-gpu in place of onnxruntime

The same prompts go through each embedder, one at a time, as a lookup sends them. Vectors are compared with those of the
first embedder. onnxruntime-gpu 1.31 from PyPI is built for CUDA 13 and cuDNN 9; it takes the libraries that torch or
the nvidia-* packages bring.
"""

from __future__ import annotations

import argparse
import random
import time

import numpy as np
from _report import Report, add_common_arguments, percentile, progress

from semblend.config import load_config
from semblend.errors import MissingDependencyError
from semblend.fingerprint.embedder import make_embedder
from semblend.prompt import Prompt

SIZES = (250, 1000, 4000, 16_000)
"""Tokens of a prompt, about."""
WORDS = ("river", "stone", "cloud", "engine", "paper", "market", "tax", "law", "cell", "gene", "the", "of", "and", "to")
COLUMNS = ["embedder", "tokens", "prompts", "p50 ms", "p90 ms", "least cosine", "largest difference"]


def write_text(tokens: int, seed: int) -> str:
    chance = random.Random(seed)
    words = [chance.choice(WORDS) + ("." if chance.random() < 0.1 else "") for _ in range(tokens)]
    return " ".join(words)


def measure(name: str, texts: list[str]) -> tuple[np.ndarray, list[float]]:
    """Embed every text by itself; return the vectors, and the milliseconds of each."""
    embedder = make_embedder(name, load_config().models_dir)
    prompts = [Prompt([1], text=text) for text in texts]
    embedder.embed(prompts[0])  # loads the model, and what the device compiles for this size
    rows, took_ms = [], []
    for prompt in prompts:
        began = time.perf_counter()
        rows.append(embedder.embed(prompt))
        took_ms.append(1000 * (time.perf_counter() - began))
    return np.stack(rows), sorted(took_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser, "embedders")
    parser.add_argument("--embedders", nargs="+", default=["minilm"])
    parser.add_argument("--prompts", type=int, default=20, help="of each size")
    args = parser.parse_args()
    report = Report("embedders", args)
    rows = []
    for tokens in SIZES[:2] if args.quick else SIZES:
        texts = [write_text(tokens, seed=args.seed + at) for at in range(args.prompts)]
        first: np.ndarray | None = None
        for name in args.embedders:
            progress(f"{name}, {tokens} tokens …")
            try:
                vectors, took_ms = measure(name, texts)
            except MissingDependencyError as error:
                report.note(f"{name} was left out: {error}")
                continue
            first = vectors if first is None else first
            cosine = float((vectors * first).sum(axis=1).min())
            apart = float(np.abs(vectors - first).max())
            times = [percentile(took_ms, at) for at in (50, 90)]
            rows.append([name, tokens, len(texts), *times, cosine, apart])
    report.table("The same prompts through each embedder, one at a time", COLUMNS, rows)
    report.note("cosine and difference: to the vectors of the first embedder, over all prompts of the size")
    report.write(args.out)


if __name__ == "__main__":
    main()
