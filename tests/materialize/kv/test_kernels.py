"""Runs the kernels against their twins without a GPU; the cases themselves stand in ``kernel_cases.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the twins need torch")
pytest.importorskip("triton", reason="the kernels need triton")

pytestmark = pytest.mark.slow  # 29 s, and triton is .9 GB that nothing else here needs
CASES = Path(__file__).with_name("kernel_cases.py")


def run_cases(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", str(CASES), "-q", "--tb=line", "-rN", *words]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, cwd=CASES.parents[3], timeout=600
    )


def test_the_kernels_equal_their_twins_in_the_interpreter():
    done = run_cases({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_the_kernels_equal_their_twins_on_a_gpu():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    done = run_cases({"TRITON_INTERPRET": "0"})
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_importing_splice_does_not_import_triton():
    code = "import sys, semblend.materialize.kv.splice; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


QUESTION = {
    "GROUP": 6, "KV_HEADS": 2, "HEAD_DIM": 128, "BLOCK_TOKENS": 16, "DIMS": 128, "WIDEN": False, "STEP": 8,
}  # fmt: skip
ROWS = {"GROUP": 6, "HEADS": 12, "HEAD_DIM": 128, "BLOCK_TOKENS": 16, "DIMS": 128, "WIDEN": False, "SPLIT": True}
COMPILED = {
    "the highest scores of a question": ("_peaks_kernel", QUESTION),
    "the mass of a question": ("_mass_kernel", QUESTION),
    "scattered rows": ("_attention_kernel", ROWS | {"GOES_ON": False}),
    "rows that go on": ("_attention_kernel", ROWS | {"GOES_ON": True}),
    "joining parts": ("_join_kernel", ROWS | {"GOES_ON": True, "SOME": 16}),
}
KINDS = dict.fromkeys(("q", "k", "v", "out", "before"), "*bf16") | dict.fromkeys(
    ("sums", "found", "partial", "before_sums"), "*fp32"
)
KINDS |= {"context": "*i64", "starts": "*i64", "positions": "*i64", "firsts": "*i32", "scale": "fp32", "share": "fp32"}


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("work", COMPILED)
def test_the_kernels_of_attention_compile_for_a_gpu_that_is_not_there(work, architecture):
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("what is interpreted is not compiled")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from semblend.materialize.kv import attention_kernels

    name, shapes = COMPILED[work]
    kernel, tile = getattr(attention_kernels, name), 128 if architecture == 90 else 64
    shapes = {**shapes, "TILE": tile, "KEYS": tile}
    signature = {at: "constexpr" if at in shapes else KINDS.get(at, "i32") for at in kernel.arg_names}
    fixed = {(number,): shapes[at] for number, at in enumerate(kernel.arg_names) if at in shapes}
    made = triton.compile(ASTSource(kernel, signature, fixed), target=GPUTarget("cuda", architecture, 32))
    assert made.asm["cubin"]
