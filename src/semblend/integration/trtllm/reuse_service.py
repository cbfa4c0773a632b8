"""What the two halves share: claims, copies, donors, receipts. Both run in one process and on the executor's thread.

TensorRT-LLM's order for a request, and what happens in it:

    offer     how many tokens behind its own hit shall we provide? They are prepared at once, in slots of our own, and
              checked; what is refused here is computed by the engine, and nothing was promised
    place     the request has its blocks
    take_copies, copy    before the step's forward pass: what was prepared goes into the blocks. This is all that is
              left to do behind a promise. If it fails the step fails, for the engine would answer from empty blocks
    finish    the request has ended: the exact part of its prompt becomes a donor, and its receipt is written

Nothing is offered before the twin has been seen to compute what the engine computes (`check_twin`): with every prompt
that is to become a donor, its first tokens through all layers and a sample of its positions in the first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from semblend.confirm.log_lines import LogFormat
from semblend.engine.model.model import PooledModel
from semblend.engine.model.paged_kv import KvPool
from semblend.errors import CapacityError, InputError, SemBlendError
from semblend.integration.trtllm.salts import read_salt
from semblend.integration.trtllm.twin_model import CHECKED_TOKENS, find_trusted_error, measure_disagreement
from semblend.materialize.contract import KvLayout, Layout, Rows, slots_of_blocks
from semblend.materialize.gate.observers import canary_positions, find_tolerance, measure_canary
from semblend.prompt import Namespace, Prompt, name_tenant
from semblend.session.local import LocalSessions, SlotPool
from semblend.session.session import SessionRequest, is_given

# -- TensorRT-LLM's KV pool as a layout, and copies between it and slots of our own.
#
# A connector gets one tensor, ``[blocks, layers, 2, numbers]``: keys, then values of each layer of a block. In which
# order a block holds its tokens and heads depends on the attention backend, and nothing tells. So both orders are
# candidates until a prompt that the engine has computed shows which one is right (`reuse_service`).


ORDERS = ("heads first", "tokens first")
"""``[heads, tokens, head_dim]`` and ``[tokens, heads, head_dim]`` within a block."""


def view_pool(pool: Tensor, order: str, *, kv_heads: int, head_dim: int) -> KvLayout:
    """The engine's pool as a layout; nothing is copied.

    >>> view_pool(torch.zeros(6, 2, 2, 96), "heads first", kv_heads=3, head_dim=8)
    KvLayout(layers=2, slots=24, kv_heads=3, head_dim=8, block_tokens=4, torch.float32 on cpu)
    """
    if pool.dim() != 4 or pool.shape[2] != 2 or pool.shape[3] % (kv_heads * head_dim):
        raise InputError(
            f"a KV pool of shape {list(pool.shape)} is not [blocks, layers, 2, tokens x {kv_heads} x {head_dim}]",
            hint="such an engine runs without reuse",
        )
    blocks = pool.shape[:3]
    if order == "heads first":
        parts = pool.view(*blocks, kv_heads, -1, head_dim).transpose(3, 4)
    else:
        parts = pool.view(*blocks, -1, kv_heads, head_dim)
    layers = range(pool.shape[1])
    return KvLayout(tuple(parts[:, n, 0] for n in layers), tuple(parts[:, n, 1] for n in layers))


def find_slots(block_ids: Sequence[int], layout: KvLayout, tokens: int) -> Tensor:
    """Slots of the first ``tokens`` of a prompt in these blocks; raises where a block is missing."""
    needed = list(block_ids[: -(-tokens // layout.block_tokens)])
    if len(needed) * layout.block_tokens < tokens or any(block < 0 for block in needed):
        raise SemBlendError(f"{tokens} tokens do not lie in {len(needed)} blocks", hint="report this: it is a bug")
    return slots_of_blocks(needed, layout.block_tokens, tokens, layout.device)


@torch.inference_mode()
def copy_kv(source: Layout, source_slots: Tensor, target: Layout, target_slots: Tensor) -> None:
    """Keys and values of some slots into others, layer by layer; queued on the current stream."""
    for layer in range(source.layers):
        target.scatter(layer, target_slots, *source.gather(layer, source_slots))


def read_request(request: Any, engine: Namespace, *, require_cache_salt: bool = False) -> SessionRequest:
    """A request of TensorRT-LLM as a session sees it. TensorRT-LLM computes the last token of a prompt itself."""
    tokens = np.array(request.get_tokens(0), dtype=np.int64)
    tenant = read_salt(find_salt(request)).tenant
    namespace = replace(engine, salt=tenant, tenant=name_tenant(tenant))
    return SessionRequest(
        request_id=str(request.request_id),
        prompt=Prompt(tokens, namespace=namespace),
        longest_prefix=len(tokens) - 1,
        unsupported=explain_decline(request, require_salt=require_cache_salt and not tenant) or "",
        source=request,
    )


def find_salt(request: Any) -> str | None:
    """The request's ``cache_salt``; None where it has none, or where this version shows a number in its place."""
    salt = getattr(request, "cache_salt", None)
    return salt if isinstance(salt, str) else None


