"""What a miss costs more than stock vLLM's prefill, over HTTP, and where: a connector that does nothing, and ours.

    PYTHONPATH=src:bench:research/miss_cost python research/miss_cost/miss_cost.py MODEL CONTEXTS OUT --kv-bytes 8e9

Five servers on one GPU take turns, one request at a time, each with a prompt that nobody has seen. All of them write
down when their functions were called (`../http_look/trace`), which is summed up by stages: what lies between the
moment that the client sends a request and the moment that its first token comes. Then `ours` answers hits: the same
stages, and what the GPU does in a load. OUT gets rows.json and the traces.

results/h200.log: one H200, vLLM 0.26.0, 2026-11-18, commit 26579b3; the shape of Qwen2.5-1.5B, random weights: --settings
'{"donor_device_bytes": 7500000000}' --budget-s 100 --flags "--dtype bfloat16 --gpu-memory-utilization 0.2 --load-format dummy"
results/h200_eager.json: a first try without torch.compile and without the stages, too noisy to tell servers apart.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lib.vllm_server as vllm_server
from lib.vllm_server import VllmServer

OURS = ("SemBlendConnectorV1", "semblend.integration.vllm.connector_v1")
SERVERS = {
    "stock": (None, {}),
    "null": (("NullConnector", "connectors"), None),
    "keeps nothing": (OURS, {"donor_device_bytes": 0, "donor_host_bytes": 0}),
    "host": (OURS, {"donor_device_bytes": 0}),
    "ours": (OURS, {}),
}
TRACE = Path(__file__).resolve().parents[1] / "http_look" / "trace"
INSIDE = ("SchedulerConnector.note_arrival", "SchedulerConnector.count_matched", "SchedulerConnector.build_orders",
          "SchedulerConnector.note_report", "ActiveKVConnector.pre_forward", "ActiveKVConnector.post_forward",
          "WorkerConnector.load", "WorkerConnector.copy_out", "SchedulerConnector._catch_up", "SemBlendPromMetrics.observe",
          "OutputProcessor.process_outputs")  # fmt: skip
"""Of the engine's process: how long they took between a request's arrival and its first token, all calls together."""


def draw(articles: list[list[int]], tokens: int, rng: random.Random, vocabulary: int) -> list[int]:
    drawn: list[int] = []
    while len(drawn) < tokens:
        drawn += rng.choice(articles)
    return [one % vocabulary for one in drawn[:tokens]]


class Look:
    """Servers, and what was asked of them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rng, self.rows = args, random.Random(1), list[dict[str, Any]]()
        with gzip.open(args.contexts, "rt") as file:
            self.articles = [one for some in json.load(file)["articles"].values() for one in some]
        flags = [*args.flags.split(), "--max-model-len", str(max(args.lengths) + 512)]
        flags += ["--kv-cache-memory-bytes", str(int(args.kv_bytes))] if args.kv_bytes else []
        folder, self.servers = Path(tempfile.mkdtemp()), dict[str, VllmServer]()
        args.out.mkdir(parents=True, exist_ok=True)
        self.profile = folder / "profile"
        for name in args.servers:
            (folder / name).mkdir()
            line, settings = SERVERS[name]
            extra = None if line is None else {} if settings is None else json.loads(args.settings) | settings
            if line is not None:
                vllm_server.LINE["kv_connector"], vllm_server.LINE["kv_connector_module_path"] = line
            path = f"{TRACE}:{os.environ.get('PYTHONPATH', '')}"
            trace = str(args.out / f"trace-{name.replace(' ', '-')}")
            variables = {"LOOK_TRACE": trace, "PYTHONPATH": path, "LOOK_PROFILE": str(self.profile)}
            self.servers[name] = VllmServer(args.model, folder / name, flags, extra, **variables)

    def draw(self, tokens: int) -> list[int]:
        return draw(self.articles, tokens, self.rng, self.args.vocabulary)

    def ask(self, server: str, arm: str, prompt: list[int], salt: str, **more: Any) -> None:
        name, begun = f"{server}-{arm}-{len(self.rows)}".replace(" ", "_"), time.monotonic()
        answer = self.servers[server].stream(prompt, 4, name, cache_salt=salt, **more)
        self.rows.append({"server": server, "arm": arm, "length": len(prompt) // 1024 * 1024, "begun": begun,
                          "ttft": answer.ttft_ms})  # fmt: skip
        time.sleep(0.03)

    def ask_for_misses(self) -> None:
        begun = time.monotonic()
        for number in range(self.args.rounds):
            for length in self.args.lengths:
                for name in self.rng.sample(list(self.servers), len(self.servers)):
                    self.ask(name, "miss", self.draw(length + 50), f"{name}-{length}-{number}")
            if time.monotonic() - begun > self.args.budget_s:
                break

    def ask_for_hits(self, server: str) -> None:
        """After a donor: fast, the first one in the default mode, and a later one; the last ones with the profiler."""
        fast = {"kv_transfer_params": {"semblend": {"quality": "fast"}}}
        for number in range(self.args.hits):
            if number == self.args.hits - 2:
                self.profile.touch()
            for length in self.args.lengths:
                context, salt = self.draw(length), f"hit-{length}-{number}"
                arms = {"donor": {}, "fast": fast, "first": {}, "later": {}}
                for arm, more in arms.items():
                    arm += "+profile" if self.profile.exists() else ""
                    self.ask(server, arm, self.draw(40) + context + self.draw(30), salt, **more)


