"""The embedded engine behind the server's seam: n answers, limits, resets, and a whole request over the app."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

from small_models import Characters

from semblend import SemBlend, SemBlendConfig
from semblend.confirm.outcome import Outcome
from semblend.engine.core.assemble import assemble
from semblend.engine.core.config import EngineConfig
from semblend.engine.model.model import DecoderModel
from semblend.engine.model.spec import ModelSpec
from semblend.engine.server.local_engine import LocalEngine
from semblend.materialize.gate.thresholds import choose_table
from semblend.prompt import Prompt
from semblend.wire.errors import ApiError
from semblend.wire.request import Request
from semblend.wire.sampling import Sampling

SHAPE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}
TEXT = "a text that is a little longer than three blocks of tokens are"


def make(**config) -> LocalEngine:
    library = SemBlend(SemBlendConfig(embedder="none", metrics=False))
    settings = EngineConfig(model_name="tiny", **config)
    model = DecoderModel.random(ModelSpec.from_hf_config(SHAPE))
    engine = assemble(model, pool_tokens=1024, semblend=library, config=settings, detokenizer=Characters())
    return LocalEngine(engine, Characters())


def ask(engine: LocalEngine, name: str, text: str = TEXT, **sampling) -> Request:
    prompt = Prompt(engine.encode(text), namespace=engine.namespace("tenant", ""))
    return Request(name, prompt, Sampling(**{"max_tokens": 6, **sampling}))


def run(engine: LocalEngine, talk):
    async def main():
        engine.start()
        try:
            return await asyncio.wait_for(talk(), 600)
        finally:
            await asyncio.to_thread(engine.close)

    return asyncio.run(main())


def test_n_answers_come_with_one_receipt_and_the_prompt_is_computed_once():
    engine = make()

    async def talk():
        request = ask(engine, "r", n=3, temperature=1.0, seed=5, logprobs=2)
        return [chunk async for chunk in engine.submit(request)]

    chunks = run(engine, talk)
    answers = [[chunk for chunk in chunks if chunk.index == index] for index in range(3)]
    assert [(len(answer), answer[-1].finish_reason) for answer in answers] == [(6, "length")] * 3
    assert len({tuple(chunk.token_ids for chunk in answer) for answer in answers}) == 3
    assert [chunk.receipt.outcome for chunk in chunks if chunk.receipt] == [Outcome.COLD_FALLBACK]
    for chunk in chunks:
        assert chunk.logprobs[0].token == chr(chunk.token_ids[0])
        assert len(chunk.logprobs[0].top) == 2
    assert engine.engine.reuse.semblend.totals().tokens["exact"] == 2 * 48
    assert engine.stats()["running"] == 0


def test_a_full_queue_is_429_with_a_time_to_come_back():
    engine = make(max_waiting=1, max_running=1)

    async def talk():
        streams = [engine.submit(ask(engine, f"r{number}", max_tokens=400)) for number in range(8)]
        tasks = [asyncio.ensure_future(anext(stream)) for stream in streams]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        refused = [task.exception() for task in done if task.exception() is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return refused

    refused = run(engine, talk)
    assert refused
    assert all(isinstance(error, ApiError) for error in refused)
    assert {(error.status, error.retry_after_s) for error in refused} == {(429, 1)}


def test_leaving_the_stream_frees_everything():
    engine = make()

    async def talk():
        stream = engine.submit(ask(engine, "r", n=2, max_tokens=400))
        await anext(stream)
        await stream.aclose()
        while await asyncio.wrap_future(engine.call_soon(lambda inner: inner.has_work)):
            await asyncio.sleep(0)
        await asyncio.wrap_future(engine.call_soon(lambda inner: inner.check()))
        return engine.stats()

    assert run(engine, talk)["running"] == 0


def test_a_reset_forgets_the_prefix_cache_and_the_donors():
    engine = make()

    async def talk():
        seen = []
        for name in ("a", "b", "c"):
            chunks = [chunk async for chunk in engine.submit(ask(engine, name))]
            seen.append(chunks[0].receipt.exact_tokens)
            if name == "b":
                assert [donor.donor_id for donor in engine.donors()] == ["a"]
                assert engine.stats()["donor_host_bytes"] > 0
                assert engine.reset() == 1
                assert engine.donors() == ()
                assert engine.stats()["donor_host_bytes"] == 0
        return seen

    assert run(engine, talk) == [0, 48, 0]


def test_a_failing_engine_is_500_and_tells_nothing_of_its_inside(monkeypatch):
    httpx = pytest.importorskip("httpx", reason="the test needs httpx")
    pytest.importorskip("fastapi", reason="the server needs fastapi")
    from semblend.engine.server.routes import create_app

    engine = make()
    monkeypatch.setattr(engine.engine.model, "forward", lambda rows, pool: 1 / 0)

    async def talk():
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            return await http.post("/v1/completions", json={"prompt": TEXT, "n": 2})

    answer = run(engine, talk)
    assert answer.status_code == 500
    assert "failed on this request" in answer.json()["error"]["message"]
    assert "division" not in answer.text
    assert "ZeroDivision" not in answer.text


def test_the_server_is_told_the_models_limits():
    engine = make()
    assert (engine.model, engine.max_context, engine.vocab) == ("tiny", 512, 128)
    assert engine.longest_token_chars == Characters.longest_token_chars
    assert engine.encode_chat([{"role": "user", "content": "hi"}]) == [104, 105]
    assert engine.namespace("t", "s") != engine.namespace("t", "")


def test_over_http_a_moved_document_is_reused_and_the_books_agree():
    httpx = pytest.importorskip("httpx", reason="the test needs httpx")
    pytest.importorskip("fastapi", reason="the server needs fastapi")
    from semblend.engine.server.routes import create_app

    engine = make()
    document = " ".join(f"{number * number} boats" for number in range(30))

    async def talk():
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            asked = {"max_tokens": 4, "temperature": 0, "semblend": {"quality": "fast"}}
            bodies = [
                (await http.post("/v1/completions", json={"prompt": f"{question} {document}", **asked})).json()
                for question in ("how many?", "and where to, please?")
            ]
            too_high = await http.post("/v1/completions", json={"prompt": [1, 5000]})
            live = (await http.get("/api/live")).json()
        await asyncio.wrap_future(engine.call_soon(lambda inner: inner.check()))
        return bodies, too_high, live

    (first, second), too_high, live = run(engine, talk)
    assert first["semblend"]["outcome"] == "cold_fallback"
    assert second["semblend"]["outcome"] == "backend_materialized_reuse"
    assert second["semblend"]["donors"] == [first["id"]]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > len(document) // 2
    assert len(second["choices"][0]["text"]) == 4
    assert too_high.status_code == 400
    kinds = live["totals"]["tokens"]
    assert sum(kinds.values()) == first["usage"]["prompt_tokens"] + second["usage"]["prompt_tokens"]


HOSTILE = [
    {"temperature": 1e-38},
    {"temperature": 5e-324},
    {"temperature": 1e-38, "top_k": 3, "logprobs": 2},
    {"temperature": 1e-7, "top_p": 1e-38, "min_p": 1e-40},
    {"repetition_penalty": 1e-38},
    {"repetition_penalty": 1e-38, "temperature": 0},
    {"repetition_penalty": 0.01, "temperature": 1e-9},
    {"top_p": 5e-324},
    {"min_p": 5e-324},
    {"frequency_penalty": -2, "presence_penalty": 5e-324, "temperature": 1e-30},
    {"logit_bias": {"3": 100, "4": 1e-45}, "repetition_penalty": 0.01, "temperature": 1e-30},
]


@pytest.mark.parametrize("hostile", HOSTILE, ids=str)
def test_a_hostile_number_beside_a_victim_leaves_the_victims_answer_alone(hostile):
    httpx = pytest.importorskip("httpx", reason="the test needs httpx")
    pytest.importorskip("fastapi", reason="the server needs fastapi")
    from semblend.engine.server.routes import create_app

    engine = make()
    victim = {"prompt": TEXT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "semblend": {"reuse": False}}

    async def talk():
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            expected = (await http.post("/v1/completions", json=victim)).json()
            attack = {"prompt": "hi", "max_tokens": 20, "ignore_eos": True, **hostile}
            posts = [http.post("/v1/completions", json=body) for body in (victim, attack, victim, attack)]
            answers = await asyncio.gather(*posts)
        await asyncio.wrap_future(engine.call_soon(lambda inner: inner.check()))
        return expected, answers

    expected, (first, attacked, second, _) = run(engine, talk)
    for answer in (first, second):
        assert answer.status_code == 200
        assert answer.json()["choices"] == expected["choices"]
    if hostile.get("repetition_penalty") == 1e-38:
        assert attacked.status_code == 400
        assert "0.01" in attacked.json()["error"]["message"]
    else:
        assert attacked.status_code == 200, attacked.text
        assert attacked.json()["usage"]["completion_tokens"] == 20


def test_closing_removes_donor_kv_from_disk_and_keeps_the_donors_in_their_store(tmp_path):
    store, disk = tmp_path / "donors.semblend", tmp_path / "kv"
    library = SemBlend(SemBlendConfig(embedder="none", metrics=False, store=str(store)))
    model = DecoderModel.random(ModelSpec.from_hf_config(SHAPE))
    inner = assemble(
        model,
        pool_tokens=1024,
        semblend=library,
        config=EngineConfig(model_name="tiny", donor_min_new_tokens=1),
        donor_host_bytes=1 << 24,
        donor_disk_bytes=1 << 24,
        donor_dir=disk,
        detokenizer=Characters(),
    )
    engine = LocalEngine(inner, Characters())
    written: list[int] = []

    async def talk():
        _ = [chunk async for chunk in engine.submit(ask(engine, "one"))]
        await asyncio.wrap_future(engine.call_soon(lambda inner: inner.reuse.donor_kv.flush()))
        written.append(len(list(disk.rglob("*.kv"))))

    run(engine, talk)
    assert written == [1]
    assert list(disk.iterdir()) == []
    assert not (tmp_path / "donors.semblend-wal").exists()  # closed, not just left
    with SemBlend(SemBlendConfig(embedder="none", metrics=False, store=str(store))) as again:
        assert [donor.donor_id for donor in again.donors()] == ["one"]
    engine.close()  # twice is once


def test_the_figures_for_an_operator_say_which_thresholds_the_gate_goes_by():
    engine = make()
    assert "quality_gate" not in engine.stats()
    engine.gate = choose_table("tiny")
    assert engine.stats()["quality_gate"].startswith("default thresholds: no table is known of 'tiny'")
    engine.close()


def test_the_engine_tells_how_requests_with_and_without_reuse_compare():
    engine = make()
    assert list(engine.compare_reuse()) == []
    for number in range(6):
        for control, ms in ((False, 40.0 + number), (True, 80.0 + number)):
            engine.engine.reuse.sessions.trial.note("a kind", ms, 80.0, control=control)
    (found,) = engine.compare_reuse()
    assert (found.kind, found.with_count, found.without_count) == ("a kind", 6, 6)
    assert found.low < found.ratio < found.high < 1
