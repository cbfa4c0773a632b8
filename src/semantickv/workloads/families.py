"""Made-up traffic with a known shape: a family is a list of block specs, and each request holds one block of each.

A block spec says what type of block it is, how long it is and how it is shared: by everybody (one of ``pool`` blocks,
the first ones more popular), inside its session, or by nobody. So a family is data, and what a policy could gain on it
follows from a few numbers that a reader can check. No text is made: a cache sees ids, lengths and types.

When sessions begin and how long people think is drawn from a seed (`Arrivals`). The loop is open: a session begins at
its time whether or not others have been served.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Final

from semantickv.traces.segmentation import hash_content
from semantickv.traces.trace import Trace, TraceRequest
from semblend.errors import InputError

PROCESSES: Final = ("sequential", "poisson", "gamma", "diurnal")
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """``rate`` sessions a second, and ``think_s`` seconds between two requests of a session (mean; 0: at once).

    sequential: evenly spaced, one session after the other (what the source text's workloads do); poisson; gamma:
    bursts where ``burstiness`` is below 1; diurnal: Poisson whose rate swings between ``trough`` and 1 of ``rate`` over
    ``period_s``.

    >>> list(Arrivals("sequential", rate=2.0).draw_starts(3, seed=0))
    [0.0, 0.5, 1.0]
    """

    process: str = "sequential"
    rate: float = 1.0
    think_s: float = 0.0
    burstiness: float = 0.3
    trough: float = 0.2
    period_s: float = DAY_S

    def __post_init__(self) -> None:
        if self.process not in PROCESSES:
            raise InputError(f"unknown arrival process {self.process!r}", hint="one of " + ", ".join(PROCESSES))
        for name in ("rate", "burstiness", "period_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"arrivals: {name} must be above 0", hint="rate is in sessions a second")
        if not self.think_s >= 0 or not 0 <= self.trough <= 1:
            raise InputError("arrivals: think_s must not be negative, trough lies between 0 and 1")

    def draw_starts(self, sessions: int, seed: int) -> Iterator[float]:
        """Draw the seconds at which ``sessions`` sessions begin, in order, from 0 on."""
        rng, now = random.Random(f"arrivals {seed}"), 0.0
        for number in range(sessions):
            if self.process == "sequential":
                yield number / self.rate
                continue
            yield now
            now += self._draw_gap(rng, now)

    def draw_think_s(self, rng: random.Random) -> float:
        """Draw the seconds until a session's next request: log-normal, because some pauses are very long."""
        sigma = 1.0
        return self.think_s * rng.lognormvariate(-sigma * sigma / 2, sigma) if self.think_s else 0.001

    def _draw_gap(self, rng: random.Random, now: float) -> float:
        """Draw the seconds until the next session begins."""
        if self.process == "gamma":
            return rng.gammavariate(self.burstiness, 1.0 / (self.rate * self.burstiness))
        gap = rng.expovariate(self.rate)
        while self.process == "diurnal" and rng.random() > self._compute_share(now + gap):  # thinning
            gap += rng.expovariate(self.rate)
        return gap

    def _compute_share(self, at_s: float) -> float:
        """Compute the share of ``rate`` that holds at a time of the day, for the diurnal process."""
        wave = 0.5 - 0.5 * math.cos(2 * math.pi * at_s / self.period_s)
        return self.trough + (1 - self.trough) * wave


SHARED, SESSION, ONCE = "shared", "session", "once"


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """One block of every request.

    ``scope`` shared: one of ``pool`` blocks of the whole workload, number k drawn with weight 1/k**``zipf``; session:
    the same from a pool of the session's own; once: a new block every time. With ``in_turn`` the requests take the
    blocks of a shared pool in turn. ``stray`` is the share of requests that get a new block instead. ``tokens`` is the
    range of lengths, ``chance`` the share of requests that have this block at all.
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
    """The block specs that hold for a share of the sessions, in order."""

    share: float
    specs: tuple[BlockSpec, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """A named shape of traffic, in one phase or several."""

    name: str
    about: str
    phases: tuple[Phase, ...]

    def find_phase(self, share: float) -> tuple[int, tuple[BlockSpec, ...]]:
        """Find the number and the block specs of the phase after ``share`` (0 to 1) of the sessions."""
        ends = list(accumulate(phase.share for phase in self.phases))
        number = next((at for at, end in enumerate(ends) if share * ends[-1] < end), len(ends) - 1)
        return number, self.phases[number].specs


def _build_family(name: str, about: str, *specs: BlockSpec) -> Family:
    """Build a family with a single phase."""
    return Family(name, about, (Phase(1.0, specs),))


FAMILIES: Final[Mapping[str, Family]] = MappingProxyType({family.name: family for family in (
    _build_family(
        "low_memory_rag_stress",
        "Three documents asked for in turn just fit; questions and stray documents, never seen again, push them out.",
        BlockSpec("system", SHARED, (40, 40)),
        BlockSpec("retrieved_context", SHARED, (830, 850), pool=3, in_turn=True, stray=0.12),
        BlockSpec("user", ONCE, (70, 100)),
    ),
    _build_family(
        "shared_system_prompt_high_reuse",
        "One system prompt and one template for everybody, then a question; all three fit.",
        BlockSpec("system", SHARED, (36, 36)),
        BlockSpec("template", SHARED, (28, 28)),
        BlockSpec("user", ONCE, (100, 136)),
    ),
    _build_family(
        "tool_agent_session_reuse",
        "A long shared system prompt, short notes that come again inside their session only, results that never do.",
        BlockSpec("system", SHARED, (180, 180)),
        BlockSpec("template", SESSION, (6, 9)),
        BlockSpec("assistant", SESSION, (6, 9)),
        BlockSpec("tool_output", ONCE, (70, 110)),
        BlockSpec("user", ONCE, (24, 44)),
    ),
    _build_family(
        "legal_review_long_context",
        "A reviewer reads one long exhibit per session: it comes again inside the session and never after it.",
        BlockSpec("system", SHARED, (16, 16)),
        BlockSpec("template", SHARED, (16, 16)),
        BlockSpec("legal_evidence", SESSION, (840, 960)),
        BlockSpec("user", ONCE, (50, 90)),
    ),
    Family(
        "workload_shift_static_vs_adaptive",
        "First three documents in turn just fit and questions push them out; then two templates take their place.",
        (
            Phase(1 / 3, (
                BlockSpec("system", SHARED, (40, 40)),
                BlockSpec("retrieved_context", SHARED, (830, 860), pool=3, in_turn=True),
                BlockSpec("user", ONCE, (90, 150)),
            )),
            Phase(2 / 3, (
                BlockSpec("system", SHARED, (40, 40)),
                BlockSpec("template", SHARED, (830, 860), pool=2, in_turn=True),
                BlockSpec("user", ONCE, (90, 150)),
            )),
        ),
    ),
    _build_family(
        "repeated_system",
        "A long system prompt, nothing else in common.",
        BlockSpec("system", SHARED, (400, 400)),
        BlockSpec("user", ONCE, (20, 120)),
    ),
    _build_family(
        "rag_shared_corpus",
        "Questions over a corpus with popular documents, three to a prompt.",
        BlockSpec("system", SHARED, (60, 60)),
        BlockSpec("retrieved_context", SHARED, (200, 400), pool=40, zipf=0.9),
        BlockSpec("retrieved_context", SHARED, (200, 400), pool=40, zipf=0.9),
        BlockSpec("retrieved_context", SHARED, (200, 400), pool=40, zipf=0.9),
        BlockSpec("user", ONCE, (15, 60)),
    ),
    _build_family(
        "support_agent",
        "A help desk: policy, the customer's file, the last answers.",
        BlockSpec("system", SHARED, (120, 120)),
        BlockSpec("template", SHARED, (80, 140), pool=4),
        BlockSpec("retrieved_context", SHARED, (150, 300), pool=20, zipf=1.0, chance=0.8),
        BlockSpec("assistant", SESSION, (60, 160), pool=3, chance=0.7),
        BlockSpec("user", ONCE, (15, 80)),
    ),
    _build_family(
        "coding_assistant",
        "A repository's files, the open one most of the time.",
        BlockSpec("system", SHARED, (150, 150)),
        BlockSpec("code", SESSION, (300, 900), pool=4, zipf=1.2),
        BlockSpec("code", SHARED, (200, 500), pool=15, zipf=1.0, chance=0.5),
        BlockSpec("user", ONCE, (20, 100)),
    ),
)})  # fmt: skip


def generate_requests(
    family: str, *, sessions: int, requests: int, seed: int, arrivals: Arrivals | None = None, tenants: int = 1
) -> Iterator[TraceRequest]:
    """Generate the requests of a family in order of arrival: ``requests`` in each of ``sessions`` sessions.

    >>> first, *rest = generate_requests("repeated_system", sessions=2, requests=2, seed=1)
    >>> first.block_types, len(rest), first.block_ids[0] == rest[-1].block_ids[0]
    (('system', 'user'), 3, True)
    """
    if family not in FAMILIES:
        raise InputError(f"unknown workload family {family!r}", hint="one of " + ", ".join(FAMILIES))
    if sessions < 1 or requests < 1 or tenants < 1:
        raise InputError("sessions, requests and tenants must be at least 1")
    made: list[TraceRequest] = []
    process = arrivals or Arrivals()
    for session, start in enumerate(process.draw_starts(sessions, seed)):
        made.extend(
            _generate_session(FAMILIES[family], session, session / sessions, start, requests, seed, process, tenants)
        )
    return iter(sorted(made, key=lambda request: (request.arrival_s, request.request_id)))


def generate_workload(
    families: Sequence[str],
    *,
    sessions: int,
    requests: int,
    seed: int,
    arrivals: Arrivals | None = None,
    tenants: int = 1,
) -> Trace:
    """Generate the trace of one family or several, mixed by time of arrival."""
    mixed = [
        request
        for number, family in enumerate(families)
        for request in generate_requests(
            family, sessions=sessions, requests=requests, seed=seed + number, arrivals=arrivals, tenants=tenants
        )
    ]
    mixed.sort(key=lambda request: (request.arrival_s, request.request_id))
    return Trace.from_requests(mixed, name="+".join(families))


def _generate_session(
    family: Family, session: int, share: float, start: float, requests: int, seed: int, process: Arrivals, tenants: int
) -> Iterator[TraceRequest]:
    """Generate the requests of one session."""
    rng = random.Random(f"{family.name} {seed} {session}")
    phase, specs = family.find_phase(share)
    tenant, at_s = f"tenant-{rng.randrange(tenants)}" if tenants > 1 else "default", start
    for turn in range(requests):
        ids, tokens, types = [], [], []
        for place, spec in enumerate(specs):
            if spec.chance < 1 and rng.random() >= spec.chance:
                continue
            name = _name_block(spec, rng, session, turn, requests)
            key = f"{family.name}/{seed}/{phase}/{place}/{name}"
            ids.append(hash_content(key))
            tokens.append(random.Random(key).randint(*spec.tokens))  # a block's length belongs to the block
            types.append(spec.type)
        yield TraceRequest(
            f"{family.name}-{session:05d}-{turn:03d}",
            round(at_s, 6),
            tuple(ids),
            tuple(tokens),
            tuple(types),
            output_tokens=rng.randint(32, 256),
            tenant=tenant,
            session=f"{family.name}-{session:05d}",
        )
        at_s += process.draw_think_s(rng)


def _name_block(spec: BlockSpec, rng: random.Random, session: int, turn: int, requests: int) -> str:
    """Choose the block that fills a spec in one request, and return its name."""
    if spec.scope == ONCE or (spec.stray and rng.random() < spec.stray):
        return f"{session}.{turn}"
    choice = 0
    if spec.in_turn:
        choice = (session * requests + turn) % spec.pool
    elif spec.pool > 1:
        weights = [1.0 / (rank + 1) ** spec.zipf for rank in range(spec.pool)]
        choice = rng.choices(range(spec.pool), weights)[0]
    return f"{session}:{choice}" if spec.scope == SESSION else str(choice)
