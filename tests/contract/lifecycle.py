"""Random lives of requests, and what must hold for each whatever happens: the half of the contract that is about time.

`live` sends requests into an engine and lets things happen to them: aborts, preemptions, resets, loads that fail, new
weights, donors that go, ids that are used again. Then it lets all of them come to their end and checks

    every request ends
    a request that was answered has one receipt, and one that was not has none
    a receipt counts reuse only where donor KV was really there
    what is called exact is what a cold prefill computes: cached prefixes, donors, rows
    nothing of another salt is used
    nothing is left behind: slots, claims, holds on donors, sessions

An engine takes part by way of `Engine`; `SymbolicEngine` is the smallest one.
"""

from __future__ import annotations

import random
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from naive_engine import NaiveEngine

from semblend.config import SemBlendConfig
from semblend.confirm.receipt import Receipt
from semblend.facade import SemBlend
from semblend.materialize.blend.quality import Blended, QualitySettings, Rejected
from semblend.plan.reuse_plan import Decline, DeclineReason
from semblend.prompt import Namespace, Prompt
from semblend.session.local import LocalSessions, SlotPool
from semblend.session.session import SessionRequest
from semblend.session.settings import LocalSettings

DOCUMENTS = tuple([(7 * n + 3 * k) % 89 + 5 for n in range(72 + 16 * k)] for k in range(3))
HEADS = ([5, 9, 2], [3, 1, 4, 1, 5], [2, 7], [1] * 12)
MODES = ("fast", "balanced", "fast", "exact")
MAX_STEPS = 300
"""More than any request needs, however often it begins again."""


def draw_prompt(rng: random.Random) -> list[int]:
    body = rng.choice(DOCUMENTS)
    return [*rng.choice(HEADS), *body[: rng.choice((len(body), 64))], rng.randrange(90, 96)]


class Engine(ABC):
    """What the lives need of an engine. ``answered`` and ``receipts`` say how often each name was answered and told."""

    def __init__(self) -> None:
        self.answered: Counter[str] = Counter()
        self.receipts: Counter[str] = Counter()
        self.faults: list[str] = []  # what was seen to be wrong on the way

    @abstractmethod
    def submit(self, name: str, tokens: list[int], mode: str, salt: str) -> None: ...
    @abstractmethod
    def step(self) -> None: ...
    @abstractmethod
    def abort(self, rng: random.Random) -> None: ...
    @abstractmethod
    def preempt(self, rng: random.Random) -> None: ...
    @abstractmethod
    def reset(self) -> None: ...
    @abstractmethod
    def forget_donor(self, rng: random.Random) -> None: ...
    @abstractmethod
    def fail_next_load(self) -> None: ...
    @abstractmethod
    def change_weights(self) -> None: ...
    @property
    @abstractmethod
    def is_idle(self) -> bool: ...
    @abstractmethod
    def list_remains(self) -> list[str]:
        """What is left behind when nothing runs, in words; it must be nothing."""

    def note_receipt(self, name: str, receipt: Receipt | None) -> None:
        self.receipts[name] += receipt is not None


def live(engine: Engine, seed: int, events: int = 16) -> None:
    """One sequence of events, and then the end of all that is under way."""
    rng, names = random.Random(seed), 0
    happens = {
        "step": (50, engine.step),
        "abort": (6, lambda: engine.abort(rng)),
        "preempt": (8, lambda: engine.preempt(rng)),
        "reset": (2, engine.reset),
        "forget": (4, lambda: engine.forget_donor(rng)),
        "fail": (5, engine.fail_next_load),
        "weights": (2, engine.change_weights),
    }
    for _ in range(events):
        if rng.random() < 0.45:
            names += rng.random() < 0.9  # else the id of the one before
            engine.submit(f"r{names}", draw_prompt(rng), rng.choice(MODES), rng.choice(("", "", "", "salt")))
        (what,) = rng.choices(list(happens), [weight for weight, _ in happens.values()])
        happens[what][1]()
    for _ in range(MAX_STEPS):
        if engine.is_idle:
            break
        engine.step()
    assert engine.is_idle, f"seed {seed}: a request never ends"
    assert engine.receipts == engine.answered, f"seed {seed}: receipts {engine.receipts}, answers {engine.answered}"
    assert not engine.faults, f"seed {seed}: {engine.faults[:3]}"
    assert not (remains := engine.list_remains()), f"seed {seed}: {remains}"


# -- The smallest engine: KV is one number that stands for all tokens up to its position, so whatever is wrong is seen.


