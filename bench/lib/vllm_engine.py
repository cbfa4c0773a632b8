"""One vLLM engine, stock or with our connector, in a process of its own: the worker of `bench/vllm_ttft.py`.

    PYTHONPATH=bench python -m lib.vllm_engine ENGINE CELLS.jsonl '{"lengths": [4096], "rounds": 15, ...}'

ENGINE is ``stock``, or where the connector keeps donors: ``default`` (where it decides), ``device`` or ``host``. A
shape has dummy weights (real speed of that architecture, no real text). Every cell is appended to CELLS as soon as it
is measured, errors too.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.update(  # read by vLLM when it is imported: one process, nothing looked up in a network
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_USE_FLASHINFER_SAMPLER="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    HF_HUB_OFFLINE="1",
)
from lib.ttft_vllm import QWEN2_5_7B
from lib.vllm_runs import take_turn

INSTRUCTION, SHIFTED, QUESTION, ROOM = 64, 24, 32, 512
TINY = QWEN2_5_7B | {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
SHAPES = {"qwen2.5-7b": QWEN2_5_7B, "tiny": TINY}
KINDS = ("outcome", "reused_tokens", "recomputed_tokens", "prefill_tokens", "exact_tokens", "risk", "escalations",
         "lookup_ms", "load_ms", "compute_ms", "canary")  # fmt: skip
PLACES = ("donor_device_bytes", "donor_host_bytes")
ACCEPT_AFTER_10 = {"kl_10": 1e9, "kl_20": 1e9, "kl_40": 1e9}
"""A random model's distributions mean nothing: accept after the first repair, so that 10 % is what is timed."""


class Engine:
    """An engine, prompts of random tokens, and one question at a time."""

    def __init__(self, kind: str, task: dict[str, Any]) -> None:
        import torch
        from vllm import LLM, SamplingParams

        self.kind, self.task, self._torch = kind, task, torch
        self.rng = random.Random(task.get("seed", 0))
        self._params = SamplingParams
        longest = max(task["lengths"]) + ROOM
        folder = Path(task["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        named: dict[str, Any] = {
            "skip_tokenizer_init": True, "dtype": task["dtype"],
            "max_model_len": longest, "max_num_batched_tokens": task.get("step_tokens", longest),
            "max_num_seqs": task.get("max_requests", 64),
            "enable_prefix_caching": True, "gpu_memory_utilization": task["memory"], "enforce_eager": task["eager"],
            "disable_log_stats": False, **_name_weights(task, folder, longest),
        }  # fmt: skip
        if task.get("kv_bytes"):
            named["kv_cache_memory_bytes"] = int(task["kv_bytes"])
        if kind != "stock":
            named["kv_transfer_config"] = self._connector(folder)
        self.llm = LLM(**named)
        config = json.loads(Path(named["model"], "config.json").read_text(encoding="utf-8"))
        self._last_token = int(config["vocab_size"]) - 2000  # the last ones may be special
        if task.get("model"):
            return
        self.llm.apply_model(_random_weights)
        if kind != "stock":
            _scatter_repairs()

    def _connector(self, folder: Path) -> Any:
        from vllm.config import KVTransferConfig

        from semblend.materialize.gate.thresholds import Thresholds

        named: dict[str, Any] = dict(self.task.get("connector", {}))
        if not self.task.get("model"):
            named["thresholds"] = str(folder / "thresholds.json")
            (folder / "thresholds.json").write_text(Thresholds(**ACCEPT_AFTER_10).to_json(), encoding="utf-8")
        budget, tier = int(self.task["donor_bytes"]), self.kind
        places = {name: budget if name == f"donor_{tier}_bytes" else 0 for name in PLACES} if tier != "default" else {}
        return KVTransferConfig(
            kv_connector="SemBlendConnectorV1",
            kv_connector_module_path="semblend.integration.vllm.connector_v1",
            kv_role="kv_both",
            kv_connector_extra_config={
                **places,
                "reset_drops_donors": False,
                # The canary's rows are computed; random weights, of which KV follows the text in front, pass it.
                **({} if self.task.get("model") else {"deep_tolerance": 1e9}),
                **named,
            },
        )

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(10, self._last_token) for _ in range(count)]

    def params(self, tokens: int = 2, **asked: Any) -> Any:
        extra = {"kv_transfer_params": {"semblend": asked}} if asked else None
        return self._params(max_tokens=tokens, ignore_eos=True, temperature=0, detokenize=False, extra_args=extra)

    def ask(self, ids: list[int], tokens: int = 2, **asked: Any) -> dict[str, Any]:
        """Milliseconds to the first token, and what the receipt says where there is one."""
        self._torch.accelerator.synchronize() if self._torch.accelerator.is_available() else None
        begun = time.perf_counter()
        (output,) = self.llm.generate([{"prompt_token_ids": ids}], self.params(tokens, **asked), use_tqdm=False)
        found = {
            "ttft_ms": output.metrics.first_token_latency * 1e3,
            "whole_ms": (time.perf_counter() - begun) * 1e3,
            "cached": output.num_cached_tokens,
        }
        receipt = (output.kv_transfer_params or {}).get("semblend") or {}
        return found | {kind: receipt[kind] for kind in KINDS if kind in receipt}


