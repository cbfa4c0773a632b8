"""Check this installation: versions, compiled kernels, optional packages, settings, and a short self test."""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from semblend.cli.output import print_json, table

SELF_TEST_TOKENS = 8192
ENGINES = {"vllm": "vllm", "sglang": "sglang", "tensorrt-llm": "trtllm", "ai-dynamo": "dynamo"}


class Status(StrEnum):
    """``note`` is worth knowing and fine; ``fail`` makes the exit code 1."""

    OK = "ok"
    NOTE = "note"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    section: str
    name: str
    status: Status
    detail: str
    hint: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    checks = [*_base(), *_kernels(), *_packages(), *_engines(), *_settings(), *_embedders(), *_self_test()]
    worst = Status.FAIL if any(check.status is Status.FAIL for check in checks) else Status.OK
    if args.json:
        print_json({"status": str(worst), "checks": [asdict(check) for check in checks]})
    else:
        print(render(checks))
    return 1 if worst is Status.FAIL else 0


def render(checks: list[Check]) -> str:
    parts = []
    for section in dict.fromkeys(check.section for check in checks):
        rows = [(f"  {check.status:<4}", check.name, check.detail) for check in checks if check.section == section]
        parts.append(section + table(rows, head=("", "", "")))
    parts += [
        f"{check.status}: {check.name}: {check.detail}\nhint: {check.hint}"
        for check in checks
        if check.hint and check.status in (Status.WARN, Status.FAIL)
    ]
    failed = sum(check.status is Status.FAIL for check in checks)
    warned = sum(check.status is Status.WARN for check in checks)
    parts.append(f"{failed} failed, {warned} to look at" if failed or warned else "all is well")
    return "\n\n".join(parts)


def _base() -> Iterator[Check]:
    from semblend._version import __version__
    from semblend.errors import SemBlendError
    from semblend.extras import DISTRIBUTION, installed_version
    from semblend.name_clash import foreign_distribution, refuse_foreign_distribution

    section = "base"
    installed = installed_version(DISTRIBUTION)
    if installed is None:
        yield Check(section, "semblend", Status.NOTE, f"{__version__}, run from a folder, not installed")
    elif installed != __version__:
        yield Check(
            section, "semblend", Status.WARN, f"{__version__}, but installed as {installed}", "install it again"
        )
    else:
        yield Check(section, "semblend", Status.OK, __version__)
    try:
        refuse_foreign_distribution()
        yield Check(section, "import name", Status.OK, "no other distribution named semblend")
    except SemBlendError as error:
        yield Check(section, "import name", Status.FAIL, f"foreign semblend {foreign_distribution()}", error.hint)
    yield Check(section, "python", Status.OK, f"{platform.python_version()} ({sys.executable})")
    yield Check(section, "platform", Status.OK, f"{platform.platform()}, {os.cpu_count()} CPUs")
    yield Check(section, "numpy", Status.OK, installed_version("numpy") or "unknown version")


def _kernels() -> Iterator[Check]:
    from semblend.extras import installed_version

    section = "kernels"
    version = installed_version("numba")
    if version is None:
        yield Check(section, "numba", Status.WARN, "missing: plain numpy does the work, slower", "pip install numba")
        return
    from semblend import SemBlend, SemBlendConfig
    from semblend.pipeline import kernels_can_be_loaded

    if not kernels_can_be_loaded():
        hint = "numba and numpy must fit together: pip install --upgrade numba"
        yield Check(
            section, "numba", Status.WARN, f"{version} cannot be loaded: plain numpy does the work, slower", hint
        )
        return
    yield Check(section, "numba", Status.OK, version)
    try:
        with SemBlend(SemBlendConfig(embedder="none", metrics=False)) as semblend:
            seconds = semblend.warm_up()
    except Exception as error:  # whatever numba throws is what the person came here to learn
        yield Check(section, "compile", Status.FAIL, f"{type(error).__name__}: {error}", "reinstall numba and llvmlite")
        return
    yield Check(section, "compile", Status.OK, f"ready after {seconds:.2f} s")
    yield _kernel_cache(section)


