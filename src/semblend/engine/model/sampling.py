"""From logits to tokens: greedy or drawn, for a batch at once, and the same whoever else is in the batch.

A drawn token is the one at which the cumulative probability passes a uniform number. Each request has its own stream
of uniform numbers, so its tokens depend on its seed and its logits alone: not on its neighbours, not on how often it
was preempted. The order is the usual one: bias, repetition penalty, frequency and presence penalty, temperature, top-k,
top-p, min-p, draw.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from semblend.errors import InputError
from semblend.wire.sampling import Sampling

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms: of the chosen token's probability, and (token, logprob) of the best ones, best first."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Draw:
    """One row of a batch: its settings, its stream of random numbers, the tokens a penalty applies to.

    The first ``prompt_tokens`` of ``seen`` are the prompt, the others the answer so far.
    """

    sampling: Sampling
    generator: torch.Generator
    seen: Sequence[int] = ()
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Sampled:
    token: int
    logprobs: Logprobs | None = None


def make_generator(seed: int | None) -> torch.Generator:
    """A stream of uniform numbers on the CPU, so that one seed gives the same tokens on every device."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


def rewind(generator: torch.Generator, draws: int) -> None:
    """Put a generator of `make_generator` back to where it was after its first ``draws`` tokens."""
    generator.manual_seed(generator.initial_seed())
    for _ in range(draws):
        _uniform(generator)


@torch.inference_mode()
def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Sampled | None]:
    """One token for each row of ``logits`` [m, vocab]; None for a row that cannot be sampled.

    That is a row with NaN, +inf or nothing but -inf, before or after bias and penalties, or one whose probabilities are
    not finite. Such a row changes no bit of its neighbours' results.

    >>> row = Draw(Sampling(), make_generator(0))
    >>> sample(torch.tensor([[0.0, 2.0, 1.0]]), [row])
    [Sampled(token=1, logprobs=None)]
    """
    if logits.ndim != 2 or logits.shape[0] != len(draws):
        raise InputError(f"{tuple(logits.shape)} logits for {len(draws)} draws", hint="pass one row a draw")
    raw = logits.float()
    usable = _find_usable(raw)
    raw = torch.where(usable[:, None], raw, 0.0)
    edited = _apply_penalties(raw, draws)
    if edited is not raw:
        usable &= _find_usable(edited)
        edited = torch.where(usable[:, None], edited, 0.0)
    chosen = _choose(edited, draws)
    usable &= (chosen >= 0) & (chosen < raw.shape[-1])
    logprobs = _logprobs(raw, torch.where(usable, chosen, 0), draws)
    tokens, fine = chosen.tolist(), usable.tolist()
    return [Sampled(tokens[row], logprobs.get(row)) if fine[row] else None for row in range(len(draws))]


def _find_usable(logits: torch.Tensor) -> torch.Tensor:
    """For each row: whether every number is finite or -inf, and at least one is finite."""
    return (torch.isfinite(logits) | (logits == -math.inf)).all(dim=-1) & (logits > -math.inf).any(dim=-1)


def _choose(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    chosen = logits.argmax(dim=-1)
    # A row's path depends on its own settings only: the same arithmetic whatever its neighbours ask for.
    for filters in (False, True):
        rows = [i for i, draw in enumerate(draws) if not draw.sampling.greedy and draw.sampling.filters == filters]
        if rows:
            draw_rows = _draw_filtered if filters else _draw_plain
            chosen[rows] = draw_rows(logits[rows], [draws[i] for i in rows])
    return chosen


def _draw_plain(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    return _pick(torch.softmax(logits / _column(logits, (d.sampling.temperature for d in draws)), dim=-1), draws)


def _draw_filtered(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    settings = [draw.sampling for draw in draws]
    vocab = logits.shape[-1]
    scaled = logits / _column(logits, (s.temperature for s in settings))
    ordered, tokens = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=logits.device)
    top_k = _column(logits, (s.top_k or vocab for s in settings))
    probabilities = torch.softmax(ordered.masked_fill(rank >= top_k, -math.inf), dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities  # the token that crosses top_p still counts
    outside = before >= _column(logits, (s.top_p for s in settings))
    outside |= probabilities < probabilities[:, :1] * _column(logits, (s.min_p for s in settings))
    outside[:, 0] = False
    position = _pick(probabilities.masked_fill(outside, 0.0), draws)
    token = tokens.gather(-1, position.clamp(0, vocab - 1)[:, None])[:, 0]
    return torch.where(position == NO_TOKEN, NO_TOKEN, token)


def _pick(weights: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """The index at which each row's cumulative weight passes its next uniform number; never one of weight 0.

    `NO_TOKEN` for a row whose weights are not finite or add up to nothing.
    """
    cumulative = weights.double().cumsum(dim=-1)
    uniform = torch.stack([_uniform(draw.generator) for draw in draws])
    total = cumulative[:, -1:]
    mark = torch.minimum(uniform.to(total.device) * total, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, mark, right=True)
    return torch.where(torch.isfinite(total) & (total > 0), found, NO_TOKEN)[:, 0]


def _uniform(generator: torch.Generator) -> torch.Tensor:
    return torch.rand(1, generator=generator, dtype=torch.float64)


def _apply_penalties(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    rows = [i for i, draw in enumerate(draws) if draw.sampling.edits_logits]
    if not rows:
        return logits
    logits = logits.clone()
    for row in rows:
        _edit_row(logits[row], draws[row])
    return logits


def _edit_row(row: torch.Tensor, draw: Draw) -> None:
    """Bias and penalties of one row, in place."""
    sampling = draw.sampling
    if sampling.logit_bias:
        tokens, biases = zip(*dict(sampling.logit_bias).items(), strict=True)
        row[list(tokens)] += torch.tensor(biases, dtype=row.dtype, device=row.device)
    if sampling.repetition_penalty != 1 and draw.seen:
        seen = torch.tensor(sorted(set(draw.seen)), device=row.device)
        values, penalty = row[seen], sampling.repetition_penalty
        row[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        answered = Counter(draw.seen[draw.prompt_tokens :])
        penalties = [sampling.frequency_penalty * times + sampling.presence_penalty for times in answered.values()]
        row[list(answered)] -= torch.tensor(penalties, dtype=row.dtype, device=row.device)


def _logprobs(logits: torch.Tensor, chosen: torch.Tensor, draws: Sequence[Draw]) -> dict[int, Logprobs]:
    wanted = {row: n for row, draw in enumerate(draws) if (n := draw.sampling.logprobs) is not None}
    if not wanted:
        return {}
    rows = list(wanted)
    table = torch.log_softmax(logits[rows], dim=-1)
    own = table.gather(-1, chosen[rows][:, None])[:, 0].tolist()
    best, tokens = table.topk(min(max(wanted.values()), table.shape[-1]), dim=-1)
    pairs = [list(zip(*both, strict=True)) for both in zip(tokens.tolist(), best.tolist(), strict=True)]
    return {row: Logprobs(own[i], tuple(pairs[i][: wanted[row]])) for i, row in enumerate(rows)}


def _column(like: torch.Tensor, values: Iterable[float]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float64, device=like.device)[:, None].to(like.dtype)
