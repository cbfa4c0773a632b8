"""Every script in examples/ runs as a reader would run it, and says the thing it is there to say."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from semblend.materialize.blend.quality import QualitySettings
from semblend.plan.reuse_plan import ReusePlan
from semblend.plan.times import NOTHING, PASSES, Timed, TimeModel, Work
from semblend.session.sessions import count_work
from semblend.span import Span

EXAMPLES = Path(__file__).parents[1] / "examples"
KEY_LINES = {
    "quickstart.py": ["1283 of 1296 tokens are held by req-1", "nothing_shared"],
    "several_donors.py": ["1199 of 1225 tokens from 3 donors", "the edited token is left to the engine"],
    "arrange_on_the_client.py": ["as retrieved   34612 characters", "arranged       83640 characters"],
    "tenants.py": ["the same namespace     600 tokens", "another tenant         nothing (nothing_shared)"],
    "receipts.py": ["planned 1000, counted as reused: 0", "confirmed, counted as reused: 984", "changed: stale"],
    "shared_store.py": ["0 donors before refresh, 1 taken over", "after a restart: 2000 tokens found", "mode 600"],
    "semantic_provider.py": ["for the second request: first"],
    "transformers_generate.py": ["the same instruction  2858 exact", "another instruction   0 exact, 2793 reused"],
    "reuse_on_cpu.py": ["exact     cold_fallback: 1206 prefill", "fast      backend_materialized_reuse: 1122 reused"],
    "langchain_rag.py": ["as retrieved 22%", "arranged     42%"],
    "replay_trace.py": ["requests, a cache of 20,000 tokens", "adaptive_semantic", "simulated"],
    "compare_policies.py": ["belady knows the future: no policy can keep more"],
    "route_by_locality.py": ["least_loaded", "semantic_locality, prefix", "33 requests a second", "busiest over mean"],
    "estimate_log.py": [
        "an exact prefix cache holds 368; reuse at any offset adds 0",
        "844 more stand in donors",
        "another tenant: never shared",
    ],
}


NEED_A_SERVER = {  # and the hint that each gives without one
    "ask_vllm.py": "hint: start vLLM",  # asked in tests/engines/vllm/test_server.py
    "ask_sglang.py": "hint: start SGLang",  # asked in tests/engines/sglang/test_server.py
    "openai_client.py": "hint: start a server with make serve",
}
NEEDED = {
    "langchain_rag.py": "langchain_core",
    "openai_client.py": "openai",
    "transformers_generate.py": "transformers",
}


def skip_without(name: str) -> None:
    if name in NEEDED:
        pytest.importorskip(NEEDED[name], reason=f"{name} needs {NEEDED[name]}")


def run_example(name: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


def test_every_example_is_checked() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(KEY_LINES) | set(NEED_A_SERVER)


HIDDEN = """
import importlib.util, runpy, sys
hidden, script = sys.argv[1:]
sys.modules[hidden] = None  # as if it were not installed
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == hidden else find_spec(name, *more)
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.parametrize("name", sorted({**NEEDED, "reuse_on_cpu.py": "torch"}))
def test_without_its_package_an_example_says_what_to_install(name: str) -> None:
    hidden = NEEDED.get(name, "torch")
    command = [sys.executable, "-c", HIDDEN, hidden, str(EXAMPLES / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "hint: pip install" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", sorted(NEED_A_SERVER))
def test_without_a_server_an_example_says_what_to_do(name: str) -> None:
    skip_without(name)
    done = run_example(name, "http://127.0.0.1:9")
    assert done.returncode == 1
    assert NEED_A_SERVER[name] in done.stderr


CHARACTERS = 4  # of a token, to the scripted server
PASS_MS = {"7B": (6.5, 122.0), "1.5B": (6.5, 40.0)}
"""Passes over 32 and over 4,096 rows: two cost 13 ms beside their rows on an H200, as much as 460 and 1,600 rows."""


def count_tokens(body: dict[str, Any]) -> int:
    texts = [message["content"] for message in body["messages"]] if "messages" in body else [body["text"]]
    return sum(map(len, texts)) // CHARACTERS


@contextmanager
def script_engine(
    reason: str | None, asked: list[dict[str, Any]], context: int = 32_768, last: int = 4
) -> Iterator[str]:
    """The address of a server that answers as vLLM and SGLang do.

    The receipt of the ``last`` request has this reason, or reuse if it is None; earlier ones shared nothing.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({"data": [{"id": "m", "max_model_len": context}]})

        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            tokens, is_last = count_tokens(asked[-1]), len(asked) == last
            reused = tokens - 40 if is_last and reason is None else 0
            why = None if reused else reason if is_last else "nothing_shared"
            receipt = {
                "outcome": "cold_fallback" if why else "backend_materialized_reuse", "reason": why,
                "prompt_tokens": tokens, "exact_tokens": 0, "reused_tokens": reused, "recomputed_tokens": 0,
                "prefill_tokens": tokens - reused,
            }  # fmt: skip
            if self.path == "/generate":
                self.reply({"meta_info": {"semblend": [receipt]}})
            else:
                self.reply({"usage": {"prompt_tokens": tokens}, "kv_transfer_params": {"semblend": receipt}})

        def reply(self, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_vllm_example_says_why_nothing_was_reused_and_what_to_try() -> None:
    for reason, next_step in (
        ("below_break_even", "hint: this mode saves too little here: send a longer prompt, or add `fast`"),
        ("quality_risk", "`fast` does not measure that"),
        ("nothing_shared", "donor_host_bytes must hold the prompt"),
        ("validation_failed", "hint: set SEMBLEND_EVENTS=events.jsonl"),
    ):
        with script_engine(reason, []) as address:
            done = run_example("ask_vllm.py", address)
        assert done.returncode == 1
        assert f"cold_fallback ({reason}): of" in done.stdout.splitlines()[1]
        assert f"nothing was reused: {reason}" in done.stderr
        assert next_step in done.stderr


def test_the_sglang_example_says_why_nothing_was_reused_and_what_to_try() -> None:
    with script_engine("below_break_even", [], last=2) as address:
        done = run_example("ask_sglang.py", address)
    assert done.returncode == 1
    assert "nothing was reused: below_break_even\nhint: what can be moved saves less" in done.stderr


def test_the_vllm_example_is_silent_where_reuse_was_confirmed() -> None:
    asked: list[dict[str, Any]] = []
    with script_engine(None, asked) as address:
        done = run_example("ask_vllm.py", address, "fast")
    assert (done.returncode, done.stderr) == (0, "")
    assert "backend_materialized_reuse: of" in done.stdout.splitlines()[1]
    assert {body["kv_transfer_params"]["semblend"]["quality"] for body in asked} == {"fast"}


def is_worth_it(tokens: int, few_ms: float, many_ms: float) -> bool:
    """Whether mode balanced begins with a document of so many tokens between ten of an instruction and a question."""
    model, plan = TimeModel(), ReusePlan((Span("d", 4, 10, tokens - 36),), tokens)
    model.warm_up(PASSES, Timed(Work.of_prefill(32), few_ms), Timed(Work.of_prefill(4096), many_ms))
    work = count_work(plan, QualitySettings(), 0.1)
    return model.expect("balanced", work, NOTHING, Work.of_prefill(tokens)).pays


def test_what_the_vllm_example_sends_is_worth_reusing_in_the_default_mode_on_a_gpu() -> None:
    asked: list[dict[str, Any]] = []
    with script_engine(None, asked) as address:
        assert run_example("ask_vllm.py", address).returncode == 0
    *samples, first, second = asked
    assert all("kv_transfer_params" not in body for body in asked), "the server's own mode"
    leads, texts = zip(*([one["content"] for one in body["messages"]] for body in (first, second)), strict=True)
    assert leads[0] != leads[1], "another instruction: a prefix cache finds nothing"
    assert texts[0].partition("\n\nWhat do you make")[0] == texts[1].partition("\n\nWhat do you make")[0]
    assert first["cache_salt"] == second["cache_salt"] not in [body["cache_salt"] for body in samples]
    assert count_tokens(second) >= 20_000
    for model, times in PASS_MS.items():
        assert is_worth_it(count_tokens(second), *times), model
        assert not is_worth_it(400, *times), f"a prompt as short as this is declined with a {model}"


def test_what_the_vllm_example_sends_fits_a_small_context() -> None:
    asked: list[dict[str, Any]] = []
    with script_engine(None, asked, context=1024) as address:
        assert run_example("ask_vllm.py", address).returncode == 0
    assert 600 < count_tokens(asked[-1]) < 1024 - 8


def test_the_openai_client_gets_receipts_from_a_server() -> None:
    skip_without("openai_client.py")
    pytest.importorskip("fastapi", reason="the server needs the extra local")
    from live_server import run_server

    from tests.fakes.fake_engine import FakeEngine

    with run_server(FakeEngine()) as server:
        done = run_example("openai_client.py", server.url)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.endswith("0 reused")
    assert "backend_materialized_reuse" in second


@pytest.mark.parametrize("name", KEY_LINES)
def test_an_example_runs_anywhere_and_says_what_it_is_there_to_say(name: str, tmp_path: Path) -> None:
    skip_without(name)
    done = run_example(name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for line in KEY_LINES[name]:
        assert line in done.stdout
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind"
