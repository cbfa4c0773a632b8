"""Eviction policies in real engines with too little memory: tokens found, tokens computed, time to first token.

    PYTHONPATH=src:bench python bench/eviction_engine.py --data-dir DATA --requests 1200            # random weights
    PYTHONPATH=src:bench python bench/eviction_engine.py --data-dir DATA --model smollm2-135m --requests 60
    .ci/engines/sglang-cpu python bench/eviction_engine.py --data-dir DATA --engine sglang --requests 60
    PYTHONPATH=src:bench python bench/eviction_engine.py --data-dir DATA --engine donors --requests 3000

Requests of two kinds come mixed, one at a time, all behind one instruction. *Chats*: turns of ShareGPT conversations;
``--open`` of them are under way, the next turn is that of any. *Retrieval*: one of ``--passages`` texts of MS MARCO by
Zipf's law, and a question. What has more than ``--longest`` tokens is left out, and ends its conversation. Every policy
gets the same requests from an empty cache, which holds ``--share`` of all their blocks. Donors are off: all hits are
exact. Beside each hit rate stands what `semantickv` predicts from the token ids alone (*simulated*), in blocks of 16
tokens, for SGLang of one.

The embedded engine runs with a model's weights, or with random ones: a Llama of two layers. Scheduler, pool and cache
are the same and hits real, but times with it say nothing and are left out. SGLang runs in this process, its scheduler
stepped by hand until the answer is whole, which its times include (tests/engines/sglang). *donors* is the library
alone: every prompt is looked up at any offset, a plan is claimed and confirmed, and a prompt with new tokens
registered, in a store of ``--share`` as many donors as requests; nothing is computed, and nothing predicted. Exit code
1 where answers differ by policy, or a prediction is off by more than two points.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _report  # first: it holds the numeric libraries to one thread
from _documents import chats, rag

POLICIES = ("lru", "lfu", "slru", "lru2", "adaptive")
PREDICTED_BY = {"adaptive": "adaptive_semantic"}
SYSTEM = "system: You are a helpful assistant. Answer shortly.\n\n"
QUESTIONS = ("What is this about?", "Summarize it in a sentence.", "Which names occur?", "Is that true?", "Why?")
BLOCK_TOKENS = 16
MIN_NEW_TOKENS = 32  # of a prompt that becomes a donor, as engines have it
RANDOM_WEIGHTS = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 49_152, "max_position_embeddings": 4096,
}  # fmt: skip
Tokens = list[int]


@dataclass(frozen=True, slots=True)
class Served:
    """What became of one request. Times in milliseconds, up to the first token."""

    prompt_tokens: int
    found_tokens: int
    wall_ms: float
    cpu_ms: float
    answer: tuple[int, ...]


def make_requests(args: argparse.Namespace, encode: Callable[[str], Tokens]) -> list[Tokens]:
    """Make the token ids of every request, in the order in which they come."""
    return [ids for ids, _ in make_stream(args, encode)]


def make_stream(args: argparse.Namespace, encode: Callable[[str], Tokens]) -> list[tuple[Tokens, int]]:
    """Make the token ids of every request and the number of its conversation; a retrieval is one of its own."""
    folder, draw = _report.data_dir(args), random.Random(args.seed)
    waiting = iter([list(reversed(chat.prompts)) for chat in chats(folder) if len(chat.prompts) > 1])
    texts = [item.parts[0] for item in rag(folder, "msmarco_rag_llma")[: args.passages]]
    weights = [1 / rank for rank in range(1, len(texts) + 1)]
    under_way = [next(waiting) for _ in range(args.open)]
    sessions = itertools.count(1)
    spoken = [next(sessions) for _ in under_way]
    requests: list[tuple[Tokens, int]] = []
    while len(requests) < args.requests:
        if draw.random() < args.retrieval:
            text = draw.choices(texts, weights)[0]
            prompt = f"user: {text}\n\n{draw.choice(QUESTIONS)}\n\nassistant:"
            place = -1
        else:
            place = draw.randrange(len(under_way))
            prompt = under_way[place].pop()
        ids = encode(SYSTEM + prompt)
        if len(ids) <= args.longest:
            requests.append((ids, spoken[place] if place >= 0 else next(sessions)))
        if place >= 0 and (len(ids) > args.longest or not under_way[place]):
            under_way[place], spoken[place] = next(waiting), next(sessions)
    return requests


def number_blocks(requests: Sequence[Tokens], size: int) -> list[list[int]]:
    """Number the full blocks of every request by their content and all before it."""
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    found = []
    for ids in requests:
        above, path = -1, []
        for begin in range(0, len(ids) - size + 1, size):
            above = numbers.setdefault((above, tuple(ids[begin : begin + size])), len(numbers))
            path.append(above)
        found.append(path)
    return found


def predict(policy: str, requests: Sequence[Tokens], pool: int, size: int) -> float:
    """Simulate the policy over blocks of ``size`` tokens in a pool of so many; the share of tokens that are found."""
    from semantickv.simulator.capacity import Capacity
    from semantickv.simulator.simulate import simulate
    from semantickv.traces.trace import Trace, TraceRequest

    trace = Trace.from_requests(
        TraceRequest(str(n), float(n), tuple(path), (size,) * len(path), ("other",) * len(path))
        for n, path in enumerate(number_blocks(requests, size))
        if path
    )
    capacity = Capacity.blocks((pool - BLOCK_TOKENS) // size)  # the last block of a request is not full
    # The engine's policy learns from blocks of 16 tokens: so many tokens are one block's evidence, not sixteen's.
    found = simulate(trace, PREDICTED_BY.get(policy, policy), capacity, share=BLOCK_TOKENS / size)
    return found.token_hits / sum(map(len, requests))


def serve_embedded(args: argparse.Namespace, model: Any, policy: str, pool: int, requests: Sequence[Tokens]) -> Any:
    """Ask the embedded engine one request after the other."""
    from semblend.config import SemBlendConfig
    from semblend.engine.core.assemble import assemble
    from semblend.facade import SemBlend
    from semblend.wire.sampling import Sampling

    library = SemBlend(SemBlendConfig(eviction=policy, quality="exact", embedder="none", metrics=False))
    engine = assemble(model, pool_tokens=pool, semblend=library, donor_host_bytes=0)
    sampling = Sampling(max_tokens=args.answer, temperature=0.0, ignore_eos=True)
    for ids in requests:
        wall, cpu = time.perf_counter(), time.process_time()
        (answer,) = engine.generate([ids], sampling)
        took = 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)
        yield Served(len(ids), answer.receipt.exact_tokens if answer.receipt else 0, *took, answer.tokens)
    engine.check()
    engine.close()


def serve_sglang(world: Any, policy: str, requests: Sequence[Tokens], answer: int) -> Iterable[Served]:
    """Ask SGLang's scheduler one request after the other; its tree asks our policy."""
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    world.flush()
    world.cache.value_leaves(policy)
    world.cache.components[ComponentType.FULL].session_ref_eviction_strategy = None  # bound to the policy before
    for ids in requests:
        wall, cpu = time.perf_counter(), time.process_time()
        (found,) = world.ask(ids, tokens=answer, opt_out=True)
        took = 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)
        yield Served(len(ids), found.cached, *took, tuple(found.tokens))


