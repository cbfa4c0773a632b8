"""The rules of safety in a scheduler with HiCache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 2.0,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
    "hicache_write_policy": "write_through",
    # The first twelve of the model's thirty layers: what HiCache and we do is alike in each of them. Without HiCache
    # the same rules are tested with all thirty.
    "json_model_override_args": '{"num_hidden_layers": 12}',
}


def test_every_rule_of_safety_holds_beside_hicache():
    """In a process of its own: a scheduler with other flags."""
    files = [HERE / name for name in ("beside_hicache.py", "test_safety.py")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-W", "ignore", "-p", "no:cacheprovider", *map(str, files)],
        env=os.environ | {"SEMBLEND_TEST_SGLANG_FLAGS": json.dumps(FLAGS)},
        capture_output=True,
        text=True,
        timeout=1800,
        cwd=HERE.parents[2],
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
