"""``semblend doctor`` and ``semblend version``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from semblend._version import __version__
from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import print_json, table
from semblend.extras import installed_version
from semblend.integration.versions import DYNAMO, SGLANG, TRANSFORMERS, TRTLLM, VLLM
from semblend.materialize.donors.places import choose_host_bytes, describe_places, read_memory

SELF_TEST_TOKENS = 8192
TYPICAL_TOKEN_BYTES = 56 << 10
"""KV of a token of Qwen2.5-7B."""
DEFAULT = "(from default)"
"""How the detail of a setting ends that nobody has set; --json shows these too."""


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


def add(commands: Commands) -> None:
    for name, command in (("version", show_version), ("doctor", run)):
        parser = add_command(commands, name, command)
        parser.add_argument("--json", action="store_true", help="print JSON")
        if command is run:
            parser.add_argument(
                "config",
                nargs="?",
                metavar="CONFIG",
                help="a model's config.json or its folder: say which engines serve it, and check nothing else",
            )


def run(args: argparse.Namespace) -> int:
    """Check this installation: versions, kernels, engines, GPU, memory, models, settings; and say what to run next.

    With a model's config.json: which engines serve that model, and why others do not.
    """
    looks = LOOKS if args.config is None else (partial(_model, read_model_config(args.config), args.config),)
    checks = [check for look in looks for check in _look(look)]
    worst = Status.FAIL if any(check.status is Status.FAIL for check in checks) else Status.OK
    if args.json:
        print_json({"status": str(worst), "checks": [asdict(check) for check in checks]})
    else:
        print(render(checks))
    return 1 if worst is Status.FAIL else 0


def _look(look: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """What a look finds; one that fails is a finding too, and the others go on."""
    try:
        yield from look()
    except Exception as error:
        what = getattr(look, "__name__", "model").strip("_").replace("_", " ")
        detail = f"could not be looked at: {type(error).__name__}: {error}".splitlines()[0]
        yield Check(what, what, Status.WARN, detail, "please report this with the output of doctor --json")


def render(checks: list[Check]) -> str:
    parts = []
    for section in dict.fromkeys(check.section for check in checks):
        found = [check for check in checks if check.section == section]
        shown = [check for check in found if not check.detail.endswith(DEFAULT)]
        rows = [(f"  {check.status:<4}", check.name, check.detail) for check in shown]
        if len(shown) < len(found):
            rows.append(("  ok  ", "all others" if shown else "all", f"{len(found) - len(shown)} at their defaults"))
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


# -- a model ---------------------------------------------------------------------------------------------------------


def read_model_config(path: str) -> dict[str, Any]:
    """A model's config.json, named itself or by its folder."""
    from semblend.errors import InputError

    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}", hint="name a model's config.json or its folder") from None
    if not isinstance(found, dict) or not ("model_type" in found or "architectures" in found):
        raise InputError(f"{file} describes no model", hint="it needs model_type and architectures")
    return found


def _model(config: Mapping[str, Any], path: str) -> Iterator[Check]:
    """What a config says; an engine's own settings may decline it all the same, and its log says so."""
    from semblend.materialize.gate.thresholds import find_known

    text = config.get("text_config") or config
    place = Path(path).resolve()
    name = str(config.get("_name_or_path") or (place if place.is_dir() else place.parent).name)
    yield Check("model", "type", Status.OK, f"{text.get('model_type')}, {_describe_kv(text)}")
    for engine, look in MODEL_LOOKS.items():
        why, how = look(config)
        if why is None:
            yield Check("model", engine, Status.OK, f"served{how}")
        else:
            yield Check("model", engine, Status.WARN, f"declined: {why}")
    known = find_known(name)
    measured = f"measured: thresholds of {known[0]}" if known else "not measured: default thresholds decide"
    hint = "" if known else "semblend calibrate measures a model"
    yield Check("model", "quality", Status.OK if known else Status.NOTE, measured, hint)


def _describe_kv(text: Mapping[str, Any]) -> str:
    def read(name: str) -> int:
        return int(text.get(name) or 0)

    heads = read("num_key_value_heads") or read("num_attention_heads")
    size = read("head_dim") or read("hidden_size") // max(1, read("num_attention_heads"))
    width = read("kv_lora_rank") + read("qk_rope_head_dim") if read("kv_lora_rank") else 2 * heads * size
    found = 2 * width * read("num_hidden_layers") / 1024
    return f"{found:,.0f} KiB of KV a token in 16 bits" if found else "of unknown KV size"


