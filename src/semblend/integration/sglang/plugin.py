"""The entry point ``sglang.srt.plugins``: SGLang knows our cache as ``--radix-cache-backend semblend``.

SGLang calls `register` in every process that it starts, whether our cache is asked for or not. So nothing is imported
here but SGLang's own table, of another release not even that, and a failure is a line in the log: an engine that does
not use us must not notice that we are installed.
"""

from __future__ import annotations

import logging
from typing import Any

from semblend.config import read_engine_variable
from semblend.integration.versions import SGLANG

BACKEND = "semblend"
CACHE_FACTORY = "sglang.srt.mem_cache.registry.create_unified_radix_cache"

log = logging.getLogger("sglang.semblend")


def register() -> None:
    """Enter our cache into SGLang's table, where it is not there yet; its module is imported when it is asked for."""
    try:
        SGLANG.require()
        from sglang.srt.mem_cache import registry

        if BACKEND not in registry.registered_radix_cache_backends():
            registry.register_radix_cache_backend(BACKEND, make_cache)
            note_engines()
        if read_engine_variable("sglang").get("patch") is True:  # by `patch_radix_cache` where this was started
            from semblend.integration.sglang.radix_patcher import patch_radix_cache

            patch_radix_cache()
    except Exception as error:
        log.warning("SemBlend is not registered in this SGLang: %s", error)


def note_engines() -> None:
    """Have SGLang tell us when it makes a radix cache: our HiCache storage has to see the engine's weights."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from semblend.integration.sglang.hicache.live_model import note_engine

    HookRegistry.register(CACHE_FACTORY, note_engine, HookType.BEFORE)


def make_cache(context: Any) -> Any:
    """See `semblend.integration.sglang.start`."""
    from semblend.integration.sglang import start

    return start.make_cache(context)
