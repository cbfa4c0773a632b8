"""Whether our Triton kernels can run here."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec


@cache
def has_triton() -> bool:
    """Whether triton is installed; without it the plain twins run."""
    return find_spec("triton") is not None
