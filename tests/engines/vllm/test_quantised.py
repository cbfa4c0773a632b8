"""Engines whose KV cache holds 8-bit floats (fp8): what is moved, what is computed, what is noticed.

vLLM has them on CPUs with AVX-512 only; elsewhere these tests are skipped, with its own words.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from faults import CONTROL, NAMES, REASONS, Faults
from vllm_world import in_pieces, make_world, serve, worst

sys.path.insert(0, str(Path(__file__).parents[2] / "contract"))

import behaviours
from behaviours import *  # noqa: F403  (the rules of the contract)

from semblend.materialize.gate.observers import NARROW_TOLERANCE

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
LONG = 12
SCALES = (0.37, 0.05)
"""Of keys and values, as a checkpoint may bring them; no powers of two."""
STEP = 0.125
"""From a number of e4m3 to the next one, at most, as a share of it."""
LARGEST = 448
TOLERANCE = NARROW_TOLERANCE[torch.float8_e4m3fn]


def explain_missing():
    """What vLLM says where this CPU cannot have such a cache; None where it can."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    try:
        _get_attn_isa(torch.bfloat16, 32, 64, "fp8")
    except NotImplementedError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def fp8_engine(small_model):
    if why := explain_missing():
        pytest.skip(why)
    made = make_world(small_model[0], {"kv_cache_dtype": "fp8"}, **small_model[1])
    yield made
    made.core.shutdown()


@pytest.fixture
def fp8(fp8_engine):
    yield from serve(fp8_engine)


def set_scales(model, scales):
    for layer in model.layers:
        for name, scale in zip("kv", scales, strict=True):
            setattr(layer, f"_{name}_scale_float", scale)
            getattr(layer, f"_{name}_scale").data.fill_(scale)


@pytest.fixture
def scaled(fp8):
    """The same with scales; what was stored under others would be read by them, so nothing of it is kept."""
    fp8.forget_prefixes()
    set_scales(fp8.worker._model, SCALES)
    yield fp8
    fp8.forget_prefixes()
    set_scales(fp8.worker._model, (1.0, 1.0))


@pytest.fixture
def world(fp8_engine):
    """For the contract: nobody asks vLLM anything meanwhile. Of numbers several times their usual size a step is
    rounding."""
    fp8_engine.start()
    model = fp8_engine.worker._model
    fp8_engine.worker.load, fp8_engine.worker.capture = (fp8_engine._real[name] for name in ("load", "capture"))
    yield behaviours.World(model, model.block_tokens, vocabulary=40_000, tolerance=5 * STEP, deep_tolerance=100.0)
    fp8_engine.half.reset()
    fp8_engine.forget_prefixes()


def test_what_is_scattered_is_gathered_and_nothing_else_changes(world):
    """In place of the contract's rule, which wants every number back: of 8 bits there are 256."""
    layout, slots, neighbours = world.model.layout, world.take_slots(40), world.take_slots(40)
    shape = (len(slots), layout.kv_heads, layout.head_dim)
    for scale in (0.01, 1.0, 1e5):
        k, v = (torch.randn(shape, generator=torch.Generator().manual_seed(n)) * scale for n in (1, 2))
        before = [part.clone() for part in layout.gather(2, neighbours)]
        layout.scatter(2, slots, k, v)
        found = layout.gather(2, slots)
        for got, wanted in zip(found, (k, v), strict=True):
            clamped = wanted.clamp(-LARGEST, LARGEST)
            assert float(((got - clamped).abs() / clamped.abs().clamp_min(2.0**-6)).max()) <= STEP / 2, "half a step"
        layout.scatter(2, slots, *found)
        order = torch.randperm(len(slots))
        assert torch.equal(layout.keys(2, slots[order]), found[0][order]), "written again, nothing changes"
        for was, part in zip(before, layout.gather(2, neighbours), strict=True):
            assert torch.equal(was, part), "a slot that nobody named was written"


def tokens_of(output):
    return list(output.outputs[0].token_ids)


def make_prompts(world, seed):
    """A donor, and a prompt that shares its document."""
    document = world.document(seed)
    return world.instruction(1) + document + world.question(), world.instruction(5) + document + world.question()


