"""Does the learning eviction policy find more when it is told which conversation a request belongs to?

    PYTHONPATH=src:bench python bench/eviction_sessions.py --data-dir DATA

The requests are those of `bench/eviction_engine.py`, with ``--open`` and ``--share`` varied, three seeds each. *Told
nothing*: the policy knows a conversation by the deepest block that it has seen, as in every engine. *All sessions*:
every request names its conversation, a retrieval one of its own. *Chats only*: retrievals name none. The first table is
simulated; the second is the embedded engine with random weights, whose policy is told by a wrapper here.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _report  # first: it holds the numeric libraries to one thread
import numpy as np
from eviction_engine import BLOCK_TOKENS, RANDOM_WEIGHTS, Tokens, make_stream, number_blocks

OPEN, SHARES, SEEDS = (12, 40), (0.05, 0.1, 0.2), 3
Stream = Sequence[tuple[Tokens, int]]


class TellSession:
    """Hands every call to another policy, and adds the conversation of the request that is served now."""

    def __init__(self, policy: Any) -> None:
        self._policy, self.session = policy, 0

    @property
    def epoch(self) -> int:
        return int(self._policy.epoch)

    def use(self, keys: Sequence[int], *, told: int = 0, session: int = 0, sizes: Any = None) -> None:  # noqa: ARG002
        self._policy.use(keys, told=told, session=self.session, sizes=sizes)

    def price(self, keys: Sequence[int]) -> list[float]:
        return list(self._policy.price(keys))

    def forget(self, key: int) -> None:
        self._policy.forget(key)


def count_capacity(args: argparse.Namespace, paths: list[list[int]], share: float) -> int:
    return max(args.longest // BLOCK_TOKENS + 2, int(share * len({one for path in paths for one in path})))


def simulate_hits(policy: str, paths: list[list[int]], sessions: Sequence[int], blocks: int, tokens: int) -> float:
    """Simulate the policy; the share of tokens that are found, in per cent."""
    from semantickv.simulator.capacity import Capacity
    from semantickv.simulator.simulate import simulate
    from semantickv.traces.trace import Trace, TraceRequest

    trace = Trace.from_requests(
        TraceRequest(
            str(n),
            float(n),
            tuple(path),
            (BLOCK_TOKENS,) * len(path),
            ("other",) * len(path),
            session=str(session) if session else "",
        )
        for n, (path, session) in enumerate(zip(paths, sessions, strict=True))
        if path
    )
    return 100 * simulate(trace, policy, Capacity.blocks(blocks - 1)).token_hits / tokens


def measure_simulated(args: argparse.Namespace, encode: Any, report: _report.Report) -> None:
    """Simulate every setting without sessions, with all of them and with those of chats."""
    rows, gains = list[list[Any]](), list[float]()
    for args.open in OPEN:
        by_share: dict[float, list[list[float]]] = {share: [] for share in SHARES}
        for seed in range(SEEDS):
            args.seed = seed
            stream = make_stream(args, encode)
            requests = [ids for ids, _ in stream]
            names, paths, tokens = (
                [one for _, one in stream],
                number_blocks(requests, BLOCK_TOKENS),
                sum(map(len, requests)),
            )
            chats = [name if names.count(name) > 1 else 0 for name in names]
            for share in SHARES:
                blocks = count_capacity(args, paths, share)
                ways = (
                    ("lru", [0] * len(names)),
                    *(("adaptive_semantic", told) for told in ([0] * len(names), names, chats)),
                )
                by_share[share].append([simulate_hits(policy, paths, told, blocks, tokens) for policy, told in ways])
        for share, found in by_share.items():
            gain = [run[2] - run[1] for run in found]
            gains += gain
            rows.append([args.open, share, *np.mean(found, axis=0), f"{min(gain):+.2f} to {max(gain):+.2f}"])
            _report.progress(f"{args.open} open, {share}: {rows[-1][2:]}")
    columns = ["open", "share", "lru", "told nothing", "all sessions", "chats only", "all less nothing, by seed"]
    report.table(f"Tokens found %, mean of {SEEDS} seeds, {args.requests} requests (simulated)", columns, rows)
    spread = 1.96 * np.std(gains, ddof=1) / len(gains) ** 0.5
    report.note(
        f"all sessions less none, mean of {len(gains)} runs: {np.mean(gains):+.2f} points, +/- {spread:.2f} (95 %)"
    )


def measure_engine(args: argparse.Namespace, encode: Any, report: _report.Report) -> None:
    """Serve one stream with the embedded engine, without sessions and with all of them."""
    from semblend.config import SemBlendConfig
    from semblend.engine.core.assemble import assemble
    from semblend.engine.model.model import DecoderModel
    from semblend.engine.model.spec import ModelSpec
    from semblend.facade import SemBlend
    from semblend.wire.sampling import Sampling

    args.open, args.seed = OPEN[0], 20  # the stream of `eviction_engine.py`
    stream = make_stream(args, encode)
    blocks = count_capacity(args, number_blocks([ids for ids, _ in stream], BLOCK_TOKENS), 0.1)
    model, rows = DecoderModel.random(ModelSpec.from_hf_config(RANDOM_WEIGHTS), args.seed), list[list[Any]]()
    for name, told in (("told nothing", False), ("all sessions", True)):
        library = SemBlend(SemBlendConfig(eviction="adaptive", quality="exact", embedder="none", metrics=False))
        engine = assemble(model, pool_tokens=blocks * BLOCK_TOKENS, semblend=library, donor_host_bytes=0)
        teller = engine.radix._policy = TellSession(engine.radix._policy)
        found = 0
        for ids, session in stream:
            teller.session = session if told else 0
            (answer,) = engine.generate([ids], Sampling(max_tokens=1, temperature=0.0, ignore_eos=True))
            found += answer.receipt.exact_tokens if answer.receipt else 0
        engine.close()
        rows.append([name, 100 * found / sum(len(ids) for ids, _ in stream)])
        _report.progress(f"{name}: {rows[-1][1]:.2f} % found")
    report.table(f"The embedded engine: {len(stream)} requests, {blocks} blocks", ["adaptive", "tokens found %"], rows)


def main() -> int:
    from semblend.engine.model.tokenizer import ModelTokenizer
    from semblend.models import resolve

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "eviction_sessions")
    parser.add_argument("--requests", type=int, default=1200, metavar="N")
    parser.add_argument("--longest", type=int, default=800, metavar="TOKENS", help="of a prompt (default: 800)")
    parser.set_defaults(passages=60, retrieval=0.5)
    args = parser.parse_args()
    if args.quick:
        args.requests, args.out = 40, ""
    report = _report.Report("eviction_sessions", args)
    encode = ModelTokenizer.load(Path(resolve("smollm2-135m"))).encode
    measure_simulated(args, encode, report)
    measure_engine(args, encode, report)
    report.write(args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
