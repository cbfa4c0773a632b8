"""What the CPU of this machine can compute: tests that need more are skipped with the reason."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


def has_bf16() -> bool:
    """Whether torch multiplies bfloat16 matrices with this CPU's own instructions."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


# Without them torch warns, and warnings are errors here; its other way is slow. Measured on a Neoverse-N1, a product of
# 300 rows and a matrix of 576 x 1536: 17 ms in float32, 4.2 s in bfloat16, 5.3 s in float16.
needs_bf16 = pytest.mark.skipif(
    not has_bf16(), reason="this CPU has no bfloat16 instructions: half precision is hundreds of times slower there"
)
BFLOAT16 = pytest.param(torch.bfloat16, marks=needs_bf16, id="bfloat16")
