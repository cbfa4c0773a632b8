"""`patch_radix_cache`: our cache in place of SGLang's own, without a flag on the command line.

For programs that start SGLang themselves. The patch holds in this process and, by an environment variable that our
plug-in reads there, in the scheduler's processes that SGLang starts from it. It also gives SGLang's own cache classes
`set_semantic_provider`, so that a provider can be tried on them alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from semblend.config import read_engine_variable, write_engine_variable
from semblend.integration.sglang.semantic_prefix import install_hooks
from semblend.integration.versions import SGLANG

log = logging.getLogger("sglang.semblend")


@dataclass(eq=False)
class Patch:
    """What `patch_radix_cache` has done; `undo` takes it back, once."""

    undos: list[Callable[[], None]] = field(default_factory=list)

    @property
    def is_applied(self) -> bool:
        return bool(self.undos)

    def undo(self) -> None:
        """Put everything back as it was, for this process and for those that are started later."""
        while self.undos:
            self.undos.pop()()


_patch = Patch()


def patch_radix_cache(*, unsafe_verbatim: bool = False) -> Patch:
    """Use our cache wherever SGLang would make its default one; calling it again changes nothing.

    Raises `SemBlendError` where SGLang is missing, or is a release that nobody has looked at. An engine that we cannot
    serve gets SGLang's own cache. ``unsafe_verbatim`` is for providers on SGLang's own classes: see
    `semblend.integration.sglang.semantic_prefix`.
    """
    row = SGLANG.require()
    if not _patch.is_applied:
        _patch.undos += [_replace_factory(row.version), *_patch_classes(unsafe_verbatim), _tell_children()]
    return _patch


def _replace_factory(version: str) -> Callable[[], None]:
    from sglang.srt.mem_cache import registry

    from semblend.integration.sglang.start import make_cache, refusal

    stock = registry.default_radix_cache_factory

    def choose(context: Any) -> Any:
        why = refusal(context, version)
        if why is None:
            return make_cache(context)
        log.warning("SemBlend reuses nothing in this engine: %s", why)
        return stock(context)

    registry.default_radix_cache_factory = choose

    def undo() -> None:
        registry.default_radix_cache_factory = stock

    return undo


def _patch_classes(unsafe_verbatim: bool) -> list[Callable[[], None]]:
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    return [install_hooks(one, unsafe_verbatim=unsafe_verbatim) for one in (RadixCache, UnifiedRadixCache)]


def _tell_children() -> Callable[[], None]:
    before = read_engine_variable("sglang")
    write_engine_variable("sglang", before | {"patch": True})
    return lambda: write_engine_variable("sglang", before)
