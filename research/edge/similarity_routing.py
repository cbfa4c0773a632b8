"""Does it pay to place prompts that share no tokens with anything by what they are about?

    python bench/similarity_routing.py --out bench/results/similarity_routing.json        # 10 minutes, one core

Two tables on real streams. First: for pairs of prompts, how much of the later one could be reused from the earlier one
(token runs of 32 and more), by bucket of cosine. Second: four replicas, the router of `semantickv`, and a cache of a
bounded size on each, which reuses equal passages at any place; a prompt of which no replica has seen anything goes to
the one with least to do, or to the one that has the most similar earlier prompt. Order of arrival by seed.
"""

from __future__ import annotations

import argparse
import random
import time
import zlib
from collections import deque
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np
from _documents import agents
from _report import Report, add_common_arguments, data_dir, progress
from _streams import find_words, read_streams

from semantickv.edge.addresses import EngineAddress
from semantickv.edge.pool import ConnectionPool
from semantickv.routing.fingerprint import PromptPieces, cut_prompt
from semantickv.routing.locality import ReplicaMemory
from semantickv.routing.prompt_view import PromptPart
from semantickv.routing.replica import Replica
from semantickv.routing.router import RouteDecision, Router, RouteRequest
from semblend.config import load_config
from semblend.confirm.outcome import Outcome
from semblend.fingerprint.embedder import make_embedder
from semblend.prompt import Prompt

BUCKETS = (-1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97, 1.01)
RUN_TOKENS = 32
REPLICAS = 4
IN_FLIGHT = 8
SIMILAR_AT = 0.60
"""SEMBLEND_MIN_SIMILARITY's default."""


@dataclass(frozen=True)
class Stream:
    """Prompts in order, cut as the router cuts them, and their vectors by embedder."""

    name: str
    texts: list[str]
    pieces: list[PromptPieces]
    vectors: dict[str, np.ndarray]

    @property
    def tokens(self) -> int:
        return len({value for one in self.pieces for value in one.hashes}) * 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser, "similarity_routing")
    parser.add_argument("--prompts", type=int, default=240, help="of each stream")
    parser.add_argument("--pairs", type=int, default=20_000, help="pairs of each stream")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--embedders", nargs="+", default=["minilm", "static", "lexical"])
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.pairs, args.seeds, args.embedders = 40, 500, 2, ["lexical"]
    report = Report("similarity_routing", args)
    streams, costs = read_all(args)
    report.table("Cost of one vector, CPU ms", ["stream", "words a prompt", *args.embedders], costs)
    measure_pairs(report, streams, args)
    report.write(args.out)
    measure_placement(report, streams, args)
    report.write(args.out)


def read_all(args: argparse.Namespace) -> tuple[list[Stream], list[list[object]]]:
    """Read the streams and embed every prompt once."""
    found: list[tuple[str, list[str]]] = []
    for stream in read_streams(data_dir(args), None, args.seed):
        texts = [
            "\n\n".join(stream.texts[one] for one in prompt) + f"\n\nQuestion: {question}"
            for prompt, question in islice(zip(stream.prompts, stream.questions, strict=True), args.prompts)
        ]
        found.append((stream.name, texts))
    sessions = [session for name in ("taubench", "miniswe") for session in agents(data_dir(args), name)]
    calls = [(step, number, text) for number, one in enumerate(sessions) for step, text in enumerate(one.prompts)]
    found.append(("agents", [text for _, _, text in sorted(calls)[: args.prompts]]))
    streams, costs = [], []
    for name, texts in found:
        vectors, row = {}, [name, round(sum(len(text.split()) for text in texts) / len(texts))]
        for kind in args.embedders:
            embedder = make_embedder(kind, load_config().models_dir)
            start = time.process_time()
            rows = [embedder.embed(make_prompt(text)) for text in texts]
            row.append(1000 * (time.process_time() - start) / len(texts))
            vectors[kind] = np.stack([np.zeros(embedder.dimension) if one is None else one for one in rows])
            progress(f"{name} {kind}")
        streams.append(Stream(name, texts, [cut(text) for text in texts], vectors))
        costs.append(row)
    return streams, costs


