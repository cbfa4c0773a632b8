"""Two vLLM servers on one machine share donors over HTTP; one is killed, and the other never answers wrongly."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from forks import ForkedServer
from server_rounds import Pair, check_controls, run_round, write_model

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SHARED = "/dev/shm" if Path("/dev/shm").is_dir() else None


@pytest.fixture
def pair(tmp_path, monkeypatch):
    started = SimpleNamespace(Popen=ForkedServer, STDOUT=subprocess.STDOUT, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr("lib.server_process.subprocess", started)
    write_model(tmp_path / "model")
    with tempfile.TemporaryDirectory(prefix="donors-", dir=SHARED) as directory:
        servers = Pair(str(tmp_path / "model"), tmp_path, Path(directory))
        try:
            yield servers
        finally:
            servers.close()


def test_kill_9_of_a_server_never_makes_its_neighbour_answer_wrongly(pair, is_long):
    assert check_controls(pair).list_failures() == [], "a wrong donor has to be noticed, or the rest shows nothing"
    kills = 25 if is_long else 3
    rounds = [run_round(pair, number, documents=3, seed=1, restart=number < kills - 1) for number in range(kills)]
    assert not any(one.problems for one in rounds)
    assert sum(one.reused for one in rounds) >= 6
    assert sum(one.reused_after_kill for one in rounds) >= 1
    assert sum(one.reused_by_restarted for one in rounds) >= 2
