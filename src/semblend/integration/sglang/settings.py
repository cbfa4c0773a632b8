"""Settings of the SGLang integration: those of local sessions, and how long a semantic provider is waited for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from semblend.config import setting
from semblend.session.settings import LocalSettings, read_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangSettings(LocalSettings):
    """How our radix cache behaves; ``config`` holds what the library reads."""

    guide: ClassVar[str] = "docs/guides/sglang.md"

    provider_deadline_ms: float = setting(
        5.0, "A semantic provider that has not answered by then is not waited for; the scheduler waits so long."
    )


def sglang_settings(own: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> SglangSettings:
    """The settings from environment and file, and ``own`` for those that only an engine has.

    >>> sglang_settings({"step_work_ms": 10}, {"SEMBLEND_QUALITY": "fast"}).config.quality
    'fast'
    """
    return read_settings(SglangSettings, own, environ)
