"""Engines that speculate: what a draft guesses, and what is rejected of it, changes no token and gets into no donor."""

from __future__ import annotations

import contextlib

import pytest
import torch
from draft_folders import limit_words, write_draft
from faults import CONTROL, REASONS, Faults
from late_outputs import schedule_ahead
from small_model import write_small_model
from vllm_lives import live_all
from vllm_world import MODEL, World, make_world, serve, worst

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
METHODS = ("ngram", "draft_model", "mtp")
AHEAD = "eagle3, scheduled ahead"
LONG = 24


def tokens_of(output):
    return list(output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory, small_model):
    """The small model with few words, so that guesses are right now and then, and its settings."""
    folder = tmp_path_factory.mktemp("speculating") / "target"
    write_small_model(folder, 49152, MODEL)
    limit_words(folder, 8)
    return folder, small_model[1]


@pytest.fixture(scope="module")
def plain_engine(target_folder):
    folder, connector = target_folder
    world = make_world(str(folder), **connector)
    yield world
    world.core.shutdown()


@pytest.fixture(scope="module")
def make_engine(target_folder):
    """Makes the engine of a method, once."""
    folder, connector = target_folder
    made = {}

    def make(name: str) -> World:
        if name not in made:
            method = name.partition(",")[0]
            model, speculative = write_draft(method, folder.with_name(name), folder)
            with schedule_ahead() if name == AHEAD else contextlib.nullcontext():
                made[name] = make_world(model, {"speculative_config": speculative}, **connector)
        return made[name]

    yield make
    for world in made.values():
        world.core.shutdown()


@pytest.fixture(scope="module")
def engines_of_vllm():
    """Without us. One that goes takes what all engines of a process share with it: they stay until the end."""
    return []


@pytest.fixture
def plain(plain_engine, monkeypatch):
    monkeypatch.setattr(plain_engine.half.sessions, "_predict_loss", lambda *plan: None)
    yield from serve(plain_engine)


@pytest.fixture(params=[*METHODS, AHEAD])
def thrifty(request, make_engine):
    """One engine for each method."""
    yield from serve(make_engine(request.param))


@pytest.fixture
def world(thrifty, monkeypatch):
    """It reuses whatever it can."""
    monkeypatch.setattr(thrifty.half.sessions, "_predict_loss", lambda *plan: None)
    return thrifty


def count_drafts(llm):
    """Tokens that drafts have guessed since the engine was made, and those of them that were right."""
    found = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics() if "spec_decode" in metric.name}
    return tuple(found[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))


def make_prompts(world, seed, lead=5):
    """A donor, and a prompt that shares its document."""
    document = world.document(seed)
    return world.instruction(1) + document + world.question(), world.instruction(lead) + document + world.question()


def turn_to(world):
    world.take_turn()
    return world


def keep(world, prompt, tokens=4):
    """Ask, and let the engine have the step in which it copies the donor: guesses end an answer in two."""
    (output,) = world.ask(prompt, tokens=tokens)
    world.settle()
    return output


def test_a_miss_and_an_exact_hit_answer_as_vllm_alone_does(thrifty, engines_of_vllm):
    from vllm import LLM, SamplingParams
    from vllm.distributed.kv_transfer import kv_transfer_state

    world = thrifty
    prompts = [world.instruction(number) + world.document(300 + number) + world.question() for number in range(3)]
    before = count_drafts(world.llm)
    ours = [*world.ask(*prompts, tokens=LONG), *world.ask(*prompts, tokens=LONG)]
    guessed, right = (now - then for now, then in zip(count_drafts(world.llm), before, strict=True))
    config = world.scheduler.vllm_config
    folder, speculative = config.model_config.model, config.speculative_config
    told = {"method": speculative.method, "num_speculative_tokens": speculative.num_speculative_tokens}
    if told["method"] == "ngram":
        told |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    elif told["method"] != "mtp":
        told |= {"model": speculative.model}
    kept, kv_transfer_state._KV_CONNECTOR_AGENT = kv_transfer_state._KV_CONNECTOR_AGENT, None
    try:
        stock = LLM(
            model=folder, speculative_config=told, dtype="float32", enforce_eager=True, max_model_len=1024,
            max_num_batched_tokens=512, kv_cache_memory_bytes=160 << 20, max_num_seqs=4, block_size=32,
            enable_prefix_caching=True, disable_log_stats=False,
        )  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=LONG, ignore_eos=True)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        theirs = [output for _ in range(2) for output in stock.generate(given, params, use_tqdm=False)]
        drafts = count_drafts(stock)
        engines_of_vllm.append(stock)
    finally:
        kv_transfer_state._KV_CONNECTOR_AGENT = kept
    assert [tokens_of(output) for output in ours] == [tokens_of(output) for output in theirs]
    assert [output.num_cached_tokens for output in ours] == [output.num_cached_tokens for output in theirs]
    assert [world.receipt(output)["reused_tokens"] for output in ours] == [0] * 6
    assert min(world.receipt(output)["exact_tokens"] for output in ours[3:]) > 0
    assert guessed > right or speculative.method == "draft_model", "the served model itself is always right"
    if speculative.method in ("ngram", "draft_model"):
        assert right > 0
    if not world.core.batch_queue:
        assert (guessed, right) == drafts, "drafts guess as they do without us"


