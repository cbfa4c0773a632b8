"""TensorRT-LLM's side of the connector, small and strict: for tests of ours, where no GPU is.

It calls the hooks in the order in which TensorRT-LLM's executor does, holds KV as its pool does, enters complete blocks
into a reuse tree by tokens and salt, and breaks where the real one would: a promise beyond the prompt, a load that is
asynchronous and empty, metadata that cannot be sent to another process. Its model has TensorRT-LLM's parameter names.
What it proves is our half of the interface, and nothing about TensorRT-LLM.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from semblend.engine.model.model import DecoderModel
from semblend.engine.model.paged_kv import KvPool
from semblend.engine.model.spec import ModelSpec
from semblend.integration.trtllm.reuse_service import copy_kv, view_pool
from semblend.materialize.contract import Rows, slots_of_blocks


class KvCacheConnectorScheduler(ABC):
    """The hooks that TensorRT-LLM's class of this name demands."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args

    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> Any: ...
    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]: ...
    @abstractmethod
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool: ...
    @abstractmethod
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None: ...


class KvCacheConnectorWorker(ABC):
    """The hooks that TensorRT-LLM's class of this name demands."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args, self._metadata = llm_args, None

    def bind_connector_meta(self, metadata: Any) -> None:
        self._metadata = metadata

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: Tensor) -> None: ...
    @abstractmethod
    def start_load_kv(self, stream: Any) -> None: ...
    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None: ...
    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: Any) -> None: ...
    @abstractmethod
    def wait_for_save(self, stream: Any) -> None: ...
    @abstractmethod
    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]: ...


@dataclass(eq=False)
class FakeRequest:
    """What a connector can read of a request."""

    request_id: int
    tokens: list[int]
    cache_salt: str | None = None
    prompt_len: int = 0

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0, "one beam"
        return self.tokens


@dataclass(frozen=True, slots=True, eq=False)
class FakeAnswer:
    """``logits`` behind the prompt; ``hit_tokens`` of the engine's tree, ``provided_tokens`` of the connector."""

    logits: Tensor
    hit_tokens: int
    provided_tokens: int


