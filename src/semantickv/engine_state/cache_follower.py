"""Follows the caches of all replicas that publish KV events, beside the requests.

A prompt that was served is tokenized once, by the engine that served it (``POST /tokenize``), and its pieces are linked
to the blocks of its tokens: they are spread over these by their share of the text, and a piece is held while every
block under it is. The share is an estimate, off by a block or two where text and code alternate: enough to choose a
place, and nothing else is done with it. So an eviction reaches the memory of that replica. Where cache entries belong
to one tenant (by salts, or because there is only one), a document that stands in some engine's cache is known from its
second request on, whoever sent the first; elsewhere that would tell one tenant what another one sent.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import ceil
from typing import Any

from semantickv.edge.headers import RawHeaders
from semantickv.edge.upstream_call import Fault, OutgoingRequest, fetch
from semantickv.engine_state.events import (
    AllBlocksCleared,
    BlockChange,
    EngineBlocks,
    KvEvent,
    list_marks,
    split_event,
    start_chain,
)
from semantickv.engine_state.subscriber import EventSource, EventSubscriber, import_zmq
from semantickv.routing.fingerprint import PromptPieces
from semantickv.routing.locality import ReplicaMemory
from semantickv.routing.replica import Replica

LEAST_UNIT_TOKENS = 16
"""SGLang's pages may be one token long: so many tokens at least stand behind one link."""
MOST_LINKS = 1_000_000


def find_unit_step(block_size: int) -> int:
    """Blocks that are linked together.

    >>> find_unit_step(1), find_unit_step(16), find_unit_step(128)
    (16, 1, 1)
    """
    return -(-LEAST_UNIT_TOKENS // block_size)


def spread_pieces(pieces: PromptPieces, units: int, covered: float) -> list[range]:
    """The units under each piece; ``covered`` is the share of the prompt that full units cover.

    >>> spread_pieces(PromptPieces((1, 2), (3, 4), (50, 150), (1.0, 1.0)), 8, 1.0)
    [range(0, 2), range(2, 8)]
    """
    total = pieces.total_tokens
    ends = [0.0, *(units * done / (total * covered) for done in accumulate(pieces.tokens))]
    return [range(min(units, int(start)), min(units, ceil(end))) for start, end in pairwise(ends)]


@dataclass(slots=True, eq=False)
class _Prompt:
    id: int
    pieces: PromptPieces
    marks: Sequence[int]
    under: list[range]
    learns: bool
    is_present: list[bool] = field(default_factory=list)


class HeldPrompts:
    """The prompts of one replica, least recently linked first; at most ``most_links`` links to blocks."""

    def __init__(self, blocks: EngineBlocks, memory: ReplicaMemory, most_links: int = MOST_LINKS) -> None:
        self.blocks = blocks
        self.memory = memory
        self.forgotten = 0
        """Pieces that the memory let go of because the engine evicted them."""
        self._most_links = most_links
        self._links = 0
        self._prompts: OrderedDict[int, _Prompt] = OrderedDict()
        self._on_mark: dict[int, list[tuple[_Prompt, int]]] = {}
        self._holders: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._prompts)

    def knows(self, prompt_id: int) -> bool:
        """Whether a prompt is linked here already; if so it counts as just used."""
        if prompt_id not in self._prompts:
            return False
        self._prompts.move_to_end(prompt_id)
        return True

    def link(
        self, prompt_id: int, pieces: PromptPieces, marks: Sequence[int], prompt_tokens: int, *, learns: bool = True
    ) -> None:
        """Link a prompt whose blocks have ``marks``.

        With ``learns`` the memory takes over what the engine holds of it, whoever sent it. Without, it only forgets.
        """
        size = self.blocks.block_size
        step = find_unit_step(size) if size else 1
        units = list(marks[step - 1 :: step])
        if prompt_id in self._prompts or not units or not pieces.hashes:
            return
        covered = len(units) * step * size / prompt_tokens
        prompt = _Prompt(prompt_id, pieces, units, spread_pieces(pieces, len(units), covered), learns)
        self._prompts[prompt_id] = prompt
        for at, under in enumerate(prompt.under):
            prompt.is_present.append(False)
            for unit in under:
                self._on_mark.setdefault(units[unit], []).append((prompt, at))
                self._links += 1
            self._look(prompt, at)
        while self._links > self._most_links and len(self._prompts) > 1:
            self._unlink(next(iter(self._prompts)))

    def follow(self, change: BlockChange) -> None:
        """Take over what an event changed."""
        if change.is_cleared:
            self.clear()
            return
        for mark in (*change.stored, *change.removed):
            for prompt, at in self._on_mark.get(mark, ()):
                self._look(prompt, at)

    def clear(self) -> None:
        """The engine's cache is empty: so is the memory."""
        self._prompts.clear()
        self._on_mark.clear()
        self._holders.clear()
        self._links = 0
        self.memory.clear()

    def drop_links(self) -> None:
        """Events were lost: what is known stays as a guess, and later events about it mean nothing any more."""
        self._prompts.clear()
        self._on_mark.clear()
        self._holders.clear()
        self._links = 0

    def _look(self, prompt: _Prompt, at: int) -> None:
        """Compare one piece with the blocks under it."""
        under = prompt.under[at]
        is_present = bool(under) and all(self.blocks.holds(prompt.marks[unit]) for unit in under)
        if is_present is prompt.is_present[at]:
            return
        prompt.is_present[at] = is_present
        pieces = prompt.pieces
        for key, tokens in ((pieces.hashes[at], pieces.tokens[at]), (pieces.chains[at], 0)):
            if is_present:
                self._holders[key] += 1
                if prompt.learns:
                    self.memory.add(key, tokens)
            else:
                self._let_go(key, forget=True)

    def _let_go(self, key: int, *, forget: bool) -> None:
        self._holders[key] -= 1
        if self._holders[key] <= 0:
            del self._holders[key]
            if forget:
                self.forgotten += self.memory.drop(key)

    def _unlink(self, prompt_id: int) -> None:
        """Stop following a prompt; what the memory has of it stays until something newer needs the room."""
        prompt = self._prompts.pop(prompt_id)
        for at, under in enumerate(prompt.under):
            for unit in under:
                links = self._on_mark[prompt.marks[unit]]
                links.remove((prompt, at))
                self._links -= 1
                if not links:
                    del self._on_mark[prompt.marks[unit]]
            if prompt.is_present[at]:
                self._let_go(prompt.pieces.hashes[at], forget=False)
                self._let_go(prompt.pieces.chains[at], forget=False)


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