@pytest.mark.parametrize("quality", ["fast", "balanced"])
def test_a_document_under_another_instruction_is_reused(fp8, quality):
    donor, target = make_prompts(fp8, 1)
    fp8.ask(donor)
    (output,) = fp8.ask(target, quality=quality)
    receipt = fp8.receipt(output)
    assert receipt["outcome"] == "backend_materialized_reuse", receipt
    assert receipt["reused_tokens"] > 0.5 * len(target)
    assert 0 < receipt["canary"] < TOLERANCE
    kinds = sum(receipt[f"{kind}_tokens"] for kind in ("exact", "reused", "recomputed", "prefill"))
    assert kinds == receipt["prompt_tokens"] == len(target)


@pytest.mark.parametrize("name", ["fp8", "scaled"])
def test_in_layer_0_values_are_copied_byte_for_byte_and_keys_are_off_by_their_rounding(request, name):
    world = request.getfixturevalue(name)
    donor, target = make_prompts(world, 2)
    cold = world.cold(target)
    world.ask(donor)
    (output,) = world.ask(target)
    (k, v), (cold_k, cold_v) = world.kv_of(output)[0], world.kv_of(cold)[0]
    (span,) = world.audited(output)["spans"]
    assert span["target_start"] != span["donor_start"]
    assert torch.equal(v, cold_v)
    inside = slice(span["target_start"] + 32, span["target_start"] + span["length"] - 1)
    moved, exact = k[inside].flatten(1), cold_k[inside].flatten(1)
    assert not torch.equal(moved, exact), "these were moved, and not computed"
    off = (moved - exact).norm(dim=1) / exact.norm(dim=1)
    assert float(off.max()) < 0.64 * STEP, "once cut off by vLLM at another place, once rounded by us"
    assert float(off.mean()) < 0.4 * STEP


def test_with_the_same_text_in_front_every_layer_is_as_cold_holes_too(fp8, monkeypatch):
    """Nothing has moved, so that every byte of it is copied."""
    prompt = fp8.instruction(3) + fp8.document(3) + fp8.question()
    cold = fp8.cold(prompt, tokens=LONG)
    fp8.ask(prompt)
    fp8.forget_prefixes()  # or vLLM's own exact hit would win
    monkeypatch.setattr(fp8.half.semblend, "lookup", in_pieces(fp8.half.semblend.lookup))
    (output,) = fp8.ask(prompt, tokens=LONG)
    spans = fp8.audited(output)["spans"]
    assert len(spans) == 3
    inside = slice(spans[0]["target_start"], spans[0]["target_start"] + spans[0]["length"] - 1)
    assert worst(fp8.kv_of(output), fp8.kv_of(cold), inside) == 0.0
    assert tokens_of(output) == tokens_of(cold)


def test_without_the_computed_rows_the_same_check_fails(fp8, monkeypatch):
    """The negative control: poison stays where nothing is computed."""
    prompt = fp8.instruction(3) + fp8.document(3) + fp8.question()
    cold = fp8.cold(prompt)
    fp8.ask(prompt)
    fp8.forget_prefixes()  # or vLLM's own exact hit would win
    monkeypatch.setattr(fp8.half.semblend, "lookup", in_pieces(fp8.half.semblend.lookup))
    monkeypatch.setattr(fp8.worker._model, "forward", lambda rows, observer=None: torch.zeros(len(rows), 128))
    (output,) = fp8.ask(prompt, tokens=1)
    assert worst(fp8.kv_of(output), fp8.kv_of(cold)) > 100


@pytest.mark.parametrize("mode", ["fast", "balanced"])
@pytest.mark.parametrize("fault", NAMES)
def test_a_load_that_fails_changes_no_token(fp8, monkeypatch, fault, mode):
    monkeypatch.setattr(fp8.half.sessions, "_predict_loss", lambda *plan: None)
    faults = Faults(fp8.connector, fp8.worker_connector)
    donor, target = make_prompts(fp8, 700 + NAMES.index(fault))
    cold = fp8.cold(target, tokens=LONG)
    with faults.spoil(fault, lambda: fp8.ask(donor)):
        (answer,) = fp8.ask(target, tokens=LONG, quality=mode)
    receipt = fp8.receipt(answer)
    assert tokens_of(answer) == tokens_of(cold)
    assert (receipt["reason"], receipt["reused_tokens"]) == (REASONS[fault], 0)


