"""Two of our routers in one real Dynamo deployment: whichever gets a request, its document is known."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from redis_server import RedisServer

ROUNDS = 6
PATIENCE_S = 120.0


def test_a_document_that_one_router_placed_is_pinned_by_both(tmp_path, documents):
    from dynamo_deployment import DynamoDeployment

    with RedisServer(tmp_path) as redis:
        shared = {"SEMANTICKV_REDIS_URL": redis.url, "SEMANTICKV_HASH_KEY": "a secret of both"}
        with DynamoDeployment(tmp_path, router=False) as deployment:
            for number in range(2):
                deployment.start_router(f"router{number}", **shared)
            deployment.wait_for_model("semantic")
            deployment.wait_for_routers(2)
            taken = count_taken(deployment)
            homes = {document: deployment.ask("One. " + document).worker for document in documents}
            wait_for_news(deployment, taken + len(documents))
            answers = [
                (document, deployment.ask(f"Question {number}, " * (number + 2) + document))
                for number in range(ROUNDS)
                for document in documents
            ]
            assert [answer.reason for _, answer in answers] == ["donors"] * len(answers)
            assert all(answer.worker == homes[document] for document, answer in answers)
            told = ask_routers(deployment)
    assert len(told) == 2
    assert all(one["donors"] > 0 for one in told), "the frontend sent requests to both"
    assert all(one["shared"]["connected"] and one["shared"]["taken"] > 0 for one in told)


def wait_for_news(deployment, wanted: int) -> None:
    """Until every placement has reached the router that did not make it: Redis brings it a moment later."""
    end = time.monotonic() + PATIENCE_S
    while count_taken(deployment) < wanted:
        assert time.monotonic() < end, "the routers do not hear of each other"


def count_taken(deployment) -> int:
    return sum(one["shared"]["taken"] for one in ask_routers(deployment))


def ask_routers(deployment) -> list[dict]:
    script = Path(__file__).with_name("ask_status.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script],
        env=deployment.make_environment(), capture_output=True, text=True, timeout=400, check=True,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
