"""A thousand mixed requests leak nothing, and five hundred clients that come and go at random break nothing.

The soak: prompts of mixed length from a few documents, four tenants, exact, fast and balanced, greedy and drawn, stop
strings, two answers to a prompt, cancellations, over a KV pool and donor budgets so small that sequences are preempted,
blocks evicted and donors moved to disk and lost. Every few steps the books of the engine are checked; every so often a
greedy request without reuse is asked again and must say what it said on an empty engine. The storm: the server on a
real socket, clients that leave before, in and after their question, in line and in the answer; afterwards every place
is free, every block accounted for, and a known question has its known answer.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from endurance.storm import answer_of, question, quiet, served, storm, text_of, until

TENANTS = ("", "acme", "bolt", "crow")
MOST_IDLE = 50  # an engine with work computes something in every step; a few empty ones are cancellations
QUALITIES = ("exact", "fast", "fast", "balanced", "balanced")
WORDS = (
    "harbour", "ferry", "ledger", "copper", "winter", "signal", "garden", "engine", "letter", "valley", "river",
    "museum", "captain", "orchard", "bridge", "window", "market", "station", "teacher", "mountain", "paper", "island",
    "kitchen", "village", "doctor", "morning", "shadow", "railway", "pocket", "silver",
)  # fmt: skip


@dataclass(slots=True)
class Soak:
    """What a soak saw; ``wrong`` is empty where all is well."""

    finished: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    evicted: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    checks: int = 0
    compared: int = 0
    preemptions: int = 0
    steps: int = 0
    wall_s: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def count(self, events: Iterable[Any]) -> None:
        """Evictions by reason, and failures of ours by place: each must have been told as an event."""
        for event in events:
            if event.kind == "error":
                self.errors[event.fields["where"]] += 1
            elif event.kind == "donor_evicted":
                self.evicted[event.fields["reason"]] += 1


def sentences(chance: random.Random, count: int) -> str:
    """Plain English without sense: nothing has to be downloaded to run this."""
    lines = []
    for _ in range(count):
        a, b, c = chance.sample(WORDS, 3)
        lines.append(f"The {a} near the {b} was sold to a {c} for {chance.randrange(1000)} coins.")
    return " ".join(lines)


class Asker:
    """Makes requests: questions over a few documents that come again in other places."""

    def __init__(self, encode: Callable[[str], Sequence[int]], seed: int, longest: int) -> None:
        self._encode = encode
        self._longest = longest
        self._chance = random.Random(seed)
        self._documents = [sentences(self._chance, self._chance.randint(2, 14)) for _ in range(16)]

    def prompt(self, chance: random.Random | None = None) -> list[int]:
        """Token ids, cut to the longest."""
        chance = chance or self._chance
        head = f"Question {chance.randrange(10_000)}: what was sold near the {chance.choice(WORDS)}?\n"
        text = head + "\n".join(chance.sample(self._documents, chance.randint(1, 3)))
        return list(self._encode(text))[: self._longest]

    def request(self, number: int) -> Any:
        """One request, or two that are copies of each other."""
        from semblend.prompt import Namespace, Prompt
        from semblend.wire.request import Request
        from semblend.wire.sampling import Sampling

        chance = self._chance
        drawn = chance.random() < 0.4
        sampling = Sampling(
            max_tokens=chance.choice([1, 2, 4, 8, 64]),
            temperature=0.8 if drawn else 0.0,
            top_p=chance.choice([1.0, 0.9]),
            frequency_penalty=chance.choice([0.0, 0.5]),
            seed=number,
            logprobs=chance.choice([None, None, 2]),
        )
        request = Request(
            f"soak-{number}",
            Prompt(self.prompt(), namespace=Namespace(tenant=chance.choice(TENANTS))),
            replace(sampling, stop=chance.choice([(), (), ("coins", " the", "e")])),
            quality=chance.choice(QUALITIES),
            opt_out=chance.random() < 0.05,
        )
        answers = 2 if chance.random() < 0.1 else 1
        return replace(request, sampling=replace(request.sampling, n=answers)).split_answers()


def soak(engine: Any, asker: Asker, requests: int, seed: int, tell: Callable[[str], Any] = str) -> Soak:
    """Runs the mix through an engine in this thread and says what came of it."""
    chance, seen = random.Random(seed + 1), Soak()
    known = _references(engine, asker)
    streams: list[Any] = []
    begun, submitted, idle, started, before = [], 0, 0, time.perf_counter(), engine.load.preemptions
    while submitted < requests or engine.has_work:
        while submitted < requests and engine.load.waiting < 6 and chance.random() < 0.7:
            for copy in asker.request(submitted):
                streams.append(engine.submit(copy))
                begun.append(copy.request_id)
            submitted += 1
            if submitted % 100 == 0:
                tell(f"{submitted} requests, {time.perf_counter() - started:.0f} s, {engine.load}")
            if submitted % 50 == 0:
                streams.append(_again(engine, chance.choice(known), submitted))
                begun.append(streams[-1].request_id)
        if begun and chance.random() < 0.04:
            engine.cancel(chance.choice(begun[-12:]))
        before_step = engine.load.steps
        engine.step()
        idle = 0 if engine.load.steps > before_step or not engine.has_work else idle + 1
        if idle > MOST_IDLE:
            seen.wrong.append(f"the engine stands still: {engine.load}")
            engine.abort("it stood still")
            break
        if engine.load.steps % 25 == 0:
            _check(engine, seen)
    seen.wall_s, seen.steps = time.perf_counter() - started, engine.load.steps
    seen.preemptions = engine.load.preemptions - before
    _sum_up(streams, seen)
    _let_go(engine, seen)
    return seen


def _references(engine: Any, asker: Asker) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Prompts and what a cold engine answers to them; the cache is empty again afterwards."""
    from semblend.wire.request import Request
    from semblend.wire.sampling import Sampling

    found = []
    for number in range(3):
        prompt = asker.request(number)[0].prompt
        done = engine.generate(
            [Request(f"reference-{number}", prompt, Sampling(max_tokens=6), quality="exact", opt_out=True)]
        )[0]
        found.append((tuple(prompt.token_ids.tolist()), done.tokens))
    engine.reset_prefix_cache()
    return found


