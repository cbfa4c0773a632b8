"""The answer of a replay as data: one row for each step, in order, with what it saves on top of those before it.

Seconds and money come from `Rates`: prefill rates and prices by model, which a user's own numbers replace.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from semblend._version import __version__
from semblend.arrange import VolatileField
from semblend.estimate.any_offset import BALANCED_SHARE
from semblend.estimate.replay import ARRANGE, BALANCED, FAST, PREFIX, Replay, redact
from semblend.formatting import format_plural, format_price
from semblend.kv_shapes import count_kv_bytes_per_token
from semblend.prices import PriceBook, load_price_book
from semblend.text.tokenization import STABLE

DEFAULT_MODEL: Final = "qwen2.5-7b"
DEFAULT_GPU: Final = "h200"
DEFAULT_KV_BYTES: Final = 40 * 10**9
"""Memory for cached KV where nobody says otherwise: what a GPU of 80 GB leaves beside the weights of 7B to 14B."""
CURRENCY: Final = "USD"


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens to seconds and money. ``*_source`` says where a number comes from."""

    model: str
    kv_bytes_per_token: int
    prefill_tokens_per_s: float
    prefill_source: str
    price_per_million: float
    price_source: str
    currency: str = CURRENCY

    def compute_seconds(self, tokens: int) -> float:
        return tokens / self.prefill_tokens_per_s

    def compute_price(self, tokens: int) -> float:
        return tokens * self.price_per_million / 1e6

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def find_rates(
    model: str = DEFAULT_MODEL,
    *,
    prefill_tokens_per_s: float | None = None,
    gpu_hour: float | None = None,
    price_per_million: float | None = None,
    gpu: str = DEFAULT_GPU,
    book: PriceBook | None = None,
) -> Rates:
    """The rates of a model on one GPU, with a user's own numbers in their places.

    >>> find_rates(prefill_tokens_per_s=10_000, gpu_hour=3.6).compute_price(1_000_000)
    0.1
    """
    kv_bytes = count_kv_bytes_per_token(model)
    prices = book or load_price_book()
    if prefill_tokens_per_s is not None:
        rate, source = prefill_tokens_per_s, "given"
    else:
        found = prices.find_prefill(model, gpu)
        rate, source = round(found.tokens_per_s, -2) or found.tokens_per_s, found.source
    if price_per_million is not None:
        return Rates(model, kv_bytes, rate, source, price_per_million, "given", prices.currency)
    hour = prices.find_gpu(gpu).hour if gpu_hour is None else gpu_hour
    told = "given" if gpu_hour is not None else prices.find_gpu(gpu).hour_source
    return Rates(
        model, kv_bytes, rate, source, round(hour / 3600 / rate * 1e6, 9),
        f"{hour:.2f} {prices.currency} a GPU hour, {told}", prices.currency,
    )  # fmt: skip


_TITLES = {
    PREFIX: "exact prefix cache, as it is",
    "fields": "move fields to the end: none found",
    "tools": "sort the tools",
    "repeats": "drop repeats",
    ARRANGE: "arrange the passages",
    BALANCED: "reuse at any offset, balanced",
    FAST: "reuse at any offset, fast",
}
_ASSUMES = {
    PREFIX: (
        "Blocks are shared from the first token on, within one tenant, model, adapter and salt. The cache is bounded: "
        "where it is full, the blocks that were used longest ago leave it, and what they held is computed again."
    ),
    "fields": "The answer does not depend on where the field stands. The label moves with it.",
    "tools": "Tools may stand in any order. They are sorted by their JSON text.",
    "repeats": "A reference that names a text by its first words does as well as the text itself.",
    ARRANGE: (
        "Passages of one list may change places. The arranger knows the cache's size (exact_size) and seeks no "
        "beginning that such a cache has dropped by now."
    ),
    BALANCED: (
        f"Donors have memory of their own. From one donor in order {100 * BALANCED_SHARE:.0f} % of the reused tokens "
        "are computed again; other prompts are computed in full, as the quality gate mostly decides. Beginnings that "
        "are loaded often are computed once for all (heal_prefixes)."
    ),
    FAST: "Instead of balanced: the first 16 tokens of each span are computed again, and no gate looks at the answer.",
}
_LABEL_CHARS = 32
_NO_PASSAGES = "No passages recognised; --passages paragraphs splits at blank lines."
LOGGED = "none, tokens as logged"
_MEMORY_ASSUMES = (
    "Everything above, with so many times the tokens of KV in the prefix cache and for donors. Passages are "
    "arranged for a cache of that size."
)


