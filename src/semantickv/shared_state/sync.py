"""Turns what happens here into messages, and messages of other routers into what this router knows.

Nothing here waits: `Sync.list_outgoing` and `Sync.take` are called by the link to Redis, the ``note_…`` methods by
requests. A router decides by its own memory alone, so a Redis that is gone costs news and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from semantickv.routing.fingerprint import PromptPieces
from semantickv.routing.replica import Replica
from semantickv.routing.router import EngineReuse, RouteDecision, Router, RouteRequest
from semantickv.routing.worker_evidence import WorkerEvidence
from semantickv.shared_state.messages import (
    MOST_KEYS,
    Failing,
    Hello,
    Known,
    Load,
    Message,
    Ordered,
    Placed,
    Refused,
    name_replica,
)
from semblend.arrange import Sent
from semblend.integration.dynamo.placement import WorkerKey

MOST_OUTGOING = 4096
"""Messages that wait for Redis. When it is gone, the oldest make room; a `Hello` brings what was missed."""
MOST_SNAPSHOT_KEYS = 64_000
"""Of one replica, the most recent so many hashes are told to a router that comes; some 2 million tokens."""
MOST_SNAPSHOT_ORDERS = 512
"""Of one replica, the last so many orders of passages are told to a router that comes."""
SNAPSHOT_PAUSE_S = 10.0
LOAD_LIFE_S = 3.0
"""The load that another router reported counts for so long."""


class Sync(ABC):
    """What the link to Redis asks of a router: messages that wait, all that it knows, and what others say."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.taken = self.unknown = self.dropped = 0
        self._now = clock
        self._waiting: deque[Message] = deque()
        self._owes_snapshot = False
        self._snapshot_at = float("-inf")

    def note_joined(self) -> None:
        """Redis is there, for the first time or again: ask the others, and tell them."""
        self._snapshot_at = float("-inf")
        self._put(Hello())
        self._put_snapshot()

    def list_outgoing(self, most: int) -> list[Message]:
        """Take the next messages that wait."""
        return [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]

    def list_loads(self) -> list[Message]:
        """What changes all the time, twice a second. A snapshot that is owed is put among what waits."""
        if self._owes_snapshot:
            self._put_snapshot()
        return []

    def take(self, sender: str, messages: list[Message]) -> None:
        """Take what another router says; what is about nobody that this router knows is counted and left out."""
        for message in messages:
            self.taken += 1
            if isinstance(message, Hello):
                self._put_snapshot()
            elif not self._take(sender, message):
                self.unknown += 1
        self.update_loads()

    def update_loads(self) -> None:  # noqa: B027  (Dynamo knows the loads of its workers)
        """Let what is old no longer count."""

    def describe(self) -> dict[str, Any]:
        """Counts for the operator."""
        return {"taken": self.taken, "waiting": len(self._waiting), "dropped": self.dropped}

    @abstractmethod
    def _take(self, sender: str, message: Message) -> bool:
        """Take one message; whether it is about somebody known."""

    @abstractmethod
    def _list_known(self) -> Iterable[Message]:
        """All that this router knows, as messages."""

    def _put(self, message: Message) -> None:
        if len(self._waiting) >= MOST_OUTGOING:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append(message)

    def _put_placed(self, name: str, pieces: PromptPieces, home: int = 0) -> None:
        hashes, chains, tokens = (list(one[:MOST_KEYS]) for one in (pieces.hashes, pieces.chains, pieces.tokens))
        self._put(Placed(name, hashes, chains, tokens, home))

    def _put_snapshot(self) -> None:
        """Tell everything that is known; not again before a pause is over, but then."""
        self._owes_snapshot = self._now() - self._snapshot_at < SNAPSHOT_PAUSE_S
        if self._owes_snapshot:
            return
        self._snapshot_at = self._now()
        for message in self._list_known():
            self._put(message)


SyncT = TypeVar("SyncT", bound=Sync)


def _list_entries(name: str, entries: Sequence[tuple[int, int]]) -> Iterator[Message]:
    """Keys and tokens of a memory, in parts that fit into a message."""
    for at in range(0, len(entries), MOST_KEYS):
        part = entries[at : at + MOST_KEYS]
        yield Known(name, [key for key, _ in part], [tokens for _, tokens in part])


