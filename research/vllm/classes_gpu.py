"""Model classes in their real shape on a GPU, compiled and with CUDA graphs: is reuse right in each, and what does it take?

    PYTHONPATH=src:bench:tests/engines/vllm python research/vllm/classes_gpu.py OUT.jsonl TOKENIZER_FOLDER [CLASS ...] [--tiny]

Weights are random: real kernels and real speed, no real text. One engine a class, in a process of its own; with TURN=FILE
several start side by side and are timed one by one. In each:

    moved     a document under another instruction: its keys in layer 0 against a cold prefill's, as a share of the largest
    in place  the same prompt again after vLLM's cache was emptied: KV of all layers, and the tokens of the answer
    poisoned  blocks are filled with a large number before each load, so that what nobody wrote would be seen
    ms        TTFT of a cold prompt, of one in which nothing is reusable, an exact hit, and both modes, by length: medians

`again` is the yardstick of `in place`: the prompt computed a second time by vLLM alone.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from lib.vllm_runs import take_turn

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_USE_FLASHINFER_SAMPLER="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="INFO" if "gpt-oss-20b" in sys.argv else "WARNING",  # it was declined, and nobody saw why
    HF_HUB_OFFLINE="1",
)
TIMED, ANSWER = ({1024: 1} if "--tiny" in sys.argv else {8192: 10, 24576: 5}), 8
LENGTH = max(TIMED)
ITEMS = 60 if "--tiny" in sys.argv else 600
FULL = {"disable_hybrid_kv_cache_manager": True}
EIGHT_BITS = {"kv_cache_dtype": "fp8"}
GUESSES = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707}  # fmt: skip


def list_classes() -> dict[str, tuple[Any, dict[str, Any], dict[str, Any]]]:
    """By name: a config of its real size, what makes it small, and the engine's settings."""
    import transformers as hf

    small = {"num_hidden_layers": 4}

    def make_7b(**more: Any) -> Any:
        return hf.Qwen2Config(**{
            "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
            "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False, **more})  # fmt: skip

    return {
        "qwen2.5-7b, n-gram": (make_7b, small, GUESSES),
        "qwen2.5-7b, fp8 cache": (make_7b, small, EIGHT_BITS),
        "qwen3-30b-a3b": (
            lambda **more: hf.Qwen3MoeConfig(**{
                "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
                "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
                "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936, "max_position_embeddings": 32768,
                **more}),
            small | {"num_experts": 8}, {},
        ),
        "gemma-3-12b": (
            lambda **more: hf.Gemma3TextConfig(**{
                "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48, "num_attention_heads": 16,
                "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 1024, "query_pre_attn_scalar": 256,
                "vocab_size": 262208, "max_position_embeddings": 131072, **more}),
            small | {"layer_types": ["sliding_attention", "full_attention"] * 2}, FULL,
        ),
        "gpt-oss-20b": (
            lambda **more: hf.GptOssConfig(**{"num_hidden_layers": 24, "num_local_experts": 32, **more}),
            small | {"num_local_experts": 4}, FULL,
        ),
        "deepseek-v2-lite": (
            lambda **more: hf.DeepseekV2Config(**{
                "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
                "num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64,
                "num_experts_per_tok": 6, "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": None,
                "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 1, "topk_group": 1,
                "routed_scaling_factor": 1.0, "norm_topk_prob": False, "rope_parameters": YARN, "vocab_size": 151936,
                "max_position_embeddings": 32768, **more}),
            small | {"n_routed_experts": 8}, {},
        ),
    }  # fmt: skip


NAMES = ("gemma-3-12b", "deepseek-v2-lite", "qwen2.5-7b, fp8 cache", "gpt-oss-20b", "qwen3-30b-a3b", "qwen2.5-7b, n-gram")
KV_GB = {"gemma-3-12b": 26}
"""Where 4 GB do not hold two prompts: 48 layers of full length."""


def make_weights_speak(model: Any) -> None:
    """vLLM's dummy weights are so small that all tokens are attended alike; a real model's are not."""
    import torch

    made = torch.Generator(device=next(model.parameters()).device).manual_seed(0)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() >= 2 and weights.is_floating_point():
                weights.normal_(0, 0.02, generator=made)
            elif "sink" in name:
                weights.normal_(0, 1, generator=made)
            elif "norm" in name and weights.dim() == 1:
                weights.fill_(1.0)  # an 8-bit cache would round all keys of a thousandth to zero


class Heard(logging.Filter):
    """What our connector says from warnings up: why its worker's half declines an engine is said there only.

    A filter that lets all through: vLLM takes handlers away when it sets its log up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            self.lines.append(record.getMessage())
        return True


def explain_decline(llm: Any, heard: Heard) -> str | None:
    """Why our connector reuses nothing in this engine, by its scheduler's half and by its worker's; None if it does."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    refusal = scheduler.connector._ours.facts.refusal
    if refusal is None and hasattr(get_kv_transfer_group()._worker, "_model"):
        return None
    groups = [
        (type(one.kv_cache_spec).__name__, len(one.layer_names)) for one in scheduler.kv_cache_config.kv_cache_groups
    ]
    return f"scheduler: {refusal}; log: {heard.lines}; groups of KV: {groups}"


def start(name: str, tokenizer: str, folder: Path, tiny: bool) -> Any:
    """An engine with our connector, and eyes on both its halves (tests/engines/vllm)."""
    from transformers import AutoTokenizer
    from vllm import LLM
    from vllm.config import KVTransferConfig
    from vllm_world import MODULE, World

    from semblend.materialize.gate.thresholds import Thresholds

    make, small, engine = list_classes()[name]
    config = make(**(small if tiny else {}))
    config.architectures = [
        type(config).__name__.replace("TextConfig", "Config").removesuffix("Config") + "ForCausalLM"
    ]
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    (folder / "thresholds.json").write_text(Thresholds(1e9, 1e9, 1e9).to_json())
    extra = {"quality": "fast", "learn_costs": False, "control_share": 0.0}
    extra |= {"thresholds": str(folder / "thresholds.json"), "deep_tolerance": 0}
    extra |= {"donor_device_bytes": 0 if tiny else 2 << 30, "donor_host_bytes": (1 if tiny else 24) << 30}
    heard = Heard()
    logging.getLogger("vllm.semblend").addFilter(heard)
    llm = LLM(
        model=str(folder), load_format="dummy", dtype="bfloat16", max_model_len=LENGTH + 512, max_num_batched_tokens=8192,
        max_num_seqs=16, gpu_memory_utilization=0.1, kv_cache_memory_bytes=(1 if tiny else KV_GB.get(name, 4)) << 30, enable_prefix_caching=True,
        disable_log_stats=False, enforce_eager=tiny, **engine,
        kv_transfer_config=KVTransferConfig(
            kv_connector="SemBlendConnectorV1", kv_connector_module_path=MODULE, kv_role="kv_both",
            kv_connector_extra_config=extra,
        ),
    )  # fmt: skip
    if why := explain_decline(llm, heard):
        raise RuntimeError(f"{name} is declined: {why}")
    llm.apply_model(make_weights_speak)
    return World(llm)


def measure_distance(ours: Any, theirs: Any) -> float:
    """The largest difference of two prompts' KV, as a share of the largest number in that layer."""
    return max(
        float((a.float() - b.float()).abs().max() / b.float().abs().max())
        for pair, other in zip(ours, theirs, strict=True)
        for a, b in zip(pair, other, strict=True)
        if b.numel()
    )


def show(world: Any, output: Any) -> dict[str, Any]:
    """Of the receipt as our log has it: a caller is not told what a check has found."""
    receipt = world.receipt(output) | {"detail": world.audited(output).get("detail")}
    kinds = (
        "outcome",
        "reason",
        "detail",
        "reused_tokens",
        "recomputed_tokens",
        "prefill_tokens",
        "canary",
        "escalations",
    )
    return {kind: receipt[kind] for kind in kinds if receipt.get(kind) is not None}


def check(world: Any) -> dict[str, Any]:
    """Is what is reused what the model computes itself?"""
    world.start()
    document, found = world.document(2, ITEMS), {}
    target = world.instruction(4) + document + world.question()
    cold = world.cold(target, tokens=ANSWER)
    world.ask(world.instruction(2) + document + world.question())
    (output,) = world.ask(target, tokens=ANSWER)
    found["moved"] = show(world, output) | {"tokens": len(target)}
    found["moved"]["layer 0"] = measure_distance(world.kv_of(output)[:1], world.kv_of(cold)[:1])
    found["moved"]["all layers"] = measure_distance(world.kv_of(output), world.kv_of(cold))
    (output,) = world.ask(world.instruction(6) + document + world.question(), quality="balanced")
    found["balanced"] = show(world, output)

    again = world.instruction(3) + world.document(3, ITEMS) + world.question()
    first, own = world.cold(again, tokens=ANSWER), world.cold(again, tokens=ANSWER)
    world.ask(again)
    world.forget_prefixes()
    (second,) = world.ask(again, tokens=ANSWER)
    found["in place"] = show(world, second) | {
        "all layers": measure_distance(world.kv_of(second), world.kv_of(first)),
        "same tokens": second.outputs[0].token_ids == first.outputs[0].token_ids,
    }
    found["again"] = {
        "all layers": measure_distance(world.kv_of(own), world.kv_of(first)),
        "same tokens": own.outputs[0].token_ids == first.outputs[0].token_ids,
    }
    return found


def time_arms(world: Any, length: int, rounds: int) -> dict[str, Any]:
    """Medians of TTFT; each round has a document of its own."""
    arms: dict[str, list[float]] = {}
    for number in range(rounds + 2):
        document = world.document(100 * length + number, length)[: length - 200]
        for arm, lead, asked in (
            ("cold", 2, {"opt_out": True}), ("miss", 3, {}), ("exact", 3, {"opt_out": True}),
            ("fast", 4, {"quality": "fast"}), ("balanced", 5, {"quality": "balanced"}),
        ):  # fmt: skip
            ending = world.question("And the last?" if arm == "exact" else "What is the first word?")
            (output,) = world.ask(world.instruction(lead) + document + ending, tokens=2, **asked)
            receipt = {} if "opt_out" in asked else world.receipt(output)
            name = arm if arm in ("cold", "miss", "exact") or receipt.get("reused_tokens") else f"{arm}, not reused"
            if number >= 2:
                arms.setdefault(name, []).append(output.metrics.first_token_latency * 1e3)
    return {name: {"ms": round(statistics.median(times), 2), "n": len(times)} for name, times in arms.items()}


def run(name: str, tokenizer: str, out: Path, tiny: bool) -> None:
    begun, row = time.monotonic(), {"class": name, "tiny": tiny}
    try:
        with tempfile.TemporaryDirectory() as folder:
            world = start(name, tokenizer, Path(folder), tiny)
            row["start s"] = round(time.monotonic() - begun, 1)
            row["check"] = check(world)
            world.start()
            world.worker.load, world.worker.capture = world._real["load"], world._real["capture"]
            with take_turn(os.environ.get("TURN", "")):
                row["ttft"] = {length: time_arms(world, length, rounds) for length, rounds in TIMED.items()}
    except BaseException:  # the file must say it: the machine may be gone when we look
        row["error"] = traceback.format_exc()[-4000:]
        print(row["error"], file=sys.stderr, flush=True)
    row["s"] = round(time.monotonic() - begun, 1)
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    os._exit("error" in row)


def main() -> None:
    tiny, names = "--tiny" in sys.argv, [one for one in sys.argv[1:] if one != "--tiny"]
    out, tokenizer, *chosen = names
    if len(chosen) == 1:
        run(chosen[0], tokenizer, Path(out), tiny)
    for name in chosen or NAMES:
        subprocess.run([sys.executable, __file__, out, tokenizer, name, *(["--tiny"] if tiny else [])])


if __name__ == "__main__":
    main()
