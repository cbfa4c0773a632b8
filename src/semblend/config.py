"""Every setting of semblend: typed, validated where it is made, read from the environment only here.

A value comes from the argument, else the environment, else the TOML file, else its default.
The reference page in docs/reference/settings.md is generated from `SETTINGS`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

from semblend.errors import ConfigError, InputError
from semblend.quality import QUALITY_MODES as QUALITY_MODES
from semblend.quality import parse_quality, parse_tenant_qualities

T = TypeVar("T")

EMBEDDERS = ("auto", "none", "lexical", "jaccard", "static", "minilm", "onnx_gpu")
EVICTION_POLICIES: Final = ("lru", "lfu", "slru", "lru2", "adaptive")
GIB = 1024**3
LARGEST = 1e12  # of times and rates: far beyond use, and the sum with a clock still fits in 64 bits of microseconds
_NOT_NEGATIVE = (
    "donor_ttl_s",
    "lookup_budget_ms",
    "evidence_budget_ms",
    "prefill_tokens_per_s",
    "load_tokens_per_s",
    "reuse_overhead_ms",
    "deep_tolerance",
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the reference page."""

    name: str
    variable: str
    default: Any
    help: str


def setting(default: T, help: str) -> T:
    """A field of a settings class, with the sentence that the reference says of it."""
    return field(default=default, metadata={"help": help})