@pytest.mark.parametrize(
    ("thrifty", "mode"),
    [*((name, "fast") for name in (*METHODS, AHEAD)), ("draft_model", "balanced")],
    indirect=["thrifty"],
)
def test_what_is_reused_is_answered_as_without_speculation(world, plain, mode):
    """Greedy answers on moved KV are those of that KV, whoever guessed: the draft has none of it."""
    answers = []
    for engine in (plain, world):
        turn_to(engine)
        donor, target = make_prompts(engine, 310)
        first = keep(engine, donor, LONG)
        (moved,) = engine.ask(target, tokens=LONG, quality=mode)
        receipt = engine.receipt(moved)
        assert receipt["reused_tokens"] > 100
        assert receipt["prefill_tokens"] + receipt["recomputed_tokens"] + receipt["reused_tokens"] == len(target)
        answers.append((tokens_of(first), tokens_of(moved), receipt["reused_tokens"], receipt["recomputed_tokens"]))
    assert answers[0] == answers[1]
    turn_to(world)
    cold = world.cold(target, tokens=LONG)
    (later,) = world.ask(target, tokens=LONG, opt_out=True)
    assert (tokens_of(later), worst(world.kv_of(later), world.kv_of(cold)) < 1e-3) == (tokens_of(cold), True)


@pytest.mark.parametrize("thrifty", ["ngram", "draft_model", AHEAD], indirect=True)
def test_a_donor_with_its_answer_holds_what_a_prefill_of_it_computes(world):
    prompts = [world.instruction(number) + world.document(320 + number, 12) + world.question() for number in (1, 2)]
    outputs = [keep(world, prompt, 72) for prompt in prompts]
    held = {donor.donor_id: donor for donor in world.half.semblend.donors()}
    for prompt, output in zip(prompts, outputs, strict=True):
        words = prompt + tokens_of(output)
        donor_id = f"{world.receipt(output)['request_id']}+answer"
        assert held[donor_id].token_count == len(words) - 1, "the last token was said and never computed"
        donor = world.worker.donor_kv.acquire(donor_id, world.half.donors.find_generation(donor_id))
        k, v = donor.k.clone(), donor.v.clone()
        world.worker.donor_kv.release(donor)
        cold = world.kv_of(world.cold(words[:-1]))
        assert len(k) == len(cold) == 3, "the draft's layers are none of a donor's"
        for layer, (cold_k, cold_v) in enumerate(cold):
            for ours, theirs in ((k[layer], cold_k), (v[layer], cold_v)):
                assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-4


@pytest.mark.parametrize("thrifty", ["draft_model", "mtp"], indirect=True)
def test_a_conversation_goes_on_from_what_was_answered_on_moved_kv(world):
    """Blocks that speculation has filled, several in a step, are found by the next turn and by nobody else."""
    donor, target = make_prompts(world, 330)
    keep(world, donor)
    (turn,) = world.ask(target, tokens=70)
    words = target + tokens_of(turn)
    later = words + world.question("And then?")
    (second,) = world.ask(later, tokens=LONG)
    drops = world.scheduler.use_eagle_block_drop
    assert second.num_cached_tokens == (len(words) - 1) // 32 * 32 - 32 * drops, (
        "vLLM computes a draft's last block anew"
    )
    assert "earlier prompt" in world.receipt(second)["detail"]
    (exact,) = world.ask(later, tokens=LONG, opt_out=True)
    assert exact.num_cached_tokens <= world.audited(turn)["spans"][0]["target_start"]
    assert tokens_of(exact) == tokens_of(world.cold(later, tokens=LONG))
    assert not [event for event in world.events if event.kind == "error"]


