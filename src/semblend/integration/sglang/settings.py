"""Settings of the SGLang integration: every SEMBLEND_* setting, and a few that only an engine has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from semblend.config import GIB, SemBlendConfig, load_config, setting
from semblend.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangSettings:
    """How our radix cache behaves; ``config`` holds what the library reads."""

    config: SemBlendConfig = field(default_factory=SemBlendConfig)
    donor_host_bytes: int = setting(4 * GIB, "Host memory for donor KV.")
    donor_device_bytes: int = setting(0, "Accelerator memory for donor KV; 0 = host only.")
    donor_min_new_tokens: int = setting(
        32, "A prompt of which fewer tokens were computed (the rest was an exact hit) is not kept as a donor."
    )
    step_work_ms: float = setting(
        40.0, "While other requests run, a scheduler step works so long on the load of the request that is next."
    )
    provider_deadline_ms: float = setting(
        5.0, "A semantic provider that has not answered by then is not waited for; the scheduler waits so long."
    )
    require_cache_salt: bool = setting(
        False, "A request without a cache_salt or extra_key neither reuses nor becomes a donor."
    )

    def __post_init__(self) -> None:
        numbers = ("donor_host_bytes", "donor_device_bytes", "donor_min_new_tokens", "step_work_ms")
        for name in (*numbers, "provider_deadline_ms"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
                raise ConfigError(f"{name}={value!r} is not a number of 0 or more", hint="see docs/guides/sglang.md")
        if not isinstance(self.require_cache_salt, bool):
            raise ConfigError(
                f"require_cache_salt={self.require_cache_salt!r} is not true or false", hint="see docs/guides/sglang.md"
            )
        if not self.step_work_ms:
            raise ConfigError("step_work_ms=0 leaves loads no time", hint="40 is the default")


def sglang_settings(own: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> SglangSettings:
    """The settings from environment and file, and ``own`` for those that only an engine has.

    >>> sglang_settings({"step_work_ms": 10}, {"SEMBLEND_QUALITY": "fast"}).config.quality
    'fast'
    """
    known = {one.name for one in fields(SglangSettings)} - {"config"}
    if unknown := sorted(set(own) - known):
        raise ConfigError(f"unknown setting {unknown[0]!r}", hint="known: " + ", ".join(sorted(known)))
    return SglangSettings(config=load_config(environ), **own)
