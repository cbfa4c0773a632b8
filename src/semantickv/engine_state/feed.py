"""Follows the caches of all replicas that publish KV events, beside the requests.

A prompt that was served is tokenized once, by the engine that served it (``POST /tokenize``), and its pieces are linked
to the blocks of its tokens. So an eviction reaches the memory of that replica. Where cache entries belong to one tenant
(by salts, or because there is only one), a document that stands in some engine's cache is known from its second request
on, whoever sent the first; elsewhere that would tell one tenant what another one sent.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from semantickv.edge.headers import RawHeaders
from semantickv.edge.upstream_call import Fault, OutgoingRequest, fetch
from semantickv.engine_state.blocks import BlockChange, EngineBlocks, list_marks, split_event, start_chain
from semantickv.engine_state.events import AllBlocksCleared, KvEvent
from semantickv.engine_state.held_prompts import HeldPrompts
from semantickv.engine_state.subscriber import EventSource, EventSubscriber, import_zmq
from semantickv.routing.fingerprint import PromptPieces
from semantickv.routing.replica import Replica

MOST_WAITING = 256
"""Prompts that wait to be tokenized; beyond that new ones are left out and counted."""
LISTEN_AGAIN_S = 5.0
MOST_EARLY = 64
"""Prompts of replicas that have published nothing yet."""
EARLY_S = 0.2
MOST_ANSWER_BYTES = 32 << 20
MOST_REMEMBERED_TOKENS = 8_000_000
SLICE_BLOCKS = 256
"""After so many blocks the event loop may do something else: less than half a millisecond."""
SLICE_TOKENS = 1024
TOKENIZE_S = 10.0
_ASKED = ("model", "messages", "prompt", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt",
          "continue_final_message", "add_special_tokens", "reasoning_effort", "tool_choice")  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServedPrompt:
    """A prompt that a replica has computed: what was asked, and what the engine said of its length."""

    replica: Replica
    pieces: PromptPieces
    fields: Mapping[str, Any]
    salt: str
    authorization: bytes
    prompt_tokens: int | None
    learns: bool = False
    """What engines hold of it counts, whoever sent it: its cache entries are its tenant's alone."""

    @property
    def id(self) -> int:
        """The chain over all of it: equal prompts of one tenant and model have one id."""
        return self.pieces.chains[-1]


class ReplicaFeed:
    """What one replica's events say. Takes them in small slices: a storm of events must not hold up a request."""

    def __init__(self, replica: Replica, source: EventSource) -> None:
        self.replica = replica
        self.blocks = EngineBlocks()
        self.held = HeldPrompts(self.blocks, replica.memory)
        self.subscriber = EventSubscriber(source, self)

    async def take(self, events: list[KvEvent]) -> None:
        """Apply events in order."""
        done = 0
        for event in events:
            for part in split_event(event, SLICE_BLOCKS):
                self._follow(self.blocks.apply(part))
                done += 1 if isinstance(part, AllBlocksCleared) else len(part.block_hashes)
                if done >= SLICE_BLOCKS:
                    done = 0
                    await asyncio.sleep(0)

    def _follow(self, change: BlockChange) -> None:
        if change.is_cleared and self.subscriber.is_catching_up:
            self.held.drop_links()  # emptied before we listened; what this router has placed there since is not gone
            return
        self.held.follow(change)
        if change.is_cleared:
            self.replica.forget_all()

    def note_loss(self) -> None:
        """Begin anew: blocks that were removed unseen must not count as held for ever."""
        self.blocks.clear()
        self.held.drop_links()

    def describe(self) -> dict[str, Any]:
        """Counts for the operator."""
        one = self.subscriber
        return {
            "blocks": len(self.blocks), "block_size": self.blocks.block_size, "linked_prompts": len(self.held),
            "evicted_pieces": self.held.forgotten, "orphans": self.blocks.orphans, "batches": one.batches,
            "replayed": one.replayed, "bad": one.bad, "losses": one.losses, "restarts": one.restarts,
        }  # fmt: skip


