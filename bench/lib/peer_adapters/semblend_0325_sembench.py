"""semblend 0.3.25 on a manifest of the benchmark, as its own benchmark sets it up.

That is: jaccard, any similarity, a reuse ratio of .25 or more, several donors, chunks of a block. ``--multi-donor 0``
is that benchmark's --disable-multi-donor.

``--store per-item`` makes a new store for every case, with that case's donors only, as that benchmark does;
``--store one`` keeps all donors of the manifest together. ``--embedder oracle`` is the perfect embedder of
semblend_0325.py: in one store it names the donors of the case at hand.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
from _protocol import Cases, resident_mib, runs, timed
from semblend_0325 import DIMENSION, OracleEmbedder, OracleIndex


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--store", choices=("one", "per-item"), required=True)
    parser.add_argument("--embedder", choices=("jaccard", "oracle"), default="jaccard")
    parser.add_argument("--multi-donor", choices=("0", "1"), default="1")
    parser.add_argument("--block-size", type=int, default=16)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    os.environ["SEMBLEND_MULTI_DONOR"] = args.multi_donor  # read when a pipeline is made
    arrays = np.load(args.cases, allow_pickle=False)
    names = json.loads(str(arrays["names"]))
    ends = [0, *arrays["ends"].tolist()]
    tokens = {key: arrays["tokens"][ends[at] : ends[at + 1]].tolist() for at, key in enumerate(names["order"])}
    Path(args.out).write_text(json.dumps(replayed(args, names, tokens)), encoding="utf-8")


def replayed(args: argparse.Namespace, names: dict[str, Any], tokens: dict[str, list[int]]) -> dict[str, Any]:
    """Names: texts by key, and for each case its recipient's key and its donors' keys."""
    texts, cases = names["texts"], Cases([], [], names["donors"], args)
    answers: dict[str, Any] = {}
    register_ms: list[float] = []
    together = None
    if args.store == "one":
        together = pipeline(args, cases)
        keys = dict.fromkeys(key for own in names["donors"].values() for key in own)
        register_ms = [timed(together.register_donor, key, tokens[key], texts[key])[0] for key in keys]
    for case, donors in names["donors"].items():
        system = together or pipeline(args, cases)
        if together is None:
            register_ms += [timed(system.register_donor, key, tokens[key], texts[key])[0] for key in donors]
        cases.asking = case
        cpu_ms, answer = timed(system.find_donor, tokens[case], texts[case])
        answers[case] = {"cpu_ms": cpu_ms, "spans": spans(answer)}
    return {"answers": answers, "register_ms": register_ms, "memory_mib": resident_mib()}


def pipeline(args: argparse.Namespace, cases: Cases) -> Any:
    from semblend import DonorStore, SemBlendPipeline

    index = OracleIndex(cases) if args.embedder == "oracle" else None
    store = DonorStore(max_entries=10_000, embedding_dim=DIMENSION, chunk_size=args.block_size, vector_index=index)
    made = SemBlendPipeline(
        embedder_type="jaccard", min_similarity=0.0, min_reuse_ratio=0.25, chunk_size=args.block_size, donor_store=store
    )
    if index is not None:
        made._embedder = OracleEmbedder()
    return made


def spans(answer: Any) -> list[Any]:
    if not answer.found:
        return []
    return runs(
        [
            (int(slot["targetPos"]), str(slot.get("donorId") or answer.donor_id), int(slot["donorPos"]))
            for slot in answer.slot_actions
            if slot["action"] == "copy_from_donor" and slot["donorPos"] is not None
        ]
    )


if __name__ == "__main__":
    main()