@dataclass(eq=False)
class FakeExecutor:
    """One engine; `serve` runs one request from beginning to end.

    ``order``: how a block holds tokens and heads. ``tree``: block by salt and all tokens up to the block's end.
    """

    scheduler: Any
    worker: Any
    spec: ModelSpec
    order: str = "heads first"
    block_tokens: int = 8
    blocks: int = 128
    reuses_blocks: bool = True
    chunk_tokens: int = 1 << 30
    seed: int = 3
    tree: dict[tuple[str | None, tuple[int, ...]], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spec = self.spec
        self._model = DecoderModel.random(spec, seed=self.seed)
        self.model_engine = SimpleNamespace(model=name_as_tensorrt_llm(self._model))
        self.pool = torch.zeros(self.blocks, spec.layers, 2, self.block_tokens * spec.kv_heads * spec.head_dim)
        self.layout = view_pool(self.pool, self.order, kv_heads=spec.kv_heads, head_dim=spec.head_dim)
        # The model computes in rows; every pass begins with what the pool holds, and ends with it.
        self._rows = KvPool.for_model(
            spec, tokens=(self.blocks - 1) * self.block_tokens, block_tokens=self.block_tokens
        )
        self._free, self._served = list(range(1, self.blocks)), 0
        self.worker.register_kv_caches(self.pool)

    def serve(self, tokens: list[int], salt: str | None = None, *, answers: bool = True) -> FakeAnswer:
        """Compute a prompt and one token; without ``answers`` it is cancelled before its first pass."""
        self._served += 1
        request = FakeRequest(self._served, list(tokens), salt)
        shared = self._find_prefix(request)
        own = [self._free.pop(0) for _ in range(-(-(len(tokens) + 1) // self.block_tokens) - len(shared))]
        block_ids = [*shared, *own]
        hit = len(shared) * self.block_tokens
        provided, is_async = self.scheduler.get_num_new_matched_tokens(request, hit)
        if is_async and not provided:
            raise RuntimeError("a load of nothing cannot be asynchronous")
        if hit + provided >= len(tokens):
            raise RuntimeError("there must be at least one token to compute")
        self.scheduler.update_state_after_alloc(request, block_ids)
        if not answers:
            self.scheduler.request_finished(request, block_ids)
            self._free += own
            return FakeAnswer(torch.zeros(0), hit, provided)
        hidden = self._run_steps(request, block_ids, hit + provided)
        if self.reuses_blocks:
            self._enter(request, block_ids)
        logits = self._model.logits(hidden[-1:])[0]
        request.tokens.append(int(logits.argmax()))
        if self.scheduler.request_finished(request, block_ids):
            raise RuntimeError("the blocks of this request would never be freed")
        kept = set(self.tree.values())
        self._free += [block for block in own if block not in kept]
        return FakeAnswer(logits, hit, provided)

    def _run_steps(self, request: FakeRequest, block_ids: list[int], start: int) -> Tensor:
        """Compute the prompt from ``start`` on, a chunk a step."""
        hidden = torch.zeros(0)
        while start < request.prompt_len:
            end = min(request.prompt_len, start + self.chunk_tokens)
            metadata = self.scheduler.build_connector_meta(SimpleNamespace(new_requests=[], cached_requests=[]))
            self.worker.bind_connector_meta(pickle.loads(pickle.dumps(metadata)))
            self.worker.start_load_kv(None)
            for layer in range(self.spec.layers):
                self.worker.wait_for_layer_load(layer, None)
            hidden = self.compute(request.tokens, block_ids, start, end)
            for layer in range(self.spec.layers):
                self.worker.save_kv_layer(layer, None)
            self.worker.wait_for_save(None)
            self.worker.get_finished([], [])
            start = end
        return hidden

    def compute(self, tokens: list[int], block_ids: list[int], start: int, end: int) -> Tensor:
        """One pass over positions ``start`` … ``end``, on what the pool holds; writes into the pool."""
        slots = slots_of_blocks(block_ids, self.block_tokens, end)
        copy_kv(self.layout, slots, self._rows.layout, slots)
        hidden = self._model.forward(Rows.of(tokens[start:end], range(start, end), slots), self._rows)
        copy_kv(self._rows.layout, slots[start:], self.layout, slots[start:])
        return hidden

    def _find_prefix(self, request: FakeRequest) -> list[int]:
        found: list[int] = []
        for key in self._list_keys(request, request.prompt_len - 1):
            if key not in self.tree:
                break
            found.append(self.tree[key])
        return found

    def _enter(self, request: FakeRequest, block_ids: list[int]) -> None:
        for key, block in zip(self._list_keys(request, request.prompt_len), block_ids, strict=False):
            self.tree.setdefault(key, block)

    def _list_keys(self, request: FakeRequest, tokens: int) -> list[tuple[str | None, tuple[int, ...]]]:
        ends = range(self.block_tokens, tokens + 1, self.block_tokens)
        return [(request.cache_salt, tuple(request.tokens[:end])) for end in ends]


class NamedParameters(nn.Module):
    """A model as a connector sees it: parameters by name, and a configuration."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config: Any = SimpleNamespace(to_dict=lambda: dict(config))


def name_as_tensorrt_llm(model: DecoderModel) -> nn.Module:
    """A module without a forward pass that has a model's parameters under the names that TensorRT-LLM gives them."""
    spec = model.spec
    root = NamedParameters(
        {
            "model_type": spec.architecture,
            "num_hidden_layers": spec.layers,
            "hidden_size": spec.hidden,
            "intermediate_size": spec.intermediate,
            "num_attention_heads": spec.heads,
            "num_key_value_heads": spec.kv_heads,
            "head_dim": spec.head_dim,
            "vocab_size": spec.vocab,
            "rms_norm_eps": spec.norm_eps,
            "tie_word_embeddings": spec.tied_embeddings,
            "max_position_embeddings": spec.max_positions,
        }
    )
    for number, layer in enumerate(model.weights.layers):
        named = {
            "input_layernorm.weight": layer.attention_norm,
            "self_attn.qkv_proj.weight": layer.qkv,
            "self_attn.qkv_proj.bias": layer.qkv_bias,
            "self_attn.q_norm.weight": layer.q_norm,
            "self_attn.k_norm.weight": layer.k_norm,
            "self_attn.o_proj.weight": layer.output,
            "post_attention_layernorm.weight": layer.mlp_norm,
            "mlp.gate_up_proj.weight": layer.gate_up,
            "mlp.down_proj.weight": layer.down,
        }
        for name, tensor in named.items():
            if tensor is not None:
                _put(root, f"model.layers.{number}.{name}", tensor)
    _put(root, "model.embed_tokens.weight", model.weights.embedding)
    _put(root, "model.norm.weight", model.weights.norm)
    _put(root, "lm_head.weight", model.weights.head)
    return root


def _put(root: nn.Module, path: str, tensor: Tensor) -> None:
    *folders, name = path.split(".")
    for folder in folders:
        if not hasattr(root, folder):
            root.add_module(folder, nn.Module())
        root = root.get_submodule(folder)
    root.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
