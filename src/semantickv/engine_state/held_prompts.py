"""Joins an engine's blocks to the pieces of routed prompts, so that a replica's memory follows the engine's cache.

A prompt's tokens give its marks (`blocks`); its pieces are spread over them by their share of the text. A piece is held
while every block under it is. The share is an estimate, off by a block or two where text and code alternate: enough to
choose a place, and nothing else is done with it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import ceil

from semantickv.engine_state.blocks import BlockChange, EngineBlocks
from semantickv.routing.fingerprint import PromptPieces
from semantickv.routing.locality import ReplicaMemory

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
