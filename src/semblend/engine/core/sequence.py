"""What the engine keeps of a request while it answers, and the whole answer that it hands back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from semblend.confirm.receipt import Receipt
from semblend.engine.core.stops import AnswerText
from semblend.engine.model.paged_kv import KvPool
from semblend.errors import InputError, SemBlendError
from semblend.materialize.blend.quality import Blended, Pieces, Rejected
from semblend.plan.reuse_plan import Decline
from semblend.plan.selection import Positions
from semblend.prompt import Namespace, Prompt
from semblend.session.session import NEVER, ReuseSession
from semblend.wire.answer import Chunk, FinishReason, Logprob
from semblend.wire.request import Request

EXACT_TO_THE_END = 1 << 62
"""`Sequence.exact_until` of a sequence that holds no donor KV."""


class QueueFull(SemBlendError):  # noqa: N818  (a state of the queue that callers name, as in the standard library)
    """The engine has as many waiting requests as it takes; try again later."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    request_id: str
    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    receipt: Receipt | None
    logprobs: tuple[Logprob, ...] = ()
    detail: str = ""

    @classmethod
    def of(cls, chunks: list[Chunk]) -> Completion:
        """The answer that these chunks make up; the last of them must be the end."""
        last = chunks[-1]
        if last.finish_reason is None:
            raise InputError(f"request {last.request_id} has not ended", hint="wait for the chunk with a finish")
        return cls(
            last.request_id,
            tuple(token for chunk in chunks for token in chunk.token_ids),
            "".join(chunk.text for chunk in chunks),
            last.finish_reason,
            next((chunk.receipt for chunk in chunks if chunk.receipt), None),
            tuple(one for chunk in chunks for one in chunk.logprobs),
            last.detail,
        )


class Stream:
    """A request's handle: its chunks so far. ``listener`` is called in the engine's thread with each of them."""

    def __init__(self, request_id: str, listener: Callable[[Chunk], None] | None = None) -> None:
        self.request_id = request_id
        self.chunks: list[Chunk] = []
        self._listener = listener

    def put(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        if self._listener is not None:
            self._listener(chunk)

    @property
    def finished(self) -> bool:
        return bool(self.chunks) and self.chunks[-1].finish_reason is not None

    def completion(self) -> Completion:
        return Completion.of(self.chunks)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request while the engine works on it: its tokens, its blocks, and how far its KV is computed.

    ``session`` says what became of it besides: donors, receipt. ``computed`` positions have their KV in ``blocks``.
    ``to_fill``: donors are to be looked for, or are being put in place. ``max_length`` is where the answer has to end,
    in tokens of prompt and answer. ``offered_blocks`` went to the exact cache. ``unsettled``: all its KV was computed
    since it was last offered to the exact cache and as a donor. ``held``: positions of the prompt, ascending, where
    donor KV is in place and that the engine leaves out while it computes the others. ``filling`` is what the blender
    has still to do, ``blended`` what it has done. ``submitted`` is a time of the performance counter; ``compute_ms``
    went by until the first token.
    """

    request: Request
    session: ReuseSession
    stream: Stream
    text: AnswerText
    generator: torch.Generator
    max_length: int
    tokens: list[int]
    to_fill: bool = False
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    finish_reason: FinishReason | None = None
    submitted: float = field(default_factory=time.perf_counter)
    compute_ms: float = 0.0
    preemptions: int = 0
    blended: Blended | None = None
    slots: torch.Tensor | None = None
    held: Positions | None = None
    filling: Pieces[Blended | Rejected | Decline] | None = None
    offered_blocks: int = 0
    unsettled: bool = True

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt(self) -> Prompt:
        return self.session.prompt

    @property
    def receipt(self) -> Receipt | None:
        return self.session.receipt

    @property
    def exact_until(self) -> int:
        """KV from there on may be approximate and must not enter the exact cache."""
        return EXACT_TO_THE_END if self.session.approximate_from is None else self.session.approximate_from

    @property
    def namespace(self) -> Namespace:
        return self.prompt.namespace

    @property
    def tenant(self) -> str:
        return self.prompt.namespace.tenant

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def answer(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[self.prompt_tokens :]

    @property
    def in_prefill(self) -> bool:
        """More than the newest token lacks its KV."""
        return self.computed < len(self.tokens) - 1 or len(self.tokens) == self.prompt_tokens

    @property
    def missing_tokens(self) -> int:
        """How many of its tokens have no KV yet."""
        return self.count_missing(self.computed, len(self.tokens))

    def count_missing(self, start: int, end: int) -> int:
        """How many positions of ``[start, end)`` hold no donor KV."""
        held = 0 if self.held is None else int(np.diff(np.searchsorted(self.held, (start, end)))[0])
        return end - start - held

    def list_missing(self, start: int, end: int) -> Positions:
        """Positions of ``[start, end)`` that hold no donor KV, ascending."""
        positions = np.arange(start, end)
        return positions if self.held is None else positions[~np.isin(positions, self.held)]

    def find_end(self, count: int) -> int:
        """The position up to which ``count`` tokens have to be computed; what a donor holds behind them is left out."""
        if self.held is None:
            return self.computed + count
        missing = self.list_missing(self.computed, len(self.tokens))
        return int(missing[count]) if count < len(missing) else len(self.tokens)

    def slots_in(self, pool: KvPool) -> torch.Tensor:
        """Slots of all its blocks, by position; made anew only when it got another block."""
        size = len(self.blocks) * pool.block_tokens
        if self.slots is None or len(self.slots) != size:
            self.slots = pool.slots_of(self.blocks, 0, size)
        return self.slots

    def stop_filling(self) -> None:
        """Give up what a blender has still to do; the donors that it held are released."""
        if self.filling is not None:
            self.filling.close()
            self.filling = None

    def drop_kv(self) -> None:
        """Forget what was computed; the caller has freed the blocks."""
        self.blocks, self.slots = [], None
        self.computed = 0
        self.held = self.blended = None
        self.stop_filling()
        self.unsettled = True
        was_asked = self.session.epoch != NEVER
        self.session.restart()
        self.to_fill = self.to_fill or (was_asked and self.session.is_open and not self.session.restarted)
