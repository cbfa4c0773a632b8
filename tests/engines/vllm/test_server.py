"""The documented line, nothing else: three processes, HTTP, receipts in answers, our metrics on vLLM's endpoint."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LINE = {
    "kv_connector": "SemBlendConnectorV1",
    "kv_connector_module_path": "semblend.integration.vllm.connector_v1",
    "kv_role": "kv_both",
}


class Server:
    def __init__(self, log, model, connector=True, start=subprocess.Popen):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        command += ["--served-model-name", "m", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
        command += ["--kv-cache-memory-bytes", str(160 << 20), "--block-size", "32", "--max-num-seqs", "4"]
        command += ["--enable-prompt-tokens-details", "--port", str(self.port), "--host", "127.0.0.1"]
        command += ["--kv-transfer-config", json.dumps(LINE)] if connector else []
        self.log, self.events = log, log.with_name("events.jsonl")
        environment = dict(os.environ, VLLM_ENABLE_V1_MULTIPROCESSING="1", SEMBLEND_QUALITY="fast")
        environment["SEMBLEND_EVENTS"] = str(self.events)
        self.process = start(
            command, env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT, start_new_session=True
        )

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=600) as answer:
            return answer.read().decode()

    def post(self, path, body):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.loads(answer.read())

    def wait(self, seconds=1200):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, OSError):
                time.sleep(2)
        raise AssertionError("the server did not come up: " + self.log.read_text()[-3000:])

    def metric(self, name, **labels):
        """Sum of the samples of this name that have these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = self.get("/metrics").splitlines()
        ours = [line for line in lines if line.startswith((name + "{", name + " "))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in ours if all(label in line for label in wanted))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    running = Server(tmp_path_factory.mktemp("server") / "log.txt", os.environ["SEMBLEND_TEST_VLLM_MODEL"])
    try:
        running.wait()
        yield running
    finally:
        running.process.terminate()
        try:
            running.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(running.process.pid, 9)


def document(seed):
    rng = random.Random(seed)
    return " ".join(f"{rng.choice(['amber', 'basin', 'cedar', 'delta'])} {rng.randint(10, 99)}" for _ in range(60))


def ask(server, system, text, **more):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    return server.post(
        "/v1/chat/completions", {"model": "m", "messages": messages, "max_tokens": 3, "temperature": 0, **more}
    )


def test_the_documented_line_is_enough(server):
    text = document(1)
    ask(server, "You are brief.", text + "\nHow many words?")
    answer = ask(server, "You are an archivist and answer with care.", text + "\nWhich word comes first?")
    receipt = answer["kv_transfer_params"]["semblend"]
    assert receipt["outcome"] == "backend_materialized_reuse"
    assert receipt["reused_tokens"] > 150
    claimed = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert claimed >= receipt["reused_tokens"]
    log = server.log.read_text()
    assert f"SemBlend materialized request_id={receipt['request_id']}" in log
    # vLLM's own split: what a donor held, and what was computed inside the claim.
    assert "spans" not in receipt, "donors and positions are the operator's"
    held = sum(span["length"] for span in confirmed(server)[receipt["request_id"]]["spans"])
    assert server.metric("vllm:external_prefix_cache_hits_total") == claimed - receipt["exact_tokens"]
    assert server.metric("vllm:prompt_tokens_cached_by_source_total", source="host") == held
    # Ours, beside them.
    assert server.metric("semblend_tokens_total", kind="reused") == receipt["reused_tokens"]
    assert server.metric("semblend_requests_total", outcome="backend_materialized_reuse", engine="vllm") == 1
    kinds = sum(server.metric("semblend_tokens_total", kind=k) for k in ("exact", "reused", "recomputed", "prefill"))
    assert kinds == server.metric("vllm:prompt_tokens_total")
    assert server.metric("semblend_donor_bytes", tier="host") > 0


@pytest.mark.parametrize("mode", ["fast", "balanced"])
def test_the_example_of_the_guide_shows_a_confirmed_reuse(server, mode):
    example = Path(__file__).parents[3] / "examples" / "ask_vllm.py"
    command = [sys.executable, str(example), f"http://127.0.0.1:{server.port}", mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "cold_fallback (nothing_shared)" in first
    assert "backend_materialized_reuse: of" in second


def test_an_opt_out_reaches_the_connector_over_http(server):
    text = document(2)
    ask(server, "You are brief.", text)
    answer = ask(server, "You are an archivist.", text, kv_transfer_params={"semblend": {"opt_out": True}})
    assert answer["kv_transfer_params"]["semblend"]["reason"] == "disabled"


# -- eight clients at once ---------------------------------------------------------------------------------------------


def mixed(number):
    """Four documents come again with every tenth question, 12 of 40; some questions want no reuse."""
    kind = number % 10
    text = document(1000 + kind) if kind in (1, 4, 7, 9) else document(2000 + number)
    lead = f"You are clerk number {number}. " + "Take your time. " * (number % 5)
    wish = {"kv_transfer_params": {"semblend": {"quality": "exact" if number % 6 == 0 else "fast"}}}
    return lead, text + "\nWhich word comes first?", wish


def streamed(server, lead, text, wish):
    """The answer's text, read as a stream; vLLM puts no receipt there."""
    body = {"model": "m", "max_tokens": 6, "temperature": 0, "stream": True, "ignore_eos": True, **wish}
    body["messages"] = [{"role": "system", "content": lead}, {"role": "user", "content": text}]
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    said, done = "", False
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            data = line.decode().removeprefix("data: ").strip()
            done = done or data == "[DONE]"
            if data.startswith("{"):
                choices = json.loads(data)["choices"]
                said += "".join(choice["delta"].get("content") or "" for choice in choices)
    assert done, "a stream that was cut"
    return said


def confirmed(server):
    """Receipts by request, from the audit stream."""
    events = [json.loads(line) for line in server.events.read_text().splitlines()]
    assert not [event for event in events if event["event"] == "error"]
    return {event["request_id"]: event["receipt"] for event in events if "receipt" in event}


def test_eight_streams_at_once_answer_as_one_after_the_other(server):
    before = set(confirmed(server))
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda number: streamed(server, *mixed(number)), range(40)))
    receipts = [receipt for name, receipt in confirmed(server).items() if name not in before]
    assert len(receipts) == 40, "one for each request"
    kinds = ("exact", "reused", "recomputed", "prefill")
    assert all(sum(r[f"{kind}_tokens"] for kind in kinds) == r["prompt_tokens"] for r in receipts)
    assert sum(r["reused_tokens"] > 0 for r in receipts) >= 8
    exact = range(0, 40, 6)
    for number in exact:
        lead, text, wish = mixed(number)
        # Behind a salt of its own it finds neither donors nor exact blocks.
        alone = streamed(server, lead, text, {**wish, "cache_salt": "alone"})
        assert together[number] == alone
