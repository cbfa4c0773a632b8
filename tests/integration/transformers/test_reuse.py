"""Reuse around generate(): exact reuse says what a cold answer says, moved KV is checked, failures cost time only."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import answer_cold, draw, ids, make_model
from transformers import GenerationConfig

from semblend import Outcome
from semblend.confirm.events import EventKind
from semblend.confirm.sinks import MemorySink
from semblend.errors import InputError
from semblend.integration.transformers.reuse import BLOCK_TOKENS, PrefixIndex, TransformersReuse, count_common
from semblend.materialize.gate.thresholds import ChosenTable, TableSource, Thresholds
from semblend.prompt import Namespace, Prompt

DOCUMENT = draw(400, seed=1)
FIRST, SECOND = draw(7, seed=2), draw(19, seed=3)
QUESTION, OTHER = draw(5, seed=4), draw(6, seed=5)


@pytest.fixture(scope="module", params=("llama", "qwen2"))
def model(request):
    return make_model(request.param)


@pytest.fixture
def heard():
    return MemorySink()


@pytest.fixture
def reuse(model, heard):
    with TransformersReuse(model, quality="fast", sinks=[heard]) as made:
        yield made


def ask(reuse, prompt, **more):
    return reuse.generate(prompt, max_new_tokens=12, do_sample=False, **more)


def count(receipt):
    return {kind: tokens for kind, tokens in receipt.tokens.items() if tokens}


@pytest.mark.parametrize("quality", ["exact", "fast", "balanced"])
def test_an_equal_prefix_gives_the_tokens_of_a_cold_answer(model, reuse, quality):
    ask(reuse, ids(FIRST, DOCUMENT, QUESTION), quality=quality)
    again = ids(FIRST, DOCUMENT, OTHER)
    found = ask(reuse, again, quality=quality)
    assert count(found.receipt) == {"exact": len(FIRST) + 400, "prefill": len(OTHER)}
    assert found.receipt.outcome is Outcome.EXACT_PREFIX_ROUTE
    assert torch.equal(found.sequences, answer_cold(model, again))


def test_the_same_prompt_again_computes_its_last_token_only(model, reuse):
    prompt = ids(FIRST, DOCUMENT)
    ask(reuse, prompt)
    found = ask(reuse, prompt)
    assert count(found.receipt) == {"exact": 406, "prefill": 1}
    assert torch.equal(found.sequences, answer_cold(model, prompt))


def test_the_next_turn_of_a_conversation_finds_the_answer_before_it(model, reuse):
    first = ask(reuse, ids(FIRST, DOCUMENT)).sequences
    turn = torch.cat([first, ids(QUESTION)], dim=1)
    found = ask(reuse, turn)
    assert found.receipt.tokens["exact"] == first.shape[1] - 1, "KV of the last answered token was never computed"
    assert torch.equal(found.sequences, answer_cold(model, turn))


@pytest.fixture
def lenient(model, monkeypatch):
    """With a gate that accepts the first repair: that of real models refuses random weights."""
    table = ChosenTable(Thresholds(1e9, 1e9, 1e9), TableSource.FILE, "lenient")
    monkeypatch.setattr("semblend.integration.transformers.reuse.choose_table", lambda *_names: table)
    with TransformersReuse(model, quality="fast") as made:
        yield made


@pytest.mark.parametrize("quality", ["fast", "balanced"])
def test_a_document_under_another_instruction_is_moved(lenient, quality):
    reuse = lenient
    ask(reuse, ids(FIRST, DOCUMENT, QUESTION))
    receipt = ask(reuse, ids(SECOND, DOCUMENT, OTHER), quality=quality).receipt
    assert receipt.outcome is Outcome.BACKEND_MATERIALIZED_REUSE
    assert receipt.tokens["reused"] > 280
    assert receipt.tokens["reused"] + receipt.tokens["recomputed"] == 400
    assert receipt.canary < 1e-3
    assert sum(receipt.tokens.values()) == receipt.prompt_tokens
    assert reuse.semblend.totals().tokens["reused"] == receipt.tokens["reused"]


def test_exact_quality_takes_nothing_but_prefixes(model, reuse):
    ask(reuse, ids(FIRST, DOCUMENT, QUESTION), quality="exact")
    prompt = ids(SECOND, DOCUMENT, OTHER)
    found = ask(reuse, prompt, quality="exact")
    assert count(found.receipt) == {"prefill": prompt.shape[1]}
    assert torch.equal(found.sequences, answer_cold(model, prompt))


def test_moved_kv_becomes_no_donor_and_no_exact_prefix(model, reuse):
    ask(reuse, ids(FIRST, DOCUMENT))
    prompt = ids(SECOND, DOCUMENT, OTHER)
    moved = ask(reuse, prompt).receipt
    again = ask(reuse, prompt, quality="exact")
    assert again.receipt.tokens["exact"] <= prompt.shape[1] - moved.tokens["reused"] - len(OTHER)
    assert torch.equal(again.sequences, answer_cold(model, prompt))


def test_a_donor_with_the_same_left_context_gives_the_tokens_of_a_cold_answer(model, reuse):
    """Nothing stands before it that differs, so moved KV is what a prefill computes there."""
    ask(reuse, ids(DOCUMENT, QUESTION))
    prompt = ids(DOCUMENT, OTHER)
    assert torch.equal(ask(reuse, prompt).sequences, answer_cold(model, prompt))


def test_a_tenant_never_sees_the_donors_of_another(reuse):
    ask(reuse, ids(FIRST, DOCUMENT, QUESTION), tenant="a", salt="secret of a")
    for wall in ({"tenant": "b"}, {}, {"tenant": "a"}, {"tenant": "a", "salt": "another"}):
        for prompt in (ids(FIRST, DOCUMENT, QUESTION), ids(SECOND, DOCUMENT, OTHER)):
            cache = reuse.prepare(prompt, **wall)
            assert cache.prepared_tokens == cache.get_seq_length() == 0
            reuse.drop(cache)
    assert reuse.prepare(ids(FIRST, DOCUMENT, QUESTION), tenant="a", salt="secret of a").prepared_tokens


def test_a_script_may_call_generate_itself(model, reuse):
    prompt = ids(FIRST, DOCUMENT)
    cache = reuse.prepare(prompt)
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=cache,
        max_new_tokens=4,
        do_sample=False,
        return_dict_in_generate=True,
    )
    receipt = reuse.keep(cache, output.sequences)
    assert count(receipt) == {"prefill": 407}
    assert reuse.keep(cache, output.sequences) is None, "a cache is counted once"
    assert reuse.prepare(ids(FIRST, DOCUMENT, OTHER)).prepared_tokens == 407


@pytest.mark.parametrize("liar", ["another prompt", "another answer", "used twice", "before generate"])
def test_a_cache_that_is_not_what_it_is_said_to_be_becomes_no_donor(model, reuse, heard, liar):
    prompt = ids(FIRST, DOCUMENT)
    cache = reuse.prepare(prompt)
    said = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, max_new_tokens=40, do_sample=False
    )
    if liar == "another prompt":
        said = ids(SECOND, DOCUMENT)
    elif liar == "another answer":
        said = torch.cat([prompt, ids(draw(40, seed=9))], dim=1)
    elif liar == "used twice":
        model(ids(OTHER), past_key_values=cache)
    else:
        reuse.drop(cache)
        cache = reuse.prepare(prompt)
    receipt = reuse.keep(cache, said)
    assert receipt is not None
    assert not reuse.semblend.donors()
    assert [event for event in heard.events if event.kind is EventKind.ERROR]


def test_new_weights_drop_every_donor(reuse, model):
    ask(reuse, ids(FIRST, DOCUMENT))
    weight = model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight += 1.0
    try:
        assert reuse.prepare(ids(FIRST, DOCUMENT, OTHER)).prepared_tokens == 0
        assert not reuse.semblend.donors()
    finally:
        with torch.no_grad():
            weight -= 1.0


def test_a_hook_or_an_adapter_that_came_later_stops_reuse(reuse, model):
    ask(reuse, ids(FIRST, DOCUMENT))
    hook = model.model.layers[0].register_forward_hook(lambda module, given, output: output)
    found = ask(reuse, ids(FIRST, DOCUMENT, OTHER))
    hook.remove()
    assert count(found.receipt) == {"prefill": 413}
    assert "other modules or hooks" in found.receipt.detail
    assert ask(reuse, ids(FIRST, DOCUMENT, OTHER)).receipt.tokens["exact"] == 407, "and goes on when it is gone"


def test_a_model_in_training_mode_is_left_alone(reuse, model):
    model.train()
    try:
        cache = reuse.prepare(ids(FIRST, DOCUMENT))
    finally:
        model.eval()
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_beams": 2},
        {"do_sample": True, "num_return_sequences": 2},
        {"use_cache": False},
        {"generation_config": GenerationConfig(num_beams=2, max_new_tokens=4, pad_token_id=0)},
    ],
    ids=lambda given: next(iter(given)),
)
def test_a_call_that_is_not_served_runs_as_without_us(reuse, arguments):
    options = {"max_new_tokens": 4, "do_sample": False} if "generation_config" not in arguments else {}
    found = reuse.generate(ids(FIRST, DOCUMENT), **(options | arguments))
    assert found.sequences.shape[1] == 411
    assert str(found.receipt.reason) == "unsupported_mode"
    assert not reuse.semblend.donors()


def test_a_batch_runs_as_without_us_and_an_event_says_so(model, reuse, heard):
    batch = torch.cat([ids(FIRST, QUESTION), ids(FIRST, QUESTION)])
    found = ask(reuse, batch)
    assert torch.equal(found.sequences, answer_cold(model, batch))
    assert found.receipt is None
    assert "a batch" in heard.events[-1].fields["message"]
    with pytest.raises(InputError, match="one prompt at a time"):
        reuse.prepare(batch)


def test_a_masked_prompt_runs_as_without_us(model, reuse):
    prompt = ids([0, 0], FIRST, QUESTION)
    mask = torch.ones_like(prompt)
    mask[:, :2] = 0
    found = ask(reuse, prompt, attention_mask=mask)
    assert torch.equal(found.sequences, model.generate(prompt, attention_mask=mask, max_new_tokens=12, do_sample=False))
    assert "masked" in found.receipt.detail


@pytest.mark.parametrize("broken", ["lookup", "splice", "forward", "prefix", "fill"])
def test_a_failure_of_ours_costs_time_and_never_the_answer(model, reuse, heard, monkeypatch, broken):
    def fail(*_, **__):
        raise RuntimeError("broken on purpose")

    ask(reuse, ids(FIRST, DOCUMENT))
    places = {
        "lookup": ("semblend.pipeline.Pipeline.run",),
        "splice": ("semblend.materialize.blend.blender.splice",),
        "forward": ("semblend.materialize.attention_runs.attend_runs",),
        "prefix": ("semblend.integration.transformers.reuse.splice",),
        "fill": ("semblend.integration.transformers.reuse._as_states",),
    }
    for place in places[broken]:
        monkeypatch.setattr(place, fail)
    prompt = ids(FIRST, DOCUMENT, OTHER) if broken == "prefix" else ids(SECOND, DOCUMENT, OTHER)
    found = ask(reuse, prompt)
    assert torch.equal(found.sequences, answer_cold(model, prompt))
    assert found.receipt.tokens["reused"] == 0
    assert str(found.receipt.reason) == "error"
    assert any(event.kind is EventKind.ERROR for event in heard.events)


def test_damaged_donor_kv_is_noticed_and_the_donor_goes(model, reuse):
    ask(reuse, ids(FIRST, DOCUMENT))
    donor = reuse.semblend.donors()[0].donor_id
    kept = reuse._sessions.donors
    held = kept.kv.acquire(donor, kept.generations[donor])
    held.k[0, 50:90] += 1.0
    kept.kv.release(held)
    prompt = ids(SECOND, DOCUMENT, OTHER)
    found = ask(reuse, prompt)
    assert torch.equal(found.sequences, answer_cold(model, prompt))
    assert str(found.receipt.reason) == "validation_failed"
    assert donor not in [one.donor_id for one in reuse.semblend.donors()]


def test_donors_stay_within_their_memory(model):
    with TransformersReuse(model, quality="fast", donor_bytes=400_000) as reuse:
        for seed in range(6):
            ask(reuse, ids(draw(200, seed=100 + seed)))
        assert reuse._sessions.donors.kv.used_bytes["host"] <= 400_000
        assert len(reuse.semblend.donors()) == len(reuse._prefixes) < 6


def test_a_cache_that_nobody_keeps_lets_go_of_its_donors(reuse):
    ask(reuse, ids(FIRST, DOCUMENT))
    assert reuse.prepare(ids(SECOND, DOCUMENT, OTHER)).prepared_tokens
    gc.collect()
    reuse.prepare(ids(draw(40, seed=8)))
    assert not reuse.semblend._claims


token_lists = st.lists(st.integers(0, 2), min_size=1, max_size=80)


@settings(max_examples=150, deadline=None)
@given(st.lists(token_lists, min_size=1, max_size=5), token_lists, st.data())
def test_the_prefix_index_finds_what_a_plain_search_finds(donors, asked, data):
    gone = data.draw(st.integers(0, len(donors) - 1))
    index = PrefixIndex()
    for number, tokens in enumerate(donors):
        index.add(str(number), Prompt(tokens))
    index.remove(str(gone))
    prompt = Prompt(asked)
    plain = [count_common(Prompt(d).token_ids, prompt.token_ids) for n, d in enumerate(donors) if n != gone]
    longest = max(plain, default=0)
    found = index.find(prompt)
    assert (found[1] if found else 0) == (longest if longest >= BLOCK_TOKENS else 0)
    assert index.find(Prompt(asked, namespace=Namespace(tenant="other"))) is None


@pytest.fixture(scope="module")
def smollm():
    """The real model, and its tokenizer."""
    from transformers import AutoModelForCausalLM

    from semblend.engine.model.tokenizer import ModelTokenizer
    from semblend.errors import MissingDependencyError
    from semblend.models import resolve

    pytest.importorskip("gguf")
    pytest.importorskip("accelerate", reason="transformers wants accelerate to read GGUF")
    try:
        path = resolve("smollm2-135m")
    except MissingDependencyError as error:
        pytest.skip(str(error))
    made = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    return made, ModelTokenizer.load(path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # transformers' own, while it reads GGUF
@pytest.mark.parametrize("quality", ["exact", "fast", "balanced"])
def test_smollm2_answers_from_an_equal_prefix_as_it_does_cold(smollm, quality):
    real, tokenizer = smollm
    text = " ".join(f"Shelf {n} holds {n * 37 % 90} boxes, counted on day {n * 11 % 28}." for n in range(40))

    def encode(instruction, question):
        return torch.tensor([tokenizer.encode(f"{instruction}\n\n{text}\n\n{question}")])

    with TransformersReuse(real, quality=quality) as reuse:
        ask(reuse, encode("Read this.", "Which shelf holds most?"))
        prompt = encode("Read this.", "How many boxes are on shelf 7?")
        found = ask(reuse, prompt)
        assert found.receipt.tokens["exact"] > 500
        assert torch.equal(found.sequences, answer_cold(real, prompt))
        moved = ask(reuse, encode("You are a careful archivist. Answer in one sentence.", "Which day?")).receipt
        if quality == "exact":
            assert moved.tokens["reused"] == 0
        elif quality == "fast":
            assert moved.tokens["reused"] > 500
        assert sum(moved.tokens.values()) == moved.prompt_tokens