def explain_decline(request: Any, *, require_salt: bool = False) -> str | None:
    """Why this request is computed without us, in one line; None for plain text generation."""
    if require_salt:
        return "this server reuses for requests with a cache_salt only (require_cache_salt), and it has none"
    if find_salt(request) is None and getattr(request, "cache_salt_id", None) is not None:
        return "its cache_salt is shown as a number, which names no tenant (cache_salt_id)"
    for name, why in (
        ("lora_task_id", "a LoRA adapter changes what its tokens compute"),
        ("multimodal_hashes", "multimodal tokens stand for inputs that token ids do not show"),
        ("prompt_embedding_table", "prompt embeddings have no tokens to compare"),
        ("return_context_logits", "it wants the logits of every token, so every token is computed"),
        ("is_generation_only_request", "its KV comes from another engine"),
        ("is_context_only_request", "its KV goes to another engine, which would take approximate KV as exact"),
    ):
        found = getattr(request, name, None)
        if is_given(found() if callable(found) else found):
            return why
    return None


log = logging.getLogger("tensorrt_llm.semblend")
Answer = TypeVar("Answer")

ENGINE: LogFormat = "trtllm"
NOT_PRIVATE = "its blocks enter the engine's reuse tree, where others would take moved KV for exact"
HAS_PREFIX = "the engine has found a prefix of its own, whose blocks are not known before the claim"
NOT_SEEN = "the twin has not been seen to compute what the engine computes"


@dataclass(frozen=True, slots=True)
class Copy:
    """Prepared KV of a request goes into these blocks. Plain values: TensorRT-LLM sends them to its workers."""

    request_id: str
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class EngineParts:
    """An engine that can be served: our model and its slots, the engine's pool in each order that it may have.

    ``reuses_blocks``: the engine keeps a reuse tree. ``namespace``: what all its requests have in common.
    """

    model: PooledModel
    orders: tuple[KvLayout, ...]
    namespace: Namespace
    reuses_blocks: bool = True


