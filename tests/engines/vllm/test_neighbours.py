"""Two engines on one machine share donors through a directory; one is killed, the other goes on and is right."""

from __future__ import annotations

import json
import os
import time

import pytest
from apart import begin

MODEL = os.environ.get("SEMBLEND_TEST_VLLM_MODEL", "")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("bits", [16, 8])
def test_a_neighbour_reuses_the_donors_of_an_engine_that_was_killed(apart, tmp_path, bits):
    directory, published = tmp_path / "donors", tmp_path / "published"
    directory.mkdir(mode=0o700)
    settings = {"model": MODEL, "directory": str(directory), "published": str(published), "bits": bits}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    first = begin("publish", tmp_path / "settings.json", tmp_path / "never", tmp_path / "log")
    deadline = time.monotonic() + 900
    while not published.exists():
        assert first.is_alive(), (tmp_path / "log").read_text()[-4000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    first.kill()
    first.join()
    told = apart("reuse", directory=str(directory), bits=bits)
    receipt = told["shared"]["receipt"]
    assert receipt["outcome"] == "backend_materialized_reuse", receipt
    assert receipt["reused_tokens"] > 0.3 * told["shared"]["prompt"]
    assert told["first"]["receipt"]["reused_tokens"] == receipt["reused_tokens"], "the first request after a start"
    assert told["first"]["tokens"] == told["shared"]["tokens"]
    assert told["cold again"]["tokens"] == told["cold"]["tokens"], "nothing of it is in the exact cache"
    assert told["damaged"]["receipt"]["reused_tokens"] == 0
    assert told["damaged"]["tokens"] == told["cold"]["tokens"]
