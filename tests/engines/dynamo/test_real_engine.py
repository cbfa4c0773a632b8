"""A real vLLM with our connector as a worker of a real Dynamo: placed there, and prefill saved, by its receipts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

MODEL = Path(os.environ.get("SEMBLEND_TEST_VLLM_MODEL", "missing"))
TEXTS = (
    "The harbour board met on Tuesday to hear the engineer's report on the north quay. ",
    "A bakery in the old town keeps its sourdough in a cellar that was cut into the rock two hundred years ago. ",
    "The observatory closed its dome at midnight because the wind had risen above sixty kilometres an hour. ",
)


@pytest.mark.skipif(
    "SEMBLEND_TEST_DYNAMO_VLLM" not in os.environ,
    reason="no vLLM for Dynamo here: .ci/engines/vllm-cpu setup, then .ci/engines/dynamo",
)
def test_documents_stay_with_the_engine_that_has_them_and_cost_less_prefill(tmp_path):
    from dynamo_deployment import DynamoDeployment

    documents = [
        " ".join(f"{text}Paragraph {n} of {len(text)}: item {n * n % 97} follows item {n * 7 % 89}." for n in range(14))
        for text in TEXTS
    ]
    with DynamoDeployment(tmp_path, workers=0, block_size=32, model=MODEL) as dynamo:
        dynamo.start_vllm_worker_on_cpu()
        dynamo.wait_until_served(1)
        (home,) = dynamo.list_workers()
        cold = [dynamo.ask(f"What is this about?\n{document}", answer_tokens=2) for document in documents]
        dynamo.start_worker(1)  # a mocker with nothing to do: where Dynamo would send the next ones
        dynamo.wait_for_workers(2)
        again = [dynamo.ask(f"{'Name three facts of it. ' * 3}\n{document}", answer_tokens=2) for document in documents]
    assert {answer.status for answer in [*cold, *again]} == {200}
    assert [(answer.worker, answer.reason) for answer in again] == [(home, "donors")] * len(documents)
    assert all(answer.receipt["prefill_tokens"] > 300 for answer in cold)
    reused = [one.receipt for one in again if one.receipt["outcome"] == "backend_materialized_reuse"]
    assert reused, [answer.receipt for answer in again]  # the quality gate may refuse one or the other
    assert all(2 * receipt["reused_tokens"] > receipt["prompt_tokens"] for receipt in reused)
    assert all(4 * receipt["prefill_tokens"] < receipt["prompt_tokens"] for receipt in reused)