def _again(engine: Any, reference: tuple[tuple[int, ...], tuple[int, ...]], number: int) -> Any:
    from semblend.prompt import Prompt
    from semblend.wire.request import Request
    from semblend.wire.sampling import Sampling

    name = f"again-{number}"
    request = Request(name, Prompt(reference[0]), Sampling(max_tokens=6), quality="exact", opt_out=True)
    stream = engine.submit(request)
    stream.expected = reference[1]
    return stream


def _check(engine: Any, seen: Soak) -> None:
    seen.checks += 1
    try:
        engine.check()
        engine.reuse.donor_kv.check()
    except Exception as error:
        seen.wrong.append(f"{type(error).__name__}: {error}")


def _sum_up(streams: Sequence[Any], seen: Soak) -> None:
    for stream in streams:
        if not stream.finished:
            seen.wrong.append(f"{stream.request_id} never ended")
            continue
        done = stream.completion()
        seen.finished[str(done.finish_reason)] += 1
        if str(done.finish_reason) == "error":
            seen.wrong.append(f"{stream.request_id} failed: {done.detail}")
        receipt = done.receipt
        if receipt is not None:
            seen.outcomes[str(receipt.outcome)] += 1
            seen.tokens.update(receipt.tokens)
            if sum(receipt.tokens.values()) != receipt.prompt_tokens:
                seen.wrong.append(f"{stream.request_id}: {receipt.tokens} of {receipt.prompt_tokens}")
        expected = getattr(stream, "expected", None)
        if expected is not None and str(done.finish_reason) != "cancelled":
            seen.compared += 1
            if done.tokens != expected:
                seen.wrong.append(f"{stream.request_id} said {done.tokens}, not {expected}")


def _let_go(engine: Any, seen: Soak) -> None:
    """Everything is given back: blocks, holds, claims, donors."""
    _check(engine, seen)
    donors = engine.reuse.donor_kv
    if donors.holders:
        seen.wrong.append(f"{donors.holders} holds on donors were not given back")
    if engine.reuse.semblend._claims:
        seen.wrong.append(f"{len(engine.reuse.semblend._claims)} claims were not given back")
    engine.reset_prefix_cache()
    if engine.pool.free_blocks != engine.pool.blocks - 1:
        seen.wrong.append(f"{engine.pool.used_blocks} blocks leaked")
    engine.reuse.forget_donors()
    donors.flush()  # what a thread was reading from the disk has its memory until it is done
    if len(donors) or any(donors.used_bytes.values()):
        seen.wrong.append(f"{len(donors)} donors, {donors.used_bytes} bytes after all were forgotten")
    _check(engine, seen)


