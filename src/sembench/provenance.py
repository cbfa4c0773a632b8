"""Describes a run: who ran what, where and with which code."""

from __future__ import annotations

import platform
import subprocess
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from semblend._version import __version__


def get_utc_time() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def get_unix_time() -> float:
    """Return the wall clock in Unix seconds. It ties evidence to a run; durations come from clocks that can't jump."""
    return datetime.now(UTC).timestamp()


def make_run_id(prefix: str) -> str:
    return f"{prefix}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:6]}"


def describe_run(
    *,
    engine: str,
    manifest_path: str,
    manifest_sha256: str,
    run_id: str | None = None,
    arm: str = "single",
    engine_version: str | None = None,
    backend_id: str | None = None,
    baseline_id: str | None = None,
) -> dict[str, Any]:
    """Return the ``run`` object of a result file."""
    sha, dirty = read_git_state()
    return {
        "run_id": run_id or make_run_id(engine),
        "engine": engine,
        "manifest_path": manifest_path,
        "manifest_sha256": manifest_sha256,
        "arm": arm,
        "engine_version": engine_version,
        "backend_id": backend_id,
        "baseline_id": baseline_id,
        "sembench_version": __version__,
        "sembench_git_sha": sha,
        "sembench_git_dirty": dirty,
        "semblend_version": __version__,
        "timestamp_utc": get_utc_time(),
        "python_version": platform.python_version(),
        "run_host": platform.node(),
    }


def describe_environment() -> dict[str, Any]:
    """Return the ``environment`` object of a result file."""
    return {"python": platform.python_version(), "platform": platform.platform(), "host": platform.node()}


def read_git_state() -> tuple[str | None, bool | None]:
    """Return the commit and whether the tree differs from it; both None outside a checkout."""
    here = Path(__file__).resolve().parent
    if not any((folder / ".git").exists() for folder in here.parents):
        return None, None
    try:
        sha = _run_git(here, "rev-parse", "HEAD")
        return sha or None, bool(_run_git(here, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None, None


def _run_git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20, check=True
    )  # fmt: skip
    return done.stdout.strip()