def _name_weights(task: dict[str, Any], folder: Path, longest: int) -> dict[str, Any]:
    """vLLM's arguments for the weights: a folder of real ones, or random ones in the shape of an architecture."""
    if task.get("model"):
        return {"model": task["model"]}
    config = SHAPES[task["shape"]] | {"max_position_embeddings": longest}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return {"model": str(folder), "load_format": "dummy"}


def _random_weights(model: Any) -> None:
    """vLLM's dummy weights are so small that all tokens are attended alike; a real model's are not."""
    import torch

    made = torch.Generator(device=next(model.parameters()).device).manual_seed(0)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() == 2:
                weights.normal_(0, 0.02, generator=made)


def _scatter_repairs() -> None:
    """Repair tokens chosen at random, the slowest case: random weights attend to whole stretches, which is cheaper."""
    from dataclasses import replace

    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from semblend.materialize.blend.quality import Step

    worker = get_kv_transfer_group()._worker
    worker._quality = replace(worker._quality, steps=(Step(10, "at_random"), *worker._quality.steps[1:]))


def ttft(engine: Engine, length: int, rounds: int) -> dict[str, Any]:
    """Every arm in every round, each over a document that nobody has seen: caches are as good as fresh.

    Two long prefills in a row: the second is a few percent slower, because the GPU is hot. So they change places.
    """
    arms: dict[str, list[dict[str, Any]]] = {}
    opted_out = {"opt_out": True} if engine.kind != "stock" else {}
    for number in range(rounds + 2):
        document, question = engine.tokens(length - INSTRUCTION - QUESTION), engine.tokens(QUESTION)
        first = engine.tokens(INSTRUCTION) + document + question
        asked: dict[str, tuple[list[int], dict[str, Any]]] = {
            "cold": (engine.tokens(length), opted_out),
            "miss": (first, {"quality": "fast"} if engine.kind != "stock" else {}),
        }
        if number % 2:
            asked = dict(reversed(asked.items()))
        asked["exact"] = first[:-QUESTION] + engine.tokens(QUESTION), opted_out  # another question to the same prefix
        if engine.kind == "host":
            del asked["cold"]  # measured with the donors on the device
        if engine.kind != "stock":
            asked["fast"] = engine.tokens(SHIFTED) + document + question, {"quality": "fast"}
            other = engine.tokens(SHIFTED + 4) + document + engine.tokens(QUESTION)
            asked["fast, other question"] = other, {"quality": "fast"}
        if engine.kind in ("default", "device"):
            asked["balanced"] = engine.tokens(SHIFTED + 8) + document + question, {"quality": "balanced"}
        for arm, (ids, extra) in asked.items():
            found = engine.ask(ids, **extra)
            if number >= 2:  # two rounds to warm up
                arms.setdefault(arm, []).append(found)
    return {"what": "ttft", "tokens": length, "arms": arms}


