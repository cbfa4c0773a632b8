"""A made-up help desk with retrieval, for a trace to try things on: ``semantickv collect --mock``.

Prompts are words drawn from a seed. The backend is a formula (a prefix cache that never forgets, a straight line, a
tail of slow requests) on a simulated clock. Every line says ``"mock": true``: no server was observed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from semantickv.traces.collection import Collector
from semantickv.traces.segmentation import Segmenter, hash_content
from semantickv.traces.trace_writer import TraceWriter
from semantickv.workloads.families import Arrivals
from semblend.errors import InputError

BASE_MS, TOKEN_MS = 42.0, 0.065
METADATA: Final = {"mock": True}
_VOCABULARY: Final = (
    "account address allow answer apply arrive before board branch bring cancel card carry change charge "
    "claim clerk close confirm contact copy cover credit customer date days deliver deposit desk document "
    "due early email enter exchange expire extend fare fee file find form free full guest handle holder "
    "hour include invoice issue item keep label late leave limit list loss luggage mail member month name "
    "notice number offer office open order original page paid paper parcel part pass period person place "
    "plan point policy port price proof purchase question rate reason receipt record refund reply report "
    "request return review rule sale seal seat sell send service ship sign staff stamp start state stay "
    "stop store take term ticket time track transfer travel valid visit voucher wait week weight window "
    "work write year "
)
_WORDS: Final = tuple(_VOCABULARY.split())
_ASKS: Final = (
    "Can I get a refund?", "Which form do I need?", "How long does it take?", "Who signs it?", "What does it cost?",
    "May I change the date?", "Where do I send it?", "Is it still valid?",
)  # fmt: skip


class MockClock:
    """A clock whose seconds pass only when ``now`` is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class MockBackend:
    """Answers no text but takes a realistic time: it counts which beginnings of prompts it has seen."""

    clock: MockClock
    rng: random.Random
    segmenter: Segmenter
    _seen: set[int] = field(default_factory=set)

    def stream(self, body: dict[str, Any], **_: Any) -> Iterator[dict[str, Any]]:
        """Stream one answer: advance the clock to the first token, then yield the usage."""
        total = cached = chain = 0
        hitting = True
        for block in self.segmenter.cut_messages(body["messages"]):
            chain = hash_content(f"{chain}/{block.content_id}")
            hitting = hitting and chain in self._seen
            cached += block.tokens if hitting else 0
            total += block.tokens
            self._seen.add(chain)
        tail = self.rng.expovariate(1 / 400) if self.rng.random() < 0.04 else 0.0  # it queued, once in a while
        took_ms = (BASE_MS + TOKEN_MS * (total - cached)) * self.rng.lognormvariate(0, 0.06) + tail
        out = self.rng.randint(20, 180)
        self.clock.now += took_ms / 1000
        yield {"choices": [{"delta": {"content": "ok"}}]}
        self.clock.now += out * 0.012
        details = {"cached_tokens": cached}
        yield {"usage": {"prompt_tokens": total, "completion_tokens": out, "prompt_tokens_details": details}}


def collect_mock(writer: TraceWriter, *, requests: int, seed: int, redact: bool = True, key: str = "") -> None:
    """Write ``requests`` lines of made-up traffic, the same for the same seed."""
    if requests < 1:
        raise InputError("--requests must be at least 1")
    clock, rng = MockClock(), random.Random(f"mock {seed}")
    segmenter = Segmenter(key=key)
    collector = Collector(writer, segmenter, redact, clock, METADATA)
    watched = collector.wrap(MockBackend(clock, rng, segmenter).stream)
    arrivals = Arrivals("gamma", rate=4.0, burstiness=0.5)
    policies = [f"You are the clerk of desk {number}. " + _draw_text(rng, 60) for number in range(3)]
    documents = [f"CONTEXT: Rule {number}. " + _draw_text(rng, rng.randint(80, 420)) for number in range(24)]
    popular = [1 / (rank + 1) ** 0.9 for rank in range(len(documents))]
    histories: dict[int, list[dict[str, str]]] = {}
    for number, at_s in enumerate(arrivals.draw_starts(requests, seed)):
        clock.now = at_s  # requests overlap: each arrives at its own time, whatever the one before it took
        visitor = rng.randrange(max(2, requests // 4))
        history = histories.setdefault(visitor, [{"role": "system", "content": rng.choice(policies)}])
        found = "\n\n".join(dict.fromkeys(rng.choices(documents, popular, k=3)))
        asked = f"{found}\n\nUSER: {rng.choice(_ASKS)} It is about number {number}, {_draw_text(rng, 12)}"
        body = {"model": "mock", "messages": [*history[:1], *history[1:][-4:], {"role": "user", "content": asked}]}
        for _ in watched(body, session=f"visitor {visitor}", tenant="ferry desk"):
            pass
        history += [{"role": "user", "content": asked}, {"role": "assistant", "content": _draw_text(rng, 40)}]


def _draw_text(rng: random.Random, words: int) -> str:
    """Draw sentences of ``words`` random words."""
    parts, left = [], words
    while left > 0:
        length = min(left, rng.randint(6, 14))
        parts.append(" ".join(rng.choices(_WORDS, k=length)).capitalize() + ".")
        left -= length
    return " ".join(parts)
