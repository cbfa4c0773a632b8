"""Times decisions for bench/dynamo_placement.py, in a process that joins a deployment: Dynamo's part, and ours."""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import _report  # noqa: F401  # first: it holds the numeric libraries to one thread
import numpy as np
import uvloop
from _dynamo_deployment import BLOCK_SIZE
from dynamo.llm import KvRouter, KvRouterConfig
from dynamo.runtime import dynamo_worker

from semantickv.routing.worker_evidence import WorkerEvidence
from semblend.integration.dynamo.placement import WorkerKey, WorkerState
from semblend.integration.dynamo.requests import read_request
from semblend.integration.dynamo.workers import KvRouterWorkers
from semblend.prompt import Namespace

ROUNDS = 200
KNOWN = 40
"""Prompts that each worker has computed before."""


def make_prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50_000, length).tolist()


def time_ours(length: int, workers: list[WorkerState]) -> list[float]:
    """Milliseconds of reading a prompt and choosing, with every worker's memory filled."""
    evidence = WorkerEvidence(2_000_000)
    for at, state in enumerate(workers):
        for seed in range(min(KNOWN, 4000 // len(workers))):
            evidence.note_placed(evidence.read(make_prompt(1000 * at + seed, length), Namespace()), state.key)
    taken = []
    for seed in range(ROUNDS):
        prompt = [7, *make_prompt(seed % 7, length - 1)]
        began = time.perf_counter()
        evidence.choose(evidence.read(prompt, Namespace()), workers)
        taken.append(1e3 * (time.perf_counter() - began))
    return taken


@dynamo_worker()
async def main(runtime: Any) -> None:
    endpoint = runtime.endpoint("dynamo.backend.generate")
    await (await endpoint.client()).wait_for_instances()
    workers = KvRouterWorkers(KvRouter(endpoint=endpoint, block_size=BLOCK_SIZE, kv_router_config=KvRouterConfig()))
    for length in (2_000, 8_000):
        routed = read_request({"model": "m", "token_ids": make_prompt(1, length)})
        states = list(await workers.list_states(routed))
        asked = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            await workers.list_states(routed)
            asked.append(1e3 * (time.perf_counter() - began))
        many = [WorkerState(WorkerKey(at)) for at in range(1000)]
        for real, known in ((True, states), (False, many)):
            ours = time_ours(length, known)
            print(json.dumps({
                "prompt tokens": length, "workers": len(known),
                "Dynamo's loads and prefixes, ms": round(statistics.median(asked), 3) if real else None,
                "our evidence, ms": round(statistics.median(ours), 3),
                "p95 of ours, ms": round(statistics.quantiles(ours, n=20)[-1], 3),
            }), flush=True)  # fmt: skip
    runtime.shutdown()


if __name__ == "__main__":
    uvloop.run(main())