_NO_TENANTS = {"1", "0", "true", "false", "yes", "no", "on", "off", "all"}
"""Words that somebody writes who means everybody or nobody: where a server has to forget, no slip goes unnoticed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SemBlendConfig:
    """How a `SemBlend` behaves. Environment variables are the field names in capitals after ``SEMBLEND_``."""

    enabled: bool = setting(True, "Look for donors at all. Off: every lookup declines with `disabled`.")
    embedder: str = setting(
        "auto",
        "Paraphrase evidence: none, lexical (also called jaccard), static, minilm, onnx_gpu. "
        "auto = minilm where its files are already on this machine, else none.",
    )
    min_similarity: float = setting(
        0.60, "Lowest cosine that counts as evidence. Never decides what may be materialized."
    )
    evidence_budget_ms: float = setting(
        20.0,
        "A lookup asks the embedder only while its mean time is below this; 0 = always. "
        "`SemBlend.similar` asks whatever it costs.",
    )
    fuzzy_chunks: bool = setting(
        False, "Add near-duplicate evidence from token sketches. Never decides what may be materialized."
    )
    discovery_only: bool = setting(False, "Look up and report, but hand no plan to an engine.")
    strict_prefix_boundary: bool = setting(
        True,
        "Claim one prefix-shaped range to an engine and compute the gaps inside it ourselves. Off: in mode fast the "
        "embedded engine takes donor spans as they are and computes the gaps in the steps of its own scheduler; "
        "vLLM cannot, and refuses to start.",
    )
    exact_materialization_only: bool = setting(
        True, "Materialize token-equal spans only. Off is accepted by no backend that we ship."
    )
    quality: str = setting(
        "balanced",
        "exact, fast, balanced, or a number: the largest expected divergence from a cold answer, in nats a token "
        "(exact is 0, balanced 0.02, fast unbounded).",
    )
    tenant_quality: str = setting(
        "", "Qualities of tenants: TENANT=QUALITY pairs with spaces between. A request's own goes first."
    )
    forget: str = setting(
        "",
        "Tenants whose requests reuse nothing that was computed with other text in view, whatever they ask, with "
        "spaces between; `*` = all.",
    )
    min_span_tokens: int = setting(
        32,
        "Shortest span worth reusing, in tokens. Below 32, short runs are found only beside a longer one "
        "of the same donor (across small edits).",
    )
    min_reuse_ratio: float = setting(
        0.0, "Decline when donors hold a smaller share of the prompt than this; 0 leaves it to break-even."
    )
    max_donors: int = setting(10_000, "Most donors kept; what `eviction` values least goes first.")
    max_bytes: int = setting(GIB, "Memory for donor tokens and their index, in bytes.")
    eviction: str = setting(
        "lru",
        "What the donors' memory, the embedded engine's exact prefix cache and SGLang's radix cache (our backend) "
        "let go first: lru, lfu, slru, lru2, or adaptive, which learns what comes back and when. A policy that fails "
        "leaves lru, and an event.",
    )
    donor_ttl_s: float = setting(0.0, "Seconds until a donor expires; 0 = never.")
    store: str = setting("", "File that keeps donors across restarts; empty = memory only.")
    lookup_budget_ms: float = setting(0.0, "Stop searching after this long and plan with what was found; 0 = no limit.")
    canary_percent: float = setting(100.0, "Share of requests, by request id, that may reuse at all.")
    learn_costs: bool = setting(
        True,
        "Do not begin what is expected to take as long as a prefill, by what this engine's requests have taken so far. "
        "Off: by counted rows alone.",
    )
    control_share: float = setting(
        0.02,
        "Share of the requests that could reuse something which are computed without it, drawn at random, so that "
        "metrics and `semblend report` can tell what reuse saves; 0 = none.",
    )
    kill_file: str = setting("", "While this file exists, every lookup declines with `disabled`.")
    prefill_tokens_per_s: float = setting(
        0.0, "Measured prefill rate of the engine. 0 = unknown: every span of min_span_tokens is accepted."
    )
    load_tokens_per_s: float = setting(0.0, "Measured rate of loading and relocating donor KV; 0 = unknown.")
    reuse_overhead_ms: float = setting(0.0, "Fixed cost of a reuse in the engine, in milliseconds.")
    seam_tokens: int = setting(16, "Tokens recomputed at the head of each span, charged by the cost model.")
    deep_tolerance: float = setting(
        1.1,
        "How far donor KV above layer 0 may be off, in units of what tokens of a layer differ by, before it counts as "
        "damaged; 0 = not checked.",
    )
    layer_share: float = setting(
        0.0, "Share of layers, by a bathtub schedule, whose leading part is recomputed for all tokens before a repair."
    )
    events: str = setting("", "File that receives the JSONL audit stream; empty = none.")
    nats_url: str = setting("", "NATS server that receives the audit stream; empty = none.")
    nats_subject: str = setting("semblend.events", "NATS subject of the audit stream.")
    metrics: bool = setting(True, "Keep Prometheus metrics where prometheus_client is installed.")
    models: str = setting("", "Folder with model files; empty = ~/.cache/semblend/models.")

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "quality", parse_quality(self.quality))
        except InputError as error:
            raise ConfigError(error.message, hint=error.hint) from None
        for f in fields(self):
            _check_type(f.name, getattr(self, f.name), type(f.default))
        _one_of("embedder", self.embedder, EMBEDDERS)
        _one_of("eviction", self.eviction, EVICTION_POLICIES)
        try:
            parse_tenant_qualities(self.tenant_quality)
        except InputError as error:
            raise ConfigError(f"tenant_quality: {error.message}", hint=error.hint) from None
        _within("min_similarity", self.min_similarity, -1.0, 1.0)
        _within("min_reuse_ratio", self.min_reuse_ratio, 0.0, 1.0)
        _within("canary_percent", self.canary_percent, 0.0, 100.0)
        _within("layer_share", self.layer_share, 0.0, 1.0)
        _within("control_share", self.control_share, 0.0, 1.0)
        _within("min_span_tokens", self.min_span_tokens, 8, 1 << 20)
        _within("max_donors", self.max_donors, 1, 1 << 30)
        _within("max_bytes", self.max_bytes, 1 << 16, 1 << 46)
        _within("seam_tokens", self.seam_tokens, 0, 1 << 20)
        for name in _NOT_NEGATIVE:
            _within(name, getattr(self, name), 0.0, LARGEST)
        if not self.exact_materialization_only:
            raise ConfigError(
                "exact_materialization_only=0 asks for spans that are not token-equal, and no backend offers that",
                hint="leave SEMBLEND_EXACT_MATERIALIZATION_ONLY at 1",
            )

        said = self.forget.split()
        if {word.lower() for word in said} & _NO_TENANTS or any(set(word) & set(",;'\"") for word in said):
            hint = "names with spaces between, such as forget='acme bolt'; `*` alone for everybody"
            raise ConfigError(f"forget is {self.forget!r}, which names no tenant", hint=hint)

    def find_tenant_quality(self, tenant: str) -> str | None:
        """The quality that a tenant's requests have unless they say another; None: the server's."""
        return parse_tenant_qualities(self.tenant_quality).get(tenant)

    def forgets(self, tenant: str) -> bool:
        """Whether this tenant's requests are exact, whatever they ask.

        >>> [SemBlendConfig(forget=said).forgets("acme") for said in ("", "bolt acme", "*", "acme2")]
        [False, True, True, False]
        """
        return bool(self.forget) and not {"*", tenant}.isdisjoint(self.forget.split())

    @property
    def models_dir(self) -> Path:
        return Path(self.models).expanduser() if self.models else _user_cache() / "models"


SETTINGS: tuple[Setting, ...] = tuple(
    Setting(f.name, f"SEMBLEND_{f.name.upper()}", f.default, f.metadata["help"]) for f in fields(SemBlendConfig)
)
CONFIG_FILE_VARIABLE = "SEMBLEND_CONFIG"
# Secrets: never in `SemBlendConfig`, which commands and tracebacks show.
KEY_VARIABLES: tuple[Setting, ...] = (
    Setting(
        "api_keys", "SEMBLEND_API_KEYS", "", "Tenants' keys of `semblend serve`: TENANT=KEY pairs with spaces between."
    ),
    Setting("admin_keys", "SEMBLEND_ADMIN_KEYS", "", "Admins' keys of `semblend serve`, with spaces between."),
)

ENGINE_VARIABLES: Final = MappingProxyType({"sglang": "SEMBLEND_SGLANG", "trtllm": "SEMBLEND_TRTLLM"})
"""What a launcher tells the processes of an engine, by engine: JSON."""


def load_config(
    environ: Mapping[str, str] | None = None, file: str | Path | None = None, **arguments: Any
) -> SemBlendConfig:
    """The configuration from a TOML file, then the environment, then ``arguments``.

    >>> load_config({"SEMBLEND_MIN_SIMILARITY": "0.7"}, max_donors=5).min_similarity
    0.7
    """
    found = _gather(os.environ if environ is None else environ, file)
    return SemBlendConfig(**_check_names({name: value for name, (value, _) in found.items()} | arguments))


def read_key_variables(environ: Mapping[str, str] | None = None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Read the server's keys from the environment: ``TENANT=KEY`` pairs, and admin keys.

    >>> read_key_variables({"SEMBLEND_API_KEYS": "acme=sk-1 bolt=sk-2"})
    (('acme=sk-1', 'bolt=sk-2'), ())
    """
    environ = os.environ if environ is None else environ
    pairs, admins = (tuple(environ.get(setting.variable, "").split()) for setting in KEY_VARIABLES)
    return pairs, admins


