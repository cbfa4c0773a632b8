"""The stock model and its cache, reached from inside a connector, as our blender wants them.

vLLM hands a connector the cache tensors and nothing else. The model is found where the call comes from: the runner that
registers its caches holds it. It is then called as the runner calls it, compiled if it is, on the rows we choose,
inside a forward context of our own. In that context a stand-in takes the place of every layer's attention
(`pass_attention`): it shows the pass to an observer, and hands unbroken stretches of rows to vLLM's backend, one pseudo
request each with the prompt's block table, which to the backend is ordinary chunked prefill; rows that lie scattered
over the prompt go to a kernel of ours instead, because a backend would read the whole context once for each of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from semblend.errors import SemBlendError
from semblend.integration.adapter import EngineRows, ModelSpec, PagedPool
from semblend.integration.vllm.worker.cache_layout import IndexedLayout, probed
from semblend.integration.vllm.worker.cuda_graphs import GraphedPasses
from semblend.integration.vllm.worker.grouped_attention import reads_far
from semblend.integration.vllm.worker.pass_attention import (
    OURS,
    Attend,
    PassAttention,
    attends,
    compile_attention,
    scattered,
    scattered_over,
    standing_in,
)
from semblend.materialize.kv.host_memory import sent
from semblend.materialize.kv.layout import KvLayout
from semblend.materialize.kv.rope import RopeSpec

Quiet = Callable[[], Any]
"""Makes a context in which the connector's own layer hooks do nothing."""


def model_of_caller() -> Any:
    """The model of the runner that called our hook, however many frames up it is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if hasattr(owner, "model") and hasattr(owner, "get_model"):
            return owner.get_model()  # type: ignore[union-attr]  # without the wrapper that replays CUDA graphs
        frame = frame.f_back
    raise SemBlendError("the model runner was not found among the callers", hint="is this vLLM version supported?")


class StockModel:
    """The engine's own model over rows of one prompt; a `Stack` of `semblend.integration.adapter`."""

    def __init__(self, model: Any, vllm_config: Any, kv_cache_config: Any, caches: Mapping[str, Tensor], quiet: Quiet):
        group = kv_cache_config.kv_cache_groups[0]
        self._model, self._config, self._quiet = model, vllm_config, quiet
        self._names = [name for name in group.layer_names if name in caches]
        self._caches = [caches[name] for name in self._names]
        self._kv_spec = group.kv_cache_spec
        self._builder: Any = None
        self._graphs: GraphedPasses | None = None
        self._far = False
        self.block_tokens: int = group.kv_cache_spec.block_size
        self.device: torch.device = self._caches[0].device
        self.spec = ModelSpec(RopeSpec.from_hf_config(rope_config(vllm_config)))

    @property
    def ranks(self) -> int:
        return int(self._config.parallel_config.tensor_parallel_size)

    def agreed(self, values: Tensor, how: str) -> Tensor:
        """The mean or the largest over the ranks that hold parts of the model."""
        from vllm.distributed import get_tp_group

        found = values.float().clone()
        largest = how == "max"
        operation = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
        torch.distributed.all_reduce(found, op=operation, group=get_tp_group().device_group)
        return found if largest else found / self.ranks

    @property
    def layers(self) -> list[Any]:
        """The attention modules, bottom up."""
        known = self._config.compilation_config.static_forward_context
        return [known[name] for name in self._names]

    def layout(self) -> KvLayout | IndexedLayout:
        """Where KV lies; asks the backend, so its builder must exist."""
        self._made_builder()
        layer = self.layers[0]

        def write(k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
            layer.impl.do_kv_cache_update(layer, k, v, cache, slots)

        return probed(self._caches, self.block_tokens, layer.num_kv_heads, layer.head_size, write)

    @torch.inference_mode()
    def forward(self, rows: EngineRows, pool: PagedPool, observer: Any = None) -> Tensor:
        looks_after = observer is None or getattr(observer, "looks_after", False)
        if looks_after and self._graphs is not None and (hidden := self._graphs.run(rows)) is not None:
            if observer is not None:
                for layer, asked in enumerate(self._graphs.asked):
                    observer.on_layer(layer, asked, rows, pool)
            return hidden
        far = self._far and not getattr(observer, "ends_early", False)
        return self._pass(rows, pool, observer, scattered(rows, pool, self.layers[0].impl, far=far))

    @torch.inference_mode()
    def warm_up(self, pool: PagedPool) -> None:
        """Compiles our kernels and records short passes, on a GPU, so that no request waits for it."""
        impl = self.layers[0].impl
        if not attends(pool, impl):
            return
        compile_attention(pool, self.layers[0])
        self._far = reads_far(self.layers[0], pool.layout)
        if self.ranks > 1:  # what ranks say to each other is not recorded
            return

        def run(rows: EngineRows, asked: Tensor) -> Tensor:
            attend = scattered_over(rows.positions, rows.context, pool, impl)

            def kept(layer: int, q: Tensor) -> Tensor:
                asked[layer].copy_(q[-asked.shape[1] :])
                return attend(layer, q)

            return self._pass(rows, pool, None, kept)

        layer = self.layers[0]
        sizes = (len(self.layers), layer.num_heads, layer.head_size)
        self._graphs = GraphedPasses(run, int(self._config.model_config.max_model_len), sizes, like=self._caches[0])

    def _pass(self, rows: EngineRows, pool: PagedPool, observer: Any, attend: Attend | None) -> Tensor:
        from vllm.forward_context import set_forward_context

        metadata = OURS if attend else self._made_builder().build(0, self._common(rows), fast_build=True)
        with (
            self._quiet(),
            standing_in(self.layers, PassAttention.of(rows, pool, observer, attend)),
            set_forward_context(
                dict.fromkeys(self._names, metadata),
                self._config,
                num_tokens=len(rows),
                slot_mapping=dict.fromkeys(self._names, rows.slots),
                skip_compiled=getattr(observer, "ends_early", False),
            ),
        ):
            hidden: Tensor = self._model(
                input_ids=rows.tokens.to(torch.int32),
                positions=rows.positions,
                intermediate_tensors=None,
                inputs_embeds=None,
            )
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        found: Tensor = self._model.compute_logits(hidden)
        return found

    def _made_builder(self) -> Any:
        if self._builder is None:
            backend = self.layers[0].get_attn_backend()
            make = backend.get_builder_cls()
            self._builder = make(self._kv_spec, self._names, self._config, self.device)
        return self._builder

    def _common(self, rows: EngineRows) -> Any:
        """One pseudo request a run: its queries are the run, its context everything before the run's end."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        lengths = torch.tensor([end - start for start, end in rows.runs], dtype=torch.int32)
        starts = torch.cat((torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)))
        ends = torch.tensor([end for _, end in rows.runs], dtype=torch.int32)
        blocks = rows.context[:: self.block_tokens] // self.block_tokens
        table = blocks.to(torch.int32).repeat(len(lengths), 1).contiguous()
        return CommonAttentionMetadata(
            query_start_loc=sent(starts, self.device),
            query_start_loc_cpu=starts,
            seq_lens=sent(ends, self.device),
            num_reqs=len(lengths),
            num_actual_tokens=len(rows),
            max_query_len=int(lengths.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=table,
            slot_mapping=rows.slots,
            causal=True,
            positions=rows.positions,
            seq_lens_cpu_upper_bound=ends,
        )


def rope_config(vllm_config: Any) -> dict[str, Any]:
    """The model's configuration as our rotation reads it."""
    config = vllm_config.model_config.hf_text_config
    found: dict[str, Any] = config.to_dict()
    return found
