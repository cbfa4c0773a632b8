"""Two real engines behind each router, the same questions: how many prompt tokens are really computed?

    python bench/edge_engines.py --peers-bin ~/peers/bin --data-dir DATA        # 10 minutes

Two embedded engines share one model in one process; each has its own KV cache and donors, and both are made anew for
every router. Questions about real documents stand behind one of several instructions, so that only an engine that has
seen the document behind another instruction can move its KV. What was computed is counted from the engines' receipts.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import _report  # first: it holds the numeric libraries to one thread
from _documents import qmsum
from _forwarders import Forwarder, find_ports, own_routers, peer_routers, running
from _placement_streams import ROLES, RULE

CLIENTS = 2
ENGINES = 2


@contextmanager
def serve_engines(launch: Any, model: Any, tokenizer: Any) -> Iterator[list[str]]:
    """Serve engines around one model, each on a port of its own; yield their addresses."""
    from semblend.config import SemBlendConfig
    from semblend.engine.server.edge.listener import HttpServer
    from semblend.engine.server.edge.sockets import listen
    from semblend.engine.server.routes import create_app
    from semblend.engine.server.serving_adapter import LocalEngine

    engines, servers = [], []
    for _ in range(ENGINES):
        engine = LocalEngine(launch.assemble(model, tokenizer, SemBlendConfig(embedder="none")), tokenizer)
        engine.start()
        sock = listen("127.0.0.1", 0)
        server = HttpServer(create_app(engine, launch.config), sock)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        server.started.wait(60)
        engines.append(engine)
        servers.append((server, thread, sock))
    try:
        yield [f"http://127.0.0.1:{sock.getsockname()[1]}" for _, _, sock in servers]
    finally:
        for server, thread, sock in servers:
            for _ in range(3):
                server.stop()
            thread.join(20)
            sock.close()
        for engine in engines:
            engine.close()


def make_questions(data: Path, seed: int, count: int, characters: int) -> list[list[dict[str, str]]]:
    """Chats: an instruction, then a document and a question about it."""
    chance = random.Random(seed)
    documents = chance.sample([one for one in qmsum(data) if len(one.questions) >= 3], 6)
    chats = []
    for _ in range(count):
        one = chance.choice(documents)
        system = f"You are the {chance.choice(ROLES)} assistant of a large company. {RULE}"
        user = f"{one.text[:characters]}\n\nQuestion: {chance.choice(one.questions)}"
        chats.append([{"role": "system", "content": system}, {"role": "user", "content": user}])
    return chats


def ask(port: int, model: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    """Send one chat; return what the engine says of it, and the seconds it took."""
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 1, "temperature": 0}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer k"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body, headers)
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as answer:
        found = json.load(answer)
    return {**found["usage"], "receipt": found.get("semblend") or {}, "seconds": time.perf_counter() - began}


def run_one(router: Forwarder, urls: list[str], model: str, chats: list[Any], folder: Path) -> list[object]:
    """One row: what the engines computed behind this router."""
    port = find_ports(1)[0]
    with running(router.name, router.fill(port, urls, folder), port, folder / "router.log"):
        time.sleep(3.0)  # peers ask their engines' health before they send anything there
        with ThreadPoolExecutor(CLIENTS) as pool:
            answers = list(pool.map(lambda chat: ask(port, model, chat), chats))
    total = sum(one["prompt_tokens"] for one in answers)
    exact = sum(one["receipt"].get("exact_tokens") or 0 for one in answers)
    moved = sum(one["receipt"].get("reused_tokens") or 0 for one in answers)
    seconds = sorted(one["seconds"] for one in answers)
    return [
        router.name, len(answers), total, exact, moved, total - exact - moved, (exact + moved) / total,
        _report.percentile(seconds, 50),
    ]  # fmt: skip


COLUMNS = ["router", "requests", "prompt tokens", "exact", "moved", "computed", "share saved", "p50 s"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "edge_engines")
    parser.add_argument("--peers-bin", metavar="DIR", help="folder with vllm-router, smg and sglang-router")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=36)
    parser.add_argument("--characters", type=int, default=2400, help="of each document")
    parser.add_argument("--routers", nargs="*", help="only those whose names contain one of these words")
    args = parser.parse_args()
    if args.quick:
        args.requests = 6
    report = _report.Report("edge_engines", args)
    from semblend.engine.server.config import ServeConfig
    from semblend.engine.server.launch import Launch

    launch = Launch(ServeConfig(model=args.model, threads=1, pool_tokens=16_384))
    model, tokenizer = launch.load()
    tokenizer.prepare()
    chats = make_questions(_report.data_dir(args), args.seed, args.requests, args.characters)
    peers, missing = peer_routers(args.peers_bin, ("cache_aware",))
    rows = []
    with tempfile.TemporaryDirectory() as folder, ExitStack():
        for router in [*own_routers(), *peers]:
            if args.routers and not any(word in router.name for word in args.routers):
                continue
            with serve_engines(launch, model, tokenizer) as urls:
                rows.append(run_one(router, urls, args.model, chats, Path(folder)))
            _report.progress(f"{router.name}: {rows[-1][5]:,} of {rows[-1][2]:,} tokens computed")
    report.table(f"{ENGINES} engines ({args.model}) behind each router", COLUMNS, rows)
    report.note(f"{CLIENTS} clients at once; six documents behind {len(ROLES)} instructions; one token an answer")
    if missing:
        report.note("not found and left out: " + ", ".join(missing))
    report.write(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