def make_prompt(text: str) -> Prompt:
    """A prompt with its text, and a token for each word."""
    return Prompt([zlib.crc32(word.encode()) >> 2 for word in find_words(text)] or [1], text=text)


def cut(text: str) -> PromptPieces:
    return cut_prompt([PromptPart("retrieved_context", text.encode())], b"bench")


def find_runs(text: str) -> tuple[np.ndarray, int]:
    """The hash of every run of 32 words, and the number of words."""
    words = np.array([zlib.crc32(word.encode()) for word in find_words(text)], np.uint64)
    if len(words) < RUN_TOKENS:
        return np.zeros(0, np.uint64), len(words)
    powers = np.cumprod(np.full(RUN_TOKENS, 0x9E3779B97F4A7C15, np.uint64))
    windows = np.lib.stride_tricks.sliding_window_view(words + np.uint64(1), RUN_TOKENS)
    return (windows * powers).sum(axis=1, dtype=np.uint64), len(words)


def measure_share(earlier: np.ndarray, later: np.ndarray, words: int) -> float:
    """The share of the later prompt's words that stand in a run of 32 words of the earlier one."""
    covered = np.zeros(words + 1, int)
    for start in np.flatnonzero(np.isin(later, earlier)):
        covered[start] += 1
        covered[start + RUN_TOKENS] -= 1 if start + RUN_TOKENS <= words else 0
    return float((np.cumsum(covered)[:words] > 0).mean()) if words else 0.0


def measure_pairs(report: Report, streams: list[Stream], args: argparse.Namespace) -> None:
    """How much can be reused, by bucket of cosine."""
    rng = random.Random(args.seed)
    samples: dict[str, list[tuple[str, float, float]]] = {kind: [] for kind in args.embedders}
    for stream in streams:
        runs = [find_runs(text) for text in stream.texts]
        pairs = [(first, second) for second in range(len(runs)) for first in range(second)]
        for first, second in rng.sample(pairs, min(args.pairs, len(pairs))):
            share = measure_share(runs[first][0], *runs[second])
            for kind in args.embedders:
                cosine = float(stream.vectors[kind][first] @ stream.vectors[kind][second])
                samples[kind].append((stream.name, cosine, share))
        progress(f"pairs of {stream.name}")
    rows = []
    for kind, found in samples.items():
        for low, high in pairwise(BUCKETS):
            shares = [share for _, cosine, share in found if low <= cosine < high]
            if shares:
                some = sum(share > 0 for share in shares) / len(shares)
                rows.append([kind, f"{max(low, 0):.2f}–{min(high, 1):.2f}", len(shares), some, float(np.mean(shares))])
    report.table(
        "What can be reused of a prompt, by cosine with an earlier one",
        ["embedder", "cosine", "pairs", "with a shared run", "share of words reusable"],
        rows,
    )


