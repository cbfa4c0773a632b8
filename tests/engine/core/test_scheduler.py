"""Who computes what: order, budgets, room, preemption. No model is needed to ask that."""

from __future__ import annotations

import zlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend.engine.core.config import EngineConfig
from semblend.engine.core.radix import RadixCache
from semblend.engine.core.scheduler import LATELY, Scheduler, StepPace
from semblend.engine.core.sequence import QueueFull, Sequence, Stream
from semblend.engine.core.stops import AnswerText, NoText
from semblend.engine.model.paged_kv import KvPool
from semblend.engine.model.sampling import make_generator
from semblend.fairness import count_places
from semblend.prompt import Namespace, Prompt
from semblend.session.session import ReuseSession, SessionRequest
from semblend.wire.request import Request
from semblend.wire.sampling import Sampling

BLOCK = 4
DECODE_MS = 30.0


class World:
    """A scheduler over a small pool, and a model that says 7 whatever it is asked."""

    def __init__(self, blocks: int = 64, row_ms: float | None = None, **config) -> None:
        """``row_ms``: what a row of a prompt takes, as told to the scheduler; None: it is told nothing."""
        self.row_ms, self.step_ms = row_ms, []
        self.pool = KvPool(layers=1, kv_heads=1, head_dim=2, blocks=blocks + 1, block_tokens=BLOCK)
        self.radix = RadixCache(self.pool)
        self.scheduler = Scheduler(self.pool, self.radix, EngineConfig(**config))

    def add(self, name: str, tokens: int, answer: int = 4, tenant: str = "") -> Sequence:
        first = zlib.crc32(name.encode()) % 1000
        prompt = Prompt(range(first, first + tokens), namespace=Namespace(tenant=tenant))
        request = Request(name, prompt, Sampling(max_tokens=answer))
        stream, text = Stream(name), AnswerText(NoText())
        known = prompt.token_ids.tolist()
        session = ReuseSession(SessionRequest(name, prompt), "fast")
        sequence = Sequence(request, session, stream, text, make_generator(0), tokens + answer, known)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> dict[str, int]:
        """Tokens computed for each request."""
        batch = self.scheduler.schedule()
        names = [piece.sequence.request_id for piece in batch.pieces]
        assert len(set(names)) == len(names), "a sequence has one piece a step"
        if self.row_ms is not None:
            prompts = [piece.rows for piece in batch.pieces if piece.sequence.in_prefill]
            self.step_ms.append(DECODE_MS * (len(batch.pieces) - len(prompts)) + self.row_ms * sum(prompts))
            self.scheduler.learn(batch, self.step_ms[-1])
        for piece in batch.pieces:
            assert piece.start == piece.sequence.computed
            assert len(piece.sequence.blocks) * BLOCK >= piece.end, "a piece has blocks to be computed in"
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
    assert again.session.exact_tokens == 4  # not 8: the second block holds the token whose logits are asked for
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


def put_prompt(sequence: Sequence, prompt: Prompt) -> None:
    sequence.session.request = replace(sequence.session.request, prompt=prompt)
    sequence.tokens = prompt.token_ids.tolist()


def twins(world: World, *names: str, tokens: int = 24) -> list[Sequence]:
    """The same prompt under several names."""
    made = []
    for name in names:
        made.append(world.add(name, tokens))
        prompt = Prompt(range(tokens))
        put_prompt(made[-1], prompt)
    return made


def test_of_equal_prompts_that_come_at_once_one_is_computed_and_the_others_find_it():
    world = World(step_tokens=100)
    first, *others = twins(world, "a", "b", "c")
    world.add("other", 8)
    assert world.step() == {"a": 24, "other": 8}  # who has nothing to wait for goes ahead
    world.radix.insert(first.namespace.digest, first.tokens[:24], first.blocks[:6], exact_until=24)
    assert world.step() == {"a": 1, "other": 1, "b": 4, "c": 4}
    assert [one.session.exact_tokens for one in others] == [20, 20]


def test_equal_prompts_of_different_namespaces_do_not_wait_for_each_other():
    world = World(step_tokens=100)
    _, other = twins(world, "a", "b")
    put_prompt(other, Prompt(other.tokens, namespace=Namespace(tenant="t")))
    assert world.step() == {"a": 24, "b": 24}


def test_a_request_does_not_wait_for_a_short_shared_beginning():
    world = World(step_tokens=100)
    _, longer = twins(world, "a", "b")
    tokens = [*longer.tokens[:8], *range(500, 530)]
    put_prompt(longer, Prompt(tokens))
    assert world.step() == {"a": 24, "b": 38}


def test_a_twin_whose_first_is_gone_is_computed():
    world = World(step_tokens=10)
    first, second = twins(world, "a", "b")
    assert world.step() == {"a": 10}
    world.scheduler.remove(first)
    assert world.step() == {"b": 10}
    assert second.session.exact_tokens == 0