@pytest.mark.parametrize("thrifty", ["draft_model", AHEAD], indirect=True)
@pytest.mark.parametrize("fault", ["noise", "exception"])
def test_a_load_that_fails_changes_no_token(world, watch_verdicts, fault):
    faults = Faults(world.connector, world.worker_connector)
    donor, target = make_prompts(world, 340 + len(fault))
    cold = world.cold(target, tokens=LONG)
    watch = watch_verdicts(world)
    with faults.spoil(fault, lambda: keep(world, donor)):
        (answer,) = world.ask(target, tokens=LONG)
    assert tokens_of(answer) == tokens_of(cold)
    assert not watch.too_early
    assert (world.receipt(answer)["reason"], world.receipt(answer)["reused_tokens"]) == (REASONS[fault], 0)
    (later,) = world.ask(target, tokens=LONG, opt_out=True)
    assert worst(world.kv_of(later), world.kv_of(cold)) < 1e-3
    assert tokens_of(later) == tokens_of(cold)


@pytest.mark.parametrize("thrifty", ["draft_model"], indirect=True)
def test_noise_that_nobody_notices_does_change_tokens(world):
    """The control: the words are few, and yet wrong KV shows."""
    faults = Faults(world.connector, world.worker_connector)
    donor, target = make_prompts(world, 350)
    cold = world.cold(target, tokens=LONG)
    with faults.spoil(CONTROL, lambda: keep(world, donor)):
        (answer,) = world.ask(target, tokens=LONG)
    assert world.receipt(answer)["reused_tokens"] > 0
    assert tokens_of(answer) != tokens_of(cold)


@pytest.mark.parametrize("thrifty", ["draft_model", AHEAD, "mtp"], indirect=True)
def test_a_draft_that_reads_noise_changes_no_token(world, plain):
    """Blocks of a load hold whatever KV of a draft was there before; the most that it can cost is guesses."""
    donor, target = make_prompts(turn_to(plain), 360)
    keep(plain, donor)
    (right,) = plain.ask(target, tokens=LONG)
    turn_to(world)
    own = {cache.data_ptr() for cache in world.worker._model._caches}
    known = world.scheduler.vllm_config.compilation_config.static_forward_context
    drafts = [layer.kv_cache for layer in known.values() if layer.kv_cache.data_ptr() not in own]
    for cache in drafts:
        cache.copy_(torch.randn_like(cache) * 100)
    keep(world, donor)
    load = world.worker.load

    def load_among_noise(orders):
        load(orders)
        for cache in drafts if orders.loads else ():
            cache.copy_(torch.randn_like(cache) * 100)

    world.worker.load = load_among_noise
    (answer,) = world.ask(target, tokens=LONG)
    assert world.receipt(answer)["reused_tokens"] > 100
    assert tokens_of(answer) == tokens_of(right)


@pytest.mark.parametrize("thrifty", ["draft_model", AHEAD], indirect=True)
def test_a_preempted_answer_goes_on_exactly(world):
    from vllm import SamplingParams

    donor, target = make_prompts(world, 370)
    cold = world.cold(target, tokens=LONG)
    keep(world, donor)
    engine = world.llm.llm_engine
    engine.add_request(
        "preempted", {"prompt_token_ids": target}, SamplingParams(temperature=0, max_tokens=LONG, ignore_eos=True)
    )
    for _ in range(6):
        engine.step()
    with contextlib.suppress(RuntimeError):  # blocks of a step under way are freed later; it is preempted all the same
        world.scheduler.reset_prefix_cache(reset_running_requests=True)
    outputs = engine.step()
    (record,) = world.half._records.values()
    assert record.restarted
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert len(tokens_of(outputs[-1])) == LONG
    (cached,) = world.ask(target, tokens=LONG, opt_out=True)
    if type(world.scheduler).__name__ != "AsyncScheduler":  # there the cache is empty afterwards, without a draft too
        assert cached.num_cached_tokens > 150
    assert worst(world.kv_of(cached), world.kv_of(cold)) < 1e-3
    assert tokens_of(cached) == tokens_of(cold)


@pytest.mark.parametrize("thrifty", ["draft_model"], indirect=True)
def test_whatever_happens_to_requests_the_contract_holds(world, monkeypatch, is_long):
    monkeypatch.setattr("semblend.plan.times.ROW_PRICE", 0.0)
    lives = 12 if is_long else 4
    assert live_all(world, lives) > 8 * lives