@dataclass(frozen=True, slots=True)
class LogFacts:
    """What is said about the log beside its numbers; ``stopped`` says why it was not read to its end."""

    source: str
    format: str
    lines_skipped: int = 0
    skipped_examples: tuple[str, ...] = ()
    stopped: str = ""
    sample: float = 1.0


def build_answer(
    replay: Replay, rates: Rates, fields: Sequence[VolatileField], facts: LogFacts, seconds: float
) -> dict[str, Any]:
    """Everything that the table, the page and the JSON file show."""
    tokenizer = replay.tokens.tokenizer.name if replay.tokens.texts_encoded else LOGGED
    redacted = replay.options.redacted
    rows = build_rows(replay, rates, [_name_field(one, redacted) for one in fields])
    saved = sum(row["saved_tokens"] for row in rows)
    tenants = replay.groups.list_tenants()
    failed, first_failure = replay.count_failures()
    return {
        "kind": "estimate",
        "version": 2,
        "measured": False,
        "semblend": __version__,
        "source": facts.source,
        "format": facts.format,
        "complete": not facts.stopped,
        "stopped": facts.stopped,
        "sample": facts.sample,
        "tokenizer": tokenizer,
        "tokens_are_approximate": tokenizer == STABLE,
        "options": replay.options_dict(),
        "rates": rates.to_dict(),
        "total": {
            "prompts": replay.prompts,
            "prompt_tokens": replay.prompt_tokens,
            "prefill_s": rates.compute_seconds(replay.prompt_tokens),
            "price": rates.compute_price(replay.prompt_tokens),
            **_price("saved", saved, replay.prompt_tokens, rates),
        },
        "rows": rows,
        "fields": [_describe_field(one, redacted) for one in fields],
        "passages": {"marked": replay.marked_passages, "assumed": replay.assumed_passages},
        "left_out": dict(replay.left_out),
        "below_break_even": {"prompts": replay.below_prompts, "tokens": replay.below_tokens},
        "breaks": replay.breaks.to_dict(),
        "history": replay.history.to_dict(),
        "curves": replay.list_curves(),
        "by_length": replay.groups.list_lengths(),
        "by_tenant": {_hide_tenant(name) if redacted else name: one for name, one in tenants.items()},
        "failed_lookups": failed,
        "first_failure": first_failure,
        "lines_skipped": facts.lines_skipped,
        "skipped_examples": list(facts.skipped_examples),
        "replay_s": round(seconds, 3),
        "replay_tokens_per_s": round(replay.prompt_tokens / seconds) if seconds else None,
    }


def build_rows(replay: Replay, rates: Rates, field_names: Sequence[str]) -> list[dict[str, Any]]:
    """Rows in the order in which steps stand on each other; the savings add up to the total."""
    before, rows = replay.prompt_tokens, []
    changed = replay.list_changed()
    for name, computed in replay.list_computed():
        rows.append(
            {
                "name": name,
                "title": _write_title(name, field_names, replay),
                "rank": None,
                **_price("saved", before - computed, replay.prompt_tokens, rates),
                "computed_tokens": computed,
                "changed_prompts": changed.get(name),
                "assumes": _write_assumption(name, replay),
                "note": _write_note(name, replay),
            }
        )
        before = computed
    ranked = sorted((row for row in rows if row["saved_tokens"] > 0), key=lambda row: -row["saved_tokens"])
    for rank, row in enumerate(ranked, start=1):
        row["rank"] = rank
    return rows