def _ask_vllm(config: Mapping[str, Any]) -> tuple[str | None, str]:
    from semblend.integration.vllm.refusals import refuse_config
    from semblend.materialize.kv.rope import attends_by_window

    text = config.get("text_config") or config
    flag = ", with --disable-hybrid-kv-cache-manager" if attends_by_window(text) else ""
    return refuse_config(config), flag


def _ask_sglang(config: Mapping[str, Any]) -> tuple[str | None, str]:
    from semblend.integration.sglang.start import MODELS
    from semblend.materialize.kv.rope import refusal

    kind = next(iter(config.get("architectures") or ()), "a model without a class")
    return (refusal(config) if kind in MODELS else f"{kind} was never looked at"), ""


def _ask_transformers(config: Mapping[str, Any]) -> tuple[str | None, str]:
    from semblend.integration.transformers.refusals import SERVED_TYPES
    from semblend.materialize.kv.rope import refusal

    kind = config.get("model_type")
    return refusal(config) or (None if kind in SERVED_TYPES else f"model type {kind!r} was never run"), ""


def _ask_embedded(config: Mapping[str, Any]) -> tuple[str | None, str]:
    from semblend.engine.model.spec import ModelSpec
    from semblend.errors import InputError

    try:
        ModelSpec.from_hf_config(config)
    except InputError as error:
        return error.message, ""
    return None, ""


MODEL_LOOKS: dict[str, Callable[[Mapping[str, Any]], tuple[str | None, str]]] = {
    "vllm": _ask_vllm, "sglang": _ask_sglang, "transformers": _ask_transformers, "embedded": _ask_embedded,
}  # fmt: skip
"""Of each engine, why it declines a model; or how it is served."""


# -- this installation -------------------------------------------------------------------------------------------------


