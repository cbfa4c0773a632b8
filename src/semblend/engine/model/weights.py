"""A model's weights, fused for the forward pass, from a folder of safetensors or a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

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

    @property
    def nbytes(self) -> int:
        tensors = [self.embedding, self.norm, *([] if self.head is self.embedding else [self.head])]
        for layer in self.layers:
            tensors += [t for f in fields(layer) if (t := getattr(layer, f.name)) is not None]
        return sum(tensor.nbytes for tensor in tensors)


class TensorSource(Protocol):
    """Tensors by the names that ``transformers`` gives them."""

    @property
    def where(self) -> str:
        """The file or folder, for error messages."""

    def has(self, name: str) -> bool: ...

    def read(self, name: str) -> Tensor: ...


def load_weights(
    path: str | Path, device: str | torch.device, dtype: torch.dtype | None
) -> tuple[ModelSpec, Weights, torch.dtype]:
    """A folder, a GGUF file, a pulled model, or one of the local Hugging Face cache. Downloads nothing.

    Without a ``dtype``: float32 on a CPU, which every CPU computes well, and the model's own elsewhere.
    """
    found = resolve(path)
    if found.is_file():
        from semblend.engine.model.gguf_weights import open_gguf

        spec, source = open_gguf(found)
        chosen = dtype or default_dtype(spec, device)
        return spec, build_weights(spec, source, device, chosen), chosen
    spec = spec_of_folder(found)
    chosen = dtype or default_dtype(spec, device)
    with SafetensorsFolder(found) as folder:
        return spec, build_weights(spec, folder, device, chosen), chosen


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
    """One or many safetensors files of a folder, opened together."""

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


def build_weights(spec: ModelSpec, source: TensorSource, device: str | torch.device, dtype: torch.dtype) -> Weights:
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
    source: TensorSource
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