def list_rows(answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rows of an answer, and behind them their sum, which has no name."""
    return [*answer["rows"], {"name": "", "title": "all of it", "rank": None, **answer["total"]}]


def list_tallies(
    tallies: Mapping[str, Mapping[str, int]], write_share: Callable[[float], str]
) -> list[tuple[str, ...]]:
    """The rows of a table over groups of prompts: tokens, and what was saved of them."""
    return [
        (
            key or "(none)",
            f"{one['prompts']:,}",
            f"{one['prompt_tokens']:,}",
            write_share(one["prefix_saved_tokens"] / one["prompt_tokens"]),
            write_share(one["saved_tokens"] / one["prompt_tokens"]),
        )
        for key, one in tallies.items()
        if one["prompts"]
    ]


_HISTORY = {
    "cost": "computed again behind edits",
    "batches": "edits in batches would save",
    BALANCED: "reuse at any offset would save, balanced",
    FAST: "reuse at any offset would save, fast",
}


def list_history(answer: Mapping[str, Any], write_share: Callable[[float], str]) -> list[tuple[str, ...]]:
    """The rows of a table over edits of histories: what they cost, and what would save of it; no row for nothing."""
    rates, total = answer["rates"], answer["total"]
    return [
        (
            title,
            f"{tokens:,}",
            write_share(tokens / total["prompt_tokens"]),
            f"{tokens / rates['prefill_tokens_per_s']:,.1f}",
            format_price(tokens * rates["price_per_million"] / 1e6, total["price"]),
        )
        for name, title in _HISTORY.items()
        if (tokens := answer["history"]["tokens"].get(name))
    ]


def describe_history(answer: Mapping[str, Any]) -> str:
    """What a reader has to know beside the rows of `list_history`."""
    history, given = answer["history"], answer["options"]["history_tokens"]
    edits, talks = format_plural(history["edits"], "edit"), format_plural(history["conversations"], "conversation")
    worst, changed = history["dearest"], format_plural(history["dearest"]["messages"], "message")
    return (
        f"{edits} in {talks}; the dearest in line {worst['line']}: {worst['tokens']:,} tokens behind {changed} removed "
        f"or replaced. Batches make it {history['edits_in_batches']:,}: each where a history exceeds "
        f"{f'{given:,} tokens' if given else 'the longest prompt so far'}, and down to half of that."
    )


def _write_title(name: str, field_names: Sequence[str], replay: Replay) -> str:
    if name == ARRANGE and not replay.marked_passages and not replay.assumed_passages:
        return f"{_TITLES[name]}: none recognised"
    if name == "fields" and field_names:
        return f"move to the end: {', '.join(field_names)}"
    if name.startswith("memory x"):
        return f"{name.removeprefix('memory x')} times the memory"
    return _TITLES[name]


def _write_assumption(name: str, replay: Replay) -> str:
    if name != ARRANGE:
        return _ASSUMES.get(name, _MEMORY_ASSUMES)
    if replay.assumed_passages and replay.marked_passages:
        return f"{_ASSUMES[name]} Marks say so for {replay.marked_passages:,}; {replay.assumed_passages:,} are assumed."
    if replay.assumed_passages:
        return (
            f"{_ASSUMES[name]} No mark says so: {replay.assumed_passages:,} passages were recognised by how they look."
        )
    return f"{_ASSUMES[name]} The log's marks say so." if replay.marked_passages else _NO_PASSAGES


def _write_note(name: str, replay: Replay) -> str:
    """What a reader has to know beside the number of a row; empty for nothing."""
    if name == ARRANGE and not replay.marked_passages and not replay.assumed_passages:
        return _NO_PASSAGES
    if name == FAST and replay.below_tokens:
        return (
            f"Another {replay.below_tokens:,} tokens in {replay.below_prompts:,} prompts stand in donors and are not "
            f"counted: each prompt would save no more than the {replay.options.pass_tokens:,} tokens that a pass costs "
            "(--break-even-tokens)."
        )
    unused = replay.list_unused().get(name)
    if unused:
        return (
            f"With all of it in use {unused:,} tokens more would be computed: more is moved, and moved KV makes "
            "neither an exact prefix nor a donor. The row takes the best size up to this one."
        )
    return ""


def describe_left_out(left_out: Mapping[str, int]) -> str:
    """Say what of the prompts was not counted; empty for nothing.

    >>> describe_left_out({"image": 3, "file": 1})
    '3 images and 1 file left out: their tokens are not counted'
    """
    named = [f"{count:,} {kind}{'' if count == 1 else 's'}" for kind, count in left_out.items()]
    return f"{' and '.join(named)} left out: their tokens are not counted" if named else ""


def _price(word: str, tokens: int, whole: int, rates: Rates) -> dict[str, Any]:
    return {
        f"{word}_tokens": tokens,
        f"{word}_share": tokens / whole if whole else 0.0,
        f"{word}_s": rates.compute_seconds(tokens),
        f"{word}_price": rates.compute_price(tokens),
    }


def _name_field(one: VolatileField, redacted: bool) -> str:
    """A name that says nothing of the prompt, where nothing may be said."""
    if redacted:
        return f"the field near character {one.offset_chars:,}"
    label = " ".join(one.before.split())[-_LABEL_CHARS:]
    return f"the text behind “{label}”" if one.name == "text" and label else one.name


def _describe_field(one: VolatileField, redacted: bool) -> Mapping[str, Any]:
    values = [redact(value) for value in one.values] if redacted else list(one.values)
    return {
        "name": _name_field(one, redacted),
        "offset_chars": one.offset_chars,
        "values": values,
        "before": redact(one.before) if redacted else one.before,
        "prompts_seen": one.prompts,
    }


def _hide_tenant(name: str) -> str:
    return f"tenant {hashlib.blake2b(name.encode('utf-8', 'surrogatepass'), digest_size=4).hexdigest()}"
