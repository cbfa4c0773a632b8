"""Runs the demo's workloads on an engine: each prompt cold and with reuse, and what came of it.

Times and tokens are the receipts' own. Answers and first-token distributions are compared with the cold run of the
same prompt. Every arm starts with an empty exact cache and the same donors, so that arms do not help each other.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from semblend.confirm.receipt import Receipt
from semblend.demo.workloads import Chat, Dialogue, Workload
from semblend.engine.core.engine import Engine
from semblend.engine.model.model import DecoderModel
from semblend.engine.model.tokenizer import ModelTokenizer
from semblend.errors import SemBlendError
from semblend.materialize.gate.thresholds import next_token_kl
from semblend.prompt import Prompt
from semblend.wire.answer import Chunk
from semblend.wire.request import Request
from semblend.wire.sampling import Sampling

ANSWER_TOKENS = 24
MODES = ("fast", "balanced")
COLD = "cold"
COLD_RUNS = 2
Say = Callable[[str], None]


def describe_machine(model: DecoderModel) -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "device": model.device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
    }


class Watched(DecoderModel):
    """A model that remembers its latest logits: at an answer's first token, those that it was drawn from."""

    latest: Tensor | None = None

    @classmethod
    def of(cls, model: DecoderModel) -> Watched:
        return cls(model.spec, model.weights)

    def logits(self, hidden: Tensor) -> Tensor:
        found = super().logits(hidden)
        self.latest = found[-1].clone()
        return found


@dataclass(frozen=True, slots=True)
class Arm:
    """One prompt served one way. ``kl`` and ``agreement`` compare with cold: nats at the first token, F1 of words.

    ``ttft_ms`` is the fastest of ``runs_ms``.
    """

    workload: str
    title: str
    name: str
    receipt: Receipt
    ttft_ms: float
    runs_ms: tuple[float, ...]
    times_faster: float
    agreement: float
    kl: float
    answer: str
    says_fact: bool | None = None
    says_stale_fact: bool | None = None

    @property
    def disturbed(self) -> bool:
        """Whether runs of the same prompt differ so much that something else was computing."""
        return max(self.runs_ms) > 1.5 * min(self.runs_ms)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "receipt"}
        return fields | {"tokens": dict(self.receipt.tokens), "receipt": self.receipt.to_dict()}


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """All arms, in order, and what they ran on."""

    model: str
    machine: Mapping[str, Any]
    arms: tuple[Arm, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": "semblend.demo.v1",
            "model": self.model,
            "machine": dict(self.machine),
            "answer_tokens": ANSWER_TOKENS,
            "arms": [arm.to_dict() for arm in self.arms],
        }


@dataclass(frozen=True, slots=True)
class _Served:
    receipt: Receipt
    answer: str
    first: Tensor
    runs_ms: tuple[float, ...] = ()

    @property
    def ttft_ms(self) -> float:
        return self.receipt.ttft_ms or 0.0


