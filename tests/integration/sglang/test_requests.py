"""Which requests of SGLang are served, and in whose name."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest

from semblend.integration.sglang.requests import read_request
from semblend.prompt import Namespace


def make(**more):
    given = {
        "rid": "r",
        "origin_input_ids": array("q", [1, 2, 3]),
        "output_ids": array("q"),
        "extra_key": None,
        "cache_salt": None,
        "sampling_params": SimpleNamespace(custom_params=None),
        "skip_radix_cache_insert": False,
        "return_logprob": False,
        "return_hidden_states": False,
    }
    return SimpleNamespace(**(given | more))


def test_plain_text_generation_is_served():
    request = read_request(make(), 2, Namespace(model="m"))
    assert request.unsupported == ""
    assert request.prompt.token_ids.tolist() == [1, 2, 3]
    assert request.prompt.namespace == Namespace(model="m")


@pytest.mark.parametrize(
    "more",
    [
        {"multimodal_inputs": object()},
        {"input_embeds": [[0.1]]},
        {"lora_id": "a"},
        {"session": object()},
        {"beam_group": object()},
        {"skip_radix_cache_insert": True},
        {"bootstrap_room": 0},
        {"return_hidden_states": True},
        {"return_logprob": True, "logprob_start_len": 0},
        {"output_ids": array("q", [7])},
    ],
    ids=lambda more: next(iter(more)),
)
def test_what_we_would_get_wrong_is_computed_without_us(more):
    assert read_request(make(**more), 2, Namespace()).unsupported


def test_log_probabilities_of_the_answer_are_served():
    assert not read_request(make(return_logprob=True, logprob_start_len=-1), 2, Namespace()).unsupported


def test_a_salt_and_an_extra_key_are_told_apart():
    spaces = [
        read_request(make(extra_key=key, cache_salt=salt), 2, Namespace()).prompt.namespace
        for key, salt in [(None, None), ("a", None), (None, "a"), ("a", "b"), ("ab", None), ("b", "a")]
    ]
    assert len(set(spaces)) == len(spaces)


def test_a_request_without_a_salt_can_be_declined():
    assert read_request(make(), 2, Namespace(), require_cache_salt=True).unsupported
    assert not read_request(make(cache_salt="s"), 2, Namespace(), require_cache_salt=True).unsupported


@pytest.mark.parametrize(
    ("said", "mode", "opt_out"),
    [
        ({"quality": "fast"}, "fast", False),
        ({"opt_out": True}, None, True),
        ({"quality": 0.05}, "0.05", False),
        ({"quality": 0}, "exact", False),
        ({"opt_out": "yes", "quality": -7, "what": 1}, "exact", True),
        ("fast", "exact", False),
        (None, None, False),
    ],
)
def test_a_caller_says_what_it_wants_and_nonsense_never_loosens_anything(said, mode, opt_out):
    params = SimpleNamespace(custom_params={"semblend": said})
    request = read_request(make(sampling_params=params), 2, Namespace())
    assert (request.quality, request.opt_out) == (mode, opt_out)
