"""The embedded engine: ``step()`` is schedule, run, postprocess.

`submit` and `cancel` may be called from any thread and return at once; everything else happens inside `step`, in the
one thread that calls it. The semantic half (donors, receipts) lies in `engine.core.reuse`; without it this is an
ordinary engine with an exact prefix cache.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from typing import Any

from semblend.engine.core.config import EngineConfig
from semblend.engine.core.radix import RadixCache
from semblend.engine.core.reuse import Reuse
from semblend.engine.core.runner import Results, Runner
from semblend.engine.core.scheduler import Scheduler, StepPace
from semblend.engine.core.sequence import Completion, QueueFull, Sequence, Stream
from semblend.engine.core.stops import AnswerText, Detokenizer, NoText
from semblend.engine.model.model import DecoderModel
from semblend.engine.model.paged_kv import KvPool
from semblend.engine.model.sampling import Sampled, make_generator
from semblend.errors import InputError, SemBlendError
from semblend.eviction.policy import EvictionPolicy, guard_policy, make_policy
from semblend.facade import SemBlend
from semblend.materialize.blend.blender import Blender
from semblend.materialize.blend.quality import Pace
from semblend.materialize.gate.gate import OutcomeMemory
from semblend.prompt import Prompt
from semblend.reporting import report_policy_failure
from semblend.wire.answer import Chunk, FinishReason, Logprob
from semblend.wire.request import Request
from semblend.wire.sampling import Sampling

log = logging.getLogger("semblend.engine")


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy the engine is, in requests and blocks."""

    running: int
    waiting: int
    free_blocks: int
    cached_blocks: int
    blocks: int
    steps: int
    preemptions: int


