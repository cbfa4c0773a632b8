"""How long does the next turn of a conversation take that was answered from reused KV: with going on from it, and without?

    .ci/engines/vllm-cpu python research/vllm/vllm_turns.py --quality fast
    .ci/engines/vllm-cpu python research/vllm/vllm_turns.py --quality fast --anew   # share_equal_prompts off

Each conversation has a document that a donor holds under another instruction, and three turns with answers of 32
tokens. Printed: the median TTFT of each turn, what donors gave, and how many loads there were.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

WORDS = "amber basin cedar delta ember flint grove harbor island jungle kettle lantern".split()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quality", default="fast")
    parser.add_argument("--anew", action="store_true")
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--conversations", type=int, default=6)
    args = parser.parse_args()
    asked = {"quality": args.quality, "share_equal_prompts": not args.anew, "control_share": 0.0, "heal_prefixes": False}
    llm = LLM(
        model=os.environ["SEMBLEND_TEST_VLLM_MODEL"], dtype="float32", enforce_eager=True, max_model_len=4096,
        kv_cache_memory_bytes=1 << 30, max_num_seqs=4, disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector="SemBlendConnectorV1", kv_connector_module_path="semblend.integration.vllm.connector_v1",
            kv_role="kv_both", kv_connector_extra_config={"donor_host_bytes": 2 << 30, **asked},
        ),
    )  # fmt: skip
    encode = llm.get_tokenizer().encode

    def ask(prompt: list[int]) -> tuple[list[int], dict[str, Any]]:
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return list(output.outputs[0].token_ids), output.kv_transfer_params["semblend"]

    turns: list[list[dict[str, Any]]] = [[], [], []]
    for number in range(args.conversations + 1):  # the first one warms up
        rng = random.Random(number)
        text = " ".join(f"{rng.choice(WORDS)} {rng.randint(10, 99)}" for _ in range(args.tokens))
        document = encode(text)[: args.tokens]
        ask(encode(f"You are assistant number {number}. Be brief.\n") + document + encode("\nWhat is the first word?\n"))
        prompt = encode(f"Answer number {number} with one word, please.\n") + document
        for turn in range(3):
            prompt += encode(f"\nQuestion {turn}: which word comes after number {rng.randint(10, 99)}?\n")
            answer, receipt = ask(prompt)
            prompt += answer
            if number:
                turns[turn].append(receipt)
    for turn, receipts in enumerate(turns, 1):
        ttft = statistics.median(one["ttft_ms"] for one in receipts)
        reused = statistics.median(one["reused_tokens"] for one in receipts)
        anew = sum(one["reused_tokens"] > 0 and "earlier prompt" not in one["detail"] for one in receipts)
        risks = [one["risk"] for one in receipts if one["risk"] is not None]
        risk = f", risk {min(risks):.4f} to {max(risks):.4f}" if risks else ""
        print(f"turn {turn}: TTFT {ttft:.0f} ms, {reused:.0f} tokens reused, {anew} of {len(receipts)} loaded{risk}")


main()
