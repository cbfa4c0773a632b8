"""How much real traffic repeats itself, without any case made up: chats, agents and RAG prompts, replayed in order.

    python bench/natural.py --data-dir DATA [--quick] [--out bench/results/natural.json]

For each request: how much an exact-prefix cache could reuse (blocks of 16, unlimited room, any earlier prompt), how
much our lookup finds at any offset, then the request is registered. Chats are interleaved: 64 conversations are open
at a time and a random one of them sends its next prompt. Agents send at their recorded times. Each data set has a
store of its own. Two sets are arranged by us and say so: several questions about one document, with the document
before or behind the question.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _documents
import _oracle
import _report
import numpy as np
from _documents import Document, Session
from _oracle import Tokens
from _report import progress, spread
from corpus import load_encoder
from recall import spans_of

BLOCK = 16
OPEN_CHATS = 64
BUCKETS = (("1", 1, 1), ("2", 2, 2), ("3-5", 3, 5), ("6-10", 6, 10), (">10", 11, 1 << 30))


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt of the traffic; ``turn`` counts from 1 within its conversation, agent run or document."""

    turn: int
    text: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was reusable of one request, in tokens; ``any_tokens`` includes what the prefix already gives."""

    turn: int
    tokens: int
    prefix_tokens: int
    any_tokens: int
    added_tokens: int
    oracle_tokens: int
    found_tokens: int
    wrong_tokens: int
    spans: int
    cpu_ms: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "natural")
    parser.add_argument("--conversations", type=int, default=600, help="chats to replay")
    args = parser.parse_args(arguments)
    report = _report.Report("natural", args)
    folder, encoder = _report.data_dir(args), load_encoder(args)
    replayed: dict[str, list[Outcome]] = {}
    empty: dict[str, int] = {}
    for name, requests in traffic(folder, args).items():
        kept = [request for request in requests if request.text.strip()]  # some agents log empty calls
        empty[name] = len(requests) - len(kept)
        kept = kept[:300] if args.quick else kept
        replayed[name] = replay([encoder.encode(request.text) for request in kept], [r.turn for r in kept])
        progress(f"{name}: {len(kept)} requests")
    tables(report, replayed)
    report.note("empty prompts left out: " + (", ".join(f"{n} of {k}" for k, n in empty.items() if n) or "none"))
    wrong = sum(item.wrong_tokens for outcomes in replayed.values() for item in outcomes)
    report.add("wrong_tokens", wrong)
    report.write(args.out)
    return 1 if wrong else 0


def traffic(folder: Path, args: argparse.Namespace) -> dict[str, list[Request]]:
    rng = random.Random(f"{args.seed}/natural")
    chats = _documents.chats(folder)[: 40 if args.quick else args.conversations]
    found = {"chat/sharegpt": list(interleaved(chats, OPEN_CHATS, rng))}
    for name in _documents.AGENTS:
        found[f"agent/{name}"] = by_arrival(_documents.agents(folder, name))
    for name in ("cacheblend_musique_s", "hotpotqa_distractor", "msmarco_rag_llma"):
        documents = _documents.rag(folder, name)
        found[f"rag/{name}"] = [Request(1, f"{d.text}\n\nQuestion: {d.questions[0]}") for d in documents]
    asked = [d for d in [*_documents.qmsum(folder), *_documents.leval(folder)] if len(d.questions) > 1]
    found["questions, document first (arranged)"] = questions(asked, rng, lambda d, q: f"{d}\n\nQuestion: {q}")
    found["questions, document last (arranged)"] = questions(asked, rng, lambda d, q: f"Question: {q}\n\n{d}")
    return found


def interleaved(sessions: Sequence[Session], most_open: int, rng: random.Random) -> Iterator[Request]:
    """A random open session sends its next prompt; one that ends makes room for the next in line."""
    waiting = list(reversed(sessions))
    running: list[tuple[Session, int]] = []
    while waiting or running:
        while waiting and len(running) < most_open:
            running.append((waiting.pop(), 0))
        at = rng.randrange(len(running))
        session, sent = running[at]
        yield Request(sent + 1, session.prompts[sent])
        if sent + 1 < len(session.prompts):
            running[at] = (session, sent + 1)
        else:
            running.pop(at)


def by_arrival(sessions: Sequence[Session]) -> list[Request]:
    calls = [
        (arrival, number, turn, prompt)
        for number, session in enumerate(sessions)
        for turn, (arrival, prompt) in enumerate(zip(session.arrivals, session.prompts, strict=True), start=1)
    ]
    return [Request(turn, prompt) for _, _, turn, prompt in sorted(calls)]


def questions(
    documents: Sequence[Document], rng: random.Random, arrange: Callable[[str, str], str], most: int = 4
) -> list[Request]:
    """Up to ``most`` questions about each document; other documents come between two about the same one."""
    sessions = [
        Session(d.source, d.doc_id, tuple(arrange(d.text, question) for question in d.questions[:most]))
        for d in documents
    ]
    return list(interleaved(sessions, 16, rng))


def replay(prompts: Sequence[Tokens], turns: Sequence[int]) -> list[Outcome]:
    from semblend import Prompt, SemBlend, SemBlendConfig

    blend = SemBlend(SemBlendConfig(embedder="none", max_donors=len(prompts) + 1, max_bytes=8 << 30))
    blend.warm_up()
    seen_blocks: set[int] = set()
    earlier = _oracle.earlier_windows(prompts)
    outcomes = []
    for number, (tokens, turn) in enumerate(zip(prompts, turns, strict=True)):
        prompt = Prompt(tokens)
        start = time.process_time_ns()
        answer = blend.lookup(prompt)
        cpu_ms = (time.process_time_ns() - start) / 1e6
        blend.register(prompt, donor_id=str(number))
        prefix = prefix_tokens(tokens, seen_blocks)
        outcomes.append(outcome(turn, tokens, prefix, earlier[number], spans_of(answer), prompts, cpu_ms))
    return outcomes


def outcome(
    turn: int,
    tokens: Tokens,
    prefix: int,
    windows: _oracle.Mask,
    spans: Sequence[tuple[str, int, int, int]],
    prompts: Sequence[Tokens],
    cpu_ms: float,
) -> Outcome:
    found = np.zeros(len(tokens), bool)
    wrong = 0
    for donor_id, donor_start, target_start, length in spans:
        same = (
            prompts[int(donor_id)][donor_start : donor_start + length] == tokens[target_start : target_start + length]
        )
        wrong += length - int(np.count_nonzero(same))
        found[target_start : target_start + length] = same
    covered = _oracle.spread_windows(windows, len(tokens))
    recovered = int(np.count_nonzero(found & covered))
    shared = int(np.count_nonzero(covered))
    found[:prefix] = True
    reusable = int(np.count_nonzero(found))
    # Up to 15 tokens behind the last whole block belong to the prefix too: they are no gain of ours.
    rest = found[prefix : prefix + BLOCK - 1]
    rounded = len(rest) if rest.all() else int(np.argmin(rest))
    added = reusable - prefix - rounded
    return Outcome(turn, len(tokens), prefix, reusable, added, shared, recovered, wrong, len(spans), cpu_ms)


def prefix_tokens(tokens: Tokens, seen: set[int]) -> int:
    """Leading whole blocks that an earlier prompt had as its own leading blocks; then adds this prompt's."""
    keys, key = [], 0
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        key = hash((key, tokens[start : start + BLOCK].tobytes()))
        keys.append(key)
    held = next((at for at, own in enumerate(keys) if own not in seen), len(keys))
    seen.update(keys)
    return held * BLOCK


