"""GGUF files: the header read here, quantised tensors unpacked by the ``gguf`` package.

The package's own reader visits every token of the vocabulary as an object and takes seconds for that;
reading the header directly takes a tenth of one, and lets every damage be named.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semblend.engine.model.spec import ModelSpec
from semblend.errors import InputError, MissingDependencyError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DAMAGED = "the file is damaged or not fully downloaded: pull it again"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the file: its shape with rows first, its GGML type, and where its bytes start."""

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Everything before the weights."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Metadata and tensor table of a GGUF file."""
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:  # numpy calls an empty file a ValueError
        raise InputError(f"cannot read {path}: {error}", hint="check the path and the permissions") from None
    if bytes(data[:4]) != MAGIC:
        raise InputError(f"{path} is not a GGUF file", hint="point at a .gguf file or a safetensors folder")
    try:
        return _Cursor(memoryview(data.data), 4).header(len(data))
    except (struct.error, UnicodeDecodeError, KeyError, RecursionError, _HeaderError) as error:
        raise InputError(f"{path}: its header cannot be read: {error}", hint=DAMAGED) from None
    except InputError as error:
        raise InputError(f"{path}: {error.message}", hint=error.hint) from None


def read_name(path: Path) -> str:
    """The model's name as the file itself has it, in one word; empty where it has none."""
    return str(read_header(path).metadata.get("general.name", "")).strip().replace(" ", "-")


class _HeaderError(Exception):
    """The file contradicts itself, or ends before what it announces."""