def _base() -> Iterator[Check]:
    from semblend.errors import SemBlendError
    from semblend.extras import DISTRIBUTION
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
    section = "kernels"
    version = installed_version("numba")
    if version is None:
        yield Check(section, "numba", Status.WARN, "missing: plain Python does the work, slower", "pip install numba")
        return
    from semblend import SemBlend, SemBlendConfig
    from semblend.pipeline import kernels_can_be_loaded

    if not kernels_can_be_loaded():
        hint = "numba and numpy must fit together: pip install --upgrade numba"
        yield Check(
            section, "numba", Status.WARN, f"{version} cannot be loaded: plain Python does the work, slower", hint
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
    from semblend.discover import kernels

    path = kernels.probe.stats.cache_path
    if path and os.path.isdir(path) and os.access(path, os.W_OK):
        yield Check(section, "cache", Status.OK, f"{path} (writable)")
    else:
        hint = "set NUMBA_CACHE_DIR to a folder you can write to, or every start compiles again"
        problem = f"{path} is not writable" if path else "no folder to keep it in"
        yield Check(section, "cache", Status.WARN, problem, hint)


def _packages() -> Iterator[Check]:
    from semblend.extras import extras

    skipped = {"dev", "docs", *(table.extra for table in ENGINES.values())}
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


def _machine() -> Iterator[Check]:
    section = "machine"
    total, available = read_memory()
    if total is None:
        yield Check(section, "memory", Status.NOTE, "the system does not say")
    else:
        free = "" if available is None else f", {available / 1e9:.1f} GB of it free"
        yield Check(section, "memory", Status.OK, f"{total / 1e9:.1f} GB{free}")
    host = choose_host_bytes(available)
    fits = describe_places(0, host, TYPICAL_TOKEN_BYTES, TYPICAL_TOKEN_BYTES).removesuffix(", none on the device")
    yield Check(
        section, "donors in vLLM", Status.OK, f"{fits}, for a 7B of 56 KiB a token; what a GPU adds, its log says"
    )
    gpus = list_gpus()
    for number, gpu in enumerate(gpus):
        yield Check(section, f"GPU {number}", Status.OK, gpu)
    if not gpus:
        yield Check(section, "GPU", Status.NOTE, "none that nvidia-smi knows; everything runs on the CPU")
    torch = installed_version("torch")
    if gpus and torch is not None and "cpu" in torch:
        hint = "install a build of torch for CUDA: make clean, then make serve TORCH=torch==2.11.0"
        yield Check(section, "torch", Status.WARN, f"{torch} cannot use the GPU", hint)


def _engines() -> Iterator[Check]:
    for package, known in ENGINES.items():
        engine = read_engine(package)
        if engine.installed is None:
            yield Check("engines", package, Status.NOTE, f"not installed; known: {engine.known}  [{known.extra}]")
        elif engine.evidence == "none":
            yield Check("engines", package, Status.WARN, f"{engine.installed}; known: {engine.known}", engine.note)
        else:
            yield Check("engines", package, Status.OK, f"{engine.installed}, {engine.evidence}: {engine.note}")


def _models() -> Iterator[Check]:
    from semblend.models import MODELS, find_pulled_path

    pulled = list_pulled()
    folder = find_pulled_path(next(iter(MODELS.values()))).parent
    if not pulled:
        yield Check("models", "pulled", Status.NOTE, f"none in {folder}; semblend models pull smollm2-135m")
    for name in pulled:
        yield Check("models", name, Status.OK, str(find_pulled_path(MODELS[name])))


def _next() -> Iterator[Check]:
    engines: dict[str, EngineVersions] = {package: read_engine(package) for package in ENGINES}
    command, why = choose_next(engines, list_pulled())
    yield Check("next", "run", Status.OK, f"{command}   ({why})")


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


LOOKS = (_base, _machine, _kernels, _packages, _engines, _models, _settings, _embedders, _self_test, _next)


def _format_value(value: Any) -> str:
    """As a person would write it; what stands before the @ of an address may be a password."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return re.sub(r"//[^/@]*@", "//***@", repr(value))


# -- the machine -----------------------------------------------------------------------------------------------------

ENGINES = {"vllm": VLLM, "sglang": SGLANG, "tensorrt-llm": TRTLLM, "ai-dynamo": DYNAMO, "transformers": TRANSFORMERS}
"""Packages of engines, and the versions that are known of each."""


@dataclass(frozen=True, slots=True)
class EngineVersions:
    """What is known of one engine's versions. ``evidence``: of the installed one; empty where there is none."""

    installed: str | None
    known: str
    evidence: str = ""
    note: str = ""


def list_gpus(run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> list[str]:
    """The GPUs that nvidia-smi knows, with memory and driver; none where it is missing, hangs or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    if done.returncode:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [f"{row[0]}, {row[1]}, driver {row[2]}" for row in rows if len(row) == 3]


def read_engine(package: str) -> EngineVersions:
    """The installed version of an engine, and what its integration's table says of it."""
    table = ENGINES[package]
    rows = table.rows
    known = ", ".join(row.version for row in rows) if len(rows) < 3 else f"{rows[0].version} to {rows[-1].version}"
    installed = installed_version(package)
    if installed is None:
        return EngineVersions(None, known)
    row = table.find(installed)
    return EngineVersions(installed, known, str(row.evidence), row.note)


def list_pulled() -> list[str]:
    """Names of the models that were pulled."""
    from semblend.models import MODELS, is_pulled

    return [model.name for model in MODELS.values() if is_pulled(model)]


def choose_next(engines: dict[str, EngineVersions], pulled: list[str]) -> tuple[str, str]:
    """The one command to run next, and why.

    >>> choose_next({"vllm": EngineVersions("0.32.0", "0.26 to 0.32", "run")}, [])[0].split()[:2]
    ['vllm', 'serve']
    >>> choose_next({}, [])
    ('semblend estimate prompts.jsonl', 'what reuse would save on a log of your prompts; needs nothing more')
    """
    served = [name for name, engine in engines.items() if engine.installed and engine.evidence in ("run", "static")]
    if "vllm" in served:
        option = """--kv-transfer-config '{"kv_connector":"SemBlendConnectorV1","kv_role":"kv_both"}'"""
        return f"vllm serve MODEL {option}", "vLLM is here, in a version that is known"
    if "sglang" in served:
        return "semblend-sglang --model-path MODEL", "SGLang is here, in a version that is known"
    if all(installed_version(package) for package in ("torch", "fastapi", "uvicorn")) and pulled:
        return f"semblend serve --model {pulled[0]}", "the embedded engine and a model are here"
    if engines.get("transformers") and "transformers" in served and not pulled:
        return "semblend models pull smollm2-135m", "a small model to try the embedded engine with"
    return "semblend estimate prompts.jsonl", "what reuse would save on a log of your prompts; needs nothing more"


# -- version ---------------------------------------------------------------------------------------------------------


def show_version(args: argparse.Namespace) -> int:
    """Tell which version of semblend this is, and on what it runs."""
    if args.json:
        print_json({"semblend": __version__, "python": platform.python_version(), "platform": platform.platform()})
    else:
        print(f"semblend {__version__}")
    return 0
