"""Everything that semantickv reads from the environment. No other module reads it.

The variable of a setting is its name in capitals after ``SEMANTICKV_`` (``health_s`` is ``SEMANTICKV_HEALTH_SECONDS``);
`_NAMES` holds the exceptions. The type of its default says how it is read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Self

from semblend.errors import ConfigError

VARIABLES = {
    "SEMANTICKV_UPSTREAM_BASE_URL": "Engine that `semantickv proxy` and `collect` forward to (--upstream).",
    "SEMANTICKV_REPLICAS": "Engines that `semantickv router` chooses from, with commas between (--replicas).",
    "SEMANTICKV_REPLICAS_FILE": "File with one engine a line (its address, then, if it has one, that of its KV events; "
    "# begins a comment) that `semantickv router` follows while it runs (--replicas-file).",
    "SEMANTICKV_ROUTING_POLICY": "round_robin, least_loaded, prefix_hash, cache_aware or semantic_locality (default).",
    "SEMANTICKV_ENGINE_REUSE": "What the engines can reuse (--engine-reuse): spans (default, engines with semblend "
    "in them) or prefix (stock engines: equal beginnings only).",
    "SEMANTICKV_SESSION_AFFINITY": "false lets the requests of one X-Session-ID go to any replica (default true).",
    "SEMANTICKV_SESSION_HINT": "How engines hear of a session: header (default: X-Session-ID, for vLLM) or body "
    "(session_id as well, for SGLang; the body is written again then).",
    "SEMANTICKV_MAX_TRACKED_TOKENS": "Tokens that the router remembers of each replica (default 2000000); of all "
    "together at most 256 million.",
    "SEMANTICKV_ARRANGE": "false leaves marked passages to the engines (default true: the router orders them).",
    "SEMANTICKV_KV_EVENTS": "Where the replicas publish KV events, in their order, with commas between: "
    "tcp://host:5557, or tcp://host:5557|tcp://host:5558 with the address of the replay; empty for one that does not.",
    "SEMANTICKV_ONE_TENANT": "true: all callers may know of each other's prompts, so KV events also teach the router "
    "what it did not send itself (default false; with SEMANTICKV_SALT_SECRET they do for each tenant).",
    "SEMANTICKV_REDIS_URL": "Redis through which several routers share what they know, for example "
    "redis://127.0.0.1:6379/0. Needs SEMANTICKV_HASH_KEY, the same for all of them.",
    "SEMANTICKV_REDIS_SECRET": "Secret that signs what routers tell each other through Redis, the same for all of them "
    "(default: made from SEMANTICKV_HASH_KEY). Entries without a valid signature are left out.",
    "SEMANTICKV_REDIS_GROUP": "Name of the routers that share (default `default`); part of every key in Redis.",
    "SEMANTICKV_HEALTH_SECONDS": "Seconds between two health checks of a replica (default 5).",
    "SEMANTICKV_HEALTH_TIMEOUT_SECONDS": "How long a health check may take (default 2).",
    "SEMANTICKV_HEALTH_FAILURES": "Health checks in a row that must fail before a replica is taken out (default 2).",
    "SEMANTICKV_HANG_SECONDS": "How long a replica may begin no answer, beyond what prompts took of late, before it is "
    "taken out although it answers health checks (default 10).",
    "SEMANTICKV_MAX_ATTEMPTS": "Replicas that a request is sent to, one after the other, before its client is "
    "told of a fault (default 3).",
    "SEMANTICKV_BREAKER_FAULTS": "Faults in a row after which a replica gets no requests for a while (default 3).",
    "SEMANTICKV_BREAKER_SECONDS": "How long it then gets none (default 1); doubled after every failed trial.",
    "SEMANTICKV_BREAKER_MAX_SECONDS": "The longest such pause (default 60).",
    "SEMANTICKV_TRACE": "false writes no traces in `semantickv proxy` and `router` (default true).",
    "SEMANTICKV_TRACE_OUTPUT_DIR": "Folder for traces; stands in for --output-dir (default outputs/live_traces).",
    "SEMANTICKV_TRACE_FILE_MB": "Size at which a trace is continued in another file; the last 16 stay (default 256).",
    "SEMANTICKV_REDACT_TEXT": "false keeps the prompts' text in traces; true (default) keeps hashes only.",
    "SEMANTICKV_PROXY_TIMEOUT_SECONDS": "How long to wait for an engine: to begin its answer, and between two pieces "
    "of it (default 600).",
    "SEMANTICKV_CONNECT_TIMEOUT_SECONDS": "How long to wait for a connection to an engine (default 5).",
    "SEMANTICKV_MAX_REQUESTS": "Requests at once; more are answered 503 (default 4096).",
    "SEMANTICKV_ADMIN_KEY": "Key for /metrics, /v1/replicas, /v1/fleet and /v1/traces/latest, sent as a bearer token. "
    "Without it they answer only to the machine itself.",
    "SEMANTICKV_SALT_SECRET": "Secret for cache salts: each API key gets a cache of its own in the engine, whatever "
    "its clients send.",
    "SEMANTICKV_CACHE_POLICY": "Eviction policy of the cache that `semantickv api` simulates (default lru).",
    "SEMANTICKV_CACHE_TOKENS": "Size of that cache in tokens (default 50000).",
    "SEMANTICKV_HASH_KEY": "Secret that keys the hashes in traces, so that short texts cannot be guessed.",
}
_NAMES = {
    "upstream": "SEMANTICKV_UPSTREAM_BASE_URL",
    "policy": "SEMANTICKV_ROUTING_POLICY",
    "trace_dir": "SEMANTICKV_TRACE_OUTPUT_DIR",
    "timeout_s": "SEMANTICKV_PROXY_TIMEOUT_SECONDS",
    "capacity_tokens": "SEMANTICKV_CACHE_TOKENS",
}
_CHOICES = {"SEMANTICKV_SESSION_HINT": ("header", "body")}
_VERBATIM = ("SEMANTICKV_REDIS_SECRET", "SEMANTICKV_HASH_KEY")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class _Settings:
    """A dataclass whose fields are read from the environment."""

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read all of them; `ConfigError` names the variable that is wrong."""
        found = os.environ if environ is None else environ
        return cls(**{one.name: _read(one, found) for one in fields(cls)})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class EdgeSettings(_Settings):
    """The settings of the proxy and of the router, read once.

    >>> EdgeSettings.read({"SEMANTICKV_REPLICAS": "http://a:1, http://b:2"}).replicas
    ('http://a:1', 'http://b:2')
    """

    upstream: str = ""
    replicas: tuple[str, ...] = ()
    replicas_file: str = ""
    policy: str = "semantic_locality"
    engine_reuse: str = "spans"
    session_affinity: bool = True
    session_hint: str = "header"
    max_tracked_tokens: int = 2_000_000
    arrange: bool = True
    kv_events: tuple[str, ...] = ()
    one_tenant: bool = False
    redis_url: str = field(default="", repr=False)
    redis_secret: str = field(default="", repr=False)
    redis_group: str = "default"
    health_s: float = 5.0
    health_timeout_s: float = 2.0
    health_failures: int = 2
    hang_s: float = 10.0
    max_attempts: int = 3
    breaker_faults: int = 3
    breaker_s: float = 1.0
    breaker_max_s: float = 60.0
    trace: bool = True
    trace_dir: str = "outputs/live_traces"
    trace_file_mb: float = 256.0
    redact_text: bool = True
    timeout_s: float = 600.0
    connect_timeout_s: float = 5.0
    max_requests: int = 4096
    admin_key: str = field(default="", repr=False)
    salt_secret: str = field(default="", repr=False)
    hash_key: str = field(default="", repr=False)