def _kernel_cache(section: str) -> Check:
    from semblend.discover import kernels

    path = kernels.probe.stats.cache_path
    if path and os.path.isdir(path) and os.access(path, os.W_OK):
        return Check(section, "cache", Status.OK, f"{path} (writable)")
    hint = "set NUMBA_CACHE_DIR to a folder you can write to, or every start compiles again"
    return Check(section, "cache", Status.WARN, f"{path} is not writable" if path else "no folder to keep it in", hint)


def _packages() -> Iterator[Check]:
    from semblend.extras import extras, installed_version

    skipped = {"dev", "docs", *ENGINES.values()}
    extra_of: dict[str, list[str]] = {}
    for extra, wanted in extras().items():
        for one in wanted:
            if extra not in skipped and "[" not in one.package:
                extra_of.setdefault(one.package, []).append(extra)
    for package, names in sorted(extra_of.items()):
        version = installed_version(package)
        brings = f"[{', '.join(names)}]"
        detail = f"{version}  {brings}" if version else f"not installed  {brings}"
        yield Check("optional packages", package, Status.OK if version else Status.NOTE, detail)


def _engines() -> Iterator[Check]:
    from semblend.extras import installed_version

    for package, extra in ENGINES.items():
        version = installed_version(package)
        yield Check("engines", package, Status.OK if version else Status.NOTE, version or f"not installed  [{extra}]")


def _settings() -> Iterator[Check]:
    from semblend.config import SETTINGS, load_config, setting_sources
    from semblend.errors import ConfigError

    try:
        config, sources = load_config(), setting_sources()
    except ConfigError as error:
        yield Check("settings", "configuration", Status.FAIL, error.message, error.hint)
        return
    for setting in SETTINGS:
        value = getattr(config, setting.name)
        yield Check("settings", setting.name, Status.OK, f"{_format_value(value)}  (from {sources[setting.name]})")


def _embedders() -> Iterator[Check]:
    from semblend.config import load_config
    from semblend.errors import ConfigError
    from semblend.fingerprint.embedder import describe_embedders

    try:
        config = load_config()
    except ConfigError:
        return  # reported under settings already
    for row in describe_embedders(config.models_dir):
        wanted = config.embedder == row.name and not row.available
        status = Status.WARN if wanted else Status.OK if row.available else Status.NOTE
        yield Check("embedders", row.name, status, row.detail, "choose another SEMBLEND_EMBEDDER" if wanted else "")


def _self_test() -> Iterator[Check]:
    """Register a prompt, look up a shifted copy of its middle, and compare the tokens one by one."""
    import numpy as np

    from semblend import Prompt, ReusePlan, SemBlend, SemBlendConfig

    section = "self test"
    ids = np.random.default_rng(7).integers(0, 50_000, SELF_TEST_TOKENS)
    asked = np.concatenate([np.arange(50_000, 50_100), ids[1000:7000]])
    with SemBlend(SemBlendConfig(embedder="none", metrics=False)) as semblend:
        semblend.warm_up()
        started = time.perf_counter()
        semblend.register(Prompt(ids), donor_id="self-test")
        registered = time.perf_counter()
        decision = semblend.lookup(Prompt(asked))
        looked_up = time.perf_counter()
    spans = decision.spans if isinstance(decision, ReusePlan) else ()
    equal = all(np.array_equal(ids[s.donor_start : s.donor_end], asked[s.target_start : s.target_end]) for s in spans)
    found = sum(span.length for span in spans)
    timing = f"register {1e3 * (registered - started):.2f} ms, lookup {1e3 * (looked_up - registered):.2f} ms"
    if equal and found == 6000:
        yield Check(section, "find and verify", Status.OK, f"6000 of 6000 shared tokens, {timing}")
    else:
        detail = f"{found} of 6000 shared tokens, equal: {equal}, {timing}"
        yield Check(
            section, "find and verify", Status.FAIL, detail, "please report this with the output of doctor --json"
        )


def _format_value(value: Any) -> str:
    """As a person would write it; what stands before the @ of an address may be a password."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return re.sub(r"//[^/@]*@", "//***@", repr(value))
