"""How a server behaves: the model and its room, who may ask, how many wait. Made once, at the edge."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from semblend.arrange import Arranger
from semblend.engine.core.config import MAX_RUNNING, MAX_WAITING, STEP_TOKENS, STEP_WORK_MS, EngineConfig
from semblend.engine.server.tenants import Tenants
from semblend.errors import ConfigError
from semblend.fairness import count_places

GIB = 1 << 30
MIB = 1 << 20
DTYPES = ("float32", "bfloat16", "float16")
_MAY_BE_ZERO = (
    "drain_s",
    "max_waiting",
    "threads",
    "donor_device_bytes",
    "donor_host_bytes",
    "donor_disk_bytes",
    "donor_directory_bytes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Everything about serving that is not the library's own (`SemBlendConfig`).

    *The model.* Empty ``device`` and ``dtype``: the best this machine has. ``threads`` of the CPU compute; 0 leaves it
    to torch. ``thresholds`` names a file of `semblend calibrate`; empty takes what is known of the model. ``aliases``
    are further names under which the model may be asked for.

    *Room.* ``pool_tokens`` of KV; bytes for donors on the device, in memory and in ``donor_dir``, the latter two at
    ``donor_bits`` (16 or 8). ``step_tokens`` are computed in one step, prompts for about ``step_work_ms`` while answers
    of other tenants run (see `EngineConfig`). ``donor_directory`` is a folder of donors that engines of this machine
    and `semblend warm` share; this one keeps ``donor_directory_bytes`` in it. ``arrange_file`` keeps the orders of
    passages over a restart.

    *Admission.* ``max_running`` requests are answered at once (up to a quarter more where a tenant has none running),
    ``max_waiting`` wait in line, the rest are refused with 429, all of it fair between tenants. ``max_n`` answers may
    be asked for in one request.

    *Limits.* ``default_output_tokens`` bounds a chat answer whose request names no limit. ``max_list_chars`` bounds the
    characters of a list of prompts together, ``max_list_tokens`` their token ids; one prompt is bounded by the context
    (see `refuse_long_texts`), and a list may always be as long as one prompt. ``max_body_bytes`` None: as much as such
    texts can take (see `compute_body_limit`). ``max_tokenizing_chars`` bounds the characters that wait for the
    tokenizer; a tenant with more than its share of them is refused with 429.

    *Connections.* A client has ``header_timeout_s`` to send its headers and ``idle_timeout_s`` between two requests;
    every ``write_timeout_s`` it is checked that it reads its answer. At most ``max_connections`` are open, fewer where
    the process has too few file descriptors. After a signal requests have ``drain_s`` to end.

    *Who may ask.* With ``public_metrics`` anyone may read everybody's figures at /metrics; else a tenant reads its own
    and an admin all. ``origins`` are web pages besides our own that may call from a browser; ``local_only`` answers to
    names of this machine alone, so that no page can reach it under a name of its own.

    >>> ServeConfig(max_running=4, max_n=2).engine_config(quality="fast").max_waiting
    10
    """

    model: str = ""
    device: str = ""
    dtype: str = ""
    threads: int = 0
    thresholds: str = ""
    aliases: tuple[str, ...] = ()

    pool_tokens: int = 32_768
    donor_device_bytes: int = 0
    donor_host_bytes: int = 2 * GIB
    donor_disk_bytes: int = 8 * GIB
    donor_dir: str = ""
    donor_bits: int = 16
    donor_directory: str = ""
    donor_directory_bytes: int = 4 * GIB
    arrange_file: str = ""
    step_tokens: int = STEP_TOKENS
    step_work_ms: float = STEP_WORK_MS

    max_running: int = MAX_RUNNING
    max_waiting: int = MAX_WAITING
    max_n: int = 8
    retry_after_s: int = 1

    default_output_tokens: int = 512
    max_body_bytes: int | None = None
    max_list_chars: int = 2 * MIB
    max_tokenizing_chars: int = 8 * MIB
    max_list_tokens: int = 128 * 1024
    request_timeout_s: float = 600.0
    body_timeout_s: float = 30.0

    header_timeout_s: float = 10.0
    idle_timeout_s: float = 75.0
    write_timeout_s: float = 30.0
    max_connections: int = 1024
    drain_s: float = 20.0

    tenants: Tenants = field(default_factory=Tenants)
    public_metrics: bool = False
    origins: tuple[str, ...] = ()
    local_only: bool = False

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                continue
            if not (value > 0 or (value == 0 and f.name in _MAY_BE_ZERO)):  # NaN fails too
                raise ConfigError(f"{f.name}={value!r} is too small", hint="see docs/guides/serve.md")
        if self.donor_bits not in (8, 16):
            raise ConfigError(f"donor_bits={self.donor_bits} is not 8 or 16", hint="see docs/guides/serve.md")
        if self.dtype and self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r} is unknown", hint="one of " + ", ".join(DTYPES))

    def make_arranger(self) -> Arranger:
        """The memory of orders; it expects as much in the exact prefix cache as the pool holds."""
        return Arranger.for_cache(self.pool_tokens, path=self.arrange_file or None)

    def engine_config(self, *, quality: str) -> EngineConfig:
        """The engine's part. Requests are admitted once, at the gate: the engine takes every answer of those."""
        return EngineConfig(
            model_name=self.model,
            quality=quality,
            step_tokens=self.step_tokens,
            step_work_ms=self.step_work_ms,
            max_running=self.max_running,
            max_waiting=count_places(self.max_running) * self.max_n,
        )