class Engine:
    """Answers requests with a model; see the module's text for who may call what."""

    def __init__(
        self,
        model: DecoderModel,
        pool: KvPool,
        semblend: SemBlend | None = None,
        blender: Blender | None = None,
        config: EngineConfig | None = None,
        *,
        detokenizer: Detokenizer | None = None,
        outcomes: OutcomeMemory | None = None,
        pace: Pace | None = None,
    ) -> None:
        """``pace`` is that of the blender's pieces, where it works in pieces."""
        self.config = config or EngineConfig()
        self.model = model
        self.pool = pool
        self.detokenizer: Detokenizer = detokenizer or NoText()
        self.radix = RadixCache(pool, self._make_eviction_policy(semblend))
        self.reuse = Reuse(semblend, blender, pool, self.config, outcomes, pace)
        self.scheduler = Scheduler(pool, self.radix, self.config, StepPace(model.spec.attention_tokens))
        self.runner = Runner(model, pool, self.reuse, self.scheduler.learn, self._has_newcomer)
        self.max_length = min(
            self.config.max_context or model.spec.max_positions,
            model.spec.max_positions,
            (pool.blocks - 1) * pool.block_tokens,
        )
        self._lock = threading.Lock()  # guards the next four, which other threads touch
        self._active: dict[str, Sequence] = {}
        self._inbox: deque[Sequence] = deque()
        self._unwanted: dict[str, None] = {}
        self._closed = False
        self._arrivals = itertools.count()
        self._steps = 0
        self._emitted: list[Chunk] = []

    # -- from any thread -------------------------------------------------------------------------------------------

    def submit(self, request: Request, listener: Callable[[Chunk], None] | None = None) -> Stream:
        """Queue a request; `QueueFull` where too many wait, `InputError` where it can never be answered."""
        request.check_fits(self.max_length, self.model.spec.vocab)
        stream = Stream(request.request_id, listener)
        sequence = self._make_sequence(request, stream)
        with self._lock:
            if self._closed:
                raise SemBlendError("the engine is closed", hint="start a new one")
            if request.request_id in self._active:
                raise InputError(f"request {request.request_id} is under way", hint="give every request its own id")
            self.scheduler.refuse_if_full(len(self._inbox))
            self._active[request.request_id] = sequence
            self._inbox.append(sequence)
        return stream

    def cancel(self, request_id: str) -> bool:
        """End a request at the next step; False where it is not under way."""
        with self._lock:
            known = request_id in self._active
            if known:
                self._unwanted[request_id] = None
        return known

    @property
    def has_work(self) -> bool:
        return bool(self._active)

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting) + len(self._inbox),
            free_blocks=self.pool.free_blocks,
            cached_blocks=len(self.radix),
            blocks=self.pool.blocks - 1,
            steps=self._steps,
            preemptions=self.scheduler.preemptions,
        )

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def step(self) -> tuple[Chunk, ...]:
        """Compute one batch; returns what it said."""
        self._emitted = []
        self._take_in()
        batch = self.scheduler.schedule()
        if batch.sequences:
            self._steps += 1
            try:
                results = self.runner.run(batch)
                self.scheduler.charge(batch)
                self._postprocess(results)
            except Exception as error:  # the books of this step broke: the engine and the other requests live on
                log.exception("a step of %d tokens failed", batch.tokens)
                self._fail(batch.sequences, error)
        return tuple(self._emitted)

    def generate(
        self, prompts: Iterable[Request | Prompt | Items[int]], sampling: Sampling | None = None
    ) -> list[Completion]:
        """Answer all prompts and return their completions in order. No other thread may step meanwhile."""
        queued: deque[Request] = deque(self._as_request(prompt, sampling) for prompt in prompts)
        streams: list[Stream] = []
        while queued or self.has_work:
            while queued:
                try:
                    streams.append(self.submit(queued[0]))
                except QueueFull:
                    break
                queued.popleft()
            self.step()
        return [stream.completion() for stream in streams]

    def reset_prefix_cache(self) -> int:
        """Drop every exact block that is not in use now; returns how many blocks the cache let go."""
        return self.radix.reset()

    def abort(self, detail: str) -> None:
        """End every request and go on."""
        with self._lock:
            sequences = list(self._active.values())
            self._inbox.clear()
        for sequence in sequences:
            self._end(sequence, FinishReason.CANCELLED, detail)

    def close(self) -> None:
        """End every request and take no more."""
        with self._lock:
            self._closed = True
        self.abort("the engine was closed")

    def check(self) -> None:
        """Raise unless every block is free, cached, or held by a running sequence, and counted so."""
        self.pool.check()
        self.radix.check()
        holders: Counter[int] = Counter(self.radix.blocks())
        for sequence in self.scheduler.running:
            holders.update(sequence.blocks)
        for sequence in self.scheduler.waiting:
            if sequence.blocks:
                raise SemBlendError(f"request {sequence.request_id} holds blocks while it waits", hint="report this")
        for block in range(1, self.pool.blocks):
            if holders[block] != self.pool.owners(block):
                raise SemBlendError(
                    f"block {block} has {self.pool.owners(block)} owners, but {holders[block]} are known",
                    hint="a block leaked or was freed twice: report this",
                )

    # -- schedule --------------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Requests and cancellations that came since the last step."""
        with self._lock:
            arrived, self._inbox = self._inbox, deque()
            unwanted = [self._active[name] for name in self._unwanted if name in self._active]
            self._unwanted.clear()
            # moved under the lock: a request is always counted once, as arrived or as waiting
            self.scheduler.take_in(arrived)
        for sequence in unwanted:
            self._end(sequence, FinishReason.CANCELLED)

    def _has_newcomer(self) -> bool:
        """Whether a tenant has come that has nothing running: a long pass for another one is given up for it."""
        if not self._inbox:
            return False
        with self._lock:
            here = {sequence.tenant for sequence in self.scheduler.running}
            return any(sequence.tenant not in here for sequence in self._inbox)

    # -- postprocess -----------------------------------------------------------------------------------------------

    def _postprocess(self, results: Results) -> None:
        # Donor KV may hold what is no number: that costs its request time, and not its answer.
        results = [(one, found) for one, found in results if found is not None or not self.reuse.compute_instead(one)]
        for sequence, sampled in results:
            try:
                if sampled is None:
                    raise SemBlendError("the logits are not finite", hint="check penalties, weights and dtype")
                if isinstance(sampled, Exception):
                    raise sampled
                self._advance(sequence, sampled)
            except Exception as error:  # one request's fault must not end its neighbours
                log.exception("request %s failed", sequence.request_id)
                self._fail([sequence], error)
        for sequence, _ in results:  # copies and books, after everyone has heard their token
            try:
                self._settle(sequence)
            except Exception as error:  # whoever has ended must still be let go, or its blocks are lost
                log.exception("request %s could not be settled", sequence.request_id)
                self._fail([sequence], error)
                if sequence.blocks and sequence.finish_reason is not None:
                    self._retire(sequence, sequence.finish_reason)

    def _advance(self, sequence: Sequence, sampled: Sampled) -> None:
        """Append the token and say it; a token outside the vocabulary would break the next pass for everybody."""
        if not 0 <= sampled.token < self.model.spec.vocab:
            raise SemBlendError(f"token {sampled.token} is not in the vocabulary", hint="check the model's logits")
        receipt = self.reuse.confirm(sequence)
        sequence.tokens.append(sampled.token)
        text, sequence.finish_reason = self._read_text_and_finish(sequence, sampled.token)
        matched = None
        if sequence.finish_reason is FinishReason.STOP:
            matched = sampled.token if sequence.text.matched is None else sequence.text.matched
        runs = self.reuse.list_recomputed(sequence) if receipt is not None else ()
        self._say(
            sequence,
            text=text,
            token_ids=(sampled.token,),
            logprobs=self._describe_logprobs(sampled),
            finish_reason=sequence.finish_reason,
            matched=matched,
            receipt=receipt,
            recomputed=runs,
        )

    def _describe_logprobs(self, sampled: Sampled) -> tuple[Logprob, ...]:
        """The sampled token's log probability and those of the best ones, with their texts; empty where not asked."""
        if sampled.logprobs is None:
            return ()
        text = self.detokenizer.token_text
        top = tuple(Logprob(text(token), token, value) for token, value in sampled.logprobs.top)
        return (Logprob(text(sampled.token), sampled.token, sampled.logprobs.chosen, top),)

    def _settle(self, sequence: Sequence) -> None:
        """Keep what later requests can use, and let go of a sequence that has ended."""
        if not sequence.blocks:  # it failed, and has gone already
            return
        fresh, sequence.unsettled = sequence.unsettled, False  # after its first token, and after each preemption
        if fresh or sequence.finish_reason is not None:
            self._cache(sequence)
        if fresh:
            self.reuse.capture(sequence)
        if sequence.finish_reason is not None:
            self.reuse.capture_answered(sequence, busy=len(self.scheduler.running) > 1)
            self._retire(sequence, sequence.finish_reason)

    def _read_text_and_finish(self, sequence: Sequence, token: int) -> tuple[str, FinishReason | None]:
        request = sequence.request
        ends = () if request.sampling.ignore_eos else self.model.spec.eos_ids
        if token in ends or token in request.sampling.stop_token_ids:
            return sequence.text.flush(), FinishReason.STOP
        text = sequence.text.push(token)
        if sequence.text.matched is not None:
            return text, FinishReason.STOP
        if len(sequence.tokens) >= sequence.max_length:
            rest = sequence.text.flush()
            return text + rest, FinishReason.LENGTH if sequence.text.matched is None else FinishReason.STOP
        return text, None

    def _cache(self, sequence: Sequence) -> None:
        """Offer the sequence's full, exact blocks to the exact cache."""
        full = min(sequence.computed, sequence.exact_until) // self.pool.block_tokens
        self.radix.insert(
            sequence.namespace.digest,
            sequence.tokens[: full * self.pool.block_tokens],
            sequence.blocks[:full],
            exact_until=sequence.exact_until,
            offered=min(sequence.offered_blocks, full),
        )
        sequence.offered_blocks = max(sequence.offered_blocks, full)

    def _make_eviction_policy(self, semblend: SemBlend | None) -> EvictionPolicy | None:
        """The policy of the settings, behind a border: one that fails leaves an LRU cache and an event."""
        if semblend is None:
            return None
        policy = make_policy(semblend.config.eviction, self.pool.blocks - 1)
        return guard_policy(policy, partial(report_policy_failure, semblend.events))

    def _fail(self, sequences: Iterable[Sequence], error: BaseException) -> None:
        for sequence in sequences:
            if sequence.finish_reason is None:
                self._end(sequence, FinishReason.ERROR, f"{type(error).__name__}: {error}")

    def _end(self, sequence: Sequence, finish: FinishReason, detail: str = "") -> None:
        self._retire(sequence, finish)
        self._say(sequence, finish_reason=finish, detail=detail)

    def _retire(self, sequence: Sequence, finish: FinishReason) -> None:
        sequence.finish_reason = finish
        self.scheduler.remove(sequence)
        self.reuse.release(sequence)
        with self._lock:
            self._active.pop(sequence.request_id, None)

    def _say(self, sequence: Sequence, **fields: Any) -> None:
        chunk = Chunk(request_id=sequence.request_id, index=sequence.request.index, **fields)
        self._emitted.append(chunk)
        try:
            sequence.stream.put(chunk)
        except Exception:  # whoever listens has gone or is broken: that must not reach the engine
            log.exception("the listener of request %s failed", sequence.request_id)
            self.cancel(sequence.request_id)

    # -- requests --------------------------------------------------------------------------------------------------

    def _make_sequence(self, request: Request, stream: Stream) -> Sequence:
        arrival = next(self._arrivals)
        seed = request.sampling.seed
        if seed is None and self.config.seed is not None:
            seed = self.config.seed + arrival
        prompt = request.place_in_namespace(
            model=self.config.model_name, kv_dtype=str(self.pool.dtype).removeprefix("torch.")
        )
        session = self.reuse.open(request, prompt)
        return Sequence(
            request,
            session,
            stream,
            AnswerText(self.detokenizer.stream(), request.sampling.stop),
            make_generator(seed),
            max_length=min(self.max_length, len(prompt) + (request.sampling.max_tokens or self.max_length)),
            tokens=prompt.token_ids.tolist(),
            to_fill=self.reuse.may_fill(session),
        )

    def _as_request(self, prompt: Request | Prompt | Items[int], sampling: Sampling | None) -> Request:
        if isinstance(prompt, Request):
            return prompt
        asked = prompt if isinstance(prompt, Prompt) else Prompt(prompt)
        return Request(f"generate-{next(_generated)}", asked, sampling or Sampling())


_generated = itertools.count()
