"""The entry point ``sglang.srt.plugins``: SGLang knows our cache as ``--radix-cache-backend semblend``.

SGLang calls `register` in every process that it starts, whether our cache is asked for or not. So nothing is imported
here but SGLang's own table, of another release not even that, and a failure is a line in the log: an engine that does
not use us must not notice that we are installed.
"""

from __future__ import annotations

import logging
import weakref
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

    HookRegistry.register(CACHE_FACTORY, note_engine, HookType.BEFORE)


def make_cache(context: Any) -> Any:
    """See `semblend.integration.sglang.start`."""
    from semblend.integration.sglang import start

    return start.make_cache(context)


# -- The model of the engine in this process, for parts that SGLang makes without telling them.
#
# SGLang makes a HiCache storage backend from shapes and names. Pages must not be shared between different weights, so
# it has to see them. SGLang's own plug-in hooks let us note the engine when its radix cache is made.


_noted: weakref.ref[Any] | None = None


def note_engine(context: Any, *more: Any, **named: Any) -> None:
    """Remember the model runner of SGLang's `TreeCacheBuildContext`; it stays SGLang's and may go."""
    global _noted
    del more, named
    runner = getattr(getattr(context, "tp_worker", None), "model_runner", None)
    _noted = None if runner is None else weakref.ref(runner)


def find_runner() -> Any | None:
    """The model runner of the engine; None where there is none yet, or none any more."""
    return None if _noted is None else _noted()