@dataclass(frozen=True, kw_only=True)
class ApiSettings(_Settings):
    """The settings of the simulation API."""

    cache_policy: str = "lru"
    capacity_tokens: int = 50_000


def find_variable(name: str) -> str:
    """Name the variable of a field.

    >>> find_variable("breaker_max_s"), find_variable("arrange")
    ('SEMANTICKV_BREAKER_MAX_SECONDS', 'SEMANTICKV_ARRANGE')
    """
    usual = f"{name[:-2]}_seconds" if name.endswith("_s") else name
    return _NAMES.get(name, f"SEMANTICKV_{usual.upper()}")


def _read(one: Field[Any], environ: Mapping[str, str]) -> Any:
    """Read the variable of a field; its default where it is not set."""
    name, default = find_variable(one.name), one.default
    text = environ.get(name, "") if name in _VERBATIM else environ.get(name, "").strip()
    if not text:
        return default
    if isinstance(default, bool):
        if text.lower() not in _TRUE + _FALSE:
            raise ConfigError(f"{name}={text} is neither true nor false", hint="write true or false")
        return text.lower() in _TRUE
    if isinstance(default, tuple):
        words = tuple(word.strip() for word in text.split(","))
        return words if one.name == "kv_events" else tuple(filter(None, words))  # there, one may publish none
    if isinstance(default, str):
        if text not in _CHOICES.get(name, (text,)):
            raise ConfigError(f"{name}={text} is unknown", hint="one of " + ", ".join(_CHOICES[name]))
        return text
    return _read_number(name, text, default)


def _read_number(name: str, text: str, default: Any) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name}={text} is not a number above 0", hint=f"for example {default:g}")
    if isinstance(default, int) and value != int(value):
        raise ConfigError(f"{name}={text} is not a whole number", hint=f"for example {default}")
    return int(value) if isinstance(default, int) else value
