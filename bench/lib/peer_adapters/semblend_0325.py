"""semblend 0.3.25 from the public index, in its own environment (its import name is the same as ours).

Two ways to run it. ``jaccard`` is the embedder that needs no model. ``oracle`` stands for a perfect embedder, which
gives the donors that the query was made from a cosine of .95 and all others none: an upper bound for any embedder,
and the only affordable one here, since MiniLM takes more than a CPU second a prompt. With ``--multi-donor 1`` the
package's own switch for several donors is on, with the chunk size that its vLLM connector uses.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import numpy as np
from _protocol import Cases, RawSpan, runs, serve

DIMENSION = 384


class OracleIndex:
    """Knows the gold donors of the query that is being asked; speaks the package's vector-index interface."""

    def __init__(self, cases: Cases) -> None:
        self.cases = cases
        self.known: set[str] = set()

    def add(self, donor_id: str, _vector: np.ndarray) -> None:
        self.known.add(donor_id)

    def remove(self, donor_id: str) -> None:
        self.known.discard(donor_id)

    def search(self, _query: np.ndarray, top_k: int, allowed: set[str] | None = None) -> list[tuple[str, float]]:
        gold = [donor_id for donor_id in self.cases.gold.get(self.cases.asking, []) if donor_id in self.known]
        return [(donor_id, 0.95) for donor_id in gold if allowed is None or donor_id in allowed][:top_k]

    def size(self) -> int:
        return len(self.known)

    def clear(self) -> None:
        self.known.clear()


class OracleEmbedder:
    """A vector of its own for every text: nothing looks like anything, except what the index says."""

    available = True
    dimension = DIMENSION

    def embed(self, text: str) -> np.ndarray:
        vector = np.random.default_rng(abs(hash(text)) % 2**32).standard_normal(DIMENSION).astype(np.float32)
        return vector / np.linalg.norm(vector)


class Semblend0325:
    def __init__(self, cases: Cases) -> None:
        from semblend import DonorStore, SemBlendPipeline

        logging.disable(logging.WARNING)
        os.environ["SEMBLEND_MULTI_DONOR"] = str(cases.args.multi_donor)  # read when the pipeline is made
        self.cases = cases
        chunk = 16 if cases.args.multi_donor else 256
        self.index = OracleIndex(cases) if cases.args.embedder == "oracle" else None
        store = DonorStore(max_entries=10_000, embedding_dim=DIMENSION, chunk_size=chunk, vector_index=self.index)
        self.pipeline = SemBlendPipeline(embedder_type="jaccard", chunk_size=chunk, donor_store=store)
        if self.index is not None:
            self.pipeline._embedder = OracleEmbedder()

    def register(self, donor_id: str, ids: list[int]) -> None:
        self.pipeline.register_donor(donor_id, ids, prompt_text=donor_id)

    def lookup(self, ids: list[int]) -> Any:
        return self.pipeline.find_donor(ids, prompt_text=self.cases.asking)

    def spans(self, answer: Any) -> list[RawSpan]:
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
    serve(Semblend0325, embedder="jaccard", multi_donor=0)
