"""Settings that an engine has beside the SEMBLEND_* settings of the library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from semblend.config import GIB, SemBlendConfig, load_config, setting
from semblend.errors import ConfigError

Settings = TypeVar("Settings", bound="LocalSettings")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """How an engine that runs in one process behaves; ``config`` holds what the library reads."""

    guide: ClassVar[str] = "docs/reference/settings.md"
    """Where a mistake sends the reader."""

    config: SemBlendConfig = field(default_factory=SemBlendConfig)
    donor_host_bytes: int = setting(4 * GIB, "Host memory for donor KV, per rank.")
    donor_device_bytes: int = setting(0, "Accelerator memory for donor KV, per rank; 0 = host only.")
    donor_min_new_tokens: int = setting(
        32, "A prompt of which fewer tokens were computed (the rest was an exact hit) is not kept as a donor."
    )
    step_work_ms: float = setting(
        40.0,
        "While other requests run, a scheduler step works so long on loads and repairs of those that wait for them.",
    )
    require_cache_salt: bool = setting(
        False, "A request without a salt of its own neither reuses nor becomes a donor: nobody shares by accident."
    )

    def __post_init__(self) -> None:
        for one in fields(self):
            value, wanted = getattr(self, one.name), one.default
            if isinstance(wanted, bool) and not isinstance(value, bool):
                raise ConfigError(f"{one.name}={value!r} is not true or false", hint=f"see {self.guide}")
            if isinstance(wanted, str) and not isinstance(value, str):
                raise ConfigError(f"{one.name}={value!r} is not a path", hint=f"see {self.guide}")
            if isinstance(wanted, bool) or not isinstance(wanted, (int, float)):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value < min(0, wanted):
                raise ConfigError(f"{one.name}={value!r} is not a number of 0 or more", hint=f"see {self.guide}")
        if not self.step_work_ms:
            raise ConfigError("step_work_ms=0 leaves loads no time", hint="40 is the default")


def list_own_settings(kind: type[LocalSettings]) -> set[str]:
    """Names of the settings that only an engine has."""
    return {one.name for one in fields(kind)} - {"config"}


def read_settings(kind: type[Settings], own: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Settings:
    """The settings from environment and file, and ``own`` for those that only an engine has.

    >>> read_settings(LocalSettings, {"step_work_ms": 10}, {"SEMBLEND_QUALITY": "fast"}).config.quality
    'fast'
    """
    known = list_own_settings(kind)
    if unknown := sorted(set(own) - known):
        raise ConfigError(f"unknown setting {unknown[0]!r}", hint="known: " + ", ".join(sorted(known)))
    return kind(config=load_config(environ), **own)
