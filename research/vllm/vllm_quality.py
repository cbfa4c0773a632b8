"""Claim: through vLLM answers are as close to cold ones as through the embedded engine, prompt by prompt.

    python bench/vllm_quality.py --model FOLDER --data-dir DATA --prompts 50 --tokens 4000 --jsonl rows.jsonl
    python bench/vllm_quality.py --tables-only rows.jsonl --engine-rows bench/results/quality_h200_rows.jsonl.gz

The prompts of `bench/quality.py`, asked of a real vLLM with our connector, in this process or (--http) of a server:
cold (opted out), then fast and balanced, each after its donors (computed exactly) and under a salt of its own, so that
no arm finds anything of another. FOLDER is a Hugging Face folder of the same weights. Scores are word F1 of greedy
answers against vLLM's own cold answer. Rows go to --jsonl as they come; a second run skips the cases that are there.
The table sets them beside the embedded engine's rows of the same prompts; intervals: bootstrap over documents.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

import _report  # first: it holds the numeric libraries to one thread
import numpy as np
from _dial_runs import refuse_other_prompts
from _quality_cases import SCENARIOS, Case, cases
from _quality_lab import next_line_similarity, word_f1
from _vllm_runs import take_turn
from _vllm_server import LINE, VllmServer
from quality import kept_rows

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
ARMS = ("cold", "fast", "balanced")
DONORS = {"donor_host_bytes": 4 << 30, "reset_drops_donors": False}
KINDS = ("outcome", "reason", "exact_tokens", "reused_tokens", "recomputed_tokens", "prefill_tokens", "risk",
         "escalations", "canary")  # fmt: skip


class Asked:
    """A vLLM with our connector in this process, one prompt at a time."""

    def __init__(self, args: argparse.Namespace) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self.llm = LLM(
            model=args.model, dtype=args.dtype, max_model_len=args.tokens * 2 + 400,
            max_num_batched_tokens=args.tokens * 2 + 400, gpu_memory_utilization=args.memory, max_num_seqs=8,
            enforce_eager=args.eager, disable_log_stats=False,
            kv_transfer_config=KVTransferConfig(**LINE, kv_connector_extra_config=DONORS),
        )  # fmt: skip
        self.tokenizer = self.llm.get_tokenizer()

    def ask(self, tokens: tuple[int, ...], count: int, salt: str, **asked: Any) -> tuple[str, dict[str, Any]]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=count, extra_args={"kv_transfer_params": {"semblend": asked}})
        prompt = {"prompt_token_ids": list(tokens), "cache_salt": salt}
        (output,) = self.llm.generate([prompt], params, use_tqdm=False)
        receipt = (output.kv_transfer_params or {}).get("semblend") or {}
        return output.outputs[0].text, {kind: receipt.get(kind) for kind in KINDS}

    def close(self) -> None:
        """The engine ends with the process."""


class AskedServer:
    """The same over HTTP, of a server in processes of its own."""

    def __init__(self, args: argparse.Namespace) -> None:
        from transformers import AutoTokenizer

        length = str(args.tokens * 2 + 400)
        flags = ["--dtype", args.dtype, "--max-model-len", length, "--max-num-batched-tokens", length,
                 "--gpu-memory-utilization", str(args.memory), "--max-num-seqs", "8"]  # fmt: skip
        flags += ["--enforce-eager"] if args.eager else []
        flags += ["--kv-cache-memory-bytes", str(int(args.kv_bytes))] if args.kv_bytes else []
        self.server = VllmServer(args.model, Path(tempfile.mkdtemp(prefix="vllm-quality-")), flags, DONORS)
        self.server.wait()
        self.tokenizer = AutoTokenizer.from_pretrained(args.model)

    def ask(self, tokens: tuple[int, ...], count: int, salt: str, **asked: Any) -> tuple[str, dict[str, Any]]:
        body = {"model": "m", "prompt": list(tokens), "max_tokens": count, "temperature": 0, "cache_salt": salt,
                "kv_transfer_params": {"semblend": asked}}  # fmt: skip
        answer = self.server.post("/v1/completions", body)
        receipt = (answer.get("kv_transfer_params") or {}).get("semblend") or {}
        return answer["choices"][0]["text"], {kind: receipt.get(kind) for kind in KINDS}

    def close(self) -> None:
        self.server.stop()


def run_case(engine: Asked | AskedServer, case: Case) -> list[dict[str, Any]]:
    """Every arm under a salt of its own: neither donors nor exact blocks of another arm are found."""
    cold, _ = engine.ask(case.tokens, case.answer_tokens, f"{case.case_id} first", opt_out=True)
    score = next_line_similarity if case.scenario == "code" else word_f1
    rows = []
    for arm in ARMS:
        salt = f"{case.case_id} {arm}"
        if arm != "cold":
            for donor in case.donors:
                engine.ask(donor, 2, salt, quality="exact")
        asked = {"opt_out": True} if arm == "cold" else {"quality": arm}
        text, receipt = engine.ask(case.tokens, case.answer_tokens, salt, **asked)
        golds = [score(text, gold) for gold in case.golds]
        fact = None if case.code is None else case.code in text
        rows.append(
            {"case": case.case_id, "prompt": case.digest, "scenario": case.scenario, "cluster": case.cluster,
             "recipe": arm, "tokens": len(case.tokens), "f1": score(text, cold), "task": max(golds, default=None),
             "fact": fact, "donor_fact": None if case.donor_code is None else case.donor_code in text, **receipt}
        )  # fmt: skip
    return rows


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    begun, path = time.perf_counter(), Path(args.jsonl)
    engine = AskedServer(args) if args.http else Asked(args)
    rows = kept_rows([path])
    mine = [row for row in rows if row["model"] == Path(args.model).name]
    finished = {row["case"] for row in mine}
    made = list(cases(_report.data_dir(args), lambda text: engine.tokenizer.encode(text, add_special_tokens=False),
                 scenarios=args.scenarios, prompts=args.prompts, tokens=args.tokens, seed=args.seed))  # fmt: skip
    refuse_other_prompts(path, mine, made)
    with closing(engine), take_turn(args.turn), path.open("a", encoding="utf-8") as out:
        for case in made:
            if case.case_id in finished:
                continue
            if args.budget_s and time.perf_counter() - begun > args.budget_s:
                break
            found = [{"model": Path(args.model).name, **row} for row in run_case(engine, case)]
            rows += found
            out.write("".join(json.dumps(row) + "\n" for row in found))
            out.flush()
            _report.progress(f"{time.perf_counter() - begun:6.0f} s  {case.case_id}")
    return rows


def interval(by_cluster: dict[str, list[float]], draws: int = 2000) -> tuple[float, float, float]:
    """Mean, and its 95 % interval when whole documents are drawn."""
    groups = [np.array(values) for values in by_cluster.values()]
    rng = np.random.default_rng(0)
    sums, counts = np.array([g.sum() for g in groups]), np.array([len(g) for g in groups])
    drawn = rng.integers(0, len(groups), (draws, len(groups)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    return float(sums.sum() / counts.sum()), float(np.percentile(means, 2.5)), float(np.percentile(means, 97.5))


def show(report: _report.Report, rows: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """A table for each model, and what a reader must know."""
    served = [row for row in rows if row["outcome"] != "exact_prefix_route"]
    for model in dict.fromkeys(row["model"] for row in rows):
        report.table(
            f"{model}: greedy answers through vLLM against vLLM's cold answer",
            ["setting", "arm", "n", "documents", "F1", "low", "high", "minus embedded", "low", "high",
             "task minus cold", "share computed", "with reuse"],
            tabulate([row for row in served if row["model"] == model],
                     [row for row in theirs if row["model"].lower().startswith(model.lower())]),
        )  # fmt: skip
    if left_out := len(rows) - len(served):
        report.note(f"{left_out} answers came from vLLM's own prefix cache, which it had not emptied: left out")
    report.note("minus embedded: F1 here minus the embedded engine's on the same prompt, paired; 95 % intervals")
    report.note("cold is asked twice: what is not 1 there is vLLM's own noise")
    report.note("share computed: tokens of the prompt that no donor provides in the end; repeated passes count once")


def tabulate(rows: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[list[Any]]:
    """A line for each setting and arm of one model; ``theirs`` are the embedded engine's rows."""
    known = {(row["case"], row["recipe"]): row for row in theirs}
    ours = {(row["case"], row["recipe"]): row for row in rows}
    table = []
    for scenario in sorted({row["scenario"] for row in rows}):
        for arm in ARMS:
            picked = [row for row in rows if row["scenario"] == scenario and row["recipe"] == arm]
            if not picked:
                continue
            f1, gap = defaultdict(list), defaultdict(list)
            for row in picked:
                f1[row["cluster"]].append(row["f1"])
                if arm != "cold" and (row["case"], arm) in known:
                    gap[row["cluster"]].append(row["f1"] - known[row["case"], arm]["f1"])
            mean, low, high = interval(f1)
            change = interval(gap) if gap else (None, None, None)
            tasks = [row["task"] - ours[row["case"], "cold"]["task"] for row in picked if row["task"] is not None]
            spent = [(row["recomputed_tokens"] or 0) + (row["prefill_tokens"] or 0) for row in picked]
            table.append(
                [scenario, arm, len(picked), len(f1), mean, low, high, *change,
                 sum(tasks) / len(tasks) if tasks else None,
                 sum(spent) / sum(row["tokens"] for row in picked), sum(bool(row["reused_tokens"]) for row in picked)]
            )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    _report.add_common_arguments(parser, "vllm_quality")
    parser.add_argument("--model", default="", help="Hugging Face folder")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=20, help="cases of each scenario")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of a document, at most")
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=list(SCENARIOS))
    parser.add_argument("--memory", type=float, default=0.5, help="share of the device's memory that vLLM takes")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--kv-bytes", type=float, default=0, help="of a server; several can start at once then")
    parser.add_argument("--turn", default="", help="a file: whoever names it asks alone")
    parser.add_argument("--http", action="store_true", help="ask a server in processes of its own, over HTTP")
    parser.add_argument("--budget-s", type=float, default=0.0, help="begin no case after this long; 0: no limit")
    parser.add_argument(
        "--jsonl", default="bench/results/vllm_quality.jsonl", help="rows; a second run goes on from them"
    )
    parser.add_argument("--tables-only", nargs="+", default=None, metavar="JSONL", help="run nothing, read these")
    parser.add_argument("--engine-rows", default="", help="rows of bench/quality.py, to set beside these")
    parser.add_argument("--measured-on", default="", help="the machine, where tables are printed on another")
    args = parser.parse_args()
    report = _report.Report("vllm_quality", args)
    rows = kept_rows(map(Path, args.tables_only)) if args.tables_only else run(args)
    show(report, rows, kept_rows([Path(args.engine_rows)]) if args.engine_rows else [])
    report.write(args.out)


if __name__ == "__main__":
    main()
