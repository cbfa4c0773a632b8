"""Processes with vLLM that are forked instead of started: an import of vLLM takes 20 s of a core.

Where this process has an engine already, a forked one could have no other: there the command is started instead.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any


def fork(do: Callable[[], object], command: Sequence[str], log: Path, environment: Mapping[str, str]) -> BaseProcess:
    """A process in a session of its own that does what ``command`` would do, and writes what it says to ``log``."""
    process = multiprocessing.get_context("fork").Process(target=_run, args=(do, command, log, dict(environment)))
    process.start()
    return process


def _run(do: Callable[[], object], command: Sequence[str], log: Path, environment: dict[str, str]) -> None:
    """Never returns: threads may not end, and what the forked process had to put away at its end is not this one's."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    if "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized():
        os.execve(command[0], command, environment)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    code = 1
    try:
        _fork_workers()
        do()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _fork_workers() -> None:
    """vLLM's package for CPUs starts its engine and the workers of ranks anew, and each imports it once more."""
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    for module in (utils, multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")


class ForkedServer:
    """As `subprocess.Popen`, as far as a server of the tests needs it; the command is ``python -m MODULE FLAG...``."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], stdout: Any, **_: Any) -> None:
        _, dash_m, module, *flags = command
        assert dash_m == "-m"

        def serve() -> None:
            sys.argv = [module, *flags]
            sys.modules.pop(module, None)
            runpy.run_module(module, run_name="__main__", alter_sys=True)

        self._process = fork(serve, command, Path(stdout.name), env)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a server", timeout or 0.0)
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()
