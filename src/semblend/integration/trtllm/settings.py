"""Settings of the TensorRT-LLM connector: those of the desk, and the size of the slots that loads are prepared in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from semblend.config import setting
from semblend.integration.desk.settings import DeskSettings, read_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmSettings(DeskSettings):
    """How the connector behaves; ``config`` holds what the library reads."""

    guide: ClassVar[str] = "docs/guides/tensorrt_llm.md"

    staging_tokens: int = setting(
        16384, "Tokens of accelerator memory in which loads are prepared; a longer prompt is computed without us."
    )


def trtllm_settings(own: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> TrtllmSettings:
    """The settings from environment and file, and ``own`` for those that only an engine has.

    >>> trtllm_settings({"staging_tokens": 4096}, {"SEMBLEND_QUALITY": "fast"}).staging_tokens
    4096
    """
    return read_settings(TrtllmSettings, own, environ)
