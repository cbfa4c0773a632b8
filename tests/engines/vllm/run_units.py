"""Runs units of tests, two at a time, in processes that are forked from one that has imported vLLM already.

    python run_units.py UNIT...

An import of vLLM takes 20 s of a core, more than most files of tests. A unit is a file of tests here, several joined
by ``+``, or a command of ``.ci/engines/vllm-cpu``. What a unit prints is shown when it has ended, with the time it
took. Name the longest first. Up to two that failed beside another are tried once more, alone: a real fault fails again.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
AT_ONCE = 2


def preload() -> None:
    """What every engine imports, and nothing of ours: some tests need a process that has not."""
    import pytest  # noqa: F401
    import transformers.models.llama  # noqa: F401
    import vllm.entrypoints.openai.api_server
    import vllm.model_executor.models.llama
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm import LLM  # noqa: F401
    from vllm.model_executor.models import registry

    # It looks at each kind of model in a process of its own, so as not to begin CUDA.
    registry._run_in_subprocess = lambda function: function()


def run(unit: str) -> int:
    import pytest

    return int(pytest.main(["-W", "ignore", "--durations=5", *(str(FOLDER / name) for name in unit.split("+"))]))


def start(unit: str) -> tuple[int, Path]:
    """The process of a unit, and the file with what it prints."""
    descriptor, log = tempfile.mkstemp()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        if not unit.endswith(".py"):
            os.execv(ROOT / ".ci/engines/vllm-cpu", ["vllm-cpu", unit])
        code = 1
        try:
            code = run(unit)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(descriptor)
    return pid, Path(log)


def run_all(units: list[str], at_once: int) -> list[str]:
    """Those that failed."""
    waiting, running, failed = list(units), {}, []
    while waiting or running:
        while waiting and len(running) < at_once:
            unit = waiting.pop(0)
            pid, log = start(unit)
            running[pid] = unit, log, time.monotonic()
        pid, status = os.wait()
        if pid not in running:
            continue
        unit, log, began = running.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        print(f"== {unit}: {time.monotonic() - began:.0f} s, exit {code}")
        print(log.read_text(errors="replace"), end="", flush=True)
        log.unlink()
        failed += [unit] if code else []
    return failed


def main(units: list[str]) -> int:
    preload()
    failed = run_all(units, AT_ONCE)
    if 1 <= len(failed) <= 2:
        print("== failed, once more, alone:", *failed)
        failed = run_all(failed, 1)
    if failed:
        print("failed:", *failed, file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
