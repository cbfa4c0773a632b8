"""Windows and macOS: every module can be imported where POSIX modules, flags and calls are missing."""

from __future__ import annotations

import subprocess
import sys

POSIX_MODULES = ("fcntl", "grp", "pwd", "pty", "resource", "termios", "uvloop")
POSIX_NAMES = (
    *("O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC", "O_NONBLOCK", "fork", "geteuid", "getuid", "sysconf"),
    *("register_at_fork", "sched_getaffinity", "sched_setaffinity", "mkfifo", "killpg", "getpgid"),
)

# Third parties may need what is hidden (numpy, torch and friends are loaded first); modules of ours may not. An engine
# that is not installed is no failure: its own module is missing, and not one that we have hidden.
IMPORT_ALL = """
import importlib, json, os, pkgutil, signal, sys
for name in ("numpy", "numba", "torch", "fastapi", "uvicorn", "pydantic", "transformers", "langchain_core.documents",
             "llama_index.core", "httpx", "matplotlib.figure", "multiprocessing.util", "prometheus_client"):
    try:
        importlib.import_module(name)
    except ImportError:
        pass
hidden, names = set(json.loads(sys.argv[1])), json.loads(sys.argv[2])
for name in hidden:
    sys.modules[name] = None
for name in names:
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGKILL", "SIGPIPE"):
    if hasattr(signal, name):
        delattr(signal, name)
seen, failed = 0, {}
for package in ("semblend", "semantickv", "sembench"):
    top = importlib.import_module(package)
    for found in pkgutil.walk_packages(top.__path__, package + ".", onerror=lambda name: None):
        if found.name.endswith("__main__") or "kernels" in found.name:
            continue
        try:
            importlib.import_module(found.name)
            seen += 1
        except ImportError as error:
            missing = getattr(error, "name", None) or ""
            if missing in hidden or missing.split(".")[0] in ("semblend", "semantickv", "sembench"):
                failed[found.name] = str(error)
        except Exception as error:
            failed[found.name] = f"{type(error).__name__}: {error}"
print(json.dumps({"seen": seen, "failed": failed}))
"""


def test_every_module_is_imported_without_posix() -> None:
    import json

    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, json.dumps(POSIX_MODULES), json.dumps(POSIX_NAMES)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert not report["failed"]
    assert report["seen"] > 350


def test_a_system_without_file_locks_says_so_and_keeps_nothing_on_disk(monkeypatch, tmp_path) -> None:
    import pytest

    from semblend.errors import StoreError
    from semblend.materialize.donors.store import DiskTier

    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.raises(StoreError, match="no file locks"):
        DiskTier(tmp_path)
