"""A model's weights, fused for the forward pass, from a folder of safetensors or a GGUF file."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semblend.engine.model.spec import ModelSpec
from semblend.errors import InputError, MissingDependencyError
from semblend.models import resolve

INDEX_FILE = "model.safetensors.index.json"
INCOMPLETE = "the files are incomplete or of another model: pull them again"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; ``qkv`` holds the rows of q, k and v in this order, ``gate_up`` those of gate and up."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a model; ``head`` is ``embedding`` itself where the two are tied."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor


def load_weights(path: str | Path, device: str | torch.device, dtype: torch.dtype | None) -> tuple[ModelSpec, Weights]:
    """A folder, a GGUF file, a pulled model, or one of the local Hugging Face cache. Downloads nothing.

    Without a ``dtype``: float32 on a CPU, which every CPU computes well, and the model's own elsewhere.
    """
    found = resolve(path)
    if found.is_file():
        spec, source = open_gguf(found)
        return spec, build_weights(spec, source, device, dtype or default_dtype(spec, device))
    spec = spec_of_folder(found)
    with SafetensorsFolder(found) as folder:
        return spec, build_weights(spec, folder, device, dtype or default_dtype(spec, device))


def default_dtype(spec: ModelSpec, device: str | torch.device) -> torch.dtype:
    if torch.device(device).type == "cpu":
        return torch.float32
    known = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    return known.get(spec.dtype, torch.bfloat16)


def spec_of_folder(folder: Path) -> ModelSpec:
    """From config.json; generation_config.json may name further tokens that end a turn."""
    spec = ModelSpec.from_hf_config(read_json(folder / "config.json"))
    generation = folder / "generation_config.json"
    more = read_json(generation).get("eos_token_id") if generation.is_file() else None
    more_ids = more if isinstance(more, list) else [] if more is None else [more]
    return replace(spec, eos_ids=tuple(dict.fromkeys([*spec.eos_ids, *map(int, more_ids)])))


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", hint="check the path and the permissions") from None
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}", hint=INCOMPLETE) from None
    if not isinstance(value, dict):
        raise InputError(f"{path} is not a JSON object", hint=INCOMPLETE)
    return value


class SafetensorsFolder:
    """One or many safetensors files of a folder, opened together; ``where`` is named in errors."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        for path in self._paths():
            opened = self._stack.enter_context(_open_safetensors(path))
            self._files.update(dict.fromkeys(opened.keys(), opened))

    def _paths(self) -> list[Path]:
        index = self._folder / INDEX_FILE
        if index.is_file():
            names = read_json(index).get("weight_map")
            if not isinstance(names, Mapping):
                raise InputError(f"{index} has no weight_map", hint=INCOMPLETE)
            paths = [self._folder / str(name) for name in sorted(set(names.values()))]
        else:
            paths = sorted(self._folder.glob("*.safetensors"))
        if not paths:
            raise InputError(f"{self._folder} holds no safetensors files", hint="convert the weights to safetensors")
        for path in paths:
            if not path.is_file():
                raise InputError(f"{path} is missing", hint=INCOMPLETE)
        return paths

    @property
    def where(self) -> str:
        return str(self._folder)

    def has(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _open_safetensors(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise MissingDependencyError(
            f"reading {path} needs the package safetensors", hint="pip install 'semblend-suite[local]'"
        ) from None
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is not a whole safetensors file: {error}", hint=INCOMPLETE) from None


def build_weights(
    spec: ModelSpec, source: SafetensorsFolder | GgufTensors, device: str | torch.device, dtype: torch.dtype
) -> Weights:
    """Read every tensor that the spec calls for, check its shape, fuse and convert."""
    reader = _Reader(spec, source, device, dtype)
    embedding = reader.get("model.embed_tokens.weight", spec.vocab, spec.hidden)
    head = embedding if spec.tied_embeddings else reader.get("lm_head.weight", spec.vocab, spec.hidden)
    layers = tuple(reader.layer(at) for at in range(spec.layers))
    if source.has(f"model.layers.{spec.layers}.input_layernorm.weight"):
        raise InputError(f"{source.where} holds more than the {spec.layers} layers of its config", hint=INCOMPLETE)
    return Weights(embedding, layers, reader.get("model.norm.weight", spec.hidden), head)


@dataclass(frozen=True, slots=True)
class _Reader:
    spec: ModelSpec
    source: SafetensorsFolder | GgufTensors
    device: str | torch.device
    dtype: torch.dtype

    def get(self, name: str, *shape: int) -> Tensor:
        if not self.source.has(name):
            raise InputError(f"{self.source.where}: tensor {name} is missing", hint=INCOMPLETE)
        tensor = self.source.read(name)
        if tuple(tensor.shape) != shape:
            raise InputError(
                f"{self.source.where}: tensor {name} is {tuple(tensor.shape)}, not {shape}", hint=INCOMPLETE
            )
        return tensor.to(self.device, self.dtype)

    def join_parts(self, layer: int, names: Mapping[str, int], kind: str, *width: int) -> Tensor:
        prefix = f"model.layers.{layer}"
        return torch.cat([self.get(f"{prefix}.{name}.{kind}", rows, *width) for name, rows in names.items()])

    def layer(self, at: int) -> LayerWeights:
        spec = self.spec
        prefix, q_rows, kv_rows = f"model.layers.{at}", spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        qkv = {"self_attn.q_proj": q_rows, "self_attn.k_proj": kv_rows, "self_attn.v_proj": kv_rows}
        mlp = {"mlp.gate_proj": spec.intermediate, "mlp.up_proj": spec.intermediate}
        normed = spec.qk_norm
        return LayerWeights(
            attention_norm=self.get(f"{prefix}.input_layernorm.weight", spec.hidden),
            qkv=self.join_parts(at, qkv, "weight", spec.hidden),
            qkv_bias=self.join_parts(at, qkv, "bias") if spec.qkv_bias else None,
            q_norm=self.get(f"{prefix}.self_attn.q_norm.weight", spec.head_dim) if normed else None,
            k_norm=self.get(f"{prefix}.self_attn.k_norm.weight", spec.head_dim) if normed else None,
            output=self.get(f"{prefix}.self_attn.o_proj.weight", spec.hidden, q_rows),
            mlp_norm=self.get(f"{prefix}.post_attention_layernorm.weight", spec.hidden),
            gate_up=self.join_parts(at, mlp, "weight", spec.hidden),
            down=self.get(f"{prefix}.mlp.down_proj.weight", spec.hidden, spec.intermediate),
        )


# -- GGUF files: the header read here, quantised tensors unpacked by the ``gguf`` package.
#
# The package's own reader visits every token of the vocabulary as an object and takes seconds for that;
# reading the header directly takes a tenth of one, and lets every damage be named.


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
