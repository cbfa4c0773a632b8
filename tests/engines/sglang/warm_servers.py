"""SGLang's servers forked from a process that has imported SGLang: they start in seconds.

A server is three processes, for HTTP, the scheduler and the detokenizer. Each imports the same modules, which takes 20
seconds of CPU time, before it does anything. Here one process imports them, for all servers of a test run, and nothing
else happens in it; what SGLang would start anew is forked. Everything else is as `semblend-sglang` and ``python -m
sglang.launch_server`` do it. That these really start, and pass on what they are told, is for servers that are not warm.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Sequence
from multiprocessing.forkserver import set_forkserver_preload
from pathlib import Path

PRELOADED = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.models.registry",  # SGLang imports all models that it knows when it looks for one
    "semblend.integration.sglang.start",
    "semblend.integration.sglang.launcher",
    __name__,
)


class WarmProcess:
    """As `subprocess.Popen`, as far as a server of the tests needs it; in a session and process group of its own."""

    def __init__(self, flags: Sequence[str], log: Path, variables: dict[str, str], *, is_ours: bool) -> None:
        given = (list(flags), str(log), variables, is_ours)
        set_forkserver_preload(list(PRELOADED))
        self._process = multiprocessing.get_context("forkserver").Process(target=_serve, args=given)
        self._process.start()
        self.pid: int = self._process.pid  # type: ignore[assignment]

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> None:
        self._process.join()


def _serve(flags: list[str], log: str, variables: dict[str, str], is_ours: bool) -> None:
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:0] = [part for part in variables.get("PYTHONPATH", "").split(os.pathsep) if part]
    set_start_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda *_, **__: set_start_method("fork", force=True)  # SGLang asks for spawn
    if is_ours:
        from semblend.integration.sglang.launcher import main

        main(flags, start=lambda command: _launch(command[command.index("sglang.launch_server") + 1 :]))
    else:
        _launch(flags)


def _launch(flags: list[str]) -> None:
    sys.argv = ["sglang.launch_server", *flags]
    del sys.modules["sglang.launch_server"]  # preloaded for what it imports
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
