"""Asks one vLLM with so many ranks the same prompts: a scenario of `apart`, for `test_tensor_parallel`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from small_model import write_small_model


def ask_all(ranks: int, folder: Path) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    from semblend.materialize.gate.thresholds import Thresholds

    if not (folder / "config.json").exists():
        write_small_model(folder)
    # A random model's gate never accepts: one repair has to do, so that ranks choose its tokens together.
    (folder / "thresholds.json").write_text(Thresholds(1e9, 1e9, 1e9).to_json(), encoding="utf-8")
    llm = LLM(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=2048,
        max_num_batched_tokens=2048, kv_cache_memory_bytes=64 << 20, max_num_seqs=4, block_size=32,
        tensor_parallel_size=ranks, disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector="SemBlendConnectorV1",
            kv_connector_module_path="semblend.integration.vllm.connector_v1",
            kv_role="kv_both",
            kv_connector_extra_config={
                "donor_host_bytes": 3 << 20,  # two or three donors, so that some are evicted on every rank
                "thresholds": str(folder / "thresholds.json"),
                "reset_drops_donors": False,
                "deep_tolerance": 0,  # random weights
            },
        ),
    )  # fmt: skip
    rng = random.Random(0)

    def drawn(count: int) -> list[int]:
        return [rng.randrange(10, 990) for _ in range(count)]

    def ask(arm: str, ids: list[int], **asked: Any) -> dict[str, Any]:
        llm.reset_prefix_cache()
        extra = {"kv_transfer_params": {"semblend": asked}}
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, extra_args=extra)
        (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        receipt = (output.kv_transfer_params or {}).get("semblend") or {}
        kinds = ("outcome", "reason", "exact_tokens", "reused_tokens", "recomputed_tokens", "prefill_tokens")
        said = {kind: receipt.get(kind) for kind in kinds}
        return {"arm": arm, "tokens": list(output.outputs[0].token_ids), **said}

    rows = []
    for _ in range(5):
        document, question = drawn(400), drawn(20)
        target = drawn(17) + document + question
        rows.append(ask("cold", target, opt_out=True))
        rows.append(ask("donor", drawn(40) + document + question, quality="exact"))
        rows.append(ask("fast", target, quality="fast"))
        rows.append(ask("balanced", target, quality="balanced"))
    return rows
