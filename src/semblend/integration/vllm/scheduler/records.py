"""What is known in the scheduler: of the engine, and of one request while it is with us."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from semblend.integration.vllm.scheduler.hash_chain import Salted
from semblend.integration.vllm.scheduler.healing import LoadCost
from semblend.plan.reuse_plan import ReusePlan
from semblend.prompt import Namespace, Prompt
from semblend.session.session import LoadResult, ReuseSession

ENGINE = "vllm"
_WEIGHTS = " weights:"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What changes with the weights only; ``refusal`` says why nothing can be reused in this engine, if so."""

    version: str
    namespace: Namespace
    block_tokens: int
    hash_block_tokens: int
    refusal: str | None = None

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
    """Approximate blocks of one prompt; ``result`` is None while they are being filled for request ``owner``."""

    prompt: bytes
    key: bytes
    owner: str
    plan: ReusePlan
    result: LoadResult | None = None


def move_prompt(prompt: Prompt, facts: EngineFacts) -> Prompt:
    """The prompt with the weights that these facts name in its namespace."""
    return Prompt(prompt.token_ids, prompt.text, replace(prompt.namespace, revision=facts.namespace.revision))


@dataclass(slots=True, eq=False)
class Record(ReuseSession):
    """A request in vLLM: its session, and the blocks and hashes that vLLM knows it by.

    ``block_ids``: it was admitted with these, to be loaded or to be computed. ``salted``: its hashes from
    ``first_block`` on are not its own. ``entered``: vLLM has its filled blocks in its prefix cache. ``share``: the
    blocks of an equal prompt that it looks for, or has; it found ``found_tokens``. ``cost``: of the load that was last
    considered, for `prefix_promotion`. ``brought_from``: another connector brings the tokens from there on, and its
    load may run in the request's first step. ``spoiled``: why some of what its KV is computed on is wrong.
    """

    name: bytes | None = None
    salted: Salted | None = None
    own_hashes: frozenset[bytes] = frozenset()
    first_block: int = 0
    kept_out: int = 0
    block_ids: list[int] | None = None
    entered: bool = False
    share: Share | None = None
    found_tokens: int = 0
    cost: LoadCost | None = None
    brought_from: int | None = None
    spoiled: str | None = None

    @property
    def source(self) -> Any:
        """vLLM's own request."""
        return self.request.source

    @property
    def is_settled(self) -> bool:
        """Its prompt is complete, and nothing approximate is in its blocks."""
        return self.has_answered and self.salted is None

    @property
    def holds_moved_kv(self) -> bool:
        """Its blocks are filled, and not all of what is in them is exact."""
        return self.salted is not None and not self.is_loading and self.block_ids is not None

    def decline(self, why: str) -> None:
        """It is computed without us from now on, and becomes no donor."""
        self.request = replace(self.request, declined=why)

    def lose_blocks(self) -> None:
        """vLLM has taken its blocks back."""
        self.block_ids = self.share = self.brought_from = None
        self.entered, self.kept_out = False, 0

    def begin_step(self, computed_tokens: int) -> int:
        """The first token whose KV is written in the next step of a request with ``computed_tokens``."""
        start, self.brought_from = self.brought_from, None
        return computed_tokens if start is None else min(start, computed_tokens)

    def find_block_in(self, block_ids: Set[int], block_tokens: int) -> int | None:
        """The place of the first block that is one of these, among those that its KV is computed on.

        While it is loaded that is its exact prefix: the others are named by its own load, where that is refused.
        """
        blocks = self.block_ids or []
        read = blocks[: self.exact_tokens // block_tokens] if self.is_loading else blocks
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
    def any_unanswered(self) -> bool:
        return any(not record.has_answered for record in self.open.values())

    def settle(self) -> None:
        """Close those about which no later step has anything to decide."""
        for request_id in [name for name, record in self.open.items() if record.is_settled]:
            del self.open[request_id]


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
