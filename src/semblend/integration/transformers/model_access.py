"""The user's own model over rows of one prompt, as `semblend.materialize.contract` wants it.

Every attention layer of transformers asks a table for its attention function, by the name in the model's configuration.
While a pass of ours runs, that name is ours: the function shows the pass to an observer, writes keys and values to the
slots that we chose, and attends to them where they lie. The model is called without a cache and without a mask, so rows
may be scattered over a prompt. The name goes back when the pass is over, also when it fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from semblend.errors import SemBlendError
from semblend.materialize.attention_runs import PassAttention
from semblend.materialize.contract import Capabilities, KvLayout, Layout, Observer, Rows
from semblend.materialize.kv.rope import RopeSpec

ATTENTION_NAME = "semblend_pass"
"""Our attention function in the table of transformers."""
PASS_ARGUMENT = "semblend_pass"
"""The keyword by which a pass reaches our attention function through the layers."""
CHECKED_TOKENS = 48
"""Tokens that the model and a pass of ours both compute when they meet."""
NOT_SERVED = "see docs/guides/transformers.md for what is served"


class TransformersModel:
    """A causal language model of transformers over the KV of one prompt at a time, the one that `lay_out` was told."""

    capabilities = Capabilities()

    def __init__(self, module: Any) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION_NAME, attend_in_pass)
        self.module: torch.nn.Module = module
        self._config, self._decoder = module.config, module.base_model
        self._head: torch.nn.Module = module.get_output_embeddings()
        self.rope = RopeSpec.from_hf_config(module.config.to_dict())
        self._layout: Layout | None = None

    @property
    def device(self) -> torch.device:
        found: torch.device = self._head.weight.device  # type: ignore[assignment]
        return found

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self._head.weight.dtype  # type: ignore[assignment]
        return found

    @property
    def layout(self) -> Layout:
        if self._layout is None:
            raise SemBlendError("no prompt is laid out", hint="call lay_out first")
        return self._layout

    def lay_out(self, layout: Layout | None) -> None:
        """From now on passes and copies are over this KV; None lets go of the last one."""
        self._layout = layout

    def make_layout(self, tokens: int) -> KvLayout:
        """Room for the KV of so many tokens, in the order of dimensions that a cache of transformers has."""
        config = self._config
        heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        shape = (heads, tokens, self.rope.head_dim)
        rooms = [
            torch.zeros((2, *shape), dtype=self.dtype, device=self.device) for _ in range(config.num_hidden_layers)
        ]
        return KvLayout.of_rows(
            [room[0].transpose(0, 1) for room in rooms], [room[1].transpose(0, 1) for room in rooms]
        )

    @torch.no_grad()
    def forward(self, rows: Rows, observer: Observer | None = None) -> Tensor:
        attention = PassAttention(rows, self.layout, observer)
        with self._use_our_attention():
            answer = self._decoder(
                input_ids=rows.tokens[None],
                position_ids=rows.positions[None],
                use_cache=False,
                **{PASS_ARGUMENT: attention},
            )
        if attention.layers_seen != self.layout.layers:
            raise SemBlendError(f"{attention.layers_seen} of {self.layout.layers} layers ran", hint=NOT_SERVED)
        hidden: Tensor = answer.last_hidden_state[0]
        return hidden

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        found: Tensor = self._head(hidden.to(self.dtype))
        return found.float()

    def agree(self, values: Tensor, how: str) -> Tensor:
        del how  # a model on several devices is refused
        return values

    @torch.no_grad()
    def measure_disagreement(self) -> float:
        """How far our pass is from the model's own, over the same tokens: largest relative error of a hidden state.

        One pass over all rows and one over scattered rows. It is how an unknown version or model is found out.
        """
        tokens = torch.arange(CHECKED_TOKENS, device=self.device) * 7 % int(self._config.vocab_size)
        theirs = self._decoder(input_ids=tokens[None], use_cache=False).last_hidden_state[0].float()
        self.lay_out(self.make_layout(CHECKED_TOKENS))
        try:
            errors = []
            for at in (torch.arange(CHECKED_TOKENS), torch.arange(1, CHECKED_TOKENS, 3)):
                ours = self.forward(
                    Rows.of(tokens[at.to(self.device)], at, torch.arange(CHECKED_TOKENS, device=self.device))
                )
                there = theirs[at.to(self.device)]
                errors.append((ours.float() - there).norm(dim=-1).max() / there.norm(dim=-1).mean().clamp_min(1e-30))
            return float(torch.stack(errors).max())
        finally:
            self.lay_out(None)

    @contextmanager
    def _use_our_attention(self) -> Iterator[None]:
        before = self._config._attn_implementation
        self._config._attn_implementation = ATTENTION_NAME
        try:
            yield
        finally:
            self._config._attn_implementation = before


def attend_in_pass(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
) -> tuple[Tensor, None]:
    """Our entry in the table of attention functions. Tensors are ``[1, heads, rows, head_dim]``."""
    attention = more.get(PASS_ARGUMENT)
    if not isinstance(attention, PassAttention):
        raise SemBlendError(
            "the model was called while SemBlend prepares a prompt in it, or its layers do not pass arguments on",
            hint="use one model in one thread at a time; " + NOT_SERVED,
        )
    scale = more.get("scaling")
    if attention_mask is not None or any(more.get(name) is not None for name in ("sliding_window", "softcap", "s_aux")):
        raise SemBlendError("attention is not plain and full in this model", hint=NOT_SERVED)
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    found = attention.attend(module.layer_idx, q, k, v, q.shape[-1] ** -0.5 if scale is None else float(scale))
    return found[None], None
