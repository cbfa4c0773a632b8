"""Unpacks the parts that lie beside this file: python3 unpack.py DEST. Run it with the Python that has a torch for CUDA 13."""

from __future__ import annotations

import io
import json
import lzma
import multiprocessing
import os
import struct
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
VARIABLES = {
    "PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK": "1",  # it was built with 9.20
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",  # its headers are left out
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
CHECK = """
import torch, triton, vllm
from vllm import _C_stable_libtorch, _moe_C_stable_libtorch
from vllm.vllm_flash_attn import _vllm_fa3_C
found = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
assert (found @ found).isfinite().all()
print("torch", torch.__version__, "vllm", vllm.__version__, "triton", triton.__version__, torch.cuda.get_device_name())
"""


def read_head(part: Path) -> tuple[dict[str, Any], int]:
    with part.open("rb") as file:
        (length,) = struct.unpack("<I", file.read(4))
        return json.loads(file.read(length)), 4 + length


def unpack(job: tuple[Path, int, int, Path, dict[str, Any]]) -> None:
    part, at, length, dest, told = job
    with part.open("rb") as file:
        file.seek(at)
        data = lzma.decompress(file.read(length))
    if told["k"] == "t":
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            tar.extractall(dest, filter="fully_trusted")
        return
    path = dest / told["p"]
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o755)
    try:
        done = 0
        while done < len(data):
            done += os.pwrite(file, data[done:], told["o"] + done)
        os.fchmod(file, told["m"])
    finally:
        os.close(file)


def link_libraries(dest: Path) -> None:
    """NVIDIA's libraries are those of this machine, but for NCCL."""
    folders = (Path(entry, "nvidia") for entry in sys.path if entry)
    found = next((one for one in folders if (one / "cu13" / "lib").is_dir() and dest not in one.parents), None)
    if found is None:
        raise SystemExit("no nvidia/cu13/lib here (hint: run this with the Python that has a torch for CUDA 13)")
    for library in found.resolve().iterdir():
        link = dest / "nvidia" / library.name
        if library.name != "nccl" and not library.name.startswith("__"):
            link.unlink(missing_ok=True)
            link.symlink_to(library)


def main() -> int:
    dest, begun, jobs = Path(sys.argv[1]).resolve(), time.time(), []
    dest.mkdir(parents=True, exist_ok=True)
    parts = sorted(HERE.glob("part_*"))
    for part in parts:
        head, start = read_head(part)
        if head["parts"] != len(parts):
            raise SystemExit(f"{len(parts)} of {head['parts']} parts are here")
        jobs += [(part, start + told["at"], told["len"], dest, told) for told in head["jobs"]]
    with multiprocessing.Pool() as pool:
        for _ in pool.imap_unordered(unpack, sorted(jobs, key=lambda job: -job[2])):
            pass
    link_libraries(dest)
    print(f"unpacked in {time.time() - begun:.1f} s; PYTHONPATH={dest}", *(f"{k}={v}" for k, v in VARIABLES.items()))
    return subprocess.run([sys.executable, "-c", CHECK], env=os.environ | VARIABLES | {"PYTHONPATH": str(dest)}).returncode


if __name__ == "__main__":
    sys.exit(main())