class FollowedCache:
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


class CacheFollower:
    """The caches that a router follows. `note_served` never waits; `run` does the work until it is cancelled."""

    def __init__(self, caches: Iterable[FollowedCache]) -> None:
        self.caches = {cache.replica.id: cache for cache in caches}
        self.tokenized = self.skipped = self.failed = 0
        self._waiting: asyncio.Queue[ServedPrompt] = asyncio.Queue(MOST_WAITING)
        self._tokens: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._remembered = 0
        self._early: deque[ServedPrompt] = deque(maxlen=MOST_EARLY)
        self._group: asyncio.TaskGroup | None = None
        self._listening: dict[str, asyncio.Task[None]] = {}

    def add(self, cache: FollowedCache) -> None:
        """Listen to one more replica, from now on."""
        self.caches[cache.replica.id] = cache
        if self._group is not None:
            self._listening[cache.replica.id] = self._group.create_task(self._listen(cache))

    def remove(self, name: str) -> None:
        """Listen to a replica no more."""
        self.caches.pop(name, None)
        if (task := self._listening.pop(name, None)) is not None:
            task.cancel()

    def note_served(self, prompt: ServedPrompt) -> None:
        """Take a prompt that was answered whole. One that is linked already costs nothing."""
        cache = self.caches.get(prompt.replica.id)
        if cache is None or not prompt.pieces.chains or cache.held.knows(prompt.id):
            return
        try:
            self._waiting.put_nowait(prompt)
        except asyncio.QueueFull:
            self.skipped += 1

    async def run(self) -> None:
        """Listen to every engine, and tokenize what was served."""
        async with asyncio.TaskGroup() as self._group:
            for cache in list(self.caches.values()):
                self.add(cache)
            self._group.create_task(self._tokenize_all())

    async def _listen(self, cache: FollowedCache) -> None:
        """Listen to one engine for ever; an address that cannot be reached as it is written is tried again."""
        while True:
            try:
                await cache.subscriber.run()
            except import_zmq().ZMQError:
                self.failed += 1
                cache.note_loss()
            await asyncio.sleep(LISTEN_AGAIN_S)

    async def _tokenize_all(self) -> None:
        while True:
            prompt = await self._next_prompt()
            tokens = self._tokens.get(prompt.id) or await self._tokenize(prompt)
            if prompt.replica.id not in self.caches:
                continue  # it was removed meanwhile
            if tokens and self.caches[prompt.replica.id].blocks.block_size:
                await self._link(prompt, tokens)
            elif tokens:
                self._early.append(prompt)  # its events are still under way, and with them the size of a block

    async def _next_prompt(self) -> ServedPrompt:
        """Wait for a prompt: one whose replica has spoken meanwhile, or a new one."""
        while True:
            for prompt in self._early:
                cache = self.caches.get(prompt.replica.id)
                if cache is None or cache.blocks.block_size:
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
        for cache in list(self.caches.values()):
            size = cache.blocks.block_size
            is_home = cache.replica is prompt.replica
            if not size or cache.held.knows(prompt.id) or not (is_home or prompt.learns):
                continue
            marks: list[int] = []
            chain = start_chain(prompt.salt)
            width = max(size, SLICE_TOKENS // size * size)
            for at in range(0, len(tokens), width):
                marks += list_marks(tokens[at : at + width], size, marks[-1] if marks else chain)
                await asyncio.sleep(0)
                if not is_home and not (marks and cache.blocks.holds(marks[0])):
                    break  # nothing of it is there
            else:
                cache.held.link(prompt.id, prompt.pieces, marks, len(tokens), learns=prompt.learns)

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
