"""Kill a process that writes the store, and use one store from eight threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from endurance import store_faults

KILL_OFTEN = "import sys; from endurance import store_faults; print(store_faults.kill_often(int(sys.argv[1])).total())"


def test_after_kills_at_random_moments_every_donor_is_whole_and_true(is_long):
    """In a process without threads: a fork of one that has some may wait for ever for a lock that nobody holds."""
    kills = "200" if is_long else "15"
    command = [sys.executable, "-c", KILL_OFTEN, kills]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.stdout.strip() == kills, done.stderr


def test_eight_threads_see_no_error_no_stale_span_and_the_budget_holds(is_long):
    result = store_faults.hammer(threads=8, seconds=60 if is_long else 2)
    assert not result.errors
    assert result.most_bytes <= result.budget_bytes
    assert set(result.steps) == {"register", "lookup", "claim", "forget", "stats"}
