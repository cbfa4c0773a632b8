"""SGLang's own model and its KV pool, as `semblend.materialize.contract` wants them.

SGLang runs its scheduler and its model in one process, so the model runner is at hand when the cache is made. Every
layer asks one object for attention, the backend of the current forward context. While a pass of ours runs, a stand-in
is that object: it shows the pass to an observer, writes keys and values to the slots that we chose, and attends to them
where they lie. So rows may be scattered over a prompt, and SGLang's batches, tables and backends are not involved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from semblend.errors import SemBlendError
from semblend.materialize.attention_runs import PassAttention
from semblend.materialize.contract import Capabilities, KvLayout, Layout, Observer, Rows
from semblend.materialize.kv.rope import RopeSpec


class SglangModel:
    """The model of an SGLang model runner over rows of one prompt: a `Model` of `semblend.materialize.contract`."""

    capabilities = Capabilities()

    def __init__(self, runner: Any) -> None:
        self._runner, self._model = runner, runner.model
        pool = runner.token_to_kv_pool
        layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
        self.layout: Layout = KvLayout.of_rows(
            [pool.get_key_buffer(layer) for layer in layers], [pool.get_value_buffer(layer) for layer in layers]
        )
        self.rope = RopeSpec.from_hf_config(read_rope_config(runner.model_config))

    @property
    def device(self) -> torch.device:
        return self.layout.device

    @property
    def module(self) -> torch.nn.Module:
        """The model itself, for whoever looks at its weights."""
        found: torch.nn.Module = self._model
        return found

    @torch.inference_mode()
    def forward(self, rows: Rows, observer: Observer | None = None) -> Tensor:
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=1,
            input_ids=rows.tokens,
            positions=rows.positions,
            out_cache_loc=rows.slots,
            req_pool_indices=torch.zeros(1, dtype=torch.int64, device=self.device),
            seq_lens=torch.tensor([rows.reach], device=self.device),
            seq_lens_sum=rows.reach,
        )
        attention = PassBackend(self._runner.attn_backend, rows, self.layout, observer)
        with forward_context(ForwardContext(attn_backend=attention), forward_batch=batch):
            hidden: Tensor = self._model.model(rows.tokens, rows.positions, batch)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        weight: Tensor = self._model.lm_head.weight
        found: Tensor = hidden.to(weight.dtype) @ weight.T
        return found[:, : self._vocabulary].float()

    def agree(self, values: Tensor, how: str) -> Tensor:
        del how  # engines of several ranks are refused
        return values

    @property
    def _vocabulary(self) -> int:
        return int(self._runner.model_config.vocab_size)


class PassBackend(PassAttention):
    """Stands in for SGLang's attention backend in one pass; what else is asked of the backend, the backend answers."""

    def __init__(self, backend: Any, rows: Rows, layout: Layout, observer: Observer | None) -> None:
        super().__init__(rows, layout, observer)
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Tensor:
        """Attention of one layer, which SGLang's layer calls; ``q`` is ``[rows, heads * head_dim]``."""
        del forward_batch
        if more or not save_kv_cache:
            raise SemBlendError(
                f"attention with {sorted(more)}, save_kv_cache={save_kv_cache} is unknown",
                hint="is this model in docs/guides/sglang.md?",
            )
        asked = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        k = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
        v = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        return self.attend(layer.layer_id, asked, k, v, layer.scaling).flatten(1)


def read_rope_config(model_config: Any) -> Mapping[str, Any]:
    """The model's configuration as our rotation reads it."""
    found: dict[str, Any] = model_config.hf_text_config.to_dict()
    return found