def read_engine_variable(engine: str, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Read what a launcher tells the processes of an engine: a JSON object, empty where nothing is said.

    >>> read_engine_variable("sglang", {"SEMBLEND_SGLANG": '{"step_work_ms": 20}'})
    {'step_work_ms': 20}
    """
    variable = ENGINE_VARIABLES[engine]
    text = (os.environ if environ is None else environ).get(variable, "")
    try:
        found = json.loads(text) if text else {}
    except ValueError as error:
        raise ConfigError(f"{variable} is not JSON: {error}", hint='such as {"step_work_ms": 20}') from None
    if not isinstance(found, dict):
        raise ConfigError(f"{variable} is not a JSON object", hint='such as {"step_work_ms": 20}')
    return found


def set_variable(name: str, value: str) -> None:
    """Set the variable of a setting for processes that are started from this one; refuses what it cannot hold."""
    setting = next(one for one in SETTINGS if one.name == name)
    load_config({setting.variable: value})
    os.environ[setting.variable] = value


def write_engine_variable(engine: str, values: Mapping[str, Any]) -> None:
    """Tell processes that are started from this one; nothing where there are no values."""
    if values:
        os.environ[ENGINE_VARIABLES[engine]] = json.dumps(dict(values))
    else:
        os.environ.pop(ENGINE_VARIABLES[engine], None)


def decline_telemetry() -> None:
    """Tell packages that report home not to: ONNX Runtime does from 1.31 on, unless this is set before its import."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def setting_sources(environ: Mapping[str, str] | None = None, file: str | Path | None = None) -> dict[str, str]:
    """Where each setting's value comes from: ``default``, a variable, or a file.

    >>> setting_sources({"SEMBLEND_MAX_DONORS": "5"})["max_donors"]
    'SEMBLEND_MAX_DONORS'
    """
    found = _gather(os.environ if environ is None else environ, file)
    return {setting.name: found[setting.name][1] if setting.name in found else "default" for setting in SETTINGS}


def _gather(environ: Mapping[str, str], file: str | Path | None) -> dict[str, tuple[Any, str]]:
    """Setting -> (value, source); the environment wins over the file."""
    file = file or environ.get(CONFIG_FILE_VARIABLE) or None
    values = {name: (value, str(file)) for name, value in (_read_toml(Path(file)) if file else {}).items()}
    for setting in SETTINGS:
        if setting.variable in environ:
            values[setting.name] = (_parse(setting, environ[setting.variable]), setting.variable)
    return values


def _check_names(values: dict[str, Any]) -> dict[str, Any]:
    names = {setting.name for setting in SETTINGS}
    for name in values:
        if name not in names:
            raise ConfigError(f"unknown setting {name!r}", hint="docs/reference/settings.md lists them all")
    return values


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "semblend"


def _read_toml(path: Path) -> dict[str, Any]:
    import tomllib  # 20 ms that few need

    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", hint=f"unset {CONFIG_FILE_VARIABLE} or fix the path"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", hint="write settings as name = value lines") from None
    section = table.get("semblend", table)
    if not isinstance(section, dict):
        raise ConfigError(f"{path}: semblend is not a table", hint="write [semblend] above the settings")
    return section


def _parse(setting: Setting, text: str) -> Any:
    kind = type(setting.default)
    parsers: dict[type, Callable[[str], Any]] = {bool: _parse_bool, int: int, float: float, str: str}
    try:
        return parsers[kind](text.strip())
    except ValueError:
        raise ConfigError(
            f"{setting.variable}={text!r} is not {_kind_name(kind)}", hint=f"default: {setting.default!r}"
        ) from None


def _parse_bool(text: str) -> bool:
    word = text.lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off", ""):
        return False
    raise ValueError(text)


def _kind_name(kind: type) -> str:
    return {bool: "a yes or no (1 or 0)", int: "a whole number", float: "a number", str: "a string"}[kind]


def _check_type(name: str, value: Any, kind: type) -> None:
    fits = isinstance(value, kind) or (kind is float and isinstance(value, int))
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name}={value!r} is not {_kind_name(kind)}", hint="see docs/reference/settings.md")
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{name}={value!r} holds a NUL character", hint="no file and no word can hold one")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is unknown", hint="one of " + ", ".join(allowed))


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # NaN fails too
        raise ConfigError(f"{name}={value!r} is outside [{low:g}, {high:g}]", hint="see docs/reference/settings.md")