class EngineFeeds:
    """All feeds of a router. `note_served` never waits; `run` does the work until it is cancelled."""

    def __init__(self, feeds: Iterable[ReplicaFeed]) -> None:
        self.feeds = {feed.replica.id: feed for feed in feeds}
        self.tokenized = self.skipped = self.failed = 0
        self._waiting: asyncio.Queue[ServedPrompt] = asyncio.Queue(MOST_WAITING)
        self._tokens: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._remembered = 0
        self._early: deque[ServedPrompt] = deque(maxlen=MOST_EARLY)
        self._group: asyncio.TaskGroup | None = None
        self._listening: dict[str, asyncio.Task[None]] = {}

    def add(self, feed: ReplicaFeed) -> None:
        """Listen to one more replica, from now on."""
        self.feeds[feed.replica.id] = feed
        if self._group is not None:
            self._listening[feed.replica.id] = self._group.create_task(self._listen(feed))

    def remove(self, name: str) -> None:
        """Listen to a replica no more."""
        self.feeds.pop(name, None)
        if (task := self._listening.pop(name, None)) is not None:
            task.cancel()

    def note_served(self, prompt: ServedPrompt) -> None:
        """Take a prompt that was answered whole. One that is linked already costs nothing."""
        feed = self.feeds.get(prompt.replica.id)
        if feed is None or not prompt.pieces.chains or feed.held.knows(prompt.id):
            return
        try:
            self._waiting.put_nowait(prompt)
        except asyncio.QueueFull:
            self.skipped += 1

    async def run(self) -> None:
        """Listen to every engine, and tokenize what was served."""
        async with asyncio.TaskGroup() as self._group:
            for feed in list(self.feeds.values()):
                self.add(feed)
            self._group.create_task(self._tokenize_all())

    async def _listen(self, feed: ReplicaFeed) -> None:
        """Listen to one engine for ever; an address that cannot be reached as it is written is tried again."""
        while True:
            try:
                await feed.subscriber.run()
            except import_zmq().ZMQError:
                self.failed += 1
                feed.note_loss()
            await asyncio.sleep(LISTEN_AGAIN_S)

    async def _tokenize_all(self) -> None:
        while True:
            prompt = await self._next_prompt()
            tokens = self._tokens.get(prompt.id) or await self._tokenize(prompt)
            if prompt.replica.id not in self.feeds:
                continue  # it was removed meanwhile
            if tokens and self.feeds[prompt.replica.id].blocks.block_size:
                await self._link(prompt, tokens)
            elif tokens:
                self._early.append(prompt)  # its events are still under way, and with them the size of a block

    async def _next_prompt(self) -> ServedPrompt:
        """Wait for a prompt: one whose replica has spoken meanwhile, or a new one."""
        while True:
            for prompt in self._early:
                feed = self.feeds.get(prompt.replica.id)
                if feed is None or feed.blocks.block_size:
                    self._early.remove(prompt)
                    return prompt
            try:
                async with asyncio.timeout(EARLY_S if self._early else None):
                    return await self._waiting.get()
            except TimeoutError:
                continue

    async def _tokenize(self, prompt: ServedPrompt) -> tuple[int, ...]:
        """Ask the replica for the prompt's tokens; none if it does not say, or says another number than before."""
        ids = prompt.fields.get("prompt")
        tokens = tuple(ids) if isinstance(ids, list) and ids and type(ids[0]) is int else await ask_tokens(prompt)
        if not tokens or (prompt.prompt_tokens is not None and prompt.prompt_tokens != len(tokens)):
            self.failed += 1
            return ()
        self.tokenized += 1
        self._tokens[prompt.id] = tokens
        self._remembered += len(tokens)
        while self._remembered > MOST_REMEMBERED_TOKENS:
            self._remembered -= len(self._tokens.popitem(last=False)[1])
        return tokens

    async def _link(self, prompt: ServedPrompt, tokens: tuple[int, ...]) -> None:
        """Link the prompt where it was served, and wherever its first block is held."""
        for feed in list(self.feeds.values()):
            size = feed.blocks.block_size
            is_home = feed.replica is prompt.replica
            if not size or feed.held.knows(prompt.id) or not (is_home or prompt.learns):
                continue
            marks: list[int] = []
            chain = start_chain(prompt.salt)
            width = max(size, SLICE_TOKENS // size * size)
            for at in range(0, len(tokens), width):
                marks += list_marks(tokens[at : at + width], size, marks[-1] if marks else chain)
                await asyncio.sleep(0)
                if not is_home and not (marks and feed.blocks.holds(marks[0])):
                    break  # nothing of it is there
            else:
                feed.held.link(prompt.id, prompt.pieces, marks, len(tokens), learns=prompt.learns)

    def describe(self) -> dict[str, Any]:
        """Counts for the operator."""
        return {"tokenized": self.tokenized, "skipped": self.skipped, "failed": self.failed}


async def ask_tokens(prompt: ServedPrompt) -> tuple[int, ...]:
    """Ask an engine's ``/tokenize`` for the tokens of a prompt, as vLLM and SGLang have it; none after any fault."""
    fields = {name: prompt.fields[name] for name in _ASKED if name in prompt.fields}
    headers: RawHeaders = [(b"content-type", b"application/json")]
    if prompt.authorization:
        headers = [*headers, (b"authorization", prompt.authorization)]
    request = OutgoingRequest("POST", "/tokenize", headers, json.dumps(fields).encode())
    answer = await fetch(prompt.replica.pool, request, TOKENIZE_S, max_bytes=MOST_ANSWER_BYTES)
    if isinstance(answer, Fault) or answer.status != 200:
        return ()
    try:
        tokens = json.loads(answer.body)["tokens"]
        return tuple(tokens) if all(type(one) is int for one in tokens) else ()
    except (ValueError, KeyError, TypeError, RecursionError):
        return ()
