"""What fails a run of the tests, and what does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SETTINGS = Path(__file__).parents[1] / "pyproject.toml"

# torch's C++ code warns in the frame that called it: the module of such a warning is ours.
WARNS = """
import warnings
def test_it():
    for kind in (UserWarning, RuntimeWarning, DeprecationWarning, FutureWarning):
        warnings.warn_explicit("bf16 is slow on this CPU", kind, "access.py", 1, module="semblend.integration.access")
"""
RAISES_IN_A_THREAD = """
import threading
def test_it():
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
"""


def run(test: str, folder: Path) -> int:
    path = folder / "test_one.py"
    path.write_text(test)
    flags = ["-c", str(SETTINGS), "--rootdir", str(folder), "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *flags, str(path)]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # what others would bring takes seconds
    return subprocess.run(command, env=environment, capture_output=True, check=False).returncode


def test_a_warning_of_a_library_fails_nothing(tmp_path: Path) -> None:
    assert run(WARNS, tmp_path) == 0


def test_an_exception_that_nobody_caught_fails_the_test(tmp_path: Path) -> None:
    assert run(RAISES_IN_A_THREAD, tmp_path) == 1
