"""Settings of the SGLang integration: those of local sessions, and how long a semantic provider is waited for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from semblend.config import GIB, setting
from semblend.errors import ConfigError
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


# -- What an operator says about HiCache pages: keys of SGLang's ``--hicache-storage-backend-extra-config``.


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOptions:
    """Where pages are kept, how many bytes of them, and of which weights."""

    directory: str = setting("", "Folder for the pages, mode 0700, of the user that runs the engine. Required.")
    max_bytes: int = setting(64 * GIB, "Limit of the folder; the least recently used pages leave first.")
    weights: str = setting("", "A name for the weights; empty = their numbers are looked at, which is safer.")

    def __post_init__(self) -> None:
        if not isinstance(self.directory, str) or not self.directory:
            raise ConfigError("the HiCache pages have no directory", hint='add "directory" to the backend extra config')
        if isinstance(self.max_bytes, bool) or not isinstance(self.max_bytes, int) or self.max_bytes <= 0:
            raise ConfigError(f"max_bytes={self.max_bytes!r} is not a number of bytes", hint="such as 64000000000")
        if not isinstance(self.weights, str):
            raise ConfigError(f"weights={self.weights!r} is not a name", hint="leave it out: they are looked at")


def read_page_options(extra: Mapping[str, Any]) -> PageOptions:
    """The options among SGLang's own keys.

    >>> read_page_options({"backend_name": "semblend", "directory": "/var/cache/pages"}).directory
    '/var/cache/pages'
    """
    known = {one.name for one in fields(PageOptions)}
    return PageOptions(**{name: value for name, value in extra.items() if name in known})
