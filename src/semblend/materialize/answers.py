"""Answers over KV that lies in a pool: greedy, and along a given answer. For calibration and benchmarks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from semblend.materialize.contract import Model, Rows

ANSWER_TOKENS = 16
"""Of a cold answer, over which divergence is averaged."""


def answer_greedily(
    model: Model, prompt_tokens: int, logits: Tensor, slots: Tensor, most: int, stop: Collection[int] = ()
) -> list[int]:
    """The most likely tokens behind a prompt, until one of ``stop``, which is the last of them, or ``most``.

    ``logits`` are those of the prompt's last token; ``slots`` have room for ``most`` tokens behind the prompt.
    """
    said = [int(logits.argmax())]
    while len(said) < most and said[-1] not in stop:
        at = torch.tensor([prompt_tokens + len(said) - 1])
        logits = model.logits(model.forward(Rows.of(said[-1:], at, slots)))[-1]
        said.append(int(logits.argmax()))
    return said


def compute_log_probabilities(
    model: Model, prompt_tokens: int, logits: Tensor, slots: Tensor, answer: Sequence[int]
) -> Tensor:
    """Of every token of ``answer``, the distribution it was drawn from, given those before it: [tokens, vocabulary]."""
    rows = [logits.reshape(1, -1).float()]
    if len(answer) > 1:
        at = torch.arange(prompt_tokens, prompt_tokens + len(answer) - 1)
        rows.append(model.logits(model.forward(Rows.of(list(answer[:-1]), at, slots))).float())
    return torch.cat(rows).log_softmax(-1)


def compute_divergence(cold: Tensor, ours: Tensor) -> float:
    """Mean KL(cold || ours) in nats over the tokens of an answer, from log probabilities of the same shape.

    >>> compute_divergence(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.5, 0.5]]).log())
    0.0
    """
    each = torch.where(cold == -torch.inf, 0.0, cold.exp() * (cold - ours)).sum(-1)
    return max(0.0, float(each.double().mean()))


def keeps_answer(ours: Tensor, answer: Sequence[int]) -> bool:
    """Whether the greedy answer would be this one: then, and only then, each of its tokens is the likeliest in turn.

    ``ours`` are log probabilities along ``answer``.
    """
    return bool((ours.argmax(-1).cpu() == torch.tensor(answer)).all())
