"""The simulation API: the source text's request, the simulator's own numbers, errors with hints."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient

from semantickv.analysis.live_simulation import LiveSimulation
from semantickv.apps.simulation_api import MOST_BODY_BYTES, build_api
from semantickv.settings import ApiSettings
from semantickv.simulator.capacity import Capacity
from semantickv.simulator.simulate import simulate
from semantickv.traces.segmentation import TextBlock
from semantickv.traces.trace import Trace, TraceRequest
from semblend.errors import InputError

EXAMPLE = {
    "request_id": "req_001",
    "session_id": "sess_001",
    "messages": [
        {"role": "system", "content": "You are a support assistant."},
        {"role": "user", "content": "CONTEXT: Document: refund policy section.\n\nUSER: summarize the policy."},
    ],
}


@pytest.fixture
def client() -> TestClient:
    return TestClient(build_api(ApiSettings()))


def test_the_request_of_the_source_text_misses_and_then_hits(client):
    first, second = (client.post("/v1/simulate/request", json=EXAMPLE).json() for _ in range(2))
    assert first["simulated"] is True
    assert (first["request_id"], first["cached_prompt_tokens"]) == ("req_001", 0)
    assert first["estimated_ttft_ms"] == pytest.approx(80 + 0.08 * first["prompt_tokens"])
    assert [block["semantic_type"] for block in first["blocks"]] == ["system", "retrieved_context", "user"]
    assert second["uncached_prompt_tokens"] == 0
    assert all(block["hit"] for block in second["blocks"])


def test_a_block_behind_a_miss_is_no_hit(client):
    client.post("/v1/simulate/request", json=EXAMPLE)
    moved = {"messages": [{"role": "system", "content": "Another beginning."}, *EXAMPLE["messages"][1:]]}
    assert client.post("/v1/simulate/request", json=moved).json()["cached_prompt_tokens"] == 0


def test_state_and_summary_add_up(client):
    asked = [client.post("/v1/simulate/request", json=EXAMPLE).json() for _ in range(3)]
    summary, state = client.get("/v1/metrics/summary").json(), client.get("/v1/cache/state").json()
    assert summary["requests"] == 3
    assert summary["tokens_saved"] == sum(one["cached_prompt_tokens"] for one in asked)
    assert state["used_tokens"] == asked[0]["prompt_tokens"] == sum(state["tokens_by_type"].values())


def test_before_the_first_request_a_rate_is_null_and_not_zero(client):
    assert client.get("/v1/metrics/summary").json()["token_hit_rate"] is None
    assert client.get("/v1/cache/state").json()["blocks"] == 0


def test_an_experiment_gives_what_the_command_gives(client):
    done = client.post("/v1/experiments/run", json={"workload_families": ["repeated_system"], "policies": ["lru"]})
    assert done.json()["simulated"] is True
    assert [record["policy"] for record in done.json()["modes"]["prefix"]] == ["lru"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/simulate/request", {"messages": []}),
        ("/v1/simulate/request", {"messages": [{"role": "user"}]}),
        ("/v1/simulate/request", {"messages": [{"role": "user", "content": ""}]}),
        ("/v1/experiments/run", {"experiment": "../../etc/passwd"}),
        ("/v1/experiments/run", {"experiment": "nothing"}),
        ("/v1/experiments/run", {"workload_families": ["nothing"]}),
        ("/v1/experiments/run", {"policies": ["nothing"]}),
        ("/v1/experiments/run", {"session": 3}),
    ],
)
def test_a_mistake_is_400_with_a_hint(client, path, body):
    answer = client.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["hint"]


def test_a_mock_answer_says_that_it_is_one_and_its_trace_holds_no_text(client):
    answer = client.post("/v1/mock/generate", json=EXAMPLE).json()
    assert answer["mock"] is True
    latest = client.get("/v1/traces/latest").json()["requests"]
    assert latest == [answer["trace"]]
    assert "refund" not in str(latest)


def test_a_body_that_is_too_large_is_refused(client):
    assert client.post("/v1/simulate/request", content=b"x" * (MOST_BODY_BYTES + 1)).status_code == 413


def test_the_live_simulation_equals_the_batch_simulator_and_is_bounded():
    live = LiveSimulation("lru", 300)
    requests = []
    for at in range(20):
        kinds = [at % 3, 10 + at % 5, 100 + at]
        blocks = [TextBlock("other", "", 20 + kind % 7, kind) for kind in kinds]
        found = live.add(blocks, request_id=str(at))
        requests.append(
            TraceRequest(str(at), at, tuple(kinds), tuple(block.tokens for block in blocks), ("other",) * 3)
        )
        batch = simulate(Trace.from_requests(requests), "lru", Capacity.tokens(300))
        assert found.hit_tokens == batch.hit_tokens_by_request[-1]
    short = LiveSimulation("lru", 300, most=3)
    kept = [short.add([TextBlock("user", "", 5, 7)], request_id="x").replayed_requests for _ in range(5)]
    assert kept == [1, 2, 3, 3, 3]


def test_a_policy_that_knows_the_future_is_refused():
    with pytest.raises(InputError):
        LiveSimulation("belady", 100)