@lru_cache(maxsize=4096)
def compute_exact(tokens: tuple[int, ...], weights: int) -> torch.Tensor:
    """What a cold prefill computes: at each position a number for all tokens up to there."""
    code, found = weights, []
    for token in tokens:
        code = zlib.crc32(token.to_bytes(4, "little"), code)
        found.append(float(code >> 12))
    return torch.tensor(found)


APPROXIMATE = 0.5
"""Added to whatever is computed over moved KV: no exact number ends in it."""


@dataclass(eq=False)
class Live:
    """A request that the engine knows; it has a row of slots while it runs."""

    request: SessionRequest
    left: int
    row: torch.Tensor | None = None
    shared: int = 0
    has_spoken: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self.request.prompt.token_ids.tolist())


class SymbolicEngine(Engine):
    """An engine over `LocalSessions` that admits one request a step and keeps exact prompts in a cache."""

    def __init__(self, seed: int, slots: int = 420) -> None:
        super().__init__()
        self.rng, self.weights, self._fails, self.slots = random.Random(seed), 1, False, slots
        self.memory = NaiveEngine.make(slots=self.slots, layers=1, heads=1, head_dim=2)
        self.free = list(range(1, self.slots))
        self.cache: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self.waiting: list[Live] = []
        self.running: list[Live] = []
        self.seen_weights = 1
        config = SemBlendConfig(quality="fast", metrics=False, min_span_tokens=16)
        self.sessions = LocalSessions(
            self.memory,
            SemBlend(config, compiled=False),
            SlotPool(self.take, self.give_back),
            LocalSettings(config=config, donor_min_new_tokens=8, step_work_ms=1e-9),
            QualitySettings(first_seam_tokens=4, seam_tokens=4, question_tokens=2, piece_ms=1e-9, prefills=False),
            engine="symbolic",
            engine_version="0",
            watch=self,  # type: ignore[arg-type]
        )
        self.salts: dict[str, str] = {}  # of donors
        self.loading_salt = ""
        self.sessions.donors.on_kept = lambda donor_id, prompt: self.salts.update({donor_id: self.loading_salt})
        self.sessions._get_blender = lambda mode: SymbolicBlender(self)  # type: ignore[assignment, return-value]

    # -- memory ------------------------------------------------------------------------------------------------------

    def have_changed(self, look: object = None) -> bool:
        before, self.seen_weights = self.seen_weights, self.weights
        return before != self.weights

    def take(self, count: int) -> torch.Tensor | None:
        while count > len(self.free) and self.cache:
            self.give_back(self.cache.pop(next(iter(self.cache))))
        if count > len(self.free):
            self.sessions.stop_loads()
        if count > len(self.free):
            return None
        taken, self.free = self.free[:count], self.free[count:]
        return torch.tensor(taken, dtype=torch.int64)

    def give_back(self, slots: torch.Tensor) -> None:
        if set(slots.tolist()) & set(self.free):
            self.faults.append("slots were freed twice")
        self.free = sorted({*self.free, *slots.tolist()})

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        return self.memory.layout.gather(0, slots)[1][:, 0, 0]

    def write(self, slots: torch.Tensor, numbers: torch.Tensor) -> None:
        both = numbers.reshape(-1, 1, 1).expand(-1, 1, 2).contiguous()
        self.memory.layout.scatter(0, slots, both, both)

    def compute(self, tokens: tuple[int, ...], row: torch.Tensor, begin: int) -> None:
        """What the engine's own prefill does: exact over what is exact, and approximate over the rest."""
        exact = compute_exact(tokens, self.weights)
        clean = torch.equal(self.read(row[:begin]), exact[:begin])
        self.write(row[begin : len(tokens)], exact[begin:] + (0.0 if clean else APPROXIMATE))

    def expect_exact(self, what: str, tokens: tuple[int, ...], numbers: torch.Tensor) -> None:
        if not torch.equal(numbers, compute_exact(tokens, self.weights)[: len(numbers)]):
            self.faults.append(f"{what} is not what a cold prefill computes")

    # -- events ------------------------------------------------------------------------------------------------------

    def submit(self, name: str, tokens: list[int], mode: str, salt: str) -> None:
        prompt = Prompt(tokens, namespace=Namespace(salt=salt))
        request = SessionRequest(name, prompt, len(tokens) - 1, quality=mode, source=object())
        if any(one.request.request_id == name for one in (*self.waiting, *self.running)):
            return  # an engine refuses a second request under an id that is under way
        self.waiting.append(Live(request, self.rng.randrange(1, 5)))

    def abort(self, rng: random.Random) -> None:
        if everybody := self.waiting + self.running:
            self.release(rng.choice(everybody))

    def preempt(self, rng: random.Random) -> None:
        """Take the row of a request back: what it has said stays said."""
        if self.running:
            one = rng.choice(self.running)
            self.release(one)
            if not one.has_spoken and rng.random() < 0.5:  # the engine may come back with the same object, or a new one
                again = one.request
            else:
                again = replace(one.request, answered=one.has_spoken, source=object())
            self.waiting.insert(0, Live(again, one.left, has_spoken=one.has_spoken))

    def reset(self) -> None:
        self.sessions.reset()
        for slots in self.cache.values():
            self.give_back(slots)
        self.cache.clear()

    def forget_donor(self, rng: random.Random) -> None:
        if donors := self.sessions.semblend.donors():
            self.sessions.semblend.forget(rng.choice(donors).donor_id)

    def fail_next_load(self) -> None:
        self._fails = True

    def change_weights(self) -> None:
        """Between requests, as engines do it; rows of running ones hold what the old weights computed."""
        for one in list(self.running):
            self.release(one)
            self.waiting.append(replace(one, row=None, request=replace(one.request, answered=one.has_spoken)))
        self.weights += 1
        self.reset()

    def take_failure(self) -> bool:
        fails, self._fails = self._fails, False
        return fails

    # -- a step ------------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def step(self) -> None:
        if self.waiting:
            one = self.waiting[0]
            try:
                admitted = self.admit(one)
            except Exception as error:
                self.sessions.give_up(one.request.request_id, "load", error)
                admitted = False
            if not admitted and self.rng.random() < 0.2:
                self.waiting.append(self.waiting.pop(0))
        for one in list(self.running):
            one.left -= 1
            if one.left <= 0:
                self.finish(one)

    def admit(self, one: Live) -> bool:
        name, tokens, salt = one.request.request_id, one.tokens, one.request.prompt.namespace.salt
        self.loading_salt = salt
        prefix = self.find_prefix(salt, tokens)
        hit = len(prefix)
        loaded = 0
        if self.sessions.offer(one.request, hit):
            self.sessions.load(name, lambda: self.find_prefix(salt, tokens))
            done = self.sessions.work(name, busy=self.rng.random() < 0.6)
            if done is None:
                return False
            loaded = done
        prefix = self.find_prefix(salt, tokens)[:hit]
        if len(prefix) < hit:  # it left while slots were taken
            self.sessions.stand_back(one.request, len(prefix), "its prefix is gone")
            return False
        own = self.take_row(prefix, len(tokens) - hit - loaded)
        if own is None:
            if self.rng.random() < 0.3:
                self.sessions.stand_back(one.request, 0, "there is no room")
            return False
        tail = self.sessions.find_tail(name) if loaded else None
        held = [prefix, *([] if tail is None else [tail]), own]
        row = torch.cat(held)
        # A row of its own for what the cache holds: the symbolic cache may evict at any time.
        self.waiting.remove(one)
        one.row, one.shared = row, hit
        self.running.append(one)
        self.compute(tokens, row, hit + (0 if tail is None else len(tail)))
        end = self.sessions.find_exact_until(name)
        self.expect_exact("the exact part of a row", tokens, self.read(row[: len(tokens) if end is None else end]))
        if one.request.answered:
            self.sessions.note_prompt(name, row)
            return True
        session = self.sessions.find(name)
        assert session is not None
        receipt = self.sessions.note_prompt(name, row)
        one.has_spoken = True
        self.answered[name] += 1
        self.note_receipt(name, receipt)
        if receipt is not None:
            moved = int((self.read(row[: len(tokens)]) != compute_exact(tokens, self.weights)).sum())
            if bool(receipt.reused_tokens) != bool(moved):
                self.faults.append(f"the receipt of {name} counts {receipt.reused_tokens} reused, {moved} are moved")
        return True

    def take_row(self, prefix: torch.Tensor, count: int) -> torch.Tensor | None:
        """Slots behind a prefix; None where there are none, or where taking them has cost the prefix."""
        before = {slots.data_ptr() for slots in self.cache.values()}
        own = self.take(count)
        if own is not None and len(prefix) and before != {slots.data_ptr() for slots in self.cache.values()}:
            self.give_back(own)
            return None
        return own

    def find_prefix(self, salt: str, tokens: tuple[int, ...]) -> torch.Tensor:
        best = torch.zeros(0, dtype=torch.int64)
        for (theirs, known), slots in self.cache.items():
            if theirs == salt and len(best) < len(known) < len(tokens) and tokens[: len(known)] == known:
                best = slots
        return best

    def finish(self, one: Live) -> None:
        """What is exact of its prompt goes to the cache."""
        name, assertion = one.request.request_id, one.row
        assert assertion is not None
        end = self.sessions.find_exact_until(name)
        tokens = one.tokens[: len(one.tokens) - 1 if end is None else min(end, len(one.tokens) - 1)]
        key = (one.request.prompt.namespace.salt, tokens)
        if one.shared == 0 and len(tokens) >= 8 and key not in self.cache:
            self.expect_exact("what enters the cache", one.tokens, self.read(assertion[: len(tokens)]))
            self.cache[key] = assertion[: len(tokens)]
            one.row, one.shared = assertion[len(tokens) :], 0
        self.release(one)

    def release(self, one: Live) -> None:
        if one in self.waiting:
            self.waiting.remove(one)
        if one in self.running:
            self.running.remove(one)
            assert one.row is not None
            self.give_back(one.row[one.shared :])
        self.sessions.forget(one.request.request_id)

    def list_remains(self) -> list[str]:
        for (_, tokens), slots in self.cache.items():
            self.expect_exact("a cached prompt", tokens, self.read(slots))
        kept = sum(len(slots) for slots in self.cache.values())
        library = self.sessions.semblend
        found = {
            "slots": self.slots - 1 - len(self.free) - kept,
            "sessions": len(self.sessions),
            "loads": len(self.sessions._loads),
            "claims": len(library._claims),
            "holds on donors": self.sessions.donors.kv.holders,
        }
        return [f"{count} {what}" for what, count in found.items() if count] + self.faults


