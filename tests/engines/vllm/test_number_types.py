"""Models in half precision: the same reuse, a canary that knows their rounding, an exact cache that stays exact."""

from __future__ import annotations

import pytest
from cpu_features import needs_bf16

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


# On an ARM CPU without bfloat16 vLLM's bfloat16 kernels end in an illegal instruction, and float16 takes many minutes.
@needs_bf16
@pytest.mark.parametrize(("dtype", "rounding"), [("bfloat16", 0.02), ("float16", 0.005)])
def test_a_model_in_half_precision_is_served(apart, dtype, rounding):
    told = apart("number_type", dtype=dtype)
    for mode in ("fast", "balanced"):
        receipt = told[mode]["receipt"]
        assert receipt["outcome"] == "backend_materialized_reuse", receipt
        assert receipt["reused_tokens"] > 0.3 * told[mode]["prompt"]
        assert 0 < receipt["canary"] < rounding, "moved keys are rounded once more, and no further off than that"
    assert told["cold again"]["cached"] < 64, "of what we served nothing is in the exact cache"
    assert told["cold again"]["tokens"] == told["cold"]["tokens"]


def test_a_model_with_four_bit_weights_is_served(apart, tmp_path):
    told = apart("number_type", dtype="float32", kind="four bits", folder=str(tmp_path / "model"))
    assert "Dynamic4bitLinearKernel" in told["log"]
    for mode in ("fast", "balanced"):
        receipt = told[mode]["receipt"]
        assert receipt["outcome"] == "backend_materialized_reuse", receipt
        assert receipt["reused_tokens"] > 0.3 * told[mode]["prompt"]
        assert 0 < receipt["canary"] < 1e-3, "keys are moved in float32, whatever the weights are"
    assert told["cold again"]["cached"] < 64, "of what we served nothing is in the exact cache"
    assert told["cold again"]["tokens"] == told["cold"]["tokens"]