class Demo:
    """Runs on an engine that was made around a `Watched` model, and that nobody else steps.

    Every arm of a workload is served ``repeats`` times and the fastest counts: other programs slow a run, none speeds
    it up. Workloads that begin after ``patience_s`` are served once, but always twice cold: a cold run that something
    else slowed down would look like a gain.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: ModelTokenizer,
        *,
        repeats: int = 1,
        patience_s: float = math.inf,
        say: Say = lambda _: None,
    ) -> None:
        if not isinstance(engine.model, Watched):
            raise SemBlendError(
                "the demo reads first-token logits", hint="assemble the engine around Watched.of(model)"
            )
        self._engine = engine
        self._model = engine.model
        self._encode = tokenizer.encode_chat
        self._repeats = repeats
        self._patient_until = time.monotonic() + patience_s
        self._say = say
        self._numbers = itertools.count()

    def run(self, workloads: Sequence[Workload], dialogue: Dialogue | None = None) -> tuple[Arm, ...]:
        """Every workload in every mode, then the dialogue."""
        self._warm_up()
        arms: list[Arm] = []
        for workload in workloads:
            arms += self._workload(workload)
        if dialogue is not None:
            arms += self._dialogue(dialogue)
        return tuple(arms)

    def _warm_up(self) -> None:
        """What only the first request pays for, out of the measured ones: threads, allocations, kernels."""
        self._say("warming up")
        for number in range(2):
            text = f"Number {number}. " + "The quick brown fox jumps over the lazy dog. " * 16
            self._serve(({"role": "user", "content": text},), "fast")
        self._forget()

    def _workload(self, workload: Workload) -> list[Arm]:
        self._forget()
        self._donate(workload.title, workload.donors)
        repeats = self._repeats if time.monotonic() < self._patient_until else 1
        cold = self._best(f"{workload.title}: {COLD}", workload.prompt, "exact", max(repeats, COLD_RUNS))
        found = [self._arm(workload, COLD, cold, cold)]
        for mode in MODES:
            served = self._best(f"{workload.title}: {mode}", workload.prompt, mode, repeats)
            found.append(self._arm(workload, mode, served, cold))
        return found

    def _dialogue(self, dialogue: Dialogue) -> list[Arm]:
        """Each turn cold, and in a conversation that the caches follow; the history holds the cold answers."""
        self._forget()
        self._donate(dialogue.title, dialogue.donors)
        chat: Chat = ({"role": "system", "content": dialogue.system},)
        colds: list[tuple[Chat, _Served]] = []
        for turn, question in enumerate(dialogue.questions, start=1):
            chat = (*chat, {"role": "user", "content": question})
            served = self._best(f"{dialogue.title}: turn {turn}, {COLD}", chat, "exact", COLD_RUNS)
            colds.append((chat, served))
            chat = (*chat, {"role": "assistant", "content": served.answer.strip()})
        self._engine.reset_prefix_cache()
        arms: list[Arm] = []
        for turn, (prompt, cold) in enumerate(colds, start=1):
            workload = Workload(f"dialogue_turn_{turn}", f"dialogue, turn {turn}", dialogue.about, (), prompt)
            self._say(f"{dialogue.title}: turn {turn}, balanced")
            arms += [self._arm(workload, COLD, cold, cold)]
            arms += [self._arm(workload, "balanced", self._serve(prompt, "balanced"), cold)]
        return arms

    def _donate(self, title: str, donors: Sequence[Chat]) -> None:
        for number, donor in enumerate(donors, start=1):
            self._say(f"{title}: earlier prompt {number} of {len(donors)}")
            self._engine.reset_prefix_cache()
            self._serve(donor, "exact", keep=True, max_tokens=1)

    def _best(self, what: str, chat: Chat, mode: str, repeats: int) -> _Served:
        """The fastest of some runs, each with an empty exact cache, and none of them a donor for the next."""
        runs = []
        for _ in range(repeats):
            self._say(what)
            self._engine.reset_prefix_cache()
            runs.append(self._serve(chat, mode, keep=False))
        self._engine.reset_prefix_cache()
        best = min(runs, key=lambda served: served.ttft_ms)
        return replace(best, runs_ms=tuple(served.ttft_ms for served in runs))

    def _serve(self, chat: Chat, mode: str, *, keep: bool = True, max_tokens: int = ANSWER_TOKENS) -> _Served:
        name = f"demo-{next(self._numbers)}"
        request = Request(name, Prompt(self._encode(chat)), Sampling(max_tokens=max_tokens), quality=mode)
        first: list[Tensor] = []

        def heard(_: Chunk) -> None:
            if not first and self._model.latest is not None:
                first.append(self._model.latest)

        stream = self._engine.submit(request, heard)
        while not stream.finished:
            self._engine.step()
        done = stream.completion()
        if done.receipt is None or not first:
            raise SemBlendError(f"a prompt of the demo failed: {done.detail}", hint="run again with --debug")
        if not keep:
            self._drop(name)
        return _Served(done.receipt, done.text, first[0])

    def _drop(self, donor_id: str) -> None:
        reuse = self._engine.reuse
        if reuse.semblend.forget(donor_id) and reuse.donor_kv is not None:
            reuse.donor_kv.drop(donor_id)

    def _forget(self) -> None:
        self._engine.reset_prefix_cache()
        self._engine.reuse.forget_donors()

    def _arm(self, workload: Workload, name: str, served: _Served, cold: _Served) -> Arm:
        return Arm(
            workload.key,
            workload.title,
            name,
            served.receipt,
            served.ttft_ms,
            served.runs_ms or (served.ttft_ms,),
            cold.ttft_ms / max(served.ttft_ms, 1e-6),
            word_f1(served.answer, cold.answer),
            next_token_kl(cold.first, served.first),
            served.answer.strip(),
            workload.fact in served.answer if workload.fact else None,
            workload.stale_fact in served.answer if workload.stale_fact else None,
        )


def word_f1(ours: str, theirs: str) -> float:
    """How much two answers say the same words, in [0, 1]; two empty answers agree.

    >>> word_f1("the red boat", "The boat")
    0.8
    """
    a, b = (Counter("".join(c if c.isalnum() else " " for c in text.lower()).split()) for text in (ours, theirs))
    if not a or not b:
        return float(a == b)
    return 2 * (a & b).total() / (a.total() + b.total())
