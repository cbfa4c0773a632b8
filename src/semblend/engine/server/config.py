"""How a server behaves: the model and its room, who may ask, how many wait. Made once, at the edge."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

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


def _flag(default: Any, text: str, *names: str, **shape: Any) -> Any:
    """A setting that is a flag of `semblend serve`, too: named after its field, unless ``names`` say otherwise."""
    return field(default=default, metadata={"help": text, "names": names, **shape})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Everything about serving that is not the library's own (`SemBlendConfig`).

    Fields with a text are flags of `semblend serve`. Of the others:

    *The model.* Empty ``device`` and ``dtype``: the best this machine has. ``aliases`` are further names under which
    the model may be asked for.

    *Admission.* Beyond ``max_running``, up to a quarter more are answered where a tenant has none running; all of it is
    fair between tenants. ``max_n`` answers may be asked for in one request.

    *Limits.* ``default_output_tokens`` bounds a chat answer whose request names no limit. ``max_list_chars`` bounds the
    characters of a list of prompts together, ``max_list_tokens`` their token ids; one prompt is bounded by the context
    (see `refuse_long_texts`), and a list may always be as long as one prompt. ``max_body_bytes`` None: as much as such
    texts can take (see `compute_body_limit`). ``max_tokenizing_chars`` bounds the characters that wait for the
    tokenizer; a tenant with more than its share of them is refused with 429. Every ``write_timeout_s`` it is checked
    that a client reads its answer.

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
    thresholds: str = _flag("", "thresholds of the quality gate, written by semblend calibrate", metavar="FILE")
    aliases: tuple[str, ...] = ()

    pool_tokens: int = _flag(32_768, "size of the KV pool, in tokens")
    donor_device_bytes: int = _flag(0, "device memory for donor KV, in bytes")
    donor_host_bytes: int = _flag(2 * GIB, "host memory for donor KV, in bytes (default: 2 GiB)", "--donor-bytes")
    donor_disk_bytes: int = _flag(8 * GIB, "limit of --donor-dir, in bytes (default: 8 GiB)")
    donor_dir: str = _flag("", "keep donor KV that falls out of memory here", metavar="DIR")
    donor_bits: int = _flag(
        16, "bits of a number of donor KV in memory and on disk; 8 halves the bytes", choices=[16, 8]
    )
    donor_directory: str = _flag(
        "", "share donors in this folder with other servers of the machine and with semblend warm", metavar="DIR"
    )
    donor_directory_bytes: int = _flag(4 * GIB, "limit of --donor-directory, in bytes (default: 4 GiB)")
    arrange_file: str = _flag(
        "", "keep the orders of passages over a restart here, see docs/guides/arrange.md", metavar="FILE"
    )
    step_tokens: int = _flag(STEP_TOKENS, "tokens computed in one scheduler step, at most")
    step_work_ms: float = _flag(
        STEP_WORK_MS,
        "milliseconds that a step works on prompts while answers of other tenants run, about",
        metavar="MS",
    )

    max_running: int = _flag(MAX_RUNNING, "requests answered at once, at most")
    max_waiting: int = _flag(MAX_WAITING, "requests that may wait; more are answered with 429")
    max_n: int = 8
    retry_after_s: int = 1

    default_output_tokens: int = 512
    max_body_bytes: int | None = None
    max_list_chars: int = 2 * MIB
    max_tokenizing_chars: int = 8 * MIB
    max_list_tokens: int = 128 * 1024
    request_timeout_s: float = 600.0
    body_timeout_s: float = 30.0

    header_timeout_s: float = _flag(
        10.0, "seconds for the headers of a request to arrive", "--header-timeout", metavar="SECONDS"
    )
    idle_timeout_s: float = _flag(75.0, "seconds that a connection may stay idle", "--idle-timeout", metavar="SECONDS")
    write_timeout_s: float = 30.0
    max_connections: int = _flag(1024, "open connections, at most")
    drain_s: float = _flag(
        20.0, "seconds for running requests after a stop signal", "--drain-seconds", "--drain", metavar="SECONDS"
    )

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
