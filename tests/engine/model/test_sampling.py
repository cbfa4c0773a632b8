"""Sampling: the right distribution, and the same tokens whoever else is in the batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend.engine.model.sampling import Draw, make_generator, rewind, sample
from semblend.errors import InputError
from semblend.wire.sampling import Sampling

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


HUGE = 3e38  # finite in float32; divided by any number below 1 it is not

OVERFLOWS = [
    {"repetition_penalty": 0.5},
    {"logit_bias": ((0, 100.0),), "repetition_penalty": 0.5, "temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 0.5, "top_k": 4},
    {"temperature": 0.5, "top_p": 0.5, "logprobs": 3},
]


@pytest.mark.parametrize("hostile", OVERFLOWS)
def test_a_row_that_overflows_gives_nothing_and_changes_no_bit_of_its_neighbours(hostile):
    logits = torch.randn(5, VOCAB, generator=make_generator(9))
    asked = [{"logprobs": 2}, {"temperature": 1.0, "logprobs": 2}, {}, {"temperature": 1.0, "top_p": 0.7}, {}]

    def draws(**middle) -> list[Draw]:
        given = [fields if at != 2 else middle for at, fields in enumerate(asked)]
        return [Draw(Sampling(**fields), make_generator(at), [0, 1]) for at, fields in enumerate(given)]

    calm = sample(logits, draws())
    logits[2, 0] = HUGE
    found = sample(logits, draws(**hostile))
    assert found[2] is None
    assert found[:2] + found[3:] == calm[:2] + calm[3:]


@pytest.mark.parametrize("tiny", [0.009, 1e-6, 1e-38, 1e-45, 5e-324])
def test_a_tiny_temperature_is_raised_and_draws_the_likeliest_token(tiny):
    assert Sampling(temperature=tiny).temperature == 0.01
    assert Sampling(temperature=0).greedy
    assert drawn(torch.tensor([1.0, 5.0, 2.0]), 50, temperature=tiny) == [1] * 50


def test_a_subnormal_number_never_reaches_a_kernel():
    tiny = 1e-40
    made = Sampling(
        temperature=1.0, top_p=tiny, min_p=tiny, frequency_penalty=-tiny, presence_penalty=tiny, logit_bias=((1, tiny),)
    )
    assert made.top_p == torch.finfo(torch.float32).tiny
    assert (made.min_p, made.frequency_penalty, made.presence_penalty, made.logit_bias) == (0, 0, 0, ((1, 0),))
    assert drawn(torch.tensor([1.0, 1.5, 1.2]), 50, temperature=1.0, top_p=tiny) == [1] * 50


def test_a_rewound_generator_draws_the_same_tokens_again():
    generator = make_generator(None)
    draw, logits = Draw(Sampling(temperature=1.0), generator), torch.zeros(1, VOCAB)
    tokens = [sample(logits, [draw])[0].token for _ in range(20)]
    rewind(generator, 5)
    assert [sample(logits, [draw])[0].token for _ in range(15)] == tokens[5:]


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
        {"repetition_penalty": 1e-38},
        {"repetition_penalty": 0.009},
        {"repetition_penalty": 1e38},
        {"repetition_penalty": math.inf},
        {"temperature": math.inf},
        {"top_p": math.nan},
        {"min_p": math.nan},
        {"logit_bias": ((1, math.nan),)},
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


def plain_twin(logits: list[float], sampling: Sampling, seen: list[int], prompt_tokens: int) -> list[float]:
    """Bias and penalties as their definitions say, one token at a time."""
    bias, out = dict(sampling.logit_bias), []
    for token, value in enumerate(logits):
        value += bias.get(token, 0.0)
        if token in seen:
            value = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
        times = seen[prompt_tokens:].count(token)
        value -= sampling.frequency_penalty * times + sampling.presence_penalty * (times > 0)
        out.append(value)
    return out


PENALTIES = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3, 2.0]),
        "frequency_penalty": st.sampled_from([-2.0, 0.0, 0.7, 2.0]),
        "presence_penalty": st.sampled_from([-1.0, 0.0, 1.5]),
        "logit_bias": st.dictionaries(st.integers(0, 9), st.floats(-5, 5, width=32), max_size=4).map(
            lambda biases: tuple(biases.items())
        ),
    }
)


@settings(max_examples=150)
@given(
    st.lists(st.floats(-4, 4, width=32), min_size=10, max_size=10),
    PENALTIES,
    st.lists(st.integers(0, 9), max_size=12),
    st.integers(0, 12),
    st.integers(0, 5),
)
def test_bias_and_penalties_choose_what_their_plain_twin_chooses(values, penalties, seen, prompt_tokens, seed):
    prompt_tokens = min(prompt_tokens, len(seen))
    logits = torch.tensor([values])
    for how in ({"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 1.3, "top_k": 4, "min_p": 0.05}):
        asked = Sampling(**how, **penalties)
        bent = torch.tensor([plain_twin(values, asked, seen, prompt_tokens)])
        ours = sample(logits, [Draw(asked, make_generator(seed), seen, prompt_tokens)])[0].token
        theirs = sample(bent, [Draw(Sampling(**how), make_generator(seed))])[0].token
        if how["temperature"]:
            assert ours == theirs
        else:  # equal up to rounding: the twin adds in another precision
            assert bent[0, ours] >= bent[0].max() - 1e-5


def test_a_penalty_on_the_answer_leaves_tokens_of_the_prompt_alone():
    logits = torch.tensor([[1.0, 0.9]])
    asked = Sampling(presence_penalty=0.5)
    assert sample(logits, [Draw(asked, make_generator(0), [0, 0], 2)])[0].token == 0
    assert sample(logits, [Draw(asked, make_generator(0), [0, 0], 1)])[0].token == 1


def test_logprobs_are_those_before_bias_and_penalties():
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    asked = Sampling(logit_bias=((0, 50.0),), logprobs=1)
    (found,) = sample(logits, [Draw(asked, make_generator(0))])
    assert found.token == 0
    assert found.logprobs.chosen == pytest.approx(float(torch.log_softmax(logits[0], -1)[0]))
    assert found.logprobs.top[0][0] == 1
