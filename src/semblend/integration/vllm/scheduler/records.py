"""What the scheduler half knows: of the engine, and of one request while it is with us."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from semblend.confirm.receipt import Receipt
from semblend.integration.vllm.orders import Loaded
from semblend.integration.vllm.scheduler.hash_chain import Salted
from semblend.integration.vllm.scheduler.healing import LoadCost
from semblend.materialize.gate.gate import OutcomeMemory
from semblend.plan.reuse_plan import Decline, ReusePlan
from semblend.prompt import Namespace, Prompt
from semblend.quality import GATED_MODE, find_path

_WEIGHTS = " weights:"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What changes with the weights only; ``refusal`` says why nothing can be reused in this engine, if so.

    ``pass_rows``: what a pass of ours costs beside its rows, in rows, as the workers have measured it; 0 before.
    """

    version: str
    namespace: Namespace
    block_tokens: int
    hash_block_tokens: int
    refusal: str | None = None
    pass_rows: int = 0

    @property
    def knows_weights(self) -> bool:
        """Whether the workers have said which weights they have."""
        return _WEIGHTS in self.namespace.revision


def name_weights(facts: EngineFacts, digest: str) -> EngineFacts:
    """The facts with the weights as part of the namespace, in place of those that were named there before.

    >>> facts = EngineFacts("0.32.0", Namespace(model="m", revision="main"), 16, 16)
    >>> name_weights(name_weights(facts, "aa"), "bb").namespace.revision
    'main weights:bb'
    """
    revision = facts.namespace.revision.partition(_WEIGHTS)[0]
    return replace(facts, namespace=replace(facts.namespace, revision=f"{revision}{_WEIGHTS}{digest}"))


@dataclass(slots=True)
class Share:
    """Approximate blocks of one prompt; ``loaded`` is None while they are being filled for request ``owner``."""

    prompt: bytes
    key: bytes
    owner: str
    plan: ReusePlan
    loaded: Loaded | None = None


def move_prompt(prompt: Prompt, facts: EngineFacts) -> Prompt:
    """The prompt with the weights that these facts name in its namespace."""
    return Prompt(prompt.token_ids, prompt.text, replace(prompt.namespace, revision=facts.namespace.revision))


@dataclass(slots=True)
class Record:
    """One request while it is with us.

    ``declined``: why a request of its kind is computed without us; None when it is not. It is found once, when the
    request arrives: connectors between engines clear their flags in the request after they have loaded it.
    ``in_vain``: why a reuse is expected to be in vain. vLLM may ask for a request in many steps; it is judged once.
    ``ordered``: the plan as the worker has it, or had for the equal prompt whose blocks this one shares.
    ``share``: the blocks of an equal prompt that it looks for, or has; it found ``found_tokens``.
    ``filled``: its load is complete, or the blocks that it shares are. ``entered``: and vLLM has them in its prefix
    cache. ``rejected``: never claimed again. ``cost``: of the load that was last considered, for `healing`.
    ``brought_from``: another connector brings the tokens from there on, and its load may run in the request's first
    step. ``spoiled``: why some of what its KV is computed on is wrong.
    """

    request: Any
    prompt: Prompt
    mode: str
    declined: str | None = None
    local_tokens: int = 0
    decision: ReusePlan | Decline | None = None
    claim_end: int = 0
    seen_epoch: int = -1
    lookup_ms: float | None = None
    name: bytes | None = None
    salted: Salted | None = None
    own_hashes: frozenset[bytes] = frozenset()
    first_block: int = 0
    kept_out: int = 0
    block_ids: list[int] | None = None
    admitted: bool = False
    ordered: ReusePlan | None = None
    loading: bool = False
    filled: bool = False
    entered: bool = False
    share: Share | None = None
    found_tokens: int = 0
    rejected: bool = False
    served: bool = False
    captured: bool = False
    restarted: bool = False
    finished: bool = False
    loaded: Loaded | None = None
    receipt: Receipt | None = None
    judged: bool = False
    in_vain: Decline | None = None
    cost: LoadCost | None = None
    brought_from: int | None = None
    spoiled: str | None = None

    @property
    def is_gated(self) -> bool:
        """Whether the gate decides about its donor KV."""
        return find_path(self.mode) == GATED_MODE

    @property
    def claimed(self) -> bool:
        return self.claim_end > 0

    @property
    def is_settled(self) -> bool:
        """Its prompt is complete, nothing approximate is in its blocks, and it holds no donors."""
        return self.served and self.salted is None and (self.admitted or not self.claimed)

    @property
    def exact_end(self) -> int:
        """Exact KV ends where moved KV begins."""
        if self.salted is not None and self.ordered is not None:
            return self.ordered.spans[0].target_start
        return len(self.prompt)

    def start_over(self) -> None:
        """vLLM has taken its blocks back."""
        self.admitted, self.restarted, self.block_ids, self.seen_epoch = False, True, None, -1
        self.filled = self.entered = False
        self.share = self.loaded = self.ordered = self.brought_from = None
        self.kept_out = 0

    def begin_step(self, computed_tokens: int) -> int:
        """The first token whose KV is written in the next step of a request with ``computed_tokens``."""
        start, self.brought_from = self.brought_from, None
        return computed_tokens if start is None else min(start, computed_tokens)

    def find_block_in(self, block_ids: Set[int], block_tokens: int) -> int | None:
        """The place of the first block that is one of these, among those that its KV is computed on.

        While it is loaded that is its exact prefix: the others are named by its own load, where that is refused.
        """
        blocks = self.block_ids or []
        read = blocks[: self.local_tokens // block_tokens] if self.loading else blocks
        return next((at for at, block in enumerate(read) if block in block_ids), None)


class RecordBook(dict[str, Record]):
    """Every request that is with us, and those ``open`` ones that a step has to look at: a request that only decodes
    costs a step nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.open: dict[str, Record] = {}

    def add(self, request_id: str, record: Record) -> Record:
        self[request_id] = self.open[request_id] = record
        return record

    def remove(self, request_id: str) -> Record | None:
        self.open.pop(request_id, None)
        return self.pop(request_id, None)

    @property
    def any_unserved(self) -> bool:
        return any(not record.served for record in self.open.values())

    def settle(self) -> None:
        """Close those about which no later step has anything to decide."""
        for request_id in [name for name, record in self.open.items() if record.is_settled]:
            del self.open[request_id]


def learn_from(record: Record, outcomes: OutcomeMemory) -> None:
    """Tell the memory what a load of mode balanced has cost."""
    plan, loaded = record.ordered, record.loaded
    if record.is_gated and plan is not None and loaded is not None and record.share is None:
        outcomes.learn(plan, record.prompt.namespace, record.mode, work=loaded.work, declined=loaded.reason)


def keep_block_tables(cached: Any, records: Mapping[str, Record]) -> None:
    """Blocks that vLLM has added to requests which go on."""
    for request_id, new_blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if not new_blocks:  # nearly always, for a request that decodes
            continue
        record = records.get(request_id)
        if record is not None and record.block_ids is not None and request_id not in cached.resumed_req_ids:
            record.block_ids.extend(new_blocks[0])


def iterate_scheduled(output: Any) -> Iterator[tuple[str, int]]:
    """``(request, tokens computed before this step)``."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)


def add_computed(
    blocks: set[int] | None, record: Record | None, start: int, end: int, block_tokens: int
) -> set[int] | None:
    """The blocks and those in which a step computes tokens ``start`` … ``end`` of a request; None: some are unknown."""
    if blocks is None or record is None or record.block_ids is None:
        return None
    blocks.update(record.block_ids[start // block_tokens : -(-end // block_tokens)])
    return blocks