def sum_up(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Milliseconds by stage, medians: from the client to the engine, its steps, back to the client."""
    for server in dict.fromkeys(row["server"] for row in rows):
        calls = []
        for path in args.out.glob(f"trace-{server.replace(' ', '-')}.*"):
            calls += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("]")]
        calls.sort(key=lambda call: call[1])
        for arm, length in dict.fromkeys((row["arm"], row["length"]) for row in rows if row["server"] == server):
            mine = [row for row in rows if (row["server"], row["arm"], row["length"]) == (server, arm, length)]
            found = [list_stages(row, calls) for row in mine]
            names = dict.fromkeys(name for one in found for name in one)
            stages = {name: statistics.median(one.get(name, 0.0) for one in found) for name in names}
            values = [row["ttft"] for row in mine]
            print(f"{length:6} {server:14} {arm:14} n {len(mine):3} p50 {statistics.median(values):7.2f} "
                  f"mean {statistics.fmean(values):7.2f} | "
                  + " ".join(f"{name} {value:.2f}" for name, value in stages.items()), flush=True)  # fmt: skip


def list_stages(row: dict[str, Any], calls: list[list[Any]]) -> dict[str, float]:
    begun, end = row["begun"], row["begun"] + row["ttft"] / 1e3
    mine = [call for call in calls if begun <= call[1] <= end]
    stages: dict[str, float] = {}

    def mark(name: str, at: float | None) -> None:
        nonlocal begun
        if at is not None:
            stages[name], begun = (at - begun) * 1e3, at

    def first(name: str, at: int) -> float | None:
        return next((call[at] for call in mine if call[0].endswith(name)), None)

    mark("to_api", first("AsyncLLM.add_request", 1))
    mark("to_engine", first("EngineCore.add_request", 1))
    mark("to_schedule", first("Scheduler.schedule", 1))
    steps = [call for call in mine if call[0].endswith("Scheduler.schedule")]
    steps = [call for call in steps if call[3]]
    prompt_steps = [call for call in steps if max(call[3].values()) > 1] or steps[:1]  # of a hit: its last token
    if prompt_steps:
        mark("until_last_prompt_step", prompt_steps[-1][1])
        mark("schedule", prompt_steps[-1][2])
    after = [call for call in mine if call[1] >= begun]
    mark("launch", next((call[2] for call in after if call[0].endswith("sample_tokens")), None))
    outputs = [call for call in after if call[0].endswith("get_output")]
    mark("to_wait", outputs[0][1] if outputs else None)
    mark("wait", outputs[0][2] if outputs else None)
    mark("to_update", next((call[2] for call in after if call[0].endswith("update_from_output") and call[1] >= begun), None))
    mark("to_client", end)
    for name in INSIDE:
        if any(call[0] == name for call in mine):
            stages[name.split(".")[1]] = sum(call[2] - call[1] for call in mine if call[0] == name) * 1e3
    return stages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("contexts")
    parser.add_argument("out", type=Path)
    parser.add_argument("--kv-bytes", type=float, default=8e9)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 24576])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--budget-s", type=float, default=100)
    parser.add_argument("--hits", type=int, default=10)
    parser.add_argument("--settings", default="{}")
    parser.add_argument("--servers", nargs="+", default=list(SERVERS))
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--flags", default="--dtype bfloat16 --gpu-memory-utilization 0.2")
    args = parser.parse_args()
    look = Look(args)
    try:
        for name, server in look.servers.items():
            server.wait()
            print(name, "answers", flush=True)
        look.ask_for_misses()
        if "ours" in look.servers and args.hits:
            look.ask_for_hits("ours")
    finally:
        time.sleep(1)
        for server in look.servers.values():
            server.stop()
        (args.out / "rows.json").write_text(json.dumps(look.rows))
    sum_up(args, look.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