# -- between tenants -------------------------------------------------------------------------------------------------


def test_a_short_prompt_does_not_wait_for_another_tenants_long_ones_even_when_they_run_already():
    world = World(blocks=400, step_tokens=32)
    for number in range(5):
        world.add(f"long{number}", 200, tenant="loud")
    world.step()
    world.add("short", 20, tenant="quiet")
    assert world.step()["short"] == 20


def test_a_step_that_tenants_share_is_as_long_as_the_short_prompt_or_a_quarter_of_a_step():
    world = World(blocks=400, step_tokens=64)
    world.add("long", 300, tenant="loud")
    world.step()
    world.add("short", 20, tenant="quiet")
    assert world.step() == {"short": 20}
    assert world.step() == {"short": 1, "long": 32}  # nobody shares it now, and the neighbour was here lately
    world.add("tiny", 4, tenant="quiet")
    assert world.step() == {"short": 1, "tiny": 4, "long": 12}


def test_steps_are_halved_while_a_neighbour_was_here_lately_and_whole_again_after_that():
    world = World(step_tokens=16, blocks=2000)
    world.add("long", 16 * LATELY + 64, tenant="loud")
    assert world.step() == {"long": 16}
    world.add("short", 4, answer=1, tenant="quiet")
    assert world.step()["short"] == 4
    alone = [world.step()["long"] for _ in range(LATELY + 1)]
    assert alone[: LATELY - 1] == [8] * (LATELY - 1)
    assert alone[-1] == 16


def test_a_prompt_that_may_be_filled_does_not_hold_up_the_first_token_of_another_tenant():
    world = World(blocks=400, step_tokens=64)
    world.add("long", 100, tenant="loud").to_fill = True
    world.add("short", 20, tenant="quiet")
    world.scheduler._clock.charge("loud", 1000)
    assert world.step() == {"short": 20}
    assert "long" in world.step()


def test_filling_is_charged_by_its_passes_and_waiting_for_it_is_not_charged():
    world = World(blocks=400, step_tokens=64)
    filled, behind = world.add("filled", 100, tenant="a"), world.add("behind", 20, tenant="b")
    filled.to_fill = behind.to_fill = True
    batch = world.scheduler.schedule()
    filled.to_fill, filled.blended = False, SimpleNamespace(passes=[SimpleNamespace(rows=70), SimpleNamespace(rows=30)])
    world.scheduler.charge(batch)
    clock = world.scheduler._clock
    assert (clock.read("a"), clock.read("b")) == (100, 0)


def test_a_tenant_that_has_nothing_running_gets_a_place_beyond_the_limit():
    world = World(blocks=400, max_running=4)
    for number in range(8):
        world.add(f"l{number}", 5, answer=50, tenant="loud")
    world.step()
    world.add("q0", 5, tenant="quiet")
    world.add("q1", 5, tenant="quiet")
    world.step()
    assert world.names(world.scheduler.running) == ["l0", "l1", "l2", "l3", "q0"]


def test_the_tenant_that_holds_most_is_preempted_and_never_the_one_that_runs_longest():
    world = World(blocks=10, step_tokens=100)
    first = world.add("first", 8, answer=28, tenant="loud")
    world.step()
    second = world.add("second", 8, answer=28, tenant="loud")
    world.step()
    quiet = world.add("quiet", 4, answer=20, tenant="quiet")  # younger than both, and holds less
    while not world.scheduler.preemptions:
        world.step()
    assert (first.preemptions, second.preemptions, quiet.preemptions) == (0, 1, 0)


def test_a_newcomer_within_its_share_gets_room_from_those_above_theirs():
    world = World(blocks=20, step_tokens=100)
    loud = [world.add(f"l{number}", 15, answer=40, tenant="loud") for number in range(4)]
    world.step()
    assert len(world.scheduler.running) == 4
    quiet = world.add("q", 12, tenant="quiet")
    assert world.step()["q"] == 12
    assert [one.preemptions for one in loud] == [0, 0, 0, 1]
    assert quiet in world.scheduler.running


def test_the_sequence_that_runs_longest_is_never_preempted_even_if_its_tenant_holds_most():
    world = World(blocks=14, step_tokens=100)
    first = world.add("first", 30, answer=20, tenant="loud")
    world.step()
    others = [world.add(f"q{number}", 6, answer=16, tenant="quiet") for number in range(2)]
    while not world.scheduler.preemptions:
        world.step()
    assert first.preemptions == 0
    assert [one.preemptions for one in others] == [0, 1]


