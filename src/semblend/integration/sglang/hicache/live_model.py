"""The model of the engine in this process, for parts that SGLang makes without telling them.

SGLang makes a HiCache storage backend from shapes and names. Pages must not be shared between different weights, so it
has to see them. SGLang's own plug-in hooks let us note the engine when its radix cache is made.
"""

from __future__ import annotations

import weakref
from typing import Any

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