def serve_donors(policy: str, most: int, requests: Sequence[Tokens]) -> Iterable[Served]:
    """Look every prompt up in a donor store that holds so many; a plan counts as carried out."""
    from semblend import Prompt, ReusePlan, SemBlend, SemBlendConfig
    from semblend.confirm.outcome import Outcome
    from semblend.confirm.receipt import Receipt

    sb = SemBlend(SemBlendConfig(eviction=policy, max_donors=most, quality="fast", embedder="none", metrics=False))
    for number, ids in enumerate(requests):
        prompt, name, wall, cpu = Prompt(ids), f"r{number}", time.perf_counter(), time.process_time()
        plan = sb.lookup(prompt, request_id=name)
        found = plan.reused_tokens if isinstance(plan, ReusePlan) else 0
        took = 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)
        if isinstance(plan, ReusePlan) and isinstance(sb.claim(plan, name), ReusePlan):
            sb.confirm(
                Receipt(
                    request_id=name,
                    engine="bench",
                    namespace=prompt.namespace.digest,
                    outcome=Outcome.BACKEND_MATERIALIZED_REUSE,
                    prompt_tokens=len(ids),
                    reused_tokens=found,
                    prefill_tokens=len(ids) - found,
                    spans=plan.spans,
                )
            )
        if len(ids) - found >= MIN_NEW_TOKENS:
            sb.register(prompt, name)
        yield Served(len(ids), found, *took, ())
    sb.close()


def open_sglang(pool: int) -> Any:
    """Start SGLang's scheduler in this process, with a tree that asks our policies."""
    import os

    sys.path.insert(0, str(_report.REPO / "tests" / "engines" / "sglang"))
    os.environ["SEMBLEND_EVICTION"] = "adaptive"
    world = importlib.import_module("scheduler_world").SchedulerWorld
    return world(os.environ["SEMBLEND_TEST_SGLANG_MODEL"], max_total_tokens=pool)