class Fleet:
    """Four replicas with their true caches, and the router before them. Requests leave in order, eight at once."""

    def __init__(self, cache_tokens: int, policy: str) -> None:
        pool = ConnectionPool(EngineAddress.parse("http://127.0.0.1:9"))
        self.caches = [ReplicaMemory(cache_tokens) for _ in range(REPLICAS)]
        self.replicas = [Replica(f"r{n}", pool, ReplicaMemory(cache_tokens)) for n in range(REPLICAS)]
        self.router = Router(self.replicas, policy)
        self.placed = [0] * REPLICAS
        self.reused = self.asked = self.moved = self.cold = 0
        self._seen: list[list[np.ndarray]] = [[] for _ in range(REPLICAS)]
        self._running: deque[tuple[RouteDecision, RouteRequest]] = deque()

    def serve(self, pieces: PromptPieces, vector: np.ndarray | None, always: bool, pile: bool = False) -> None:
        request = RouteRequest(pieces=pieces)
        decision = self.router.choose(request)
        assert isinstance(decision, RouteDecision)
        is_cold = decision.outcome is Outcome.COLD_FALLBACK
        self.cold += is_cold
        if vector is not None and (is_cold or always):
            decision = self._follow(decision, request, vector)
        elif pile and is_cold:
            decision = self._pile(decision, request)
        at = self.replicas.index(decision.replica)
        self.router.start(decision, request)
        self.router.remember(decision, request)
        self._running.append((decision, request))
        if len(self._running) > IN_FLIGHT:
            first, _ = self._running.popleft()
            self.router.note_first_byte(first)
            self.router.end(first, None, had_first_byte=True)
        overlap = self.caches[at].match(pieces)
        self.reused += max(overlap.prefix_tokens, overlap.any_tokens)
        self.asked += pieces.total_tokens
        self.caches[at].note(pieces)
        self.placed[at] += 1
        if vector is not None:
            self._seen[at].append(vector)

    def _pile(self, decision: RouteDecision, request: RouteRequest) -> RouteDecision:
        """Go where most went so far, if the guard allows it: what piling up alone brings."""
        at = int(np.argmax(self.placed))
        limit = self.router._guard.compute_limit([one.running for one in self.replicas])
        if self.replicas[at].running >= limit or decision.replica is self.replicas[at]:
            return decision
        found = self.router.choose(request, [one for one in self.replicas if one is not self.replicas[at]])
        assert isinstance(found, RouteDecision)
        return found

    def _follow(self, decision: RouteDecision, request: RouteRequest, vector: np.ndarray) -> RouteDecision:
        """Go where the most similar earlier prompt went, if it is similar enough and the guard allows it."""
        best = [max((float(vector @ one) for one in seen[-500:]), default=-1.0) for seen in self._seen]
        at = int(np.argmax(best))
        others = [one for one in self.replicas if one is not self.replicas[at]]
        limit = self.router._guard.compute_limit([one.running for one in self.replicas])
        if best[at] < SIMILAR_AT or self.replicas[at].running >= limit or decision.replica is self.replicas[at]:
            return decision
        found = self.router.choose(request, others)
        assert isinstance(found, RouteDecision)
        self.moved += 1
        return found


def measure_placement(report: Report, streams: list[Stream], args: argparse.Namespace) -> None:
    """Placement with and without similarity, in several orders of arrival."""
    arms = [("round_robin", "round_robin", None, False), ("token overlap", "semantic_locality", None, False)]
    arms += [("overlap, then the fullest", "semantic_locality", "pile", False)]
    arms += [(f"overlap, then {kind}", "semantic_locality", kind, False) for kind in args.embedders]
    arms += [(f"{kind} alone", "semantic_locality", kind, True) for kind in args.embedders]
    rows = []
    for stream in streams:
        cache = max(4000, stream.tokens // 8)  # the four caches together hold half of what is different
        for name, policy, kind, always in arms:
            shares, busiest, moved, cold = [], [], 0, 0
            for seed in range(args.seeds):
                order = list(range(len(stream.texts)))
                random.Random(seed).shuffle(order)
                fleet = Fleet(cache, policy)
                for at in order:
                    vector = stream.vectors[kind][at] if kind in stream.vectors else None
                    fleet.serve(stream.pieces[at], vector, always, pile=kind == "pile")
                shares.append(fleet.reused / fleet.asked)
                busiest.append(max(fleet.placed) * REPLICAS / sum(fleet.placed))
                moved, cold = moved + fleet.moved, cold + fleet.cold
            half = 1.96 * float(np.std(shares, ddof=1)) / len(shares) ** 0.5 if len(shares) > 1 else 0.0
            total = args.seeds * len(stream.texts)
            rows.append([
                stream.name, name, float(np.mean(shares)), half, float(np.mean(busiest)), cold / total, moved / total,
            ])  # fmt: skip
        progress(f"placement of {stream.name}")
    report.table(
        "Placement on four replicas",
        ["stream", "arm", "tokens reused", "±", "busiest / mean", "share cold", "share moved by similarity"],
        rows,
    )


if __name__ == "__main__":
    main()
