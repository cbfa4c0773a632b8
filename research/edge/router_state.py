"""What does a router's knowledge of engines and of other routers cost beside the requests, and during one?

    python bench/router_state.py        # half a minute

CPU time of this process, median and spread of repeats, for a prompt of 8k tokens. Most of it happens beside the
requests, in slices; what a request itself pays is marked so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from statistics import median

from _report import Report, add_common_arguments, percentile
from msgspec.msgpack import encode

from semantickv.edge.addresses import EngineAddress
from semantickv.edge.pool import ConnectionPool
from semantickv.engine_state.blocks import list_marks, start_chain
from semantickv.engine_state.events import BlockRemoved, read_batch
from semantickv.engine_state.feed import ReplicaFeed
from semantickv.engine_state.scripted_publisher import store
from semantickv.engine_state.subscriber import EventSource
from semantickv.routing.arranging import read_marked
from semantickv.routing.fingerprint import cut_prompt
from semantickv.routing.locality import ReplicaMemory
from semantickv.routing.prompt_view import PromptPart, PromptView
from semantickv.routing.replica import Replica
from semantickv.routing.router import RouteDecision, Router, RouteRequest
from semantickv.shared_state.exchange import StateExchange
from semantickv.shared_state.messages import read_messages, write_messages
from semblend.arrange import Arranger
from semblend.prompt import Namespace

TOKENS = 8192
WORDS = " ".join(f"clause {n * 7919 % 1000} of book {n * 31 % 97}," for n in range(1500))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser, "router_state")
    args = parser.parse_args()
    repeats = 5 if args.quick else 40
    report = Report("router_state", args)
    rows = [[name, during, *measure(work, repeats)] for name, during, work in list_works()]
    report.table(
        "CPU time for a prompt of 8,192 tokens, microseconds",
        ["what", "during a request", "median", "10 %", "90 %"],
        rows,
    )
    report.write(args.out)


def measure(work: Callable[[], Callable[[], object]], repeats: int) -> tuple[float, float, float]:
    """Prepare and run, again and again; microseconds of CPU time of the run alone."""
    found = []
    for _ in range(repeats):
        run = work()
        start = time.process_time_ns()
        run()
        found.append((time.process_time_ns() - start) / 1000)
    return median(found), percentile(sorted(found), 10), percentile(sorted(found), 90)


def list_works() -> list[tuple[str, str, Callable[[], Callable[[], object]]]]:
    ids = [(n * 7919) % 50_000 for n in range(TOKENS)]
    pieces = cut_prompt([PromptPart("retrieved_context", WORDS.encode())], b"bench")

    def make_feed() -> ReplicaFeed:
        replica = Replica("r0", ConnectionPool(EngineAddress.parse("http://127.0.0.1:9")), ReplicaMemory(2_000_000))
        return ReplicaFeed(replica, EventSource("tcp://127.0.0.1:9"))

    def read(size: int) -> Callable[[], Callable[[], object]]:
        data = encode([0.0, [store(range(TOKENS // size), None, ids, size)], 0])
        return lambda: lambda: read_batch(data)

    def apply(size: int) -> Callable[[], Callable[[], object]]:
        events = read_batch(encode([0.0, [store(range(TOKENS // size), None, ids, size)], 0]))

        def prepare() -> Callable[[], object]:
            feed = make_feed()
            return lambda: asyncio.run(feed.take(events))

        return prepare

    def slice_of_pages() -> Callable[[], Callable[[], object]]:
        (event,) = read_batch(encode([0.0, [store(range(256), None, ids[:256], 1)], 0]))

        def prepare() -> Callable[[], object]:
            feed = make_feed()
            return lambda: feed.held.follow(feed.blocks.apply(event))

        return prepare

    def link(size: int, *, evict: bool) -> Callable[[], Callable[[], object]]:
        events = read_batch(encode([0.0, [store(range(TOKENS // size), None, ids, size)], 0]))
        gone = BlockRemoved(tuple(reversed(range(TOKENS // size))), "GPU")

        def prepare() -> Callable[[], object]:
            feed = make_feed()
            asyncio.run(feed.take(events))

            def run() -> None:
                marks = list(list_marks(ids, size, start_chain("")))
                feed.held.link(1, pieces, marks, TOKENS)

            if not evict:
                return run
            run()
            return lambda: feed.held.follow(feed.blocks.apply(gone))

        return prepare

    replicas = [
        Replica(f"r{n}", ConnectionPool(EngineAddress.parse(f"http://127.0.0.1:{9 + n}")), ReplicaMemory(2_000_000))
        for n in range(4)
    ]
    router, request = Router(replicas), RouteRequest(pieces=pieces)
    exchange, other = StateExchange(router, never), StateExchange(router, never)
    decision = router.choose(request)
    assert isinstance(decision, RouteDecision)
    exchange.note_placed(decision, request)
    messages = exchange.list_outgoing(64)
    entry = write_messages(messages)

    def receive() -> None:
        other.take("peer", read_messages(entry) or [])

    parts = [
        {"type": "text", "text": WORDS[at * 4000 : at * 4000 + 4000], "semblend": {"commutes": "docs"}}
        for at in range(8)
    ]
    view = PromptView({"model": "m", "messages": [{"role": "user", "content": parts}]})
    plain = PromptView({"model": "m", "messages": [{"role": "user", "content": WORDS}]})
    arranger = Arranger()
    marked = read_marked(view)
    assert marked is not None
    for sent in marked.arrange(arranger, Namespace()).sent:
        arranger.record(sent)
    print(json.dumps({"pieces": len(pieces.hashes), "entry_bytes": len(entry)}))
    return [
        ("read a batch, blocks of 16", "no", read(16)),
        ("read a batch, pages of 1", "no", read(1)),
        ("apply it, blocks of 16 (with a loop's start)", "no", apply(16)),
        ("apply it, pages of 1 (with a loop's start)", "no", apply(1)),
        ("one slice of that: 256 pages", "no", slice_of_pages()),
        ("link the prompt, blocks of 16", "no", link(16, evict=False)),
        ("link the prompt, pages of 1", "no", link(1, evict=False)),
        ("forget it block by block, blocks of 16", "no", link(16, evict=True)),
        ("tell other routers (queue one message)", "yes", lambda: lambda: exchange.note_placed(decision, request)),
        ("take one placement of another router", "no", lambda: receive),
        ("choose among four replicas", "yes", lambda: lambda: router.choose(request)),
        ("look for marks where there are none", "yes", lambda: lambda: read_marked(plain)),
        ("read the marks of 8 passages", "only with marks", lambda: lambda: read_marked(view)),
        (
            "arrange 8 passages for one replica", "only with marks",
            lambda: lambda: marked.arrange(arranger, Namespace()),
        ),
    ]  # fmt: skip


async def never(replica: Replica) -> bool:
    del replica
    return True


if __name__ == "__main__":
    main()
