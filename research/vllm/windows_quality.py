"""How far are answers from cold where most layers have a window? Gemma 3 270M, real weights, in a real vLLM on a CPU.

    PYTHONPATH=src:bench:tests/engines/vllm python research/vllm/windows_quality.py FOLDER DATA OUT.jsonl [--budget-s 1500]
    python research/vllm/windows_quality.py --tables OUT.jsonl

FOLDER is a Hugging Face folder. Prompts and donors are those of `bench/quality.py`, behind the model's first token. Each
arm gets the donors under one salt, computed exactly, and then the prompt: once with cold's answer forced on it (the
divergence of each next token), once free (F1). `rerun` is cold once more. Repairs take two passes, as in mode balanced
where a question is the first to its document, and every one is accepted. A second run goes on behind the last prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
SCENARIOS = ("one_document", "edits", "subset", "reordered", "several")
ARMS: dict[str, int | None] = {"rerun": None, "fast": 0, "10 %": 10, "20 %": 20, "40 %": 40}
LENGTH, ANSWER = 4096, 12


class Eyes:
    """Sees the logits of every step of the only request there is, and may say which token comes of them."""

    def __init__(self, world: Any) -> None:
        self.forced: list[int] = []
        self.seen: list[Any] = []
        world.llm.apply_model(self._open)

    def _open(self, model: Any) -> None:
        real = model.compute_logits

        def compute_logits(*given: Any, **more: Any) -> Any:
            logits = real(*given, **more)
            is_a_look = "semblend" in sys._getframe(1).f_code.co_filename  # ours, before the request is computed
            if logits is not None and self.forced and not is_a_look:
                self.seen.append(logits[-1].float().log_softmax(-1).clone())
                logits = logits.clone().fill_(-1e9)
                logits[:, self.forced[min(len(self.seen), len(self.forced)) - 1]] = 0.0
            return logits

        model.compute_logits = compute_logits


class Bench:
    """An engine in this process, whose repair is chosen for each request."""

    def __init__(self, folder: str) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig
        from vllm_world import MODULE, World

        extra = {"quality": "fast", "learn_costs": False, "control_share": 0.0, "donor_host_bytes": 1 << 30,
                 "share_equal_prompts": False, "heal_prefixes": False}  # fmt: skip
        llm = LLM(
            model=folder, dtype="float32", enforce_eager=True, max_model_len=LENGTH, max_num_batched_tokens=LENGTH,
            kv_cache_memory_bytes=1 << 30, max_num_seqs=4, enable_prefix_caching=True, disable_log_stats=False,
            disable_hybrid_kv_cache_manager=True,
            kv_transfer_config=KVTransferConfig(
                kv_connector="SemBlendConnectorV1", kv_connector_module_path=MODULE, kv_role="kv_both",
                kv_connector_extra_config=extra,
            ),
        )  # fmt: skip
        self.world = World(llm)
        self.world.start()
        self.world.worker.load, self.world.worker.capture = self.world._real["load"], self.world._real["capture"]
        self.eyes = Eyes(self.world)

    def answer(self, prompt: list[int], forced: list[int], **asked: Any) -> tuple[list[int], list[Any], dict[str, Any]]:
        self.eyes.forced, self.eyes.seen = forced, []
        (output,) = self.world.ask(prompt, tokens=len(forced) or ANSWER, **asked)
        self.eyes.forced = []
        return list(output.outputs[0].token_ids), self.eyes.seen, dict(self.world.receipt(output))

    def compute_cold(self, prompt: list[int], forced: list[int]) -> tuple[list[int], list[Any], dict[str, Any]]:
        self.world.forget_prefixes()
        found = self.answer(prompt, forced, opt_out=True)
        self.world.forget_prefixes()
        return found

    def repair(self, percent: int) -> str:
        """The next pass repairs so much, and accepts. The mode to ask for."""
        from semblend.materialize.blend.quality import Step
        from semblend.materialize.gate.thresholds import DialTable, PassageOrder, Thresholds

        if not percent:
            return "fast"
        worker = self.world.worker
        worker._blenders.clear()
        dial = DialTable({order: {percent: 0.0} for order in PassageOrder}, {percent: (0.0, 0.0, 0.0, 0.0, -50.0)})
        accepts = Thresholds(1e9, 1e9, 1e9, dial=dial)
        worker._quality = replace(worker._quality, thresholds=accepts, steps=(Step(percent, "attended"),), most_work=9.0)
        return "balanced"

    def close_life(self) -> None:
        self.world.half.reset()
        self.world.forget_prefixes()


def measure(bench: Bench, case: Any, first: list[int]) -> list[dict[str, Any]]:
    from lib.quality_lab import word_f1

    prompt, decode = first + list(case.tokens), bench.world.tokenizer.decode
    said, _, _ = bench.compute_cold(prompt, [])
    _, truth, _ = bench.compute_cold(prompt, said)
    rows = []
    are_there = False  # donors; a prompt that was computed without them is one itself, and they are made anew
    for arm, percent in ARMS.items():
        if not are_there and percent is not None:
            bench.close_life()
            for donor in case.donors:
                bench.world.ask(first + list(donor), tokens=2, quality="exact")
            bench.world.forget_prefixes()
        if percent is None:
            free, seen, receipt = bench.compute_cold(prompt, [])[0], bench.compute_cold(prompt, said)[1], {}
        else:
            mode = bench.repair(percent)
            _, seen, receipt = bench.answer(prompt, said, quality=mode)
            bench.world.forget_prefixes()
            free, _, again = bench.answer(prompt, [], quality=mode)
            are_there = bool(receipt.get("reused_tokens")) and bool(again.get("reused_tokens"))
            receipt = receipt | {"same": receipt.get("reused_tokens") == again.get("reused_tokens")}
        bench.world.forget_prefixes()
        apart = [float((cold.exp() * (cold - other)).sum()) for cold, other in zip(truth, seen, strict=True)]
        agree = sum(int(cold.argmax() == other.argmax()) for cold, other in zip(truth, seen, strict=True)) / len(truth)
        kinds = ("outcome", "reason", "detail", "reused_tokens", "recomputed_tokens", "prefill_tokens", "canary", "same")
        rows.append(
            {"case": case.case_id, "scenario": case.scenario, "cluster": case.cluster, "arm": arm, "tokens": len(prompt),
             "kl": sum(apart) / len(apart), "kl_first": apart[0], "top1": agree, "f1": word_f1(decode(free), decode(said)),
             **{kind: receipt[kind] for kind in kinds if receipt.get(kind) is not None}}
        )  # fmt: skip
    bench.close_life()
    return rows


def show(path: Path) -> None:
    rows, groups = [json.loads(line) for line in path.read_text().splitlines()], defaultdict(list)
    for row in rows:
        for name in (row["scenario"], "all"):
            groups[name, row["arm"]].append(row)
    print("| prompts | arm | n | reused | tokens computed | KL | median | largest | above 0.1 | top-1 | F1 |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for (name, arm), found in groups.items():
        kls = sorted(row["kl"] for row in found)
        computed = [1 - row.get("reused_tokens", 0) / row["tokens"] for row in found]
        mean = {key: sum(row[key] for row in found) / len(found) for key in ("kl", "top1", "f1")}
        reused = sum(bool(row.get("reused_tokens")) for row in found)
        print(f"| {name} | {arm} | {len(found)} | {reused} | {sum(computed) / len(found):.2f} | {mean['kl']:.4f} | "
              f"{kls[len(kls) // 2]:.4f} | {kls[-1]:.3f} | {sum(kl > 0.1 for kl in kls)} | {mean['top1']:.3f} | {mean['f1']:.2f} |")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("given", nargs="+")
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--budget-s", type=float, default=1500)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=900)
    args = parser.parse_args()
    if args.tables:
        return show(Path(args.given[0]))
    from lib.quality_cases import ChatForm, cases

    begun, (folder, data, out) = time.monotonic(), args.given
    done = {json.loads(line)["case"] for line in Path(out).read_text().splitlines()} if Path(out).exists() else set()
    bench = Bench(folder)
    encode = bench.world.ids
    first = [bench.world.tokenizer.bos_token_id]
    made = defaultdict(list)
    form = ChatForm("{system}\n\n", "\nAnswer:", "{role}: {text}\n")  # a base model: no chat
    for case in cases(
        Path(data), encode, scenarios=SCENARIOS, prompts=args.prompts, tokens=args.tokens, seed=20, form=form
    ):
        made[case.scenario].append(case)
    turns = [group[turn] for turn in range(max(map(len, made.values()))) for group in made.values() if turn < len(group)]
    for case in turns:
        if case.case_id in done or len(case.tokens) > LENGTH - 64:
            continue
        if time.monotonic() - begun > args.budget_s:
            break
        with open(out, "a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in measure(bench, case, first)))
        print(f"{time.monotonic() - begun:6.0f} s  {case.case_id}", flush=True)


if __name__ == "__main__":
    main()
