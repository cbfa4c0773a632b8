"""The cache that ``model.generate()`` is handed: a `DynamicCache` that begins with KV of a prompt, and knows whose."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache

from semblend.errors import InputError
from semblend.materialize.contract import KvLayout, Layout
from semblend.prompt import Prompt


class ReuseCache(DynamicCache):
    """KV of the first ``prepared_tokens`` of ``prompt``; generate() computes the rest and appends to it.

    ``request_id`` names its receipt. Use it once: KV of an answer is in it afterwards.
    """

    def __init__(self, request_id: str, prompt: Prompt) -> None:
        super().__init__()
        self.request_id, self.prompt, self.prepared_tokens = request_id, prompt, 0

    def fill(self, layout: Layout, tokens: int) -> None:
        """Take the KV of slots 0 … ``tokens``."""
        slots = torch.arange(tokens, device=layout.device)
        for layer in range(layout.layers):
            k, v = layout.gather(layer, slots)
            self.update(_as_states(k), _as_states(v), layer)
        self.prepared_tokens = tokens

    def view(self) -> KvLayout:
        """Its KV by position: of one sequence, or refused."""
        states = [(layer.keys, layer.values) for layer in self.layers]
        if not states or any(part is None or part.dim() != 4 or part.shape[0] != 1 for pair in states for part in pair):
            raise InputError("the cache does not hold one sequence", hint="generate one answer to one prompt")
        k, v = ([pair[at][0].transpose(0, 1) for pair in states] for at in (0, 1))
        return KvLayout.of_rows(k, v)


def _as_states(part: Tensor) -> Tensor:
    """``[tokens, heads, head_dim]`` as a cache of transformers has it, ``[1, heads, tokens, head_dim]``."""
    return part.transpose(0, 1)[None].contiguous()
