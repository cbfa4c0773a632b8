"""Packs vLLM with its own torch for a GPU machine that has no network: parts that can be carried one by one.

    python research/vllm/air_gapped/pack.py OUT [--work FOLDER]     # 7 parts, 332 MB; needs pip and about 8 GB for a while
    python3 OUT/unpack.py DEST                                      # there: it says which variables to set

vLLM 0.32.0, torch 2.13.0, CPython 3.12, x86_64, GPUs of sm_90 (H100, H200). That machine has a torch with the NVIDIA
libraries of CUDA 13 (2.11 was tried), transformers, tokenizers, numba and what else `THERE` names. NCCL is brought:
torch 2.13 does not load with 2.28. cuDNN 9.19 does, where torch is told not to compare versions.

Device code for other GPUs is taken out of the libraries' fatbins, symbols and debug sections are blanked; sizes and
places of everything else stay, so nothing is linked again. 1.9 GB of files become 0.33.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from multiprocessing import Pool
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
BRING = ("torch==2.13.0", "triton==3.7.1", "torchvision==0.28.0", "vllm==0.32.0", "nvidia-nccl-cu13==2.29.7")
THERE = tuple(
    "accelerate fsspec grpcio hf_xet huggingface_hub llvmlite mpmath networkx numba numpy opencv pillow regex safetensors "
    "sentencepiece sympy tiktoken tokenizers transformers".split()
)
UNUSED = tuple(
    "agent_detector detect_installer fastapi_cloud_cli hypothesis iniconfig pluggy pytest rignore sentry_sdk "
    "sortedcontainers supervisor".split()
)
"""Tests', and those of a command that nobody types there."""
LEFT_OUT = (
    "torch/bin/protoc", "torch/testing/_internal/generated", "torch/share/", "triton/backends/amd/include",
    "triton/backends/amd/lib", "triton/backends/nvidia/bin/cuobjdump", "triton/backends/nvidia/bin/nvdisasm",
    "triton/backends/nvidia/bin/ptxas-blackwell", "triton/backends/nvidia/lib/cupti", "triton/_C/libproton",
    "triton/FileCheck", "triton/instrumentation", "triton/plugins", "pycountry/locales", "vllm/vllm-rs",
    "vllm/third_party/deep_gemm/include", "vllm/third_party/fmha_sm100/cutlass",
)  # fmt: skip
LEFT_OUT_WORDS = ("_vllm_fa2_C", "_qutlass_C", "swagger")
SM = 90
PART, CHUNK, BIG = 47 << 20, 32 << 20, 8 << 20
FATBIN, CUBIN, PTX = 0xBA55ED50, 2, 1


@dataclass(frozen=True)
class Piece:
    """A part of a file, or a tar of small ones, compressed in ``path``; ``told`` says to `unpack.py` which."""

    told: dict[str, Any]
    path: Path


def download(work: Path) -> list[Path]:
    """The wheels of what is brought and of what it needs."""
    lines = (ROOT / "constraints" / "vllm.txt").read_text(encoding="utf-8").splitlines()
    names = [line for line in lines if line and not line.startswith("#")]
    needed = [one for one in names if not one.lower().replace("-", "_").startswith((*THERE, *UNUSED))]
    platforms = [f"manylinux_2_{n}_x86_64" for n in (39, 38, 35, 34, 31, 28, 27, 26, 24, 18, 17, 5)]
    platforms += ["manylinux2014_x86_64", "manylinux1_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(work / "wheels")]
    command += ["--python-version", "312", "--only-binary=:all:"]
    command += [word for platform in platforms for word in ("--platform", platform)]
    subprocess.run([*command, *BRING, *needed], check=True)
    return sorted((work / "wheels").glob("*.whl"))


def unzip(wheel: Path, site: Path) -> None:
    """Its files as an installer would lay them, without what is left out; times stay, so that nothing looks stale."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            name = member.filename
            if ".data/" in name:
                kind, _, name = name.partition(".data/")[2].partition("/")
                if kind not in ("purelib", "platlib"):
                    continue
            skipped = name.startswith(LEFT_OUT) or any(word in name for word in LEFT_OUT_WORDS)
            if member.is_dir() or skipped or name.endswith((".a", ".cmake", ".pyi")):
                continue
            target = site / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, target.open("wb") as out:
                shutil.copyfileobj(source, out)
            target.chmod((member.external_attr >> 16) & 0o777 | 0o644)
            if ".so" in target.name:
                prune(target)


def prune(library: Path) -> None:
    """Takes device code for other GPUs out of a library, and blanks what is not loaded; its size stays."""
    data = bytearray(library.read_bytes())
    if data[:4] != b"\x7fELF":
        return
    for name, kind, flags, offset, size in list(_list_sections(data)):
        if name in (".nv_fatbin", "__nv_relfatbin"):
            for start, head, end, entries in list(_list_fatbins(data, offset, size)):
                own = [one for one in entries if one[:2] == (CUBIN, SM)]
                own = own or [one for one in entries if one[0] == PTX and one[1] <= SM] or [min(entries, key=_size_of)]
                body = b"".join(bytes(data[first:last]) for _, _, first, last in own)
                struct.pack_into("<Q", data, start + 8, len(body))
                data[start + head : end] = body + bytes(end - start - head - len(body))
        elif not flags & 2 and kind not in (0, 8) and name != ".shstrtab":  # not loaded
            data[offset : offset + size] = bytes(size)
    library.write_bytes(data)


def _size_of(entry: tuple[int, int, int, int]) -> int:
    return entry[3] - entry[2]


def _list_sections(data: bytearray) -> Iterator[tuple[str, int, int, int, int]]:
    """Name, type, flags, offset and size of each."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", data, table + number * size) for number in range(count)]
    for name, kind, flags, _, offset, length in heads:
        start = heads[names][4] + name
        yield bytes(data[start : data.find(b"\0", start)]).decode(), kind, flags, offset, length


