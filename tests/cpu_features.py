"""What the CPU of this machine can compute: tests that need more are skipped with the reason."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


def has_bf16() -> bool:
    """Whether torch multiplies bfloat16 matrices with this CPU's own instructions."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


# Without them torch warns and takes a path that is many times slower, and warnings are errors here.
needs_bf16 = pytest.mark.skipif(not has_bf16(), reason="this CPU has no bfloat16 instructions")
BFLOAT16 = pytest.param(torch.bfloat16, marks=needs_bf16, id="bfloat16")