@pytest.mark.parametrize("off", [1, -1])
def test_keys_that_are_off_by_one_position_are_noticed(fp8, monkeypatch, off):
    monkeypatch.setattr(fp8.half.sessions, "_predict_loss", lambda *plan: None)
    from semblend.materialize.kv.rope import RopeSpec

    donor, target = make_prompts(fp8, 4)
    cold, relocate = fp8.cold(target, tokens=LONG), RopeSpec.relocate
    fp8.ask(donor)
    monkeypatch.setattr(RopeSpec, "relocate", lambda rope, k, shift: relocate(rope, k, shift + off))
    (answer,) = fp8.ask(target, tokens=LONG)
    assert fp8.receipt(answer)["reason"] == "validation_failed"
    assert tokens_of(answer) == tokens_of(cold)


def test_noise_that_nobody_notices_does_change_tokens(fp8, monkeypatch):
    """The control: if this passed as equal, the tests above would show nothing."""
    monkeypatch.setattr(fp8.half.sessions, "_predict_loss", lambda *plan: None)
    faults = Faults(fp8.connector, fp8.worker_connector)
    donor, target = make_prompts(fp8, 710)
    cold = fp8.cold(target, tokens=LONG)
    with faults.spoil(CONTROL, lambda: fp8.ask(donor)):
        (answer,) = fp8.ask(target, tokens=LONG)
    assert fp8.receipt(answer)["reused_tokens"] > 0
    assert tokens_of(answer) != tokens_of(cold)


@pytest.mark.parametrize("name", ["fp8", "scaled"])
def test_the_check_at_the_start_finds_a_backend_that_reads_otherwise(request, monkeypatch, name):
    from semblend.errors import SemBlendError

    model = request.getfixturevalue(name).worker._model
    model.check()
    impl, real = model.layers[0].impl, model.layers[0].impl.forward

    def scale_values(layer, *args, output):
        return real(layer, *args, output=output).mul_(1.3)

    def one_key_less(layer, q, k, v, cache, metadata, output):
        metadata.seq_lens -= 1
        return real(layer, q, k, v, cache, metadata, output=output)

    for wrong in (scale_values, one_key_less):
        monkeypatch.setattr(impl, "forward", wrong)
        with pytest.raises(SemBlendError, match="plain twin over 8-bit KV"):
            model.check()


def test_the_check_at_the_start_finds_a_kernel_of_ours_that_reads_otherwise(fp8, monkeypatch):
    from semblend.errors import SemBlendError
    from semblend.integration.vllm.worker import model_access

    def choose(rows, layout, *, layers, grouped):
        del rows, layout, layers, grouped
        return lambda layer, q: q

    monkeypatch.setattr(model_access, "choose_attention", choose)
    with pytest.raises(SemBlendError, match="our kernel is off"):
        fp8.worker._model.check()


def test_answers_of_a_16_bit_model_and_without_reuse_are_those_of_stock_vllm(apart):
    """A trained model in bfloat16, in processes of their own."""
    if why := explain_missing():
        pytest.skip(why)
    ours, stock = (apart("number_type", dtype="bfloat16", kv="fp8", connected=there) for there in (True, False))
    assert ours["cold"]["tokens"] == stock["cold"]["tokens"]
    assert ours["cold again"]["tokens"] == stock["cold"]["tokens"]
    for mode in ("fast", "balanced"):
        receipt = ours[mode]["receipt"]
        assert receipt["outcome"] == "backend_materialized_reuse", receipt
        assert receipt["reused_tokens"] > 0.3 * ours[mode]["prompt"]
        assert 0 < receipt["canary"] < TOLERANCE
    assert ours["cold again"]["cached"] < 64, "of what we served nothing is in the exact cache"