def test_a_newcomer_does_not_push_out_the_oldest_request_of_another_tenant():
    world = World(blocks=20, step_tokens=100)
    world.add("small", 3, answer=40, tenant="third")
    world.step()
    large = world.add("large", 56, answer=8, tenant="loud")  # alone, and above its share
    world.step()
    world.add("q", 16, tenant="quiet")
    assert "q" not in world.step()
    assert large.preemptions == 0
    while "q" not in world.step():
        pass
    assert large.preemptions == 0


def test_a_tenant_that_comes_back_does_not_catch_up_for_the_time_it_was_away():
    world = World(blocks=4000, step_tokens=40, max_waiting=1000, max_running=1000)
    world.add("early", 20, answer=1, tenant="back")
    for number in range(100):
        world.add(f"l{number}", 20, answer=1, tenant="loud")
    for _ in range(30):
        world.step()
    for number in range(30):
        world.add(f"b{number}", 20, answer=1, tenant="back")
    served = [name for _ in range(8) for name in world.step()]
    assert sum(name.startswith("l") for name in served) >= 5, served


def test_a_newcomer_beyond_its_share_waits():
    world = World(blocks=20, step_tokens=100)
    loud = [world.add(f"l{number}", 15, answer=40, tenant="loud") for number in range(4)]
    world.step()
    world.add("q", 48, tenant="quiet")
    assert "q" not in world.step()
    assert [one.preemptions for one in loud] == [0, 0, 0, 0]


def test_running_requests_of_one_tenant_leave_the_neighbours_cache_its_half():
    world = World(blocks=20, step_tokens=100)
    kept = world.pool.allocate(8, "quiet")
    world.radix.insert("elsewhere", list(range(32)), kept, exact_until=1 << 62)
    world.pool.free(kept)
    for number in range(8):
        world.add(f"l{number}", 10, answer=20, tenant="loud")
    for _ in range(30):
        world.step()
        assert len(world.radix) == 8
    while world.scheduler.waiting or world.scheduler.running:
        world.step()
        assert len(world.radix) == 8


asked = st.tuples(st.sampled_from("abc"), st.integers(1, 30), st.integers(1, 10), st.integers(0, 8))


@settings(max_examples=80)
@given(
    st.lists(asked, min_size=1, max_size=14),
    st.integers(10, 30),
    st.integers(1, 40),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
def test_everything_of_every_tenant_ends_in_any_pool(requests, blocks, step_tokens, max_running, chance):
    world = World(blocks=blocks, step_tokens=step_tokens, max_running=max_running)
    coming = sorted(enumerate(requests), key=lambda one: one[1][3])
    alive = []
    for step in range(3000):
        while coming and coming[0][1][3] <= step:
            number, (tenant, tokens, answer, _) = coming.pop(0)
            alive.append(world.add(f"r{number}", tokens, answer, tenant=tenant))
        busy = world.scheduler.waiting or world.scheduler.running
        if not busy and not coming:
            break
        if alive and chance.random() < 0.05:
            world.scheduler.remove(chance.choice(alive))
        busy = world.scheduler.waiting or world.scheduler.running
        computed = world.step()
        assert computed or not busy, "a step with work to do computes something"
        world.pool.check()
        world.radix.check()
        assert len(world.scheduler.running) <= count_places(max_running)
    assert not world.scheduler.waiting
    assert not world.scheduler.running
    assert world.pool.used_blocks == len(world.radix) == 0


@settings(max_examples=80)
@given(
    st.lists(st.integers(1, 60), min_size=20, max_size=40),
    st.lists(st.integers(1, 60), min_size=20, max_size=40),
    st.integers(8, 64),
)
def test_two_tenants_that_both_wait_are_served_alike_to_within_a_piece(left, right, step_tokens):
    world = World(blocks=4000, step_tokens=step_tokens, max_running=1000, max_waiting=1000)
    for tenant, lengths in (("left", left), ("right", right)):
        for number, tokens in enumerate(lengths):
            world.add(f"{tenant}{number}", tokens, answer=1, tenant=tenant)
    served = {"left": 0, "right": 0}
    while all(any(one.tenant == name for one in world.scheduler.waiting) for name in served):
        for name, tokens in world.step().items():
            served["left" if name.startswith("left") else "right"] += tokens
        assert abs(served["left"] - served["right"]) <= step_tokens, served


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 20)), min_size=1, max_size=25))
def test_inside_a_tenant_prompts_begin_in_the_order_in_which_they_came(requests):
    world = World(blocks=4000, step_tokens=16)
    added = [world.add(f"r{i}", tokens, 1, tenant=tenant) for i, (tenant, tokens) in enumerate(requests)]
    begun = []
    while world.scheduler.waiting or world.scheduler.running:
        begun += [name for name in world.step() if name not in begun]
    for tenant in "abc":
        mine = [one.request_id for one in added if one.tenant == tenant]
        assert [name for name in begun if name in mine] == mine


# -- how long a step takes -----------------------------------------------------------------------------------------


