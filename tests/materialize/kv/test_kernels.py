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