def tables(report: _report.Report, replayed: dict[str, list[Outcome]]) -> None:
    columns = ["traffic", "turn", "n", "tokens", "prefix hits", "prefix share", "any-offset hits",
               "any-offset share", "added", "recovered", "CPU ms p50", "p95"]  # fmt: skip
    rows, facts = [], {}
    for name, outcomes in replayed.items():
        buckets = [(label, [o for o in outcomes if low <= o.turn <= high]) for label, low, high in BUCKETS]
        for label, own in [*buckets, ("all", outcomes)]:
            if own and not (label != "all" and len(own) == len(outcomes)):
                facts[f"{name} / {label}"] = summary = summarize(own)
                rows.append([name, label, *(summary[key] for key in list(summary)[:10])])
    report.table("Reusable share of real traffic, one store for each row group", columns, rows)
    report.note("hits: share of the requests with a leading block of 16 seen before; any offset: that, or a span")
    report.note("share: of the prompt tokens, pooled over the requests of the row")
    report.note("added: what only the any-offset lookup gives, less the rest of a prefix's last block; share of tokens")
    report.note("recovered: share of the tokens in runs of 32 or more of an earlier prompt that the lookup found")
    report.note("reusable is what is token-equal, not what an engine has reused; unlimited room, nothing evicted")
    report.add("groups", facts)


def summarize(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    tokens = sum(item.tokens for item in outcomes)
    shared = sum(item.oracle_tokens for item in outcomes)
    cpu = spread([item.cpu_ms for item in outcomes])
    prefix, anywhere = sum(o.prefix_tokens for o in outcomes), sum(o.any_tokens for o in outcomes)
    return {
        "n": len(outcomes),
        "tokens": tokens,
        "prefix_hit_rate": sum(item.prefix_tokens > 0 for item in outcomes) / len(outcomes),
        "prefix_share": prefix / tokens,
        "any_offset_hit_rate": sum(item.any_tokens > 0 for item in outcomes) / len(outcomes),
        "any_offset_share": anywhere / tokens,
        "added_share": sum(item.added_tokens for item in outcomes) / tokens,
        "recovered": sum(item.found_tokens for item in outcomes) / shared if shared else None,
        "cpu_ms_p50": cpu["p50"],
        "cpu_ms_p95": cpu["p95"],
        "any_offset_share_of_a_request": spread([item.any_tokens / item.tokens for item in outcomes]),
        "prefix_share_of_a_request": spread([item.prefix_tokens / item.tokens for item in outcomes]),
        "wrong_tokens": sum(item.wrong_tokens for item in outcomes),
    }


if __name__ == "__main__":
    raise SystemExit(main())