def build(folder: str, *, pool_tokens: int, donor_tokens: int) -> tuple[Any, Any, Any]:
    """Engine, tokenizer and what keeps its events; the pool and the donor budgets are small on purpose."""
    from semblend import SemBlend, SemBlendConfig
    from semblend.confirm.sinks import MemorySink
    from semblend.engine.core.assemble import assemble
    from semblend.engine.core.config import EngineConfig
    from semblend.materialize.blend.quality import QualitySettings
    from semblend.materialize.gate.thresholds import choose_table

    model, tokenizer = random_parts()
    sink = MemorySink(limit=200_000)
    library = SemBlend(SemBlendConfig(embedder="none", metrics=False), sinks=[sink])
    token_bytes = model.new_pool(16).bytes_per_token
    engine = assemble(
        model,
        pool_tokens=pool_tokens,
        config=EngineConfig(model_name="soak", step_tokens=256, max_running=8, quality="balanced"),
        semblend=library,
        quality=QualitySettings(thresholds=choose_table("tiny").thresholds),
        donor_host_bytes=donor_tokens * token_bytes,
        donor_disk_bytes=donor_tokens * token_bytes,
        donor_dir=folder,
        detokenizer=tokenizer,
    )
    return engine, tokenizer, sink


def random_parts() -> tuple[Any, Any]:
    """A model of two layers over bytes; it knows nothing, and every path of the engine runs as with a real one."""
    from semblend.engine.core.stops import NoText
    from semblend.engine.model.model import DecoderModel
    from semblend.engine.model.spec import ModelSpec

    class Bytes(NoText):
        longest_token_chars = 1

        def add(self, token: int) -> str:
            return chr(token)

        def token_text(self, token: int) -> str:
            return chr(token)

        def encode(self, text: str, **_: Any) -> list[int]:
            return [byte % 128 for byte in text.encode()]

        def encode_chat(self, messages: Any, **_: Any) -> list[int]:
            return self.encode("\n".join(message["content"] for message in messages))

    shape = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 2048,
    }  # fmt: skip
    return DecoderModel.random(ModelSpec.from_hf_config(shape)), Bytes()


def weather(
    engine: Any, tokenizer: Any, asker: Asker, clients: int, seed: int, *, patience_s: float, **limits: Any
) -> tuple[Any, list[str]]:
    """The storm over HTTP, and what was wrong afterwards."""
    from semblend.engine.server.config import ServeConfig
    from semblend.engine.server.local_engine import LocalEngine
    from semblend.engine.server.routes import create_app

    local = LocalEngine(engine, tokenizer)
    app = create_app(local, ServeConfig(**limits))
    known = question(sentences(random.Random(5), 3), 12, stream=False, semblend={"reuse": False})
    local.start()
    try:
        with served(app) as (host, port):
            before = text_of(asyncio.run(answer_of(host, port, known, patience_s))[2])
            seen = asyncio.run(storm(host, port, asker.prompt, clients, seed, tokens=8, patience_s=patience_s))
            wrong = list(seen.wrong)
            if not until(lambda: quiet(app, engine), patience_s):
                gate = app.state.service.admission
                wrong.append(f"{gate.running} places and {gate.waiting} in line are still taken: {engine.load}")
            try:
                status, _, body = asyncio.run(answer_of(host, port, known, patience_s))
            except (TimeoutError, ConnectionError) as error:
                status, body = 0, repr(error).encode()
            if status != 200 or text_of(body) != before:
                wrong.append(f"the known question was answered with {status} {body[:200]!r}, not {before!r}")
        local.call_soon(lambda inner: inner.check()).result(60)
    finally:
        local.close()
    if seen.without_retry_after:
        wrong.append(f"{seen.without_retry_after} answers of 429 without Retry-After")
    after = Soak()
    _let_go(engine, after)
    return seen, wrong + after.wrong