def _list_fatbins(data: bytearray, offset: int, size: int) -> Iterator[tuple[int, int, int, list[tuple[int, int, int, int]]]]:
    """Start, length of the head and end of each, and its entries: kind, architecture, first and last byte."""
    at = offset
    while at + 16 <= offset + size:
        magic, _, head, length = struct.unpack_from("<IHHQ", data, at)
        if magic != FATBIN:
            at += 8
            continue
        end, entry, entries = at + head + length, at + head, []
        while entry < end:
            kind, _, own = struct.unpack_from("<HHI", data, entry)
            (body,) = struct.unpack_from("<Q", data, entry + 8)
            (arch,) = struct.unpack_from("<I", data, entry + 28)
            entries.append((kind, arch, entry, entry + own + body))
            entry += own + body
        yield at, head, end, entries
        at = end


def compress(job: tuple[Path, int, int, Path]) -> None:
    """``length`` bytes of a file."""
    source, start, length, target = job
    filters = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 2, "dict_size": 16 << 20}]
    with source.open("rb") as file:
        file.seek(start)
        target.write_bytes(lzma.compress(file.read(length), check=lzma.CHECK_CRC32, filters=filters))


def cut(site: Path, work: Path) -> list[Piece]:
    """All files: large ones in chunks, small ones in tars, each compressed by itself, so that they unpack side by side."""
    files = sorted(path for path in site.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    pieces, jobs, small = [], [], []
    for number, path in enumerate(files):
        size, name = path.stat().st_size, str(path.relative_to(site))
        if size < BIG:
            small.append((path.suffix != ".py", path, name))
            continue
        for start in range(0, size, CHUNK):
            length, target = min(CHUNK, size - start), work / f"piece-{number}-{start // CHUNK}.xz"
            told = {"k": "c", "p": name, "o": start, "n": length, "s": size, "m": path.stat().st_mode & 0o777}
            jobs.append((path, start, length, target))
            pieces.append(Piece(told, target))
    while small:
        tar, held = BytesIO(), 0
        with tarfile.open(fileobj=tar, mode="w", format=tarfile.GNU_FORMAT) as archive:
            while small and held < CHUNK - BIG:
                _, path, name = small.pop()
                archive.add(path, name)
                held += path.stat().st_size
        plain = work / f"tar-{len(pieces)}"
        plain.write_bytes(tar.getvalue())
        jobs.append((plain, 0, len(tar.getvalue()), work / f"{plain.name}.xz"))
        pieces.append(Piece({"k": "t"}, work / f"{plain.name}.xz"))
    with Pool() as pool:
        for done, _ in enumerate(pool.imap_unordered(compress, jobs), 1):
            print(f"\r{done} of {len(jobs)} pieces", end="", file=sys.stderr)
    return pieces


def write_parts(pieces: list[Piece], out: Path) -> int:
    """The largest first, each into the first part that has room; how many parts."""
    parts: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda one: -one.path.stat().st_size):
        size = piece.path.stat().st_size + 400
        room = (one for one in parts if sum(held.path.stat().st_size + 400 for held in one) + size < PART - (64 << 10))
        if (part := next(room, None)) is None:
            parts.append(part := [])
        part.append(piece)
    for number, part in enumerate(parts):
        bodies = [piece.path.read_bytes() for piece in part]
        starts = [sum(map(len, bodies[:index])) for index in range(len(bodies))]
        jobs = [piece.told | {"at": at, "len": len(body)} for piece, at, body in zip(part, starts, bodies, strict=True)]
        head = json.dumps({"parts": len(parts), "jobs": jobs}).encode()
        whole = struct.pack("<I", len(head)) + head + b"".join(bodies)
        (out / f"part_{number:02d}").write_bytes(whole)
    return len(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--work", type=Path, help="kept: a second run downloads and unpacks nothing again")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    work = args.work or Path(tempfile.mkdtemp(prefix="air-gapped-"))
    site = work / "site"
    if not site.exists():
        for wheel in download(work):
            print(wheel.name, file=sys.stderr)
            unzip(wheel, site)
    pieces = work / "pieces"
    pieces.mkdir(exist_ok=True)
    count = write_parts(cut(site, pieces), args.out)
    shutil.copy(Path(__file__).with_name("unpack.py"), args.out)
    size = sum(os.path.getsize(part) for part in args.out.glob("part_*"))
    print(f"\n{count} parts, {size / 1e6:.0f} MB, in {args.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
