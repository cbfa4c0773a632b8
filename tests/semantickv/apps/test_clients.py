"""Clients that people have, unchanged, against the router: openai, LangChain, curl, a load like vLLM's benchmark."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from edge_servers import PATIENCE_S, serve
from live_server import run_server

from semantickv.apps.build import build_router
from semantickv.settings import EdgeSettings
from semblend import SemBlend, SemBlendConfig
from tests.fakes.fake_engine import FakeEngine

MODEL = "fake"
ENGINES = Path(__file__).parents[3] / ".engines"
VLLM, TOKENIZER = ENGINES / "vllm", ENGINES / "models" / "smollm2-135m"
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
DOCUMENT = " ".join(f"clause{n}" for n in range(300))


@contextmanager
def fleet():
    """Two of our servers, whose engine makes text up, behind one router."""
    config = SemBlendConfig(embedder="none")
    with (
        SemBlend(config) as one,
        SemBlend(config) as two,
        run_server(FakeEngine(one)) as first,
        run_server(FakeEngine(two)) as second,
    ):
        app = build_router(EdgeSettings(replicas=(first.url, second.url), trace=False))
        with serve(app) as (url, _):
            yield url, app


@pytest.fixture(scope="module")
def router():
    with fleet() as found:
        yield found


def test_the_openai_package_chats_streams_completes_and_lists_models(router):
    openai = pytest.importorskip("openai", reason="pip install openai")
    with openai.OpenAI(base_url=router[0] + "/v1", api_key="key", timeout=PATIENCE_S, max_retries=0) as client:
        model = client.models.list().data[0].id
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": DOCUMENT}]
        whole = client.chat.completions.create(model=model, messages=messages, max_tokens=4)
        assert whole.choices[0].message.content
        assert whole.usage.prompt_tokens > 100
        events = list(
            client.chat.completions.create(
                model=model, messages=messages, max_tokens=4, stream=True, stream_options={"include_usage": True}
            )
        )
        assert (
            "".join(e.choices[0].delta.content or "" for e in events if e.choices) == whole.choices[0].message.content
        )
        assert events[-1].usage.prompt_tokens == whole.usage.prompt_tokens
        assert client.completions.create(model=model, prompt=DOCUMENT, max_tokens=4).choices[0].text
        raw = client.chat.completions.with_raw_response.create(model=model, messages=messages, max_tokens=4)
        assert raw.headers["x-semantic-route"] == "exact_prefix_route"


def test_the_openai_package_sees_errors_as_its_own(router):
    openai = pytest.importorskip("openai", reason="pip install openai")
    with (
        openai.OpenAI(base_url=router[0] + "/v1", api_key="key", timeout=PATIENCE_S, max_retries=0) as client,
        pytest.raises(openai.BadRequestError),
    ):
        client.chat.completions.create(model=MODEL, messages=[], max_tokens=4)


def test_the_asynchronous_openai_package_streams_side_by_side(router):
    openai = pytest.importorskip("openai", reason="pip install openai")

    async def ask(client, number: int) -> str:
        messages = [{"role": "user", "content": f"{number} {DOCUMENT}"}]
        events = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4, stream=True)
        return "".join([e.choices[0].delta.content or "" async for e in events if e.choices])

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=router[0] + "/v1", api_key="key", timeout=PATIENCE_S) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(12)))

    assert all(asyncio.run(run()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_langchain_chats_and_streams(router):
    package = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")
    model = package.ChatOpenAI(base_url=router[0] + "/v1", api_key="key", model=MODEL, max_tokens=4, timeout=PATIENCE_S)
    whole = model.invoke([("system", "Be brief."), ("user", DOCUMENT)])
    assert whole.content
    assert whole.usage_metadata["input_tokens"] > 100
    assert (
        "".join(piece.content for piece in model.stream([("system", "Be brief."), ("user", DOCUMENT)])) == whole.content
    )


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl_gets_json_and_events(router):
    def curl(*words: str, **body: object) -> str:
        data = json.dumps({"messages": [{"role": "user", "content": DOCUMENT}], "max_tokens": 4, **body})
        command = ["curl", "-sS", "--fail-with-body", "--max-time", str(PATIENCE_S), *words, "-d", data]
        command += ["-H", "Content-Type: application/json", router[0] + "/v1/chat/completions"]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout

    assert json.loads(curl())["choices"]
    assert "x-replica-id: r" in curl("-i")
    events = [line for line in curl("-N", stream=True).split("\n\n") if line]
    assert events[-1] == "data: [DONE]"
    assert "transfer-encoding: chunked" in curl("-i", "--http1.1", stream=True).lower()
    assert json.loads(curl("-H", "Expect: 100-continue"))["choices"]
    assert json.loads(curl("-H", "Transfer-Encoding: chunked"))["choices"]


@pytest.mark.slow  # vLLM alone takes half a minute to be imported
def test_vllms_own_benchmark_runs_against_the_router(router, tmp_path):
    """``vllm bench serve`` of a real vLLM, unchanged: it waits for the server, warms up, sends, and counts."""
    if not (VLLM / ".made-of").exists() or not TOKENIZER.exists():
        pytest.skip("no vLLM here: .ci/engines/vllm-cpu setup")
    url, app = router
    requests, before = 24, sum(replica.served for replica in app.router.replicas)
    # The package of the CPU is called vllm-cpu, and the command asks for the version of "vllm"; this is what it calls.
    command = [str(VLLM / "bin" / "python"), "-c", BENCH_SERVE, "--backend", "openai-chat", "--model", MODEL]
    command += ["--base-url", url, "--endpoint", "/v1/chat/completions", "--tokenizer", str(TOKENIZER)]
    command += ["--dataset-name", "random", "--random-input-len", "128", "--random-output-len", "8", "--disable-tqdm"]
    command += ["--num-prompts", str(requests), "--request-rate", "100", "--max-concurrency", "8", "--seed", "1"]
    command += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"]
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONPATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, **quiet})
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (requests, 0)
    assert result["total_output_tokens"] >= requests
    assert result["median_ttft_ms"] > 0
    assert sum(replica.served for replica in app.router.replicas) - before >= requests
    assert sum(replica.running for replica in app.router.replicas) == 0


def test_a_load_like_vllms_benchmark_is_served_and_accounted_for(router):
    """Streams at random moments, as ``vllm bench serve`` sends them: every one with its first token and its usage."""
    url, app = router
    requests, before = 60, sum(replica.served for replica in app.router.replicas)

    async def ask(client: httpx.AsyncClient, number: int) -> tuple[float, int]:
        await asyncio.sleep(0.01 * (number % 17))
        body = {"model": MODEL, "prompt": f"{number % 5} {DOCUMENT}", "max_tokens": 8, "stream": True}
        body["stream_options"] = {"include_usage": True}
        began, first, tokens = time.perf_counter(), None, 0
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    first = first or time.perf_counter() - began
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        return first or 0.0, tokens

    async def run() -> list[tuple[float, int]]:
        limits = httpx.Limits(max_connections=32)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(requests)))

    found = asyncio.run(run())
    assert all(first > 0 and tokens > 0 for first, tokens in found)
    assert sum(replica.served for replica in app.router.replicas) - before == requests
    assert sum(replica.running for replica in app.router.replicas) == 0
