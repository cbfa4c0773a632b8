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
    "estimate_log.py": ["an exact-prefix cache holds 368, donors at any offset 1367", "another tenant: never shared"],
}


NEED_A_SERVER = {"ask_vllm.py"}  # asked in tests/engines/vllm/test_server.py


def test_every_example_is_checked() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(KEY_LINES) | NEED_A_SERVER


@pytest.mark.parametrize("name", sorted(NEED_A_SERVER))
def test_without_a_server_an_example_says_what_to_do(name: str) -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), "http://127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "hint: start vLLM" in done.stderr


@pytest.mark.parametrize("name", KEY_LINES)
def test_an_example_runs_anywhere_and_says_what_it_is_there_to_say(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for line in KEY_LINES[name]:
        assert line in done.stdout
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind"


@pytest.mark.parametrize("name", [*KEY_LINES, *NEED_A_SERVER])
def test_an_example_fits_on_a_page(name: str) -> None:
    assert (EXAMPLES / name).read_text("utf-8").count("\n") < 60
