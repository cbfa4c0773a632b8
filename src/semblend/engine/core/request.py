"""What is asked of the engine, what it keeps while it answers, and what it hands back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

import torch

from semblend.config import QUALITY_MODES
from semblend.confirm.receipt import Receipt
from semblend.engine.core.stops import AnswerText
from semblend.engine.model.paged_kv import KvPool
from semblend.engine.model.sampling import Logprobs, Sampling
from semblend.errors import InputError, SemBlendError
from semblend.materialize.blend.quality import Blended
from semblend.plan.reuse_plan import Decline, ReusePlan
from semblend.prompt import Namespace, Prompt

EXACT_TO_THE_END = 1 << 62
"""`Sequence.exact_until` of a sequence that holds no donor KV."""


class QueueFull(SemBlendError):  # noqa: N818  (a state of the queue that callers name, as in the standard library)
    """The engine has as many waiting requests as it takes; try again later."""


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt and how to answer it.

    ``namespace`` and ``cache_salt`` are walls: neither exact blocks nor donors cross them. ``quality`` overrides the
    engine's mode for this request; ``opt_out`` wants neither to use donors nor to become one. ``stop`` strings end the
    answer wherever they fall and are not part of it; ``stop_ids`` end it and give no text.

    >>> Request("r", Prompt([1, 2, 3]), stop="x").stop
    ('x',)
    """

    request_id: str
    prompt: Prompt
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    quality: str | None = None
    cache_salt: str = ""
    opt_out: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str) or not self.request_id:
            raise InputError("a request id must be a non-empty string", hint="use a fresh id for every request")
        if not isinstance(self.prompt, Prompt):
            raise InputError(f"expected a Prompt, got {type(self.prompt).__name__}", hint="Prompt(token_ids)")
        if self.quality is not None and self.quality not in QUALITY_MODES:
            raise InputError(f"quality={self.quality!r} is unknown", hint="one of " + ", ".join(QUALITY_MODES))
        if not isinstance(self.cache_salt, str):
            raise InputError(f"cache_salt is {type(self.cache_salt).__name__}, not str", hint="pass a string")
        object.__setattr__(self, "stop", _texts(self.stop))
        object.__setattr__(self, "stop_ids", tuple(int(token) for token in self.stop_ids))

    def check_fits(self, max_length: int, vocab: int) -> None:
        """Raise `InputError` where a context of ``max_length`` tokens and ``vocab`` token ids cannot answer this."""
        length = len(self.prompt)
        if length >= max_length:
            raise InputError(
                f"the prompt has {length} tokens, and this engine takes {max_length - 1} at most",
                hint="shorten the prompt, or serve with a larger context and KV pool",
            )
        highest = int(self.prompt.token_ids.max())
        if highest >= vocab:
            raise InputError(
                f"token id {highest} is outside the model's vocabulary of {vocab}",
                hint="tokenize with the model's own tokenizer",
            )
        foreign = [token for token, _ in self.sampling.logit_bias if token >= vocab]
        if foreign:
            raise InputError(
                f"logit_bias names token {foreign[0]}, and the model's vocabulary has {vocab}",
                hint="name token ids of this model's tokenizer",
            )

    def walled(self, **defaults: str) -> Prompt:
        """The prompt in the namespace its KV belongs to; ``defaults`` fill fields that are empty."""
        namespace = self.prompt.namespace
        filled = {name: value for name, value in defaults.items() if value and not getattr(namespace, name)}
        if self.cache_salt:
            # a pair, not a sum: ("a", "bc") and ("ab", "c") are different walls
            filled["salt"] = f"{len(namespace.salt)}:{namespace.salt}{self.cache_salt}"
        return Prompt(self.prompt.token_ids, self.prompt.text, replace(namespace, **filled))

    def copies(self, n: int) -> tuple[Request, ...]:
        """``n`` requests for ``n`` answers to one prompt; with a seed, each draws with its own."""
        if n == 1:
            return (self,)
        seed = self.sampling.seed
        return tuple(
            replace(
                self,
                request_id=f"{self.request_id}-{i}",
                sampling=self.sampling if seed is None else replace(self.sampling, seed=seed + i),
            )
            for i in range(n)
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """One step of an answer. The last one has ``finish``; the one after prefill has the ``receipt``.

    ``token`` is None where an answer ends without one: cancelled or failed, and ``detail`` says why. ``matched`` is
    the stop string or the token that ended it. ``recomputed`` comes with the receipt: the runs ``[start, end)`` of the
    prompt that a donor held and that were computed again, where the blender tells them.
    """

    request_id: str
    token: int | None = None
    text: str = ""
    logprobs: Logprobs | None = None
    finish: FinishReason | None = None
    receipt: Receipt | None = None
    matched: str | int | None = None
    detail: str = ""
    recomputed: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    request_id: str
    tokens: tuple[int, ...]
    text: str
    finish: FinishReason
    receipt: Receipt | None
    logprobs: tuple[Logprobs, ...] = ()
    detail: str = ""

    @classmethod
    def of(cls, chunks: list[Chunk]) -> Completion:
        """The answer that these chunks make up; the last of them must be the end."""
        last = chunks[-1]
        if last.finish is None:
            raise InputError(f"request {last.request_id} has not ended", hint="wait for the chunk with a finish")
        return cls(
            last.request_id,
            tuple(chunk.token for chunk in chunks if chunk.token is not None),
            "".join(chunk.text for chunk in chunks),
            last.finish,
            next((chunk.receipt for chunk in chunks if chunk.receipt), None),
            tuple(chunk.logprobs for chunk in chunks if chunk.logprobs),
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
        return bool(self.chunks) and self.chunks[-1].finish is not None

    def completion(self) -> Completion:
        return Completion.of(self.chunks)


@dataclass(slots=True)
class Times:
    """When things happened, on the performance counter; durations in milliseconds."""

    submitted: float = field(default_factory=time.perf_counter)
    lookup_ms: float | None = None
    load_ms: float | None = None
    compute_ms: float = 0.0
    ttft_ms: float | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """A request while the engine works on it: its tokens, its blocks, and how far its KV is computed.

    ``computed`` positions have their KV in ``blocks``. From ``exact_until`` on that KV may be approximate and must
    not enter the exact cache. ``decision`` came from the library, ``declined`` from the blender. ``max_length`` is
    where the answer has to end, in tokens of prompt and answer.
    """

    request: Request
    prompt: Prompt
    stream: Stream
    text: AnswerText
    generator: torch.Generator
    max_length: int
    tokens: list[int]
    arrival: int = 0
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    exact_tokens: int = 0
    exact_until: int = EXACT_TO_THE_END
    finish: FinishReason | None = None
    times: Times = field(default_factory=Times)
    preemptions: int = 0
    decision: ReusePlan | Decline | None = None
    declined: Decline | None = None
    blended: Blended | None = None
    receipt: Receipt | None = None
    slots: torch.Tensor | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def namespace(self) -> Namespace:
        return self.prompt.namespace

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

    def slots_in(self, pool: KvPool) -> torch.Tensor:
        """Slots of all its blocks, by position; made anew only when it got another block."""
        size = len(self.blocks) * pool.block_tokens
        if self.slots is None or len(self.slots) != size:
            self.slots = pool.slots_of(self.blocks, 0, size)
        return self.slots

    def drop_kv(self) -> None:
        """Forget what was computed; the caller has freed the blocks."""
        self.blocks, self.slots = [], None
        self.computed = 0
        self.exact_until = EXACT_TO_THE_END


def _texts(stop: str | tuple[str, ...] | list[str]) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in texts):
        raise InputError("a stop string must be a non-empty string", hint="leave stop out, or pass a list of strings")
    return texts