def decode(engine: Engine, rounds: int) -> dict[str, Any]:
    """Tokens a second of one long answer, its first token left out."""
    rates = []
    for _ in range(rounds + 1):
        found = engine.ask(engine.tokens(min(1024, max(engine.task["lengths"]))), tokens=256)
        rates.append(255 / (found["whole_ms"] - found["ttft_ms"]) * 1e3)
    return {"what": "decode", "tokens_per_s": rates[1:]}


def crowd(engine: Engine, requests: int, length: int, reusable: float = 0.3, at_once: int = 8) -> dict[str, Any]:
    """A closed loop of ``at_once`` clients; a share of the prompts repeats an earlier document behind other words."""
    rng = random.Random(1)
    documents: list[list[int]] = []
    prompts, repeats = [], 0
    for _ in range(requests):
        if len(documents) > at_once and rng.random() < reusable:
            document, repeats = rng.choice(documents[:-at_once]), repeats + 1
        else:
            document = engine.tokens(length)
            documents.append(document)
        prompts.append(engine.tokens(rng.randrange(16, 64)) + document + engine.tokens(QUESTION))
    core, waiting, running, done = engine.llm.llm_engine, list(enumerate(prompts)), 0, []
    begun = time.perf_counter()
    while waiting or running:
        while waiting and running < at_once:
            number, ids = waiting.pop(0)
            core.add_request(f"crowd-{length}-{number}", {"prompt_token_ids": ids}, engine.params(64))
            running += 1
        for output in core.step():
            if output.finished:
                running -= 1
                receipt = (output.kv_transfer_params or {}).get("semblend") or {}
                done.append(
                    {"ttft_ms": output.metrics.first_token_latency * 1e3, "reused": receipt.get("reused_tokens")}
                )
    wall = time.perf_counter() - begun
    return {"what": "crowd", "requests": requests, "repeats": repeats, "tokens": length, "wall_s": wall, "done": done}


def profile(engine: Engine, length: int) -> dict[str, Any]:
    """Where the time of one fast and one balanced request goes."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    document, question, found = engine.tokens(length), engine.tokens(QUESTION), {}
    engine.ask(engine.tokens(INSTRUCTION) + document + question)
    for quality in ("fast", "balanced"):
        for _ in range(2):
            engine.ask(engine.tokens(SHIFTED) + document + question, quality=quality)
        with profiled(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            engine.ask(engine.tokens(SHIFTED) + document + question, tokens=1, quality=quality)
        for order in ("self_cuda_time_total", "self_cpu_time_total"):
            found[f"{quality} {order}"] = seen.key_averages().table(
                sort_by=order, row_limit=22, max_name_column_width=60
            )
        seen.export_chrome_trace(f"{engine.task['folder']}/{quality}-{length}.trace.json")
    return {"what": "profile", "tokens": length, "tables": found}


def main(kind: str, cells: str, task: dict[str, Any]) -> int:
    def write(cell: dict[str, Any]) -> None:
        with Path(cells).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"engine": kind, **cell}) + "\n")

    begun = time.perf_counter()
    try:
        engine = Engine(kind, task)
    except Exception:  # the file must say it: the machine may be gone when we look
        write({"what": "start", "error": traceback.format_exc()[-3000:]})
        return 1
    write({"what": "start", "seconds": time.perf_counter() - begun})
    work = [
        (f"ttft {length}", lambda length=length: ttft(engine, length, task["rounds"])) for length in task["lengths"]
    ]
    if task.get("decode"):
        work.append(("decode", lambda: decode(engine, task["decode"])))
    if task.get("crowd"):
        work.append(("crowd", lambda: crowd(engine, task["crowd"], task["crowd_tokens"])))
    if kind != "stock":
        traced = task.get("profile") or ()
        work += [(f"profile {length}", lambda length=length: profile(engine, length)) for length in traced]
    failed = 0
    with take_turn(task.get("turn", "")):
        begun = time.perf_counter()
        for name, measure in work:
            if time.perf_counter() - begun > task.get("budget_s", 1e9):
                write({"what": name, "error": "the time budget was used up"})
                continue
            try:
                write(measure())
            except Exception:  # the other cells may go well
                failed += 1
                write({"what": name, "error": traceback.format_exc()[-3000:]})
            print(f"{kind} {name} {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
