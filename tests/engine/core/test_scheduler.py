"""Who computes what: order, budgets, room, preemption. No model is needed to ask that."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend.engine.core.config import EngineConfig
from semblend.engine.core.radix import RadixCache
from semblend.engine.core.scheduler import Scheduler
from semblend.engine.core.sequence import QueueFull, Sequence, Stream
from semblend.engine.core.stops import AnswerText, NoText
from semblend.engine.model.paged_kv import KvPool
from semblend.engine.model.sampling import make_generator
from semblend.prompt import Namespace, Prompt
from semblend.wire.request import Request
from semblend.wire.sampling import Sampling

BLOCK = 4


class World:
    """A scheduler over a small pool, and a model that says 7 whatever it is asked."""

    def __init__(self, blocks: int = 64, **config) -> None:
        self.pool = KvPool(layers=1, kv_heads=1, head_dim=2, blocks=blocks + 1, block_tokens=BLOCK)
        self.radix = RadixCache(self.pool)
        self.scheduler = Scheduler(self.pool, self.radix, EngineConfig(**config))

    def add(self, name: str, tokens: int, answer: int = 4) -> Sequence:
        first = zlib.crc32(name.encode()) % 1000
        prompt = Prompt(range(first, first + tokens))
        request = Request(name, prompt, Sampling(max_tokens=answer))
        stream, text = Stream(name), AnswerText(NoText())
        known = prompt.token_ids.tolist()
        sequence = Sequence(request, prompt, stream, text, make_generator(0), tokens + answer, known)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> dict[str, int]:
        """Tokens computed for each request."""
        batch = self.scheduler.schedule()
        for piece in batch.pieces:
            piece.sequence.computed = piece.end
        for sequence in [piece.sequence for piece in batch.pieces if piece.completes]:
            sequence.tokens.append(7)
            if len(sequence.tokens) == sequence.max_length:
                self.scheduler.remove(sequence)
        return {piece.sequence.request_id: piece.end - piece.start for piece in batch.pieces}

    def names(self, sequences) -> list[str]:
        return [sequence.request_id for sequence in sequences]


def test_a_long_prompt_is_computed_in_chunks_within_the_budget():
    world = World(step_tokens=10)
    world.add("a", 25)
    assert [world.step() for _ in range(4)] == [{"a": 10}, {"a": 10}, {"a": 5}, {"a": 1}]


def test_running_answers_come_before_prompts_and_older_prompts_before_younger():
    world = World(step_tokens=10)
    world.add("a", 5)
    assert world.step() == {"a": 5}
    world.add("b", 12)
    world.add("c", 12)
    assert world.step() == {"a": 1, "b": 9}
    assert world.step() == {"a": 1, "b": 3, "c": 6}


def test_a_request_that_does_not_fit_is_not_overtaken():
    world = World(blocks=10, step_tokens=100)
    world.add("a", 20)
    world.step()
    world.add("large", 30)
    world.add("small", 2)
    world.step()
    assert world.names(world.scheduler.waiting) == ["large", "small"]


def test_the_queue_has_an_end():
    world = World(max_waiting=2)
    world.add("a", 5)
    world.add("b", 5)
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        world.add("c", 5)


def test_no_more_requests_run_than_allowed():
    world = World(max_running=2)
    for name in "abc":
        world.add(name, 5)
    world.step()
    assert world.names(world.scheduler.running) == ["a", "b"]


def test_the_youngest_is_preempted_when_an_answer_needs_a_block():
    world = World(blocks=6, step_tokens=100)
    old = world.add("old", 8, answer=12)
    young = world.add("young", 8, answer=12)
    while not young.preemptions:
        world.step()
    assert (young.blocks, young.computed) == ([], 0)
    assert world.names(world.scheduler.running) == ["old"]
    assert world.names(world.scheduler.waiting) == ["young"]
    assert old.preemptions == 0


def test_cached_blocks_are_evicted_before_anyone_is_preempted():
    world = World(blocks=8, step_tokens=100)
    kept = world.pool.allocate(4)
    world.radix.insert("elsewhere", list(range(16)), kept, exact_until=1 << 62)
    world.pool.free(kept)
    world.add("a", 16, answer=12)
    for _ in range(12):
        world.step()
    assert world.scheduler.preemptions == 0
    assert len(world.radix) == 1  # 27 of its 28 tokens needed KV: seven blocks of eight


def test_a_known_prefix_is_shared_and_the_last_token_is_always_computed():
    world = World(step_tokens=100)
    first = world.add("a", 8, answer=1)
    digest = first.namespace.digest
    world.scheduler.schedule()
    world.radix.insert(digest, first.tokens, first.blocks, exact_until=1 << 62)
    again = world.add("a", 8)
    batch = world.scheduler.schedule()
    assert again.exact_tokens == 4  # not 8: the second block holds the token whose logits are asked for
    assert again.blocks[0] == first.blocks[0]
    assert [(p.start, p.end) for p in batch.pieces if p.sequence is again] == [(4, 8)]


def test_a_prompt_that_may_be_filled_gets_a_piece_like_any_other():
    world = World(step_tokens=30)
    world.add("a", 20).to_fill = True
    world.add("b", 20)
    batch = world.scheduler.schedule()
    assert [(p.sequence.request_id, p.start, p.end) for p in batch.pieces] == [("a", 0, 20), ("b", 0, 10)]
    assert batch.filled == ()


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 10)), min_size=1, max_size=12),
    st.integers(10, 30),
    st.integers(1, 40),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
def test_everything_ends_in_any_pool_and_no_block_is_left(asked, blocks, step_tokens, max_running, chance):
    world = World(blocks=blocks, step_tokens=step_tokens, max_running=max_running)
    alive = [world.add(f"r{i}", tokens, answer) for i, (tokens, answer) in enumerate(asked)]
    for _ in range(2000):
        if not (world.scheduler.waiting or world.scheduler.running):
            break
        if chance.random() < 0.05:
            world.scheduler.remove(chance.choice(alive))  # at any moment, also twice
        before = [len(sequence.tokens) for sequence in alive]
        computed = world.step()
        assert computed or not (world.scheduler.waiting or world.scheduler.running)
        decodes = sum(computed.get(f"r{i}", 0) for i, s in enumerate(alive) if before[i] > s.prompt_tokens)
        assert sum(computed.values()) <= max(step_tokens, decodes)
        order = [alive.index(sequence) for sequence in world.scheduler.running]
        assert order == sorted(order)  # arrival order, through every preemption
    assert not world.scheduler.waiting
    assert not world.scheduler.running
    world.pool.check()
    assert world.pool.used_blocks == 0


def twins(world: World, *names: str, tokens: int = 24) -> list[Sequence]:
    """The same prompt under several names."""
    made = []
    for name in names:
        made.append(world.add(name, tokens))
        prompt = Prompt(range(tokens))
        made[-1].prompt, made[-1].tokens = prompt, prompt.token_ids.tolist()
    return made


def test_of_equal_prompts_that_come_at_once_one_is_computed_and_the_others_find_it():
    world = World(step_tokens=100)
    first, *others = twins(world, "a", "b", "c")
    world.add("other", 8)
    assert world.step() == {"a": 24, "other": 8}  # who has nothing to wait for goes ahead
    world.radix.insert(first.namespace.digest, first.tokens[:24], first.blocks[:6], exact_until=24)
    assert world.step() == {"a": 1, "other": 1, "b": 4, "c": 4}
    assert [one.exact_tokens for one in others] == [20, 20]


def test_equal_prompts_of_different_namespaces_do_not_wait_for_each_other():
    world = World(step_tokens=100)
    _, other = twins(world, "a", "b")
    other.prompt = Prompt(other.tokens, namespace=Namespace(tenant="t"))
    assert world.step() == {"a": 24, "b": 24}


def test_a_request_does_not_wait_for_a_short_shared_beginning():
    world = World(step_tokens=100)
    _, longer = twins(world, "a", "b")
    tokens = [*longer.tokens[:8], *range(500, 530)]
    longer.prompt, longer.tokens = Prompt(tokens), tokens
    assert world.step() == {"a": 24, "b": 38}


def test_a_twin_whose_first_is_gone_is_computed():
    world = World(step_tokens=10)
    first, second = twins(world, "a", "b")
    assert world.step() == {"a": 10}
    world.scheduler.remove(first)
    assert world.step() == {"b": 10}
    assert second.exact_tokens == 0
