"""The file that holds a donor's tensors, in the disk tier and in the shared directory.

    8 bytes    magic
    8 bytes    length of the header, little-endian
    32 bytes   SHA-256 of the two above and the header
    header     JSON: what the donor is, where each tensor lies, checksums of the payload; padded with spaces
    payload    the tensors, each at a multiple of 64 bytes; the gaps are zero and covered by the checksums

Every byte is covered: a flipped bit, a short file and a file of another donor are found before a tensor is handed out.
The payload has one CRC-32 for every 16 MiB. On an ARM Neoverse-N1 core zlib's CRC-32 was at least 1.3 times as fast as
SHA-256 and 2.5 times as fast as BLAKE2b (decision 0080). A checksum protects against damage, not against somebody who
may write the file: that is what its mode and its folder's are for.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from semblend.materialize.kv.layout import DTYPES
from semblend.materialize.kv.rope import RopeSpec

MAGIC = b"SBKV0002"
ALIGNMENT = 64  # tensors start at a multiple of this, so that a mapped view is aligned for every dtype
PIECE_BYTES = 16 << 20
LARGEST_HEADER = 16 << 20
_FIXED = len(MAGIC) + 8 + 32
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*DTYPES, torch.int8, torch.uint8)}
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def write_donor_file(out: BinaryIO, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> int:
    """Write the named tensors and what ``about`` says of them; returns the bytes written."""
    parts = {name: _view_bytes(tensor) for name, tensor in tensors.items()}
    layout, at = {}, 0
    for name, tensor in tensors.items():
        layout[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "at": at}
        at += _align(parts[name].nbytes)
    header = {"about": dict(about), "tensors": layout, "payload_bytes": at, "crc32": list(_sum_parts(parts.values()))}
    packed = json.dumps(header, sort_keys=True).encode()
    packed = packed.ljust(_align(_FIXED + len(packed)) - _FIXED)
    start = MAGIC + len(packed).to_bytes(8, "little")
    out.write(start + hashlib.sha256(start + packed).digest() + packed)
    for part in parts.values():
        out.write(part.data)
        out.write(bytes(_align(part.nbytes) - part.nbytes))
    return _FIXED + len(packed) + at


def read_header(descriptor: int) -> dict[str, Any]:
    """The header of an open donor file; raises ValueError when it is damaged or the file is not as long as it says."""
    fixed = os.pread(descriptor, _FIXED, 0)
    length = int.from_bytes(fixed[len(MAGIC) : len(MAGIC) + 8], "little")
    if fixed[: len(MAGIC)] != MAGIC or not 0 < length <= LARGEST_HEADER:
        raise ValueError("it does not begin as a donor file")
    packed = os.pread(descriptor, length, _FIXED)
    if len(packed) != length or hashlib.sha256(fixed[: len(MAGIC) + 8] + packed).digest() != fixed[len(MAGIC) + 8 :]:
        raise ValueError("its header is damaged")
    header: dict[str, Any] = json.loads(packed)
    wanted, found = _FIXED + length + header["payload_bytes"], os.fstat(descriptor).st_size
    if wanted != found:
        raise ValueError(f"{found} bytes instead of {wanted}")
    header["start"] = _FIXED + length
    return header


def verify_payload(descriptor: int, header: Mapping[str, Any]) -> None:
    """Read the payload once; raises ValueError where a checksum is wrong, OSError where a disk cannot read it.

    By reads and not through the map: a map answers a bad sector with a signal that ends the process.
    """
    at, end = header["start"], header["start"] + header["payload_bytes"]
    buffer = bytearray(min(PIECE_BYTES, end - at))
    found = []
    while at < end:
        piece = memoryview(buffer)[: min(PIECE_BYTES, end - at)]
        got = 0
        while got < len(piece):
            step = os.preadv(descriptor, [piece[got:]], at + got)
            if not step:
                raise ValueError("it ends too early")
            got += step
        found.append(zlib.crc32(piece))
        at += got
    if found != header["crc32"]:
        raise ValueError("its checksum is wrong")


def map_tensors(descriptor: int, header: Mapping[str, Any]) -> dict[str, Tensor]:
    """Views of the mapped file by name. Verify it first: nothing is checked here.

    The map is private: torch wants writable memory, and a stray write must not reach the file. It lives as long as a
    tensor does, also after the file was unlinked and the descriptor closed.
    """
    if not header["payload_bytes"]:
        raise ValueError("it holds no tensors")
    mapped = np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY), np.uint8)
    payload = mapped[header["start"] : header["start"] + header["payload_bytes"]]
    return {name: _view_tensor(payload, about) for name, about in header["tensors"].items()}


def pack_rope(rope: RopeSpec | None) -> dict[str, Any] | None:
    """A rotation as JSON; floats come back bit for bit."""
    return None if rope is None else asdict(rope)


def unpack_rope(packed: Mapping[str, Any] | None) -> RopeSpec | None:
    """What `pack_rope` was given."""
    return None if packed is None else RopeSpec(**{**packed, "inv_freq": tuple(packed["inv_freq"])})


def _view_tensor(payload: Bytes, about: Mapping[str, Any]) -> Tensor:
    dtype = _DTYPES[about["dtype"]]
    nbytes = math.prod(about["shape"]) * dtype.itemsize
    piece = payload[about["at"] : about["at"] + nbytes]
    return torch.from_numpy(piece).view(dtype).view(about["shape"])


def _view_bytes(tensor: Tensor) -> Bytes:
    flat: Bytes = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return flat


def _sum_parts(parts: Iterable[Bytes]) -> Iterator[int]:
    """A CRC-32 for every 16 MiB of the parts with their padding, without joining them in memory."""
    value, room = 0, PIECE_BYTES
    for part in parts:
        for run in (part, np.zeros(_align(part.nbytes) - part.nbytes, np.uint8)):
            at = 0
            while at < len(run):
                step = min(room, len(run) - at)
                value, room, at = zlib.crc32(run[at : at + step].data, value), room - step, at + step
                if not room:
                    yield value
                    value, room = 0, PIECE_BYTES
    if room < PIECE_BYTES:
        yield value


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
