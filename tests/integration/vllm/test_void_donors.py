"""Donors of a cache that was emptied, or of weights that are no longer there, are not used."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend.integration.vllm.orders import Report
from semblend.integration.vllm.scheduler.worker_donors import ResetWatch
from semblend.materialize.weights_watch import STRETCH_NUMBERS, WeightsWatch


def network(seed: int = 1, *, layers: int = 4) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    parts = [part for _ in range(layers) for part in (torch.nn.Linear(32, 32), torch.nn.LayerNorm(32))]
    return torch.nn.Sequential(torch.nn.Embedding(100, 32), *parts)


def test_a_reset_is_seen_once_and_a_failed_one_is_none():
    pool = SimpleNamespace(cached_block_hash_to_block={})
    watch = ResetWatch(pool)
    pool.cached_block_hash_to_block["hash"] = "block"
    assert not watch.was_reset()
    pool.cached_block_hash_to_block = {}
    assert watch.was_reset()
    assert not watch.was_reset()


def test_weights_that_stay_are_not_taken_for_others():
    watch = WeightsWatch(network())
    assert not watch.have_changed()
    assert watch.digest == WeightsWatch(network()).digest
    assert watch.digest != WeightsWatch(network(2)).digest
    assert len(watch.digest) == 16


@pytest.mark.parametrize("number", range(17))
def test_an_update_of_any_one_parameter_is_seen_once(number):
    model = network()
    watch, parameter = WeightsWatch(model), list(model.parameters())[number]
    before = watch.digest
    with torch.no_grad():
        parameter.data.mul_(1.0001)  # .data: torch's own counter of versions does not move
        parameter.data.add_(1e-4)
    assert watch.have_changed()
    assert watch.digest != before
    assert not watch.have_changed()


def test_a_look_compares_the_weights_as_they_were_when_it_began_and_changes_nothing():
    model = network()
    watch = WeightsWatch(model)
    before = watch.begin_look()
    model[1].weight.data.add_(1)
    after = watch.begin_look()
    assert (before(), after(), after()) == (False, True, True)
    assert watch.have_changed()
    assert not watch.begin_look()()


def refuse_to_record(work):
    raise RuntimeError("operation not permitted when stream is capturing")


def repeat_into_the_same_memory(work):
    answer = work()

    def again():
        answer.copy_(work())
        return answer.clone()

    return again


def remember_the_first_answer(work):
    answer = work()
    return lambda: answer


@pytest.mark.parametrize("record", [repeat_into_the_same_memory, refuse_to_record, remember_the_first_answer])
def test_a_recorded_look_sees_what_a_plain_one_sees_and_two_at_once_keep_their_answers(record):
    model = network()
    watch = WeightsWatch(model, record)
    before = watch.begin_look()
    model[1].weight.data.add_(1)
    after = watch.begin_look()
    assert (before(), after()) == (False, True)
    assert watch.have_changed()
    assert not watch.have_changed()
    model[1].weight = torch.nn.Parameter(model[1].weight.detach().clone())  # the recording would read the old one
    assert watch.have_changed()
    model[1].weight.data.add_(1)
    assert watch.have_changed(), "of the new one there is a new recording"


def test_a_parameter_that_was_replaced_or_moved_counts_as_changed():
    model = network()
    watch = WeightsWatch(model)
    model[1].weight = torch.nn.Parameter(model[1].weight.detach().clone())
    assert watch.have_changed()
    model[1].weight.data = model[1].weight.data.clone()
    assert watch.have_changed()
    assert not watch.have_changed()


def test_empty_transposed_shared_and_broken_parameters_are_watched_too():
    model = torch.nn.Module()
    model.empty = torch.nn.Parameter(torch.empty(0))
    model.turned = torch.nn.Parameter(torch.randn(64, 8).t())
    model.spread = torch.nn.Parameter(torch.zeros(1).expand(500), requires_grad=False)
    model.small = torch.nn.Parameter(torch.tensor([math.nan, 1.0]))
    model.packed = torch.nn.Parameter(torch.arange(1000, dtype=torch.int32), requires_grad=False)
    model.nothing = None
    model.register_parameter("absent", None)
    watch = WeightsWatch(model)
    assert not watch.have_changed(), "not a number is equal to itself here"
    model.turned.data[:, 21] += 1
    model.turned.data[:, 63] += 1
    assert watch.have_changed()
    model.packed.data += 1
    assert watch.have_changed()


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_a_sparse_update_of_a_hundredth_of_all_numbers_is_seen(seed):
    model = network(layers=12)
    watch = WeightsWatch(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        chosen = torch.rand(parameter.shape, generator=generator) < 0.01
        parameter.data[chosen] += 0.01
    assert watch.have_changed()


def test_a_sample_is_small_however_large_the_parameter(monkeypatch):
    model, gathered = torch.nn.Linear(1000, 1000), []
    watch = WeightsWatch(model)
    with monkeypatch.context() as counted:
        counted.setattr(torch, "ne", lambda now, was: gathered.append(now.numel()) or now != was)
        assert not watch.have_changed()
    assert gathered == [4 * STRETCH_NUMBERS * 4]


def test_the_digests_of_all_ranks_are_one_name_whatever_their_order():
    one, two = Report(weights="aa"), Report(weights="bb")
    assert one.merge(two).weights == two.merge(one).weights == "aa.bb"
    assert Report().merge(Report()).weights == ""
    assert bool(Report(weights="aa"))
