"""Made-up traffic with a known shape: a family is a list of slots, a request fills each of them with a block.

A slot says what kind of block stands there, how long it is and how it is shared: by everybody (one of ``pool`` blocks,
the first ones more popular), inside its session, or by nobody. So a family is data, and what a policy could gain on it
follows from a few numbers that a reader can check. No text is made: a cache sees ids, lengths and types.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Final

from semantickv.traces.request import TraceRequest
from semantickv.traces.segmentation import content_id
from semantickv.traces.trace import Trace
from semantickv.workloads.arrivals import Arrivals
from semblend.errors import InputError

SHARED, SESSION, ONCE = "shared", "session", "once"


@dataclass(frozen=True, slots=True)
class Slot:
    """One block of every request.

    ``scope`` shared: one of ``pool`` blocks of the whole workload, number k drawn with weight 1/k**``zipf``; session:
    the same from a pool of the session's own; once: a new block every time. With ``in_turn`` a shared pool is visited
    in turn, one block a request. ``stray`` is the share of requests that get a block of nobody else's instead.
    ``tokens`` is the range of lengths, ``chance`` the share of requests that have the slot at all.
    """

    type: str
    scope: str
    tokens: tuple[int, int]
    pool: int = 1
    zipf: float = 0.0
    in_turn: bool = False
    stray: float = 0.0
    chance: float = 1.0


@dataclass(frozen=True, slots=True)
class Phase:
    """Slots that hold for a share of the sessions, in order."""

    share: float
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """A named shape of traffic, in one phase or several."""

    name: str
    about: str
    phases: tuple[Phase, ...]

    def slots_at(self, share: float) -> tuple[int, tuple[Slot, ...]]:
        """Which phase and which slots hold when ``share`` (0 to 1) of the sessions have begun."""
        ends = list(accumulate(phase.share for phase in self.phases))
        number = next((at for at, end in enumerate(ends) if share * ends[-1] < end), len(ends) - 1)
        return number, self.phases[number].slots


def _steady(name: str, about: str, *slots: Slot) -> Family:
    return Family(name, about, (Phase(1.0, slots),))


FAMILIES: Final[Mapping[str, Family]] = MappingProxyType({family.name: family for family in (
    _steady(
        "low_memory_rag_stress",
        "Three documents asked for in turn just fit; questions and stray documents, never seen again, push them out.",
        Slot("system", SHARED, (40, 40)),
        Slot("retrieved_context", SHARED, (830, 850), pool=3, in_turn=True, stray=0.12),
        Slot("user", ONCE, (70, 100)),
    ),
    _steady(
        "shared_system_prompt_high_reuse",
        "One system prompt and one template for everybody, then a question; all three fit.",
        Slot("system", SHARED, (36, 36)),
        Slot("template", SHARED, (28, 28)),
        Slot("user", ONCE, (100, 136)),
    ),
    _steady(
        "tool_agent_session_reuse",
        "A long shared system prompt, short notes that come again inside their session only, results that never do.",
        Slot("system", SHARED, (180, 180)),
        Slot("template", SESSION, (6, 9)),
        Slot("assistant", SESSION, (6, 9)),
        Slot("tool_output", ONCE, (70, 110)),
        Slot("user", ONCE, (24, 44)),
    ),
    _steady(
        "legal_review_long_context",
        "A reviewer reads one long exhibit per session: it comes again inside the session and never after it.",
        Slot("system", SHARED, (16, 16)),
        Slot("template", SHARED, (16, 16)),
        Slot("legal_evidence", SESSION, (840, 960)),
        Slot("user", ONCE, (50, 90)),
    ),
    Family(
        "workload_shift_static_vs_adaptive",
        "First three documents in turn just fit and questions push them out; then two templates take their place.",
        (
            Phase(1 / 3, (
                Slot("system", SHARED, (40, 40)),
                Slot("retrieved_context", SHARED, (830, 860), pool=3, in_turn=True),
                Slot("user", ONCE, (90, 150)),
            )),
            Phase(2 / 3, (
                Slot("system", SHARED, (40, 40)),
                Slot("template", SHARED, (830, 860), pool=2, in_turn=True),
                Slot("user", ONCE, (90, 150)),
            )),
        ),
    ),
    _steady(
        "repeated_system",
        "A long system prompt, nothing else in common.",
        Slot("system", SHARED, (400, 400)),
        Slot("user", ONCE, (20, 120)),
    ),
    _steady(
        "rag_shared_corpus",
        "Questions over a corpus with popular documents, three to a prompt.",
        Slot("system", SHARED, (60, 60)),
        Slot("retrieved_context", SHARED, (200, 400), pool=40, zipf=0.9),
        Slot("retrieved_context", SHARED, (200, 400), pool=40, zipf=0.9),
        Slot("retrieved_context", SHARED, (200, 400), pool=40, zipf=0.9),
        Slot("user", ONCE, (15, 60)),
    ),
    _steady(
        "support_agent",
        "A help desk: policy, the customer's file, the last answers.",
        Slot("system", SHARED, (120, 120)),
        Slot("template", SHARED, (80, 140), pool=4),
        Slot("retrieved_context", SHARED, (150, 300), pool=20, zipf=1.0, chance=0.8),
        Slot("assistant", SESSION, (60, 160), pool=3, chance=0.7),
        Slot("user", ONCE, (15, 80)),
    ),
    _steady(
        "coding_assistant",
        "A repository's files, the open one most of the time.",
        Slot("system", SHARED, (150, 150)),
        Slot("code", SESSION, (300, 900), pool=4, zipf=1.2),
        Slot("code", SHARED, (200, 500), pool=15, zipf=1.0, chance=0.5),
        Slot("user", ONCE, (20, 100)),
    ),
)})  # fmt: skip


def generate(
    family: str, *, sessions: int, requests: int, seed: int, arrivals: Arrivals | None = None, tenants: int = 1
) -> Iterator[TraceRequest]:
    """Requests of a family in order of arrival: ``requests`` in each of ``sessions`` sessions.

    >>> first, *rest = generate("repeated_system", sessions=2, requests=2, seed=1)
    >>> first.block_types, len(rest), first.block_ids[0] == rest[-1].block_ids[0]
    (('system', 'user'), 3, True)
    """
    if family not in FAMILIES:
        raise InputError(f"unknown workload family {family!r}", hint="one of " + ", ".join(FAMILIES))
    if sessions < 1 or requests < 1 or tenants < 1:
        raise InputError("sessions, requests and tenants must be at least 1")
    made: list[TraceRequest] = []
    process = arrivals or Arrivals()
    for session, start in enumerate(process.starts(sessions, seed)):
        made.extend(_session(FAMILIES[family], session, session / sessions, start, requests, seed, process, tenants))
    return iter(sorted(made, key=lambda request: (request.arrival_s, request.request_id)))


def workload(families: Sequence[str], *, sessions: int, requests: int, seed: int, arrivals: Arrivals | None = None,
             tenants: int = 1) -> Trace:  # fmt: skip
    """The trace of one family or several, mixed by time of arrival."""
    mixed = [
        request
        for number, family in enumerate(families)
        for request in generate(
            family, sessions=sessions, requests=requests, seed=seed + number, arrivals=arrivals, tenants=tenants
        )
    ]
    mixed.sort(key=lambda request: (request.arrival_s, request.request_id))
    return Trace.from_requests(mixed, name="+".join(families))


def _session(
    family: Family, session: int, share: float, start: float, requests: int, seed: int, process: Arrivals, tenants: int
) -> Iterator[TraceRequest]:
    drawn = random.Random(f"{family.name} {seed} {session}")
    phase, slots = family.slots_at(share)
    tenant, at_s = f"tenant-{drawn.randrange(tenants)}" if tenants > 1 else "default", start
    for turn in range(requests):
        ids, tokens, types = [], [], []
        for place, slot in enumerate(slots):
            if slot.chance < 1 and drawn.random() >= slot.chance:
                continue
            name = _name(slot, drawn, session, turn, requests)
            key = f"{family.name}/{seed}/{phase}/{place}/{name}"
            ids.append(content_id(key))
            tokens.append(random.Random(key).randint(*slot.tokens))  # a block's length belongs to the block
            types.append(slot.type)
        yield TraceRequest(
            f"{family.name}-{session:05d}-{turn:03d}",
            round(at_s, 6),
            tuple(ids),
            tuple(tokens),
            tuple(types),
            output_tokens=drawn.randint(32, 256),
            tenant=tenant,
            session=f"{family.name}-{session:05d}",
        )
        at_s += process.think(drawn)


def _name(slot: Slot, drawn: random.Random, session: int, turn: int, requests: int) -> str:
    if slot.scope == ONCE or (slot.stray and drawn.random() < slot.stray):
        return f"{session}.{turn}"
    choice = 0
    if slot.in_turn:
        choice = (session * requests + turn) % slot.pool
    elif slot.pool > 1:
        weights = [1.0 / (rank + 1) ** slot.zipf for rank in range(slot.pool)]
        choice = drawn.choices(range(slot.pool), weights)[0]
    return f"{session}:{choice}" if slot.scope == SESSION else str(choice)
