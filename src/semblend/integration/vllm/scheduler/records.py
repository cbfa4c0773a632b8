"""What is known in the scheduler: of the engine, and of one request while it is with us."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

from semblend.confirm.receipt import Receipt, RequestFacts, build_receipt
from semblend.integration.vllm.settings import ConnectorSettings
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan
from semblend.prompt import LatePrompt, Namespace, Prompt, name_tenant
from semblend.quality import RequestOptions, read_request_options
from semblend.session.session import LoadResult, ReuseSession, SessionRequest, is_given
from semblend.session.sessions import choose_mode

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
    """Approximate blocks of one prompt; ``result`` is None while they are being filled for request ``owner``.

    ``end`` is the exact hash of the prompt's last full block, and stands for all tokens up to there; ``rest`` are those
    behind it. ``prompt_tokens`` counts both. ``is_edited``: it was to be repaired as edited histories are. ``marks``:
    exact hashes on the way there, and on that of those who went on from it.
    """

    end: bytes
    rest: tuple[int, ...]
    namespace: str
    mode: str
    key: bytes
    owner: str
    plan: ReusePlan
    prompt_tokens: int
    is_edited: bool
    result: LoadResult | None = None
    marks: dict[bytes, None] = field(default_factory=dict)

    @property
    def name(self) -> tuple[Any, ...]:
        """Equal for equal prompts of one namespace and mode."""
        return self.end, self.rest, self.namespace, self.mode


@dataclass(frozen=True, slots=True)
class Salted:
    """What `restore` and a check need: the index of the first salted hash, all ``exact`` hashes, those that were
    ``given`` to the request in their place, its own hasher, and whether others find them by a key."""

    first: int
    exact: list[bytes]
    given: list[bytes]
    hasher: Any
    has_key: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a prompt: ``key`` stands for all its tokens up to ``tokens``.

    ``rows``: what a load computes up to there, behind the exact prefix; ``price``: what a prefill in its place costs
    more than an exact hit up to there would.
    """

    tokens: int
    key: bytes
    rows: float
    price: float


@dataclass(frozen=True, slots=True)
class LoadCost:
    """What a request's load would cost, by marks in the order of the prompt, all behind its exact prefix."""

    request_id: str
    tenant: str
    marks: tuple[Mark, ...]


def move_prompt(prompt: Prompt, facts: EngineFacts) -> Prompt:
    """The prompt with the weights that these facts name in its namespace."""
    return Prompt(prompt.token_ids, prompt.text, replace(prompt.namespace, revision=facts.namespace.revision))


@dataclass(slots=True, eq=False)
class Record(ReuseSession):
    """A request in vLLM: its session, and the blocks and hashes that vLLM knows it by.

    ``block_ids``: it was admitted with these, to be loaded or to be computed. ``salted``: its hashes from
    ``first_block`` on are not its own. ``checked_blocks``: so many were seen to be private. ``entered``: vLLM has its
    filled blocks in its prefix cache. ``lent``: what others may share of it. ``share``: the blocks of an equal prompt,
    or of one that it goes on from, that it looks for, or has: they begin with the same ``common_tokens``, and it found
    ``found_tokens``. ``cost``: of the load that was last considered, for `healing`. ``brought_from``: another connector
    brings the tokens from there on, and its load may run in the request's first step. ``spoiled``: why some of what its
    KV is computed on is wrong.
    """

    salted: Salted | None = None
    first_block: int = 0
    checked_blocks: int = 0
    block_ids: list[int] | None = None
    entered: bool = False
    lent: Share | None = None
    share: Share | None = None
    common_tokens: int = 0
    found_tokens: int = 0
    cost: LoadCost | None = None
    brought_from: int | None = None
    spoiled: str | None = None

    @property
    def source(self) -> Any:
        """vLLM's own request."""
        return self.request.source

    @property
    def has_said(self) -> bool:
        """Whether vLLM has taken in its first token, or has none to take in. What a step computes of a request that is
        aborted meanwhile, or preempted by a reset, it throws away."""
        return self.source.num_output_tokens > 0 or is_given(getattr(self.source, "pooling_params", None))

    @property
    def is_settled(self) -> bool:
        """Its prompt is complete, and nothing approximate is in its blocks."""
        return self.has_answered and self.salted is None

    @property
    def holds_moved_kv(self) -> bool:
        """Its blocks are filled, and not all of what is in them is exact."""
        return self.salted is not None and not self.is_loading and self.block_ids is not None

    def rule_out(self, why: str) -> None:
        """It is computed without us from now on, and becomes no donor."""
        self.request = replace(self.request, unsupported=why)

    def lose_blocks(self) -> None:
        """vLLM has taken its blocks back."""
        self.block_ids = self.share = self.brought_from = None
        self.entered, self.checked_blocks = False, 0

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


# -- What a request asks of us, and whether it is of a kind that we can serve.


