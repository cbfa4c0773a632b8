"""Every script in examples/ runs as a reader would run it, and says the thing it is there to say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
KEY_LINES = {
    "quickstart.py": ["1283 of 1296 tokens are held by req-1", "nothing_shared"],
    "several_donors.py": ["1199 of 1225 tokens from 3 donors", "the edited token is left to the engine"],
    "arrange_on_the_client.py": ["as retrieved   34612 characters", "arranged       83640 characters"],
    "tenants.py": ["the same namespace     600 tokens", "another tenant         nothing (nothing_shared)"],
    "receipts.py": ["planned 1000, counted as reused: 0", "confirmed, counted as reused: 984", "changed: stale"],
    "shared_store.py": ["0 donors before refresh, 1 taken over", "after a restart: 2000 tokens found", "mode 600"],
    "semantic_provider.py": ["for the second request: first", "a stock cache serves 0 tokens of it"],
    "transformers_generate.py": ["the same instruction  2858 exact", "another instruction   0 exact, 2825 reused"],
    "reuse_on_cpu.py": ["exact     cold_fallback: 1206 prefill", "fast      backend_materialized_reuse: 1154 reused"],
    "langchain_rag.py": ["as retrieved 22%", "arranged     42%"],
    "replay_trace.py": ["requests, a cache of 20,000 tokens", "adaptive_semantic", "simulated"],
    "compare_policies.py": ["belady knows the future: no policy can keep more"],
    "route_by_locality.py": ["round_robin", "semantic_locality", "simulated, with four empty caches"],
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
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


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
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "hint: pip install" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", sorted(NEED_A_SERVER))
def test_without_a_server_an_example_says_what_to_do(name: str) -> None:
    skip_without(name)
    done = run_example(name, "http://127.0.0.1:9")
    assert done.returncode == 1
    assert NEED_A_SERVER[name] in done.stderr


def test_the_openai_client_gets_receipts_from_a_server() -> None:
    skip_without("openai_client.py")
    pytest.importorskip("fastapi", reason="the server needs the extra local")
    from live_server import run_server

    from semblend.engine.server.fake_engine import FakeEngine

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


@pytest.mark.parametrize("name", [*KEY_LINES, *NEED_A_SERVER])
def test_an_example_fits_on_a_page(name: str) -> None:
    assert (EXAMPLES / name).read_text("utf-8").count("\n") < 60