class _Cursor:
    """A place in the header that moves on with every read."""

    def __init__(self, data: memoryview, at: int) -> None:
        self._data = data
        self._at = at

    def header(self, size: int) -> GgufHeader:
        version = self.scalar("I")
        if version not in VERSIONS:
            raise InputError(f"GGUF version {version} is not known", hint="versions 2 and 3, little-endian, are")
        tensor_count, pair_count = self.scalar("Q"), self.scalar("Q")
        metadata = {}
        for _ in range(pair_count):
            name = self.string()
            metadata[name] = self.value(self.scalar("I"))
        tables = [self.tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise _HeaderError(f"its alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors = {name: replace(table, offset=start + table.offset) for name, table in tables}
        for name, tensor in tensors.items():
            if tensor.offset + byte_count(tensor) > size:
                raise _HeaderError(f"tensor {name} ends at byte {tensor.offset + byte_count(tensor)} of {size}")
        return GgufHeader(metadata, tensors)

    def tensor(self) -> tuple[str, GgufTensor]:
        name = self.string()
        sizes = [self.scalar("Q") for _ in range(self.scalar("I"))]
        kind, offset = self.scalar("I"), self.scalar("Q")
        return name, GgufTensor(tuple(reversed(sizes)), kind, offset)

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.scalar("I"), self.scalar("Q")
            if inner in (_STRING, _ARRAY):
                self._need(count)  # each takes bytes; a damaged count must not fill the memory first
                return [self.value(inner) for _ in range(count)]
            form = f"<{count}{_SCALARS[inner]}"
            self._need(struct.calcsize(form))
            values = list(struct.unpack_from(form, self._data, self._at))
            self._at += struct.calcsize(form)
            return values
        return self.scalar(_SCALARS[kind])

    def scalar(self, code: str) -> Any:
        form = f"<{code}"
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        self._need(length)
        text = bytes(self._data[self._at : self._at + length]).decode("utf-8")
        self._at += length
        return text

    def _need(self, count: int) -> None:
        if self._at + count > len(self._data):
            raise _HeaderError(f"it ends at byte {len(self._data)}")


def byte_count(tensor: GgufTensor) -> int:
    gguf = _gguf()
    try:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.kind)]
    except (ValueError, KeyError):
        raise InputError(f"tensor type {tensor.kind} is not known", hint="a newer gguf package may know it") from None
    count = 1
    for length in tensor.shape:
        count *= length
    return int(count // block * size)


def open_gguf(path: Path) -> tuple[ModelSpec, GgufTensors]:
    """The spec of a GGUF model and its tensors."""
    header = read_header(path)
    tied = "output.weight" not in header.tensors
    spec = ModelSpec.from_gguf_metadata({**header.metadata, "semblend.tied_embeddings": tied})
    source = GgufTensors(path, header, spec)
    if ROPE_FACTORS in header.tensors:  # how GGUF writes the llama3 scaling: a divisor per frequency
        factors = source.raw(ROPE_FACTORS).tolist()
        if len(factors) != len(spec.rope.inv_freq):
            raise InputError(f"{path}: {ROPE_FACTORS} has {len(factors)} values", hint=DAMAGED)
        scaled = tuple(f / factor for f, factor in zip(spec.rope.inv_freq, factors, strict=True))
        spec = replace(spec, rope=replace(spec.rope, inv_freq=scaled))
    return spec, source


class GgufTensors:
    """Tensors of a GGUF file by their ``transformers`` names, unpacked to float32."""

    def __init__(self, path: Path, header: GgufHeader, spec: ModelSpec) -> None:
        self._path = path
        self._tensors = header.tensors
        self._spec = spec
        self._data = np.memmap(path, dtype=np.uint8, mode="r")

    @property
    def where(self) -> str:
        return str(self._path)

    def has(self, name: str) -> bool:
        return gguf_name(name) in self._tensors

    def read(self, name: str) -> Tensor:
        tensor = self.raw(gguf_name(name))
        if self._spec.architecture == "llama":
            if ".q_proj." in name:
                return half_split(tensor, self._spec.heads)
            if ".k_proj." in name:
                return half_split(tensor, self._spec.kv_heads)
        return tensor

    def raw(self, name: str) -> Tensor:
        gguf = _gguf()
        found = self._tensors[name]
        kind = gguf.GGMLQuantizationType(found.kind)
        packed = self._data[found.offset : found.offset + byte_count(found)]
        if kind == gguf.GGMLQuantizationType.Q4_K:
            return unpack_q4_k(torch.from_numpy(np.array(packed))).view(found.shape)
        try:
            values = gguf.quants.dequantize(packed.reshape(*found.shape[:-1], -1) if found.shape else packed, kind)
        except (NotImplementedError, ValueError) as error:
            raise InputError(
                f"{self._path}: tensor {name} of type {kind.name} cannot be unpacked: {error}",
                hint="use a file quantised to Q4_K_M, Q8_0 or F16",
            ) from None
        return torch.from_numpy(np.array(values, dtype=np.float32).reshape(found.shape))


def unpack_q4_k(packed: Tensor) -> Tensor:
    """Values of Q4_K blocks, four times as fast as the package does it; most of a Q4_K_M file is of this type.

    A block of 256 values in 144 bytes: two float16 (scale of scales, scale of minima), eight 6-bit scales and
    minima in 12 bytes, 128 bytes of nibbles: in each 32 bytes first all low halves, then all high halves.
    """
    blocks = packed.view(-1, 144)
    factors = blocks[:, :4].contiguous().view(torch.float16).float()
    a, b, c = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([a & 63, (c & 15) | (a >> 6 << 4)], dim=1) * factors[:, :1]
    minima = torch.cat([b & 63, (c >> 4) | (b >> 6 << 4)], dim=1) * factors[:, 1:]
    nibbles = blocks[:, 16:].reshape(-1, 4, 1, 32)
    values = torch.cat([nibbles & 15, nibbles >> 4], dim=2).view(-1, 8, 32).float()
    return values.mul_(scales[:, :, None]).sub_(minima[:, :, None]).flatten()


def gguf_name(name: str) -> str:
    """The GGUF name of a tensor.

    >>> gguf_name("model.layers.3.self_attn.q_proj.bias")
    'blk.3.attn_q.bias'
    """
    if not name.startswith("model.layers."):
        return _TOP_NAMES.get(name, name)
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_LAYER_NAMES.get(module, module)}.{kind}"


def half_split(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head from interleaved rotary pairs, as GGUF keeps them for llama, to two halves."""
    rows = weight.shape[0] // heads
    return weight.reshape(heads, rows // 2, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _gguf() -> Any:
    try:
        import gguf
        import gguf.quants
    except ImportError:
        raise MissingDependencyError(
            "reading a GGUF file needs the package gguf", hint="pip install 'semblend-suite[local]'"
        ) from None
    return gguf


def special_tokens(metadata: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Control and user-defined tokens: matched whole in a text, never cut."""
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    for at, kind in enumerate(metadata.get("tokenizer.ggml.token_type", ())):
        if kind in (3, 4):
            yield at, tokens[at]
