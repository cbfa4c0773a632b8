"""Sampling: the right distribution, and the same tokens whoever else is in the batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend.engine.sampling import Draw, Sampling, make_generator, sample
from semblend.errors import InputError

VOCAB = 50


def row(seed: int = 0, **fields) -> Draw:
    return Draw(Sampling(**fields), make_generator(seed), fields.pop("seen", ()))


def drawn(logits: torch.Tensor, n: int, **fields) -> list[int]:
    draw = row(1, **fields)
    return [sample(logits[None], [draw])[0].token for _ in range(n)]


def test_greedy_takes_the_most_likely_token():
    logits = torch.randn(7, VOCAB, generator=make_generator(0))
    assert [s.token for s in sample(logits, [row() for _ in range(7)])] == logits.argmax(-1).tolist()


def test_a_seed_gives_the_same_tokens_again_and_another_seed_others():
    logits = torch.zeros(1, VOCAB)
    tokens = [[sample(logits, [draw])[0].token for _ in range(20)] for draw in (row(3, temperature=1),) * 1]
    again = row(3, temperature=1)
    other = row(4, temperature=1)
    assert [sample(logits, [again])[0].token for _ in range(20)] == tokens[0]
    assert [sample(logits, [other])[0].token for _ in range(20)] != tokens[0]


def test_frequencies_follow_the_distribution_at_its_temperature():
    probabilities = torch.tensor([0.5, 0.3, 0.2])
    tokens = drawn(probabilities.log() * 2, 4000, temperature=2.0)
    shares = torch.bincount(torch.tensor(tokens), minlength=3) / 4000
    assert torch.allclose(shares, probabilities, atol=0.04)


def test_top_k_keeps_the_k_best():
    logits = torch.randn(VOCAB, generator=make_generator(5))
    assert set(drawn(logits, 300, temperature=5.0, top_k=3)) == set(logits.topk(3).indices.tolist())


def test_top_p_keeps_the_token_that_crosses_the_limit():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(drawn(logits, 300, temperature=1.0, top_p=0.6)) == {0, 1}
    assert set(drawn(logits, 50, temperature=1.0, top_p=1e-9)) == {0}


def test_min_p_is_relative_to_the_best_token():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(drawn(logits, 400, temperature=1.0, min_p=0.25)) == {0, 1, 2}


def test_a_repetition_penalty_turns_to_a_token_that_was_not_said():
    logits = torch.tensor([[1.0, 0.9, -1.0], [-0.5, -0.6, -2.0]])
    draws = [Draw(Sampling(repetition_penalty=1.5), make_generator(0), [0, 0])] * 2
    assert [s.token for s in sample(logits, draws)] == [1, 1]


def test_logprobs_are_the_models_own_whatever_the_temperature():
    logits = torch.randn(1, VOCAB, generator=make_generator(2))
    found = sample(logits, [row(temperature=3.0, top_k=2, logprobs=4)])[0]
    table = torch.log_softmax(logits[0], -1)
    assert math.isclose(found.logprobs.chosen, table[found.token], rel_tol=1e-6)
    assert [token for token, _ in found.logprobs.top] == table.topk(4).indices.tolist()
    assert sample(logits, [row()])[0].logprobs is None
    assert sample(logits, [row(logprobs=0)])[0].logprobs.top == ()


def test_a_row_without_a_usable_number_gives_nothing_and_leaves_its_neighbours_alone():
    logits = torch.zeros(4, VOCAB)
    logits[0, 3] = math.nan
    logits[1] = -math.inf
    logits[2, :] = -math.inf
    logits[2, 7] = 0.0
    logits[3, 1] = math.inf
    found = sample(logits, [row(temperature=1.0) for _ in range(4)])
    assert [s and s.token for s in found] == [None, None, 7, None]


settings_of_a_row = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 5]),
    min_p=st.sampled_from([0.0, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logprobs=st.sampled_from([None, 0, 2]),
)


@settings(max_examples=80)
@given(st.lists(settings_of_a_row, min_size=1, max_size=6), st.integers(0, 99))
def test_a_rows_token_does_not_depend_on_its_neighbours(asked, seed):
    logits = torch.randn(len(asked), VOCAB, generator=make_generator(seed))
    together = sample(logits, [Draw(s, make_generator(seed + i), [1, 2]) for i, s in enumerate(asked)])
    alone = [sample(logits[i : i + 1], [Draw(s, make_generator(seed + i), [1, 2])])[0] for i, s in enumerate(asked)]
    assert [s.token for s in together] == [s.token for s in alone]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"logprobs": 21},
        {"seed": 1 << 65},
        {"temperature": "warm"},
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        Sampling(**wrong)
