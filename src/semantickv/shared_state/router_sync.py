"""Turns what happens here into messages, and messages of other routers into what this router knows.

Nothing here waits: `list_outgoing` and `take` are called by the link to Redis, the `note_…` methods by requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from semantickv.routing.fingerprint import PromptPieces
from semantickv.routing.replica import Replica
from semantickv.routing.router import RouteDecision, Router, RouteRequest
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
from semantickv.shared_state.outbox import MOST_SNAPSHOT_KEYS, Outbox, split_entries
from semblend.arrange import Sent

MOST_SNAPSHOT_ORDERS = 512
"""Of one replica, the last so many orders of passages are told to a router that comes."""
LOAD_LIFE_S = 3.0
"""The load that another router reported counts for so long."""


class RouterSync:
    """What one router tells the others, and takes from them. ``probe`` asks a replica whether it is well."""

    def __init__(
        self,
        router: Router,
        probe: Callable[[Replica], Awaitable[bool]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.router = router
        self.taken = self.unknown = 0
        self._outbox = Outbox(clock)
        self._probe = probe
        self._clock = clock
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

    # -- out ---------------------------------------------------------------------------------------------------------

    def note_placed(self, decision: RouteDecision, request: RouteRequest) -> None:
        """A request was sent to a replica."""
        pieces = request.pieces
        home = self.router.find_home_key(request)
        if not pieces.hashes and not home:
            return
        most = MOST_KEYS
        message = Placed(
            self._name_of[decision.replica.id],
            list(pieces.hashes[:most]), list(pieces.chains[:most]), list(pieces.tokens[:most]), home,
        )  # fmt: skip
        self._outbox.put(message)

    def note_refused(self, decision: RouteDecision, new: Sequence[int]) -> None:
        """The replica refused a request: what it alone brought is not there."""
        for at in range(0, len(new), MOST_KEYS):
            self._outbox.put(Refused(self._name_of[decision.replica.id], list(new[at : at + MOST_KEYS])))

    def note_arranged(self, decision: RouteDecision, sent: Sequence[Sent]) -> None:
        """The replica got passages in these orders."""
        for one in sent:
            self._put_order(decision.replica, one)

    def note_joined(self) -> None:
        """Redis is there, for the first time or again: ask the others, and tell them."""
        self._outbox.forget_pause()
        self._outbox.put(Hello())
        self._put_snapshot()

    def list_outgoing(self, most: int) -> list[Message]:
        """Take the next messages that wait."""
        return self._outbox.take(most)

    def list_loads(self) -> list[Message]:
        """The load of this moment, and the replicas that have begun to fail since the last time."""
        if self._outbox.owes_snapshot:
            self._put_snapshot()
        found: list[Message] = []
        for one in self.router.replicas:
            name = self._name_of[one.id]
            found.append(Load(name, one.running, max(0, one.waiting_tokens)))
            if self._were_up[one.id] and not one.can_serve:
                found.append(Failing(name))
            self._were_up[one.id] = one.can_serve
        return found

    def _put_snapshot(self) -> None:
        """Tell everything that is known; not again before a pause is over, but then."""
        if not self._outbox.is_snapshot_due():
            return
        for one in self.router.replicas:
            for keys, tokens in split_entries(one.memory.list_recent(MOST_SNAPSHOT_KEYS)):
                self._outbox.put(Known(self._name_of[one.id], keys, tokens))
            for sent in one.arranger.list_sent(MOST_SNAPSHOT_ORDERS) if one.arranger is not None else ():
                self._put_order(one, sent)

    def _put_order(self, replica: Replica, sent: Sent) -> None:
        if sent.keys and len(sent.keys) <= MOST_KEYS:
            name = self._name_of[replica.id]
            self._outbox.put(Ordered(name, sent.owner, sent.scope, sent.root, list(sent.keys), list(sent.sizes)))

    # -- in ----------------------------------------------------------------------------------------------------------

    def take(self, sender: str, messages: list[Message]) -> None:
        """Take what another router says. Replicas that this router does not have are left out."""
        for message in messages:
            self.taken += 1
            if isinstance(message, Hello):
                self._put_snapshot()
                continue
            replica = self._names.get(message.replica)
            if replica is None:
                self.unknown += 1
            elif isinstance(message, Placed):
                pieces = PromptPieces(
                    tuple(message.hashes), tuple(message.chains), tuple(message.tokens), (1.0,) * len(message.hashes)
                )
                self.router.note_placed_elsewhere(replica, pieces, message.home)
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
                self._loads[sender, replica.id] = (self._clock(), message)
            elif replica.can_serve:
                self._look_at(replica)
        self.update_loads()

    def update_loads(self) -> None:
        """Add up what the others have on each replica; what is old no longer counts."""
        now = self._clock()
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
        """Counts for the operator."""
        senders = {sender for sender, _ in self._loads}
        return {
            "routers_seen": len(senders), "taken": self.taken, "unknown_replicas": self.unknown,
            "waiting": len(self._outbox), "dropped": self._outbox.dropped,
        }  # fmt: skip
