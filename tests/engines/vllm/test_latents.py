"""Models with latent attention (MLA) in a real vLLM: what is moved, what is computed, what is noticed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from faults import CONTROL, NAMES, REASONS, Faults
from vllm_world import in_pieces, worst

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
LONG = 12


def tokens_of(output):
    return list(output.outputs[0].token_ids)


def make_prompts(world, seed):
    """A donor, and a prompt that shares its document."""
    document = world.document(seed)
    return world.instruction(1) + document + world.question(), world.instruction(5) + document + world.question()


@pytest.mark.parametrize("quality", ["fast", "balanced"])
def test_a_document_under_another_instruction_is_reused(latent_world, quality):
    donor, target = make_prompts(latent_world, 1)
    latent_world.ask(donor)
    (output,) = latent_world.ask(target, quality=quality)
    receipt = latent_world.receipt(output)
    assert receipt["outcome"] == "backend_materialized_reuse", receipt
    assert receipt["reused_tokens"] > 0.6 * len(target)
    assert 0 < receipt["canary"] < 1e-5
    kinds = sum(receipt[f"{kind}_tokens"] for kind in ("exact", "reused", "recomputed", "prefill"))
    assert kinds == receipt["prompt_tokens"] == len(target)


def test_in_layer_0_latents_are_copied_bitwise_and_what_is_rotated_is_exact(latent_world):
    donor, target = make_prompts(latent_world, 2)
    cold = latent_world.cold(target)
    latent_world.ask(donor)
    (output,) = latent_world.ask(target)
    (k, v), (cold_k, cold_v) = latent_world.kv_of(output)[0], latent_world.kv_of(cold)[0]
    (span,) = latent_world.audited(output)["spans"]
    assert span["target_start"] != span["donor_start"]
    start = latent_world.worker._model.rope.rotary_start
    assert torch.equal(v, cold_v)
    assert torch.equal(k[..., :start], cold_k[..., :start])
    assert float((k - cold_k).abs().max()) < 1e-4
    inside = slice(span["target_start"] + 32, span["target_start"] + span["length"] - 1)
    assert float((k[inside] - cold_k[inside]).abs().max()) > 0, "these were moved, and not computed"


def test_with_the_same_text_in_front_every_layer_is_as_cold_holes_too(latent_world, monkeypatch):
    prompt = latent_world.instruction(3) + latent_world.document(3) + latent_world.question()
    cold = latent_world.cold(prompt, tokens=LONG)
    latent_world.ask(prompt)
    monkeypatch.setattr(latent_world.half.semblend, "lookup", in_pieces(latent_world.half.semblend.lookup))
    (output,) = latent_world.ask(prompt, tokens=LONG)
    assert len(latent_world.audited(output)["spans"]) == 3
    assert worst(latent_world.kv_of(output), latent_world.kv_of(cold)) < 1e-3
    assert tokens_of(output) == tokens_of(cold)


def test_without_the_computed_rows_the_same_check_fails(latent_world, monkeypatch):
    """The negative control: poison stays where nothing is computed."""
    prompt = latent_world.instruction(3) + latent_world.document(3) + latent_world.question()
    cold = latent_world.cold(prompt)
    latent_world.ask(prompt)
    monkeypatch.setattr(latent_world.half.semblend, "lookup", in_pieces(latent_world.half.semblend.lookup))
    monkeypatch.setattr(latent_world.worker._model, "forward", lambda rows, observer=None: torch.zeros(len(rows), 128))
    (output,) = latent_world.ask(prompt, tokens=1)
    assert worst(latent_world.kv_of(output), latent_world.kv_of(cold)) > 100


@pytest.mark.parametrize("mode", ["fast", "balanced"])
@pytest.mark.parametrize("fault", NAMES)
def test_a_load_that_fails_changes_no_token(latent_world, monkeypatch, fault, mode):
    monkeypatch.setattr(latent_world.half.sessions, "_predict_loss", lambda *plan: None)
    faults = Faults(latent_world.connector, latent_world.worker_connector)
    donor, target = make_prompts(latent_world, 700 + NAMES.index(fault))
    cold = latent_world.cold(target, tokens=LONG)
    with faults.spoil(fault, lambda: latent_world.ask(donor)):
        (answer,) = latent_world.ask(target, tokens=LONG, quality=mode)
    receipt = latent_world.receipt(answer)
    assert tokens_of(answer) == tokens_of(cold)
    assert (receipt["reason"], receipt["reused_tokens"]) == (REASONS[fault], 0)


def test_noise_that_nobody_notices_does_change_tokens(latent_world, monkeypatch):
    """The control: if this passed as equal, the test above would show nothing."""
    monkeypatch.setattr(latent_world.half.sessions, "_predict_loss", lambda *plan: None)
    faults = Faults(latent_world.connector, latent_world.worker_connector)
    donor, target = make_prompts(latent_world, 710)
    cold = latent_world.cold(target, tokens=LONG)
    with faults.spoil(CONTROL, lambda: latent_world.ask(donor)):
        (answer,) = latent_world.ask(target, tokens=LONG)
    assert latent_world.receipt(answer)["reused_tokens"] > 0
    assert tokens_of(answer) != tokens_of(cold)


# -- what an observer sees of latent attention, and the check at the start ---------------------------------------------


def run_rows(world, positions, tokens=160):
    """A prompt in blocks that nobody has; these positions of it computed again, with the question's mass."""
    from semblend.materialize.contract import Rows, slots_of_blocks
    from semblend.materialize.gate.observers import AttentionMass

    model = world.worker._model
    context = slots_of_blocks(range(40, 40 + tokens // model.block_tokens), model.block_tokens, tokens)
    ids = torch.randint(1, 40_000, (tokens,), generator=torch.Generator().manual_seed(5))
    model.forward(Rows.of(ids, torch.arange(tokens), context))
    mass = AttentionMass(20)
    model.forward(Rows.of(ids[positions], positions, context), mass)
    return mass.mass


def compute_plain_mass(model, monkeypatch, work, rows=20):
    """The same from keys that are multiplied out, as in the model's papers."""
    asked = {}
    with monkeypatch.context() as patched:
        for number, layer in enumerate(model.layers):
            real = layer.impl.forward_mha

            def keep(q, *more, real=real, number=number, **named):
                asked[number] = q[-rows:].clone()
                return real(q, *more, **named)

            patched.setattr(layer.impl, "forward_mha", keep)
        work()
    total = 0
    for number, layer in enumerate(model.layers):
        vectors = model.layout.keys(number, torch.arange(40 * 16, 50 * 16))[:, 0]
        both = layer.kv_b_proj(vectors[:, :512].contiguous())[0].view(160, layer.num_heads, -1)
        keys = torch.cat((both[..., :32], vectors[:, None, 512:].expand(-1, layer.num_heads, -1)), dim=-1)
        scores = torch.einsum("nhd,thd->hnt", asked[number], keys) * layer.impl.scale
        ahead = torch.arange(160) > torch.arange(160 - rows, 160)[:, None]
        total = total + scores.masked_fill(ahead, -torch.inf).softmax(-1).mean((0, 1))
    return total


def test_what_the_question_attends_to_is_what_a_plain_model_says(latent_world, monkeypatch):
    """Once from a run, whose query we multiply, and once from rows one by one, whose query vLLM multiplies."""
    model = latent_world.worker._model
    run, scattered = torch.arange(100, 160), torch.cat((torch.arange(0, 140, 3), torch.arange(140, 160)))
    with torch.inference_mode():
        plain = compute_plain_mass(model, monkeypatch, lambda: run_rows(latent_world, run))
        for positions in (run, scattered):
            torch.testing.assert_close(run_rows(latent_world, positions), plain, rtol=1e-3, atol=1e-5)
    latent_world.forget_prefixes()


@pytest.mark.parametrize("way", ["forward_mha", "forward_mqa"])
def test_a_backend_that_attends_otherwise_is_found_out_when_the_engine_starts(latent_world, monkeypatch, way):
    from semblend.errors import SemBlendError

    model = latent_world.worker._model
    model.check()
    impl = model.layers[0].impl
    real = getattr(impl, way)

    def one_key_less(q, *more):
        cache, metadata, layer = more
        lengths = metadata.decode.seq_lens
        fewer = dataclasses.replace(metadata.decode, seq_lens=(lengths - 1).clamp_min(1))
        return real(q, cache, dataclasses.replace(metadata, decode=fewer), layer)

    def no_context(q, latents, rotated, cache, metadata, *more, **named):
        without = dataclasses.replace(metadata.prefill, chunked_context=None)
        return real(q, latents, rotated, cache, dataclasses.replace(metadata, prefill=without), *more, **named)

    monkeypatch.setattr(impl, way, no_context if way == "forward_mha" else one_key_less)
    with pytest.raises(SemBlendError, match="plain twin"):
        model.check()


def test_a_backend_that_packs_its_weights_is_not_served(latent_world, monkeypatch):
    from semblend.errors import SemBlendError

    model = latent_world.worker._model
    monkeypatch.setattr(model.layers[0], "W_UK_T", None)
    with pytest.raises(SemBlendError, match="packs"):
        model.check()