def test_beside_a_neighbours_answer_prompts_take_a_step_the_time_they_are_given():
    world = World(blocks=2000, row_ms=2.0, step_tokens=512, step_work_ms=40.0)
    world.add("answer", 8, answer=200, tenant="bolt")
    world.step()
    world.step()
    world.add("long", 3000, tenant="acme")
    steps = [world.step() for _ in range(20)]
    assert all(step["answer"] == 1 for step in steps)
    assert {step["long"] for step in steps[1:]} == {20}  # 40 ms of 2 ms a row
    assert max(world.step_ms[1:]) <= DECODE_MS + 40.0


def test_beside_its_own_answers_a_tenants_prompts_get_four_times_as_long():
    world = World(blocks=2000, row_ms=2.0, step_tokens=512, step_work_ms=40.0)
    world.add("answer", 8, answer=200)
    world.step()
    world.step()
    world.add("long", 3000)
    assert [world.step()["long"] for _ in range(4)][1:] == [80] * 3


def test_a_tenant_alone_computes_whole_steps():
    world = World(blocks=2000, row_ms=2.0, step_tokens=512, step_work_ms=40.0)
    world.add("long", 3000)
    assert [world.step()["long"] for _ in range(5)] == [512] * 5


def test_rows_far_behind_in_a_prompt_count_for_what_they_attend_to():
    world = World(blocks=2000, step_tokens=512, step_work_ms=40.0)
    world.scheduler.pace = StepPace(attention_tokens=1000)
    world.scheduler.pace.note(512, 0, 1024.0)
    world.add("answer", 8, answer=200, tenant="bolt")
    world.step()
    world.step()
    long = world.add("long", 3000, tenant="acme")
    assert world.step()["long"] == 20
    long.computed = 1000
    assert world.step()["long"] == 10


def test_however_slow_the_machine_is_prompts_get_on_beside_answers():
    world = World(blocks=2000, row_ms=50.0, step_tokens=512, step_work_ms=1.0)
    world.add("answer", 8, answer=200, tenant="bolt")
    world.step()
    world.step()
    world.add("long", 300, tenant="acme")
    assert [world.step()["long"] for _ in range(10)] == [8] * 10


def test_four_long_prompts_of_a_tenant_hold_up_a_neighbours_short_answer_for_some_steps_of_that_time():
    world = World(blocks=8000, row_ms=2.0, step_tokens=512, step_work_ms=40.0)
    for number in range(4):
        world.add(f"long{number}", 7000, tenant="acme")
    for _ in range(3):
        world.step()
    short = world.add("short", 20, answer=4, tenant="bolt")
    world.step_ms.clear()
    steps = []
    while len(short.tokens) < short.max_length:
        steps.append(world.step())
    assert steps[0]["short"] == 20
    assert len(steps) == 4
    assert sum(world.step_ms) <= 2.0 * 20 + 40.0 + 3 * (DECODE_MS + 40.0)
    assert all(sum(step.values()) > step["short"] for step in steps[1:])  # the long ones get on, too


def test_many_answers_of_a_tenant_take_turns_while_a_neighbour_has_one():
    world = World(blocks=2000, row_ms=2.0, step_tokens=512, step_work_ms=40.0, max_running=64)
    many = [world.add(f"many{n}", 4, answer=60, tenant="acme") for n in range(32)]
    world.step()
    assert len(world.step()) == 32  # alone they all get on
    one = world.add("one", 4, answer=9, tenant="bolt")
    world.step()
    before = [len(sequence.tokens) for sequence in many]
    steps = [world.step() for _ in range(8)]
    assert all("one" in step for step in steps)
    assert max(map(len, steps)) < 32
    told = [len(sequence.tokens) - length for sequence, length in zip(many, before, strict=True)]
    assert max(told) - min(told) <= 1  # nobody is left out
    assert len(one.tokens) == one.max_length
    assert len(world.step()) == 32


def test_tenants_with_as_many_answers_as_each_other_all_get_on():
    world = World(blocks=2000, row_ms=2.0, step_tokens=512, step_work_ms=1.0, max_running=64)
    for tenant in ("acme", "bolt"):
        for number in range(16):
            world.add(f"{tenant}{number}", 4, answer=20, tenant=tenant)
    while len(world.scheduler.running) < 32 or any(one.in_prefill for one in world.scheduler.running):
        world.step()
    assert len(world.step()) == 32


def test_a_short_prompt_beside_a_neighbours_answers_takes_one_step_and_they_make_room_for_it():
    world = World(blocks=2000, row_ms=2.0, step_tokens=512, step_work_ms=20.0, max_running=64)
    for number in range(32):
        world.add(f"many{number}", 4, answer=60, tenant="acme")
    for _ in range(3):
        world.step()
    world.add("short", 16, tenant="bolt")
    step = world.step()
    assert step["short"] == 16
    assert len(step) == 1 + 8