class SymbolicBlender:
    """Moves numbers where a real blender moves KV; what becomes of a load is drawn."""

    def __init__(self, engine: SymbolicEngine) -> None:
        self._engine = engine

    def prepare_in_pieces(self, target: Any, plan: Any, *, mode: str) -> Any:
        engine, kv = self._engine, self._engine.sessions.donors.kv
        held = []
        try:
            for span in plan.spans:
                tensors = kv.acquire(span.donor_id, span.generation)
                if tensors is None:
                    return Decline(DeclineReason.STALE, f"{span.donor_id} is gone")
                held.append(tensors)
                donor = engine.sessions.semblend.donor_tokens(span.donor_id)
                if engine.salts.get(span.donor_id) != engine.loading_salt:
                    engine.faults.append("a donor of another salt was used")
                if donor is not None:
                    engine.expect_exact("a donor", tuple(donor.tolist()), tensors.v[0, : len(donor), 0, 0].float())
            for _ in range(engine.rng.randrange(4)):
                yield
            if engine.take_failure():
                raise RuntimeError("a pass failed")
            return self._place(target, plan, held, mode)
        finally:
            for tensors in held:
                kv.release(tensors)

    def _place(self, target: Any, plan: Any, held: list[Any], mode: str) -> Blended | Rejected | Decline:
        engine = self._engine
        tokens, first = tuple(target.tokens.tolist()), plan.spans[0].target_start
        numbers = compute_exact(tokens, engine.weights).clone()
        drawn = engine.rng.random()
        if drawn < 0.1:
            return Decline(DeclineReason.VALIDATION_FAILED, "wrong", faulty_donors=plan.donor_ids[:1])
        if drawn < 0.2 and mode == "balanced":
            engine.write(target.slots[plan.exact_tokens :], numbers[plan.exact_tokens :] + APPROXIMATE)
            return Rejected(first, 1.0, 1, 0.0, 1.0, 1.0, 0.4)
        all_computed = drawn < 0.3 and mode == "balanced"
        if not all_computed:
            numbers[first:] += APPROXIMATE
            for span, tensors in zip(plan.spans, held, strict=True):
                part = tensors.v[0, span.donor_start : span.donor_start + span.length, 0, 0].float()
                numbers[span.target_start : span.target_end] = part + APPROXIMATE
        engine.write(target.slots[plan.exact_tokens :], numbers[plan.exact_tokens :])
        reused = 0 if all_computed else plan.reused_tokens
        return Blended(
            logits_last=torch.zeros(1), exact_tokens=plan.exact_tokens, reused_tokens=reused,
            recomputed_tokens=plan.reused_tokens - reused, prefill_tokens=plan.prefill_tokens,
            exact_until=len(tokens) if all_computed else first, decision="fast", risk=0.1, escalations=0,
            canary=0.0, load_ms=1.0, compute_ms=1.0, passes=(), work=0.3,
        )  # fmt: skip