def make_slot_pool(pool: KvPool) -> SlotPool:
    """The slots of a pool of our own, in whole blocks."""

    def take(count: int) -> Tensor | None:
        try:
            return pool.slots_of(pool.allocate(pool.blocks_for(count)), 0, count)
        except CapacityError:
            return None

    def give_back(slots: Tensor) -> None:
        pool.free((slots[:: pool.block_tokens] // pool.block_tokens).tolist())

    return SlotPool(take, give_back, pool.block_tokens)


@dataclass(eq=False)
class ReuseService:
    """See the module. Without sessions it offers nothing."""

    sessions: LocalSessions | None = None
    parts: EngineParts | None = None
    blocks: KvLayout | None = None
    """The engine's pool, once it is known in which order it holds tokens and heads."""
    trusts_twin: bool = False
    _requests: dict[str, SessionRequest] = field(default_factory=dict)
    _promised: set[str] = field(default_factory=set)
    _placed: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def open(self, parts: EngineParts, make_sessions: Callable[[SlotPool], LocalSessions]) -> None:
        """Serve requests from now on."""
        self.parts, self._pool = parts, make_slot_pool(parts.model.pool)
        self.sessions = make_sessions(self._pool)

    # -- the scheduler's side ----------------------------------------------------------------------------------------

    def offer(self, request: Any, computed_tokens: int) -> int:
        """Tokens behind the engine's own hit that lie prepared in our slots now; 0 for none."""
        name = str(request.request_id)
        self._placed.pop(name, None)
        offered = self._guard("match", name, lambda sessions: self._offer(sessions, request, computed_tokens), 0)
        self._promised.discard(name)
        if offered:
            self._promised.add(name)
        return offered

    def place(self, request_id: Any, block_ids: list[int]) -> None:
        """The request has its blocks."""
        if str(request_id) in self._promised:
            self._promised.remove(str(request_id))
            self._placed[str(request_id)] = tuple(int(block) for block in block_ids)

    def take_copies(self) -> list[Copy]:
        """What is to be copied before the next forward pass; each once."""
        placed, self._placed = self._placed, {}
        return [Copy(name, blocks) for name, blocks in placed.items()]

    def finish(self, request: Any, block_ids: list[int]) -> None:
        """The request has ended, well or not."""
        name = str(request.request_id)
        self._placed.pop(name, None)
        self._promised.discard(name)
        waiting = self._requests.pop(name, None)
        if waiting is not None:
            self._guard("finish", name, lambda sessions: self._finish(sessions, waiting, request, block_ids), None)
            self._guard("release", name, lambda sessions: sessions.forget(name), None)

    # -- the worker's side -------------------------------------------------------------------------------------------

    def copy(self, copies: list[Copy]) -> None:
        """Put what was promised into the engine's blocks. Raises: an answer from empty blocks would be a wrong one."""
        for order in copies:
            tail = self.sessions.find_tail(order.request_id) if self.sessions is not None else None
            if tail is None or self.blocks is None or self.parts is None:
                raise SemBlendError(f"{order.request_id} was promised KV that is gone", hint="report this: it is a bug")
            try:
                there = find_slots(order.block_ids, self.blocks, len(tail))
                copy_kv(self.parts.model.layout, tail, self.blocks, there)
            finally:
                self._pool.give_back(tail)

    # -- parts -------------------------------------------------------------------------------------------------------

    def _offer(self, sessions: LocalSessions, request: Any, computed_tokens: int) -> int:
        assert self.parts is not None, "a sessions has an engine"
        waiting = read_request(request, self.parts.namespace, require_cache_salt=sessions.settings.require_cache_salt)
        self._requests[waiting.request_id] = waiting
        if why := self._explain_no_offer(request, computed_tokens):
            sessions.stand_back(waiting, computed_tokens, why)
            return 0
        if not sessions.offer(waiting, computed_tokens):
            return 0
        nothing = torch.zeros(0, dtype=torch.int64, device=self.parts.model.device)
        sessions.load(waiting.request_id, lambda: nothing)
        return sessions.work(waiting.request_id, busy=False) or 0

    def _explain_no_offer(self, request: Any, computed_tokens: int) -> str | None:
        assert self.parts is not None, "a sessions has an engine"
        if self.parts.reuses_blocks and not read_salt(find_salt(request)).is_one_time:
            return NOT_PRIVATE
        if computed_tokens:
            return HAS_PREFIX
        return None if self.trusts_twin else NOT_SEEN

    def _finish(self, sessions: LocalSessions, waiting: SessionRequest, request: Any, block_ids: list[int]) -> None:
        length = len(waiting.prompt)
        if len(request.get_tokens(0)) <= length:  # no token is out: the prompt may be incomplete
            return
        slots = self._pool.take(self._pool.round_up(length))
        try:
            kept = slots is not None and self._fetch(sessions, waiting, slots, block_ids)
            sessions.note_prompt(waiting.request_id, slots[:length] if slots is not None and kept else None)
        finally:
            if slots is not None:
                self._pool.give_back(slots)

    def _fetch(self, sessions: LocalSessions, waiting: SessionRequest, slots: Tensor, block_ids: list[int]) -> bool:
        """Copy a prompt's KV out of the engine's blocks; whether it is what the twin would have computed."""
        assert self.parts is not None, "a sessions has an engine"
        exact_until = sessions.find_exact_until(waiting.request_id)
        length = len(waiting.prompt) if exact_until is None else exact_until
        tokens = torch.from_numpy(waiting.prompt.token_ids[:length].astype(np.int64))
        if length < 1 or not self._check_twin(tokens, slots, block_ids):
            return False
        assert self.blocks is not None, "the check has found it"
        copy_kv(self.blocks, find_slots(block_ids, self.blocks, length), self.parts.model.layout, slots[:length])
        sample = canary_positions(torch.tensor([0]), torch.tensor([length]))
        rows = Rows.of(tokens[sample], sample, slots[:length])
        return bool(measure_canary(self.parts.model, rows) <= find_tolerance(self.parts.model.layout.dtype))

    def _check_twin(self, tokens: Tensor, scratch: Tensor, block_ids: list[int]) -> bool:
        """Whether the engine's blocks hold what the twin computes; the first time it also finds their order."""
        assert self.parts is not None, "a sessions has an engine"
        count = min(CHECKED_TOKENS, len(tokens))
        candidates = self.parts.orders if self.blocks is None else (self.blocks,)
        errors = [
            measure_disagreement(self.parts.model, tokens, scratch, held, find_slots(block_ids, held, count))
            for held in candidates
        ]
        best = min(range(len(errors)), key=errors.__getitem__)
        agrees = errors[best] <= find_trusted_error(self.parts.model.layout.dtype)
        if agrees and self.blocks is None:
            self.blocks = candidates[best]
            log.info("SemBlend serves this engine: the twin's KV differs from the engine's by %.2g", errors[best])
        if not agrees:
            log.warning("SemBlend offers nothing: the twin's KV differs from the engine's by %.2g", errors[best])
        self.trusts_twin = agrees
        return agrees

    def _guard(self, where: str, request_id: str, hook: Callable[[LocalSessions], Answer], otherwise: Answer) -> Answer:
        """The border: whatever fails behind it costs the request time, never its answer."""
        if self.sessions is None:
            return otherwise
        sessions = self.sessions
        return sessions.guard(where, request_id, lambda: hook(sessions), otherwise)


class MeetingPoint:
    """Where the two halves of an engine find each other: TensorRT-LLM makes both, with the same arguments object."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[object, ReuseService]] = {}

    def meet(self, llm_args: object) -> ReuseService:
        """The service of an engine; the first half makes it, the second takes it.

        >>> point, args = MeetingPoint(), object()
        >>> point.meet(args) is point.meet(args), point.meet(args) is point.meet(object())
        (True, False)
        """
        made = (llm_args, ReuseService())
        kept = self._waiting.setdefault(id(llm_args), made)  # one step: TensorRT-LLM makes the halves in two threads
        if kept is not made:
            self._waiting.pop(id(llm_args), None)
        return kept[1]