def _read_pieces(message: Placed) -> PromptPieces:
    weights = (1.0,) * len(message.hashes)
    return PromptPieces(tuple(message.hashes), tuple(message.chains), tuple(message.tokens), weights)


class RouterSync(Sync):
    """What one router tells the others, and takes from them. ``probe`` asks a replica whether it is well."""

    def __init__(
        self,
        router: Router,
        probe: Callable[[Replica], Awaitable[bool]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(clock)
        self.router = router
        self._probe = probe
        self._loads: dict[tuple[str, str], tuple[float, Load]] = {}
        self._were_up: dict[str, bool] = {}
        self._probes: set[asyncio.Task[None]] = set()
        self._name_of: dict[str, str] = {}
        self.note_replicas()

    def note_replicas(self) -> None:
        """The router's replicas have changed."""
        replicas = self.router.replicas
        self._names = {name_replica(one.pool.address.url): one for one in replicas}
        # A request may still end on a replica that has left: its name is known to the end.
        self._name_of |= {replica.id: name for name, replica in self._names.items()}
        self._by_id = {replica.id: replica for replica in replicas}
        self._were_up = {one.id: self._were_up.get(one.id, one.can_serve) for one in replicas}

    def note_placed(self, decision: RouteDecision, request: RouteRequest) -> None:
        """A request was sent to a replica."""
        home = self.router.find_home_key(request)
        if request.pieces.hashes or home:
            self._put_placed(self._name_of[decision.replica.id], request.pieces, home)

    def note_refused(self, decision: RouteDecision, new: Sequence[int]) -> None:
        """The replica refused a request: what it alone brought is not there."""
        for at in range(0, len(new), MOST_KEYS):
            self._put(Refused(self._name_of[decision.replica.id], list(new[at : at + MOST_KEYS])))

    def note_arranged(self, decision: RouteDecision, sent: Sequence[Sent]) -> None:
        """The replica got passages in these orders."""
        for message in self._list_orders(decision.replica, sent):
            self._put(message)

    def list_loads(self) -> list[Message]:
        """The load of this moment, and the replicas that have begun to fail since the last time."""
        found = super().list_loads()
        for one in self.router.replicas:
            name = self._name_of[one.id]
            found.append(Load(name, one.running, max(0, one.waiting_tokens)))
            if self._were_up[one.id] and not one.can_serve:
                found.append(Failing(name))
            self._were_up[one.id] = one.can_serve
        return found

    def _list_known(self) -> Iterator[Message]:
        for one in self.router.replicas:
            yield from _list_entries(self._name_of[one.id], one.memory.list_recent(MOST_SNAPSHOT_KEYS))
            if one.arranger is not None:
                yield from self._list_orders(one, one.arranger.list_sent(MOST_SNAPSHOT_ORDERS))

    def _list_orders(self, replica: Replica, orders: Iterable[Sent]) -> Iterator[Message]:
        for sent in orders:
            if sent.keys and len(sent.keys) <= MOST_KEYS:
                name = self._name_of[replica.id]
                yield Ordered(name, sent.owner, sent.scope, sent.root, list(sent.keys), list(sent.sizes))

    def _take(self, sender: str, message: Message) -> bool:
        """Take a message about a replica that this router has."""
        assert not isinstance(message, Hello)
        replica = self._names.get(message.replica)
        if replica is None:
            return False
        if isinstance(message, Placed):
            self.router.note_placed_elsewhere(replica, _read_pieces(message), message.home)
        elif isinstance(message, Refused):
            replica.memory.forget(message.keys)
        elif isinstance(message, Known):
            for key, tokens in zip(message.keys, message.tokens, strict=True):
                replica.memory.add(key, tokens)
        elif isinstance(message, Ordered):
            if replica.arranger is not None:
                sizes = tuple(message.sizes)
                replica.arranger.take(Sent(message.owner, message.scope, message.root, tuple(message.keys), sizes))
        elif isinstance(message, Load):
            self._loads[sender, replica.id] = (self._now(), message)
        elif replica.can_serve:
            self._look_at(replica)
        return True

    def update_loads(self) -> None:
        """Add up what the others have on each replica; what is old no longer counts."""
        now = self._now()
        self._loads = {key: entry for key, entry in self._loads.items() if now - entry[0] <= LOAD_LIFE_S}
        for one in self.router.replicas:
            one.running_elsewhere = one.waiting_elsewhere = 0
        for (_, name), (_, load) in self._loads.items():
            if (replica := self._by_id.get(name)) is not None:
                replica.running_elsewhere += load.running
                replica.waiting_elsewhere += load.waiting_tokens

    def _look_at(self, replica: Replica) -> None:
        """Another router says that a replica fails: one look of our own decides."""
        if len(self._probes) >= len(self.router.replicas):
            return
        task = asyncio.ensure_future(self._check(replica))
        self._probes.add(task)
        task.add_done_callback(self._probes.discard)

    async def _check(self, replica: Replica) -> None:
        if not await self._probe(replica):
            for _ in range(replica.failed_probes_to_leave):  # the other router's word counts as the other signs
                replica.note_probe(False)

    def describe(self) -> dict[str, Any]:
        senders = {sender for sender, _ in self._loads}
        return {"routers_seen": len(senders), "unknown_replicas": self.unknown, **super().describe()}


class SharedEvidence(WorkerEvidence, Sync):
    """Worker evidence that several routers of one Dynamo deployment share; loads are Dynamo's to tell.

    A worker that cannot be reached is not told: others see that with their own next request, and a wrong word could
    take a good worker away.

    >>> from semblend.integration.dynamo.placement import WorkerState
    >>> from semblend.prompt import Namespace
    >>> here, there = (SharedEvidence(100_000, secret="s") for _ in range(2))
    >>> prompt = here.read(range(1000), Namespace())
    >>> here.note_placed(prompt, WorkerKey(7))
    >>> there.take("here", here.list_outgoing(9))
    >>> there.choose(prompt, [WorkerState(WorkerKey(1)), WorkerState(WorkerKey(7))]).worker
    WorkerKey(worker_id=7, dp_rank=0)
    """

    def __init__(
        self,
        most_tokens: int,
        *,
        reuse: EngineReuse = EngineReuse.SPANS,
        secret: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        WorkerEvidence.__init__(self, most_tokens, reuse=reuse, secret=secret, clock=clock)
        Sync.__init__(self, clock)

    def note_placed(self, prompt: PromptPieces, worker: WorkerKey) -> None:
        """Remember that a worker computes this prompt, and tell the others."""
        super().note_placed(prompt, worker)
        self._put_placed(write_worker(worker), prompt)

    def _list_known(self) -> Iterator[Message]:
        for worker, entries in self.list_known(MOST_SNAPSHOT_KEYS).items():
            yield from _list_entries(write_worker(worker), entries)

    def _take(self, sender: str, message: Message) -> bool:
        """Take a message about a worker; loads, faults and orders are not for this router."""
        del sender
        if not isinstance(message, (Placed, Known)) or (worker := read_worker(message.replica)) is None:
            return False
        if isinstance(message, Known):
            self.note_known(worker, zip(message.keys, message.tokens, strict=True))
        else:
            super().note_placed(_read_pieces(message), worker)
        return True

    def describe(self) -> dict[str, Any]:
        return {"unknown_workers": self.unknown, **super().describe()}


def write_worker(worker: WorkerKey) -> str:
    """The name of a worker between routers: its ids in Dynamo.

    >>> read_worker(write_worker(WorkerKey(7587890, 1))), read_worker("0c1f"), read_worker("1.2.3")
    (WorkerKey(worker_id=7587890, dp_rank=1), None, None)
    """
    return f"{worker.worker_id}.{worker.dp_rank}"


def read_worker(name: str) -> WorkerKey | None:
    """The worker of a name; None for any other."""
    words = name.split(".")
    if len(words) != 2 or not all(word.isascii() and word.isdigit() for word in words):
        return None
    return WorkerKey(int(words[0]), int(words[1]))