HINT_ACTION = "semblend.reuse"
"""The ``action_type`` of a KV hint that is for us; its payload says what ``kv_transfer_params.semblend`` would."""


def make_record(request: Any, facts: EngineFacts, settings: ConnectorSettings) -> Record:
    """The record of a request that vLLM asks about for the first time."""
    options, namespace = read_options(request), build_namespace(request, facts.namespace)
    asked = SessionRequest(
        request.request_id,
        LatePrompt(request.prompt_token_ids, namespace),
        quality=options.quality,
        unsupported=explain_decline(request, require_cache_salt=settings.require_cache_salt) or "",
        opt_out=options.opt_out,
        base=options.base,
        source=request,
    )
    return Record(asked, choose_mode(settings.config, options.quality, namespace.tenant))


def read_options(request: Any) -> RequestOptions:
    """What the request says about itself, and what an orchestrator says about it in ``kv_hints`` (from vLLM 0.32 on).

    The request says it in ``kv_transfer_params={"semblend": {"opt_out": true, "quality": 0.05}}``. Either of them may
    opt out, or have it ``forget``. In the mode the request's own word counts, then the last hint.
    """
    own = read_request_options((getattr(request, "kv_transfer_params", None) or {}).get("semblend"))
    hints = [read_request_options(payload) for payload in _iterate_hints(getattr(request, "kv_hints", None))]
    said = (own, *reversed(hints))
    quality = next((one.quality for one in said if one.quality), None)
    opt_out, forget = any(one.opt_out for one in said), any(one.forget for one in said)
    base = next((one.base for one in said if one.base), "")
    return RequestOptions(opt_out, "exact" if forget else quality, forget, base)


def _iterate_hints(envelope: Any) -> Iterator[Any]:
    """The payloads that are for us."""
    for action in getattr(envelope, "actions", None) or ():
        if getattr(action, "action_type", None) == HINT_ACTION:
            yield getattr(action, "payload", None)


def build_refused_receipt(request: Any, exact_tokens: int, engine: EngineFacts, settings: ConnectorSettings) -> Receipt:
    """The receipt of a request in an engine that we do not serve, without a look at its tokens."""
    namespace = build_namespace(request, engine.namespace)
    return build_receipt(
        RequestFacts(
            request_id=request.request_id,
            engine=ENGINE,
            engine_version=engine.version,
            namespace=namespace,
            mode=choose_mode(settings.config, read_options(request).quality, namespace.tenant),
            prompt_tokens=len(request.prompt_token_ids),
            exact_tokens=exact_tokens,
            decision=Decline(DeclineReason.UNSUPPORTED_MODE, engine.refusal or ""),
        )
    )


def explain_decline(request: Any, *, require_cache_salt: bool = False) -> str | None:
    """Why this request is computed without us, in one line; None for plain text generation.

    ``require_cache_salt``: a request without a salt has no tenant, and shares nothing with anybody.
    """
    if require_cache_salt and not getattr(request, "cache_salt", None):
        return "this server reuses for requests with a cache_salt only (require_cache_salt), and it has none"
    for name, why in _DECLINES:
        if is_given(getattr(request, name, None)):
            return why
    return _explain_transfer_decline(getattr(request, "kv_transfer_params", None) or {})


_DECLINES = (
    ("pooling_params", "a pooling request has no next token to check"),
    ("prompt_embeds", "prompt embeddings have no tokens to compare"),
    ("mm_features", "multimodal tokens stand for inputs that token ids do not show"),
    ("lora_request", "a LoRA adapter is bound to the rows of vLLM's own batch"),
    ("skip_reading_prefix_cache", "the request wants every token computed (prompt logprobs)"),
    ("resumable", "a streaming-input session grows while it runs"),
)


def _explain_transfer_decline(params: Mapping[str, Any]) -> str | None:
    """Why a request that is split between a prefill and a decode engine is computed without us; None for others.

    The decode engine caches the KV that it gets as exact, whatever it is, so the prefill engine must not reuse
    approximately. What a decode engine gets comes from an engine that we know nothing about, so it is no donor.
    """
    if params.get("do_remote_decode"):
        return "its KV goes to a decode engine, which would take approximate KV as exact (do_remote_decode)"
    if params.get("do_remote_prefill"):
        return "its KV comes from a prefill engine (do_remote_prefill)"
    if params.get("disagg_spec") is not None:
        return "its KV goes to a decode engine, which would take approximate KV as exact (LMCache's disagg_spec)"
    return None


def build_namespace(request: Any, engine: Namespace) -> Namespace:
    """The engine's, with what the request adds: its salt, the tenant that the salt stands for, and its adapter."""
    lora = getattr(request, "lora_request", None)
    adapter = f"{lora.lora_name}:{lora.lora_int_id}:{lora.lora_path}" if lora else ""
    salt = request.cache_salt or ""
    return replace(engine, salt=salt, tenant=name_tenant(salt), adapter=adapter)