def measure(args: argparse.Namespace, report: _report.Report) -> int:
    """Serve all requests under every policy; the number of things that are wrong."""
    timed = args.engine == "sglang" or args.model != "random"
    encode, open_engine = open_model(args)
    requests = make_requests(args, encode)
    distinct = len({one for path in number_blocks(requests, BLOCK_TOKENS) for one in path})
    capacity = max(args.longest // BLOCK_TOKENS + 2, int(args.share * distinct))
    pool, size = capacity * BLOCK_TOKENS, 1 if args.engine == "sglang" else BLOCK_TOKENS
    serve = open_engine(pool)
    rows, wrong, answers = [], 0, dict[str, list[tuple[int, ...]]]()
    for policy in args.policies:
        served = list(serve(policy, requests))
        answers[policy] = [one.answer for one in served]
        prompt, found = sum(one.prompt_tokens for one in served), sum(one.found_tokens for one in served)
        expected = None
        if args.engine != "donors":
            expected = 100 * predict(policy, requests, pool, size)
        off = None if expected is None else 100 * found / prompt - expected
        wrong += off is not None and abs(off) > 2.0
        same = answers[policy] == answers[args.policies[0]]
        wrong += not same
        times = [statistics.median(getattr(one, name) for one in served) for name in ("wall_ms", "cpu_ms")]
        total = sum(one.cpu_ms for one in served) / 1e3
        row = [policy, 100 * found / prompt, prompt - found]
        if expected is not None:
            row += [expected, off, "yes" if same else "NO", *((*times, total) if timed else ())]
        rows.append(row)
        _report.progress(f"{policy}: {100 * found / prompt:.2f} % found, predicted: {expected}")
    what = {
        "sglang": "SGLang, smollm2-135m",
        "donors": f"donors, {int(args.share * args.requests)} at most",
        "embedded": f"the embedded engine, {args.model} weights",
    }[args.engine]
    space = "" if args.engine == "donors" else f", {capacity} blocks of 16"
    title = f"{what}: {len(requests)} requests, {sum(map(len, requests)):,} tokens{space}"
    columns = ["policy", "tokens found %", "tokens not found"]
    if args.engine != "donors":
        times_of = ["TTFT ms (median)", "CPU ms to it (median)", "CPU s, all"] if timed else []
        columns += ["simulated %", "difference", "same answers", *times_of]
    report.table(title, columns, rows)
    return wrong


def open_model(args: argparse.Namespace) -> tuple[Callable[[str], Tokens], Callable[[int], Any]]:
    """Return the tokenizer's encode, and what makes a server of a pool of so many tokens."""
    from semblend.engine.model.tokenizer import ModelTokenizer
    from semblend.models import resolve

    path = Path(resolve("smollm2-135m" if args.model == "random" else args.model))
    tokenizer = ModelTokenizer.load(path)
    if args.engine == "sglang":

        def open_world(pool: int) -> Any:
            world = open_sglang(pool)
            return lambda policy, requests: serve_sglang(world, policy, requests, args.answer)

        return tokenizer.encode, open_world
    if args.engine == "donors":
        most = max(1, int(args.share * args.requests))
        return tokenizer.encode, lambda _: lambda policy, requests: serve_donors(policy, most, requests)
    import torch

    from semblend.engine.model.model import DecoderModel
    from semblend.engine.model.spec import ModelSpec

    model = (
        DecoderModel.random(ModelSpec.from_hf_config(RANDOM_WEIGHTS), args.seed)
        if args.model == "random"
        else DecoderModel.load(path, dtype=torch.float32)
    )
    return tokenizer.encode, lambda pool: lambda policy, requests: serve_embedded(args, model, policy, pool, requests)


def add_stream_arguments(parser: argparse.ArgumentParser, *, answer: int) -> None:
    """The flags of `make_requests`, and how much of the stream fits."""
    parser.add_argument("--requests", type=int, default=1200, metavar="N")
    parser.add_argument("--longest", type=int, default=800, metavar="TOKENS", help="of a prompt (default: 800)")
    parser.add_argument(
        "--answer", type=int, default=answer, metavar="TOKENS", help=f"of an answer (default: {answer})"
    )
    parser.add_argument("--share", type=float, default=0.1, help="of all distinct blocks that fit (default: .1)")
    parser.add_argument("--open", type=int, default=12, metavar="N", help="conversations under way (default: 12)")
    parser.add_argument("--passages", type=int, default=60, metavar="N", help="that are retrieved (default: 60)")
    parser.add_argument("--retrieval", type=float, default=0.5, help="share of the requests (default: .5)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "eviction_engine")
    parser.add_argument("--engine", choices=("embedded", "sglang", "donors"), default="embedded")
    parser.add_argument("--model", default="random", help="random weights (default), or a model's name")
    add_stream_arguments(parser, answer=1)
    parser.add_argument("--policies", nargs="+", default=POLICIES, choices=POLICIES)
    args = parser.parse_args()
    if args.quick:
        args.requests, args.policies, args.out = 40, POLICIES[:1] + POLICIES[-1:], ""
    report = _report.Report("eviction_engine", args)
    wrong = measure(args, report)
    report.write(args.out)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
