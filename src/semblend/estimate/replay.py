"""Replays a log through every step in turn and counts the tokens that an engine would still compute.

One prompt goes through all stages before the next one is read: exact prefix as it is, then with each step on top of
those before it, then with any-offset reuse, then with more memory. Every stage has a cache of its own, of bounded size.
What a step saves is the difference between the tokens computed before it and with it, so the rows add up to the total.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np

from semblend.errors import InputError
from semblend.estimate.any_offset import PASS_TOKENS, AnyOffsetReplay, ReuseCount
from semblend.estimate.history import HistoryEdits
from semblend.estimate.prefix_cache import BlockHasher, KeyArray, PrefixCache
from semblend.estimate.steps import Parts, Step
from semblend.prompt import Namespace, Prompt, TokenArray
from semblend.text.chat import list_chat_parts
from semblend.text.logs import LoggedPrompt
from semblend.text.parts import Part, Splitter, join_parts, split_parts
from semblend.text.tokenization import Tokenizer

BUCKET_EDGES = (256, 1024, 4096, 16_384, 65_536)
MAX_TENANTS = 1000
OTHERS = "(other tenants)"


@dataclass(slots=True)
class GroupTally:
    """Tokens of the prompts of a group: in all, saved by the exact prefix cache, saved by every step up to balanced."""

    prompts: int = 0
    prompt_tokens: int = 0
    prefix_saved_tokens: int = 0
    saved_tokens: int = 0


class GroupTallies:
    """Tallies by prompt length and by tenant; tenants beyond the first thousand share one."""

    def __init__(self) -> None:
        self._buckets = [GroupTally() for _ in range(len(BUCKET_EDGES) + 1)]
        self._tenants: dict[str, GroupTally] = {}

    def add(self, tenant: str, tokens: int, computed_prefix: int, computed: int) -> None:
        if tenant not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            tenant = OTHERS
        for tally in (
            self._buckets[bisect_right(BUCKET_EDGES, tokens)],
            self._tenants.setdefault(tenant, GroupTally()),
        ):
            tally.prompts += 1
            tally.prompt_tokens += tokens
            tally.prefix_saved_tokens += tokens - computed_prefix
            tally.saved_tokens += tokens - computed

    def list_lengths(self) -> dict[str, dict[str, Any]]:
        return {name: asdict(tally) for name, tally in zip(bucket_names(), self._buckets, strict=True)}

    def list_tenants(self) -> dict[str, dict[str, Any]]:
        """The largest first."""
        largest = sorted(self._tenants.items(), key=lambda item: -item[1].prompt_tokens)
        return {name: asdict(tally) for name, tally in largest}


def bucket_names() -> list[str]:
    """Names of the prompt length buckets.

    >>> bucket_names()[:2]
    ['under 256', '256-1023']
    """
    middle = [f"{low}-{high - 1}" for low, high in pairwise(BUCKET_EDGES)]
    return [f"under {BUCKET_EDGES[0]}", *middle, f"{BUCKET_EDGES[-1]} and more"]


MAX_CACHED_TOKENS = 8_000_000


class PartTokens:
    """Token ids of parts, remembered while there is room: passages and templates come again and again."""

    def __init__(self, tokenizer: Tokenizer, most_tokens: int = MAX_CACHED_TOKENS) -> None:
        self.tokenizer = tokenizer
        self.texts_encoded = 0
        self._known: OrderedDict[str, TokenArray] = OrderedDict()
        self._held = 0
        self._most = most_tokens

    def encode(self, parts: Sequence[Part]) -> TokenArray:
        """The token ids of a prompt."""
        arrays = [part.token_ids if part.token_ids is not None else self._encode(part.text) for part in parts]
        if len(arrays) == 1:
            return arrays[0]
        return np.concatenate(arrays) if arrays else np.zeros(0, np.int32)

    def _encode(self, text: str) -> TokenArray:
        tokens = self._known.get(text)
        if tokens is not None:
            self._known.move_to_end(text)
            return tokens
        self.texts_encoded += 1
        tokens = self.tokenizer.encode(text)
        self._known[text] = tokens
        self._held += len(tokens)
        while self._held > self._most:
            _, gone = self._known.popitem(last=False)
            self._held -= len(gone)
        return tokens


EXAMPLES = 3
RECENT_PROMPTS = 256
MAX_TEXT_CHARS = 200_000
MAX_RECENT_CHARS = 8_000_000
CONTEXT_CHARS = 80
SHOWN_CHARS = 120


class BreakKind(StrEnum):
    """Why a prompt was not hit further; the words of the report."""

    FIELD = "a field in front changes"
    TOOLS = "tools in another order"
    REPEATS = "text that the prompt has twice"
    ORDER = "passages in another order"
    EDITED = "its history was edited"
    EVICTED = "evicted before it came again"
    PLACE = "same text at another place"
    SMALL = "same text elsewhere, too little for a pass"
    REST = "what follows is new"
    NEW = "nothing like it before"


@dataclass(frozen=True, slots=True)
class Break:
    """A prompt that was hit no further: why, before which stage, and what mending it would have saved."""

    kind: BreakKind
    stage: int
    prompt_tokens: int
    hit_tokens: int
    lost_tokens: int


@dataclass(frozen=True, slots=True)
class BreakExample:
    """One prompt: where its prefix broke, and the text around that place, here and in the earlier prompt."""

    line: int
    request_id: str
    prompt_tokens: int
    position_tokens: int
    position_chars: int | None
    before: str
    here: str
    earlier: str | None


@dataclass(slots=True)
class BreakTally:
    """Prompts of one kind, and the tokens that mending it would have saved."""

    prompts: int = 0
    tokens: int = 0
    examples: list[BreakExample] = field(default_factory=list)


class BreakLog:
    """Counts breaks by kind and shows the first of each. Keeps the latest prompts for comparison, and no others.

    A prompt comes as the texts that were sent at each stage: a break that a step mends is shown as it was before that
    step, so that what earlier steps mend does not stand in front of it.
    """

    def __init__(self, *, redacted: bool = False) -> None:
        self._redacted = redacted
        self._recent: deque[tuple[Namespace, Sequence[str]]] = deque()
        self._chars = 0
        self.kinds: dict[BreakKind, BreakTally] = {kind: BreakTally() for kind in BreakKind}

    def add(self, found: Break | None, logged: LoggedPrompt, namespace: Namespace, texts: Sequence[str]) -> None:
        """Count a prompt; None stands for one that did not break. ``texts`` are empty where the log holds no text."""
        if found is not None:
            tally = self.kinds[found.kind]
            tally.prompts += 1
            tally.tokens += found.lost_tokens
            if len(tally.examples) < EXAMPLES:
                tally.examples.append(self._show(found, logged, namespace, texts))
        if texts:
            self._remember(namespace, [text[:MAX_TEXT_CHARS] for text in texts])

    def _remember(self, namespace: Namespace, texts: Sequence[str]) -> None:
        self._recent.append((namespace, texts))
        self._chars += sum(map(len, texts))
        while len(self._recent) > RECENT_PROMPTS or self._chars > MAX_RECENT_CHARS:
            self._chars -= sum(map(len, self._recent.popleft()[1]))

    def _show(self, found: Break, logged: LoggedPrompt, namespace: Namespace, texts: Sequence[str]) -> BreakExample:
        name = self._hide(logged.request_id)
        if not texts:
            return BreakExample(logged.line, name, found.prompt_tokens, found.hit_tokens, None, "", "", None)
        text = texts[found.stage]
        common, earlier = 0, None
        for other_namespace, others in self._recent:
            if other_namespace == namespace:
                shared = count_common(text, others[found.stage])
                if shared >= common:
                    common, earlier = shared, others[found.stage]
        return BreakExample(
            logged.line,
            name,
            found.prompt_tokens,
            found.hit_tokens,
            common,
            self._hide(text[max(0, common - CONTEXT_CHARS) : common]),
            self._hide(text[common : common + SHOWN_CHARS]),
            None if earlier is None else self._hide(earlier[common : common + SHOWN_CHARS]),
        )

    def _hide(self, text: str) -> str:
        return redact(text) if self._redacted else text

    def to_dict(self) -> dict[str, Any]:
        return {kind.value: asdict(tally) for kind, tally in self.kinds.items() if tally.prompts}


def count_common(one: str, other: str) -> int:
    """Leading characters that two texts share.

    >>> count_common("prefix", "preface")
    4
    """
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def redact(text: str) -> str:
    """The shape of a text without its words: letters become x, digits 0; blanks and punctuation stay.

    >>> redact("Müller owes 30 €.")
    'xxxxxx xxxx 00 €.'
    """
    return "".join("0" if char.isdigit() else "x" if char.isalnum() else char for char in text)


PREFIX, ARRANGE, BALANCED, FAST = "prefix", "arrange", "balanced", "fast"
_CURVE = (0.25, 0.5)
_KIND_OF_STEP = {
    "fields": BreakKind.FIELD,
    "tools": BreakKind.TOOLS,
    "repeats": BreakKind.REPEATS,
    ARRANGE: BreakKind.ORDER,
}
_Sent = tuple[TokenArray, KeyArray, int]


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How to replay. Sizes are in tokens of KV; ``factors`` are how many times the memory the last rows have.

    ``history_tokens``: agents' histories are edited in batches beyond that; 0 for the longest prompt so far.
    """

    cache_tokens: int = 700_000
    donor_tokens: int = 700_000
    block_tokens: int = 16
    factors: tuple[int, ...] = (2, 4)
    splitter: Splitter = "auto"
    max_donors: int = 1 << 30
    pass_tokens: int = PASS_TOKENS
    redacted: bool = False
    history_tokens: int = 0

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or self.cache_tokens < self.block_tokens or self.donor_tokens < 1:
            raise InputError(
                f"a cache of {self.cache_tokens} tokens in blocks of {self.block_tokens} holds nothing",
                hint="give the cache at least one block",
            )
        if list(self.factors) != sorted(set(self.factors)) or any(factor < 2 for factor in self.factors):
            raise InputError(f"memory factors {list(self.factors)} do not grow from 2", hint="such as 2,4,8")

    @property
    def curve_tokens(self) -> tuple[int, ...]:
        """Sizes of the cache that the curve over memory shows, smallest first; ``cache_tokens`` is one of them."""
        wanted = [
            *(self.cache_tokens * share for share in _CURVE),
            *(self.cache_tokens * f for f in (1, *self.factors)),
        ]
        return tuple(sorted({max(1, int(size) // self.block_tokens) * self.block_tokens for size in wanted}))


@dataclass(frozen=True, slots=True)
class _StageCount:
    """A prompt in one stage, in tokens: its length, what the cache held of it, and what the largest one held."""

    tokens: int
    hit: int
    most_hit: int

    @property
    def computed(self) -> int:
        return self.tokens - self.hit


class _Stage:
    """The exact prefix cache behind one or more steps, for all sizes of the curve."""

    def __init__(self, name: str, step: Step | None, options: ReplayOptions) -> None:
        self.name, self.step = name, step
        sizes = [size // options.block_tokens for size in options.curve_tokens]
        self._block_tokens = options.block_tokens
        self._at = sizes.index(options.cache_tokens // options.block_tokens)
        self._cache = PrefixCache(sizes)
        self.computed_tokens = self.changed_prompts = 0
        self.hits_by_size = [0] * len(sizes)

    def count(self, tokens: TokenArray, keys: KeyArray, asked: int, *, changed: bool) -> _StageCount:
        """Look a prompt up in caches of every size, and hold it there."""
        hits = [blocks * self._block_tokens for blocks in self._cache.replay(keys, asked)]
        for at, hit in enumerate(hits):
            self.hits_by_size[at] += hit
        self.computed_tokens += len(tokens) - hits[self._at]
        self.changed_prompts += changed
        return _StageCount(len(tokens), hits[self._at], hits[-1])


class Replay:
    """Takes logged prompts one by one. ``list_computed`` are the tokens computed after each step, in order."""

    def __init__(self, steps: Sequence[Step], tokenizer: Tokenizer, options: ReplayOptions | None = None) -> None:
        self.options = options = options or ReplayOptions()
        self.tokens = PartTokens(tokenizer)
        self.breaks = BreakLog(redacted=options.redacted)
        self.groups = GroupTallies()
        self.prompts = self.prompt_tokens = self.assumed_passages = self.marked_passages = 0
        self.below_tokens = self.below_prompts = 0  # found at another offset, too few in a prompt to pay for a pass
        self.left_out: Counter[str] = Counter()  # images and other blocks without text, by kind
        self._hasher = BlockHasher(options.block_tokens)
        self._stages = [_Stage(PREFIX, None, options), *(_Stage(step.name, step, options) for step in steps)]
        self._larger = [[step.scale(factor) for step in steps] for factor in options.factors]
        self._reuses = [self._make_reuse(BALANCED, 1), *(self._make_reuse(FAST, f) for f in (1, *options.factors))]
        self._reuse_names = [BALANCED, FAST, *(f"memory x{factor}" for factor in options.factors)]
        self._reuse_computed = [0] * len(self._reuses)
        sizes = options.cache_tokens, options.block_tokens, options.history_tokens
        self.history = HistoryEdits(
            self._encode_chat, lambda message: len(self.tokens.encode(list_chat_parts([message]))), *sizes
        )

    def _make_reuse(self, mode: Any, factor: int) -> AnyOffsetReplay:
        options = self.options
        return AnyOffsetReplay(
            mode,
            cache_tokens=options.cache_tokens * factor,
            donor_tokens=options.donor_tokens * factor,
            block_tokens=options.block_tokens,
            max_donors=min(options.max_donors * factor, 1 << 30),
            pass_tokens=options.pass_tokens,
            counts_below=mode == FAST and factor == 1,
        )

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *_: object) -> None:
        for reuse in self._reuses:
            reuse.close()

    def add(self, logged: LoggedPrompt) -> None:
        """Send one prompt through every stage."""
        namespace = Namespace(tenant=logged.tenant, model=logged.model, adapter=logged.adapter, salt=logged.salt)
        parts = split_parts(logged.parts, self.options.splitter)
        passages = [part for part in parts if part.kind == "passage"]
        self.marked_passages += sum(part.marked for part in passages)
        self.assumed_passages += sum(not part.marked for part in passages)
        as_logged = sent = self._encode(parts, logged, namespace)
        if not len(sent[0]):
            return
        passed: list[_StageCount] = []
        texts: list[str] = []
        given: list[Parts] = []
        for stage in self._stages:
            given.append(parts)
            changed = parts if stage.step is None else self._apply(stage.step, parts, logged, namespace)
            if changed is not parts:
                sent = self._encode(changed, logged, namespace)
            passed.append(stage.count(*sent, changed=changed is not parts))
            if logged.text is not None:
                texts.append(texts[-1] if texts and changed is parts else join_parts(changed))
            parts = changed
        larger = [self._resend(steps, given[1:], (parts, sent), logged, namespace) for steps in self._larger]
        counts = [
            reuse.add(Prompt(tokens, namespace=namespace), keys, asked, wanted=logged.reuse)
            for reuse, (tokens, keys, asked) in zip(self._reuses, [sent, sent, *larger], strict=True)
        ]
        for at, count in enumerate(counts):
            self._reuse_computed[at] += count.computed_tokens
        below = counts[1].below_tokens
        self.below_tokens += below
        self.below_prompts += below > 0
        self.left_out.update(part.group for part in given[0] if part.kind == "omitted")
        self.prompts += 1
        self.prompt_tokens += passed[0].tokens
        self.groups.add(logged.tenant, passed[0].tokens, passed[0].computed, counts[0].computed_tokens)
        saved = {name: passed[-1].computed - counts[at].computed_tokens for at, name in enumerate((BALANCED, FAST))}
        edited = self.history.add(logged, namespace, as_logged, passed[0].hit, saved)
        self.breaks.add(self._find_break(passed, counts[1], edited), logged, namespace, texts)

    def _apply(self, step: Step, parts: Parts, logged: LoggedPrompt, namespace: Namespace) -> Parts:
        """The prompt behind a step. A server moves no passages of a request that wants no reuse."""
        if step.name == ARRANGE and not logged.reuse:
            return parts
        return step.apply(parts, namespace, logged.keep)

    def _resend(
        self,
        steps: Sequence[Step],
        given: Sequence[Parts],
        usual: tuple[Parts, _Sent],
        logged: LoggedPrompt,
        namespace: Namespace,
    ) -> _Sent:
        """The prompt as it would be sent beside more memory, where a step depends on that; else as usual."""
        parts = usual[0]
        for at, (stage, step) in enumerate(zip(self._stages[1:], steps, strict=True)):
            if step is not stage.step:
                parts = given[at]
                for one in steps[at:]:
                    parts = self._apply(one, parts, logged, namespace)
                break
        return usual[1] if parts == usual[0] else self._encode(parts, logged, namespace)

    def _encode(self, parts: Parts, logged: LoggedPrompt, namespace: Namespace) -> _Sent:
        """Token ids of a prompt, keys of its blocks and of those of its answer, and how many of them may be hit."""
        tokens = self.tokens.encode(parts)
        # An engine computes at least the last token, to have something to continue from.
        asked = max(0, len(tokens) - 1) // self.options.block_tokens
        if not logged.answer or logged.text is None:
            return tokens, self._hasher.hash(tokens, namespace), asked
        whole = self.tokens.encode((*parts, *logged.answer_parts))
        return tokens, self._hasher.hash(whole, namespace), asked

    def _encode_chat(self, messages: Sequence[Mapping[str, Any]], logged: LoggedPrompt, namespace: Namespace) -> _Sent:
        """The same for a chat in place of the logged one, with its tools."""
        parts = list_chat_parts(list(messages), tools=list(logged.tools) or None)
        return self._encode(split_parts(parts, self.options.splitter), logged, namespace)

    def _find_break(self, passed: Sequence[_StageCount], fast: ReuseCount, edited: int) -> Break | None:
        """Why a prompt was not hit further: the kind that would save most of it; ``edited`` is what its edit cost."""
        first, last = passed[0], passed[-1]
        gains = [
            (passed[at].computed - passed[at + 1].computed, -at, _KIND_OF_STEP[stage.name])
            for at, stage in enumerate(self._stages[1:])
            if stage.name in _KIND_OF_STEP
        ]
        gains.append((first.most_hit - first.hit, 0, BreakKind.EVICTED))
        gains.append((edited, 0, BreakKind.EDITED))
        gains.append((last.computed - fast.computed_tokens, 1 - len(passed), BreakKind.PLACE))
        lost, stage, kind = max(gains, key=lambda gain: gain[:2])
        if lost > 0:
            return Break(kind, -stage, passed[-stage].tokens, passed[-stage].hit, lost)
        if first.computed <= 2 * self.options.block_tokens:
            return None
        if fast.below_tokens:
            return Break(BreakKind.SMALL, len(passed) - 1, last.tokens, last.hit, fast.below_tokens)
        kind = BreakKind.REST if first.hit else BreakKind.NEW
        return Break(kind, 0, first.tokens, first.hit, first.computed)

    def list_computed(self) -> Iterator[tuple[str, int]]:
        """Name and computed tokens of every stage, in the order in which they stand on each other."""
        for stage in self._stages:
            yield stage.name, stage.computed_tokens
        fast = self._reuse_names.index(FAST)
        for at, name in enumerate(self._reuse_names):
            yield name, self._reuse_computed[at] if at <= fast else min(self._reuse_computed[fast : at + 1])

    def list_unused(self) -> dict[str, int]:
        """Tokens more that a row with more memory would compute if all of it were used than if the rest stood empty.

        More donors mean more moved KV, which makes neither an exact prefix nor a donor, so that later prompts may find
        less. Whoever has the memory need not use it: `list_computed` takes the best size up to it.
        """
        best = dict(self.list_computed())
        found = zip(self._reuse_names, self._reuse_computed, strict=True)
        return {name: computed - best[name] for name, computed in found if computed > best[name]}

    def list_changed(self) -> dict[str, int]:
        """Prompts that each step changed."""
        return {stage.name: stage.changed_prompts for stage in self._stages if stage.step is not None}

    def list_curves(self) -> dict[str, list[int]]:
        """Tokens that an exact prefix cache alone hits, by its size: as it is, and behind all steps."""
        return {
            "cache_tokens": list(self.options.curve_tokens),
            "as_it_is": list(self._stages[0].hits_by_size),
            "after_steps": list(self._stages[-1].hits_by_size),
        }

    def count_failures(self) -> tuple[int, str]:
        """Lookups that failed, and what the first said: reuse is counted too low by them."""
        said = (reuse.first_failure for reuse in self._reuses if reuse.failed_lookups)
        return sum(reuse.failed_lookups for reuse in self._reuses), next(said, "")

    def options_dict(self) -> dict[str, Any]:
        return asdict(self.options)
