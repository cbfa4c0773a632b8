"""Eviction policies in vLLM's CPU offload with too little host memory: tokens found, answers, the simulator beside it.

    python bench/eviction_vllm.py --model FOLDER --data-dir DATA --measured-on "one H200, vLLM 0.26.0"

The requests are those of `bench/eviction_engine.py`: turns of chats and retrieved passages, mixed, one at a time, all
behind one instruction. The device's cache holds one request and little more, the host's memory ``--share`` of all
blocks, so that nearly every hit is loaded from the host. Engines, each in a process of its own: *device alone* without
offload, vLLM's own *lru* and *arc*, and ours (`semblend.integration.vllm.offload_policy`). Hits are the tokens that
vLLM says it did not compute. *Simulated* is what `semantickv` predicts for the host's memory from token ids alone.
Answers are compared with those of *device alone*. A half-precision model may answer otherwise where a prompt is
computed in other pieces: *lru*'s row says how often. Exit code 1 where a prediction is off by more than two points.
"""

from __future__ import annotations

import _report  # first: it holds the numeric libraries to one thread

# isort: split
import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from _vllm_runs import Rows, add_engine_arguments, read_arguments, run_engines, write_report
from eviction_engine import BLOCK_TOKENS, Tokens, add_stream_arguments, make_requests, number_blocks, predict

ALONE = "device alone"
OURS = {"lfu": "Lfu", "slru": "Slru", "lru2": "Lru2", "adaptive": "Adaptive"}
KINDS = (ALONE, "lru", "arc", *OURS)
POLICY_MODULE = "semblend.integration.vllm.offload_policy"
SPEC = {"spec_name": "SemBlendOffloadingSpec", "spec_module_path": "semblend.integration.vllm.offload_spec"}


def read_requests(args: argparse.Namespace) -> list[Tokens]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    return make_requests(args, lambda text: list(tokenizer.encode(text, add_special_tokens=False)))


def count_host_blocks(args: argparse.Namespace, requests: list[Tokens]) -> int:
    distinct = {one for path in number_blocks(requests, BLOCK_TOKENS) for one in path}
    longest: int = args.longest
    return max(longest // BLOCK_TOKENS + 2, int(args.share * len(distinct)))


def count_block_bytes(folder: str) -> int:
    """Bytes of a block of keys and values in half precision."""
    told = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    width = told.get("head_dim") or told["hidden_size"] // told["num_attention_heads"]
    return int(2 * told["num_hidden_layers"] * told["num_key_value_heads"] * width * 2 * BLOCK_TOKENS)


def name_policy(kind: str) -> dict[str, str]:
    """What vLLM's offload is told: by a policy's module path, or in vLLM 0.26 by that of the whole offload."""
    if kind not in OURS:
        return {"eviction_policy": kind}
    try:
        import vllm.v1.kv_offload.cpu.policies.factory  # noqa: F401
    except ImportError:
        return {"eviction_policy": OURS[kind], **SPEC}
    return {"eviction_policy": OURS[kind], "cache_policy_module_path": POLICY_MODULE}


def serve(kind: str, args: argparse.Namespace) -> None:
    """Ask one engine all requests that have no row yet. A cache that was lost makes the whole run void: begin again."""
    from vllm import LLM, SamplingParams

    requests, rows = read_requests(args), Rows(args.rows)
    if len(rows.find(kind=kind)) == len(requests):
        return
    named: dict[str, Any] = {}
    if kind != ALONE:
        named["kv_transfer_config"] = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": count_host_blocks(args, requests) * count_block_bytes(args.model),
                **name_policy(kind),
            },
        }
    llm = LLM(
        args.model, dtype="bfloat16", max_model_len=args.longest + 64, max_num_seqs=1, enforce_eager=True,
        block_size=BLOCK_TOKENS, num_gpu_blocks_override=args.longest // BLOCK_TOKENS + 8, enable_prefix_caching=True,
        gpu_memory_utilization=args.memory, skip_tokenizer_init=True, seed=0, **named,
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=args.answer, temperature=0.0, ignore_eos=True, detokenize=False)
    run = time.time()
    for number, ids in enumerate(requests):
        wall = time.perf_counter()
        (told,) = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        rows.add(
            {
                "kind": kind, "run": run, "number": number, "tokens": len(ids), "found": told.num_cached_tokens or 0,
                "answer": list(told.outputs[0].token_ids), "ms": 1e3 * (time.perf_counter() - wall),
            }
        )  # fmt: skip
        if number % 100 == 0:
            _report.progress(f"{kind}: {number} of {len(requests)}")


def show(args: argparse.Namespace, report: _report.Report) -> int:
    """Table of all engines whose run is whole; how many predictions are off."""
    requests, wrong = read_requests(args), 0
    blocks = count_host_blocks(args, requests)
    served = {kind: last_run(Rows(args.rows).find(kind=kind)) for kind in KINDS}
    whole = {kind: rows for kind, rows in served.items() if len(rows) == len(requests)}
    if ALONE not in whole:
        _report.fail("the run without offload is not whole", hint="run again without --finished-only")
    prompt, lines = sum(map(len, requests)), []
    for kind, rows in whole.items():
        found = 100 * sum(row["found"] for row in rows) / prompt
        expected = None
        if kind not in (ALONE, "arc"):
            expected = 100 * predict(kind, requests, blocks * BLOCK_TOKENS, BLOCK_TOKENS)
            wrong += abs(found - expected) > 2
        same = sum(row["answer"] == other["answer"] for row, other in zip(rows, whole[ALONE], strict=True))
        off = None if expected is None else found - expected
        lines.append([kind, found, expected, off, f"{same} of {len(rows)}", statistics.median(r["ms"] for r in rows)])
    report.table(
        f"vLLM's CPU offload: {len(requests)} requests, {prompt:,} tokens, {blocks} blocks of 16 in the host's memory",
        ["policy", "tokens found %", "simulated %", "difference", "answers as without offload", "ms (median)"], lines,
    )  # fmt: skip
    for kind in sorted(set(KINDS) - set(whole)):
        report.note(f"{kind}: no whole run")
    return wrong


def last_run(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the run that began last."""
    return [row for row in rows if row["run"] == max(one["run"] for one in rows)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(parser, "eviction_vllm")
    add_stream_arguments(parser, answer=4)
    args = read_arguments(parser, requests=40)
    if args.engine:
        serve(args.engine, args)
        return 0
    failed = 0 if args.finished_only else run_engines(list(KINDS), args.turn)
    report = _report.Report("eviction_vllm", args)
    wrong = show(args, report)
    write_report(report, args, "hits of the device's own cache are counted too; it holds one request and eight blocks")
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
