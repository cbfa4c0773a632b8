"""The estimate for a terminal. Everything in it comes from the answer as data."""

from __future__ import annotations

from typing import Any

from semblend.cli.output import table
from semblend.estimate.answer import describe_left_out
from semblend.formatting import format_percent, format_plural, format_price

TENANTS_SHOWN = 10
CAVEAT = (
    "A replay of tokens, not a measurement: no model ran. Seconds are prefilled tokens over the rate above, without\n"
    "queues and batches. Each row stands on those before it. Only an engine's receipt counts as reuse."
)


def render(answer: dict[str, Any]) -> str:
    """The tables, with what they assume."""
    parts = [_describe(answer), _render_rows(answer), _render_breaks(answer["breaks"]), _render_groups(answer), CAVEAT]
    return "\n\n".join(part for part in parts if part)


def _describe(answer: dict[str, Any]) -> str:
    total, rates, options = answer["total"], answer["rates"], answer["options"]
    about = " (an approximation)" if answer["tokens_are_approximate"] else ""
    part = "" if answer["sample"] == 1 else f", a sample of {answer['sample']:.1%}"
    stopped = "" if answer["complete"] else "; stopped before the end of the log"
    gigabytes = options["cache_tokens"] * rates["kv_bytes_per_token"] / 1e9
    return "\n".join(
        [
            f"{format_plural(total['prompts'], 'prompt')}, {format_plural(total['prompt_tokens'], 'token')} "
            f"(log format {answer['format']}, tokenizer {answer['tokenizer']}{about}{part}{stopped})",
            f"prefix cache: {options['cache_tokens']:,} tokens, {gigabytes:.1f} GB of {rates['model']} KV, "
            f"blocks of {options['block_tokens']}, LRU; donors: {options['donor_tokens']:,} tokens more",
            "what is full forgets what was used longest ago; passages are arranged for that size (exact_size)",
            f"prefill: {rates['prefill_tokens_per_s']:,.0f} tokens/s ({rates['prefill_source']})",
            f"price: {rates['price_per_million']:.4g} {rates['currency']} a million tokens ({rates['price_source']})",
            *([make_printable(describe_left_out(answer["left_out"]))] if answer["left_out"] else []),
        ]
    )


def _render_rows(answer: dict[str, Any]) -> str:
    total, currency = answer["total"], answer["rates"]["currency"]
    rows = [
        (
            f"{number}. {make_printable(row['title'])}",
            f"{row['saved_tokens']:+,}",
            format_percent(row["saved_share"], 1),
            f"{row['saved_s']:+,.1f}",
            format_price(row["saved_price"], total["price"]),
            "" if row["rank"] is None else row["rank"],
        )
        for number, row in enumerate(answer["rows"], start=1)
    ]
    rows.append(
        (
            "all of it",
            f"{total['saved_tokens']:+,}",
            format_percent(total["saved_share"], 1),
            f"{total['saved_s']:+,.1f}",
            format_price(total["saved_price"], total["price"]),
            "",
        )
    )
    head = ("each step on top of those before it", "tokens saved", "of all", "prefill s", currency, "rank")
    cost = (
        f"Without any cache this log takes {total['prefill_s']:,.1f} s of prefill and "
        f"{format_price(total['price'], total['price'])} {currency}."
    )
    found = [row for row in answer["rows"] if row["name"] == "arrange" and row["saved_tokens"]]
    notes = [f"arrange: {row['assumes']}" for row in found if answer["passages"]["assumed"]]
    notes += [f"{row['name']}: {row['note']}" for row in answer["rows"] if row["note"]]
    worse = [row["title"] for row in answer["rows"] if row["saved_tokens"] < 0]
    notes += [f"costs more than it saves here: {', '.join(map(make_printable, worse))}"] if worse else []
    if failed := answer["failed_lookups"]:
        notes.append(f"{failed:,} lookups failed, so reuse is counted too low: {answer['first_failure']}")
    return "\n".join([table(rows, head=head, right=(1, 2, 3, 4, 5)), cost, *notes])


def _render_breaks(breaks: dict[str, Any]) -> str:
    if not breaks:
        return ""
    rows = []
    for kind, one in breaks.items():
        first = one["examples"][0]
        shown = ""
        if first["position_chars"] is not None:
            before = make_printable(first["before"])[-24:]
            shown = f"line {first['line']}: …{before}⟨{make_printable(first['here'])[:32]}⟩"
        rows.append((kind, f"{one['prompts']:,}", f"{one['tokens']:,}", shown))
    head = ("what ended the hit", "prompts", "tokens", "the first one: … the same ⟨then different⟩")
    return table(rows, head=head, right=(1, 2))


def _render_groups(answer: dict[str, Any]) -> str:
    parts = [_render_tallies("prompt length", answer["by_length"])]
    tenants = answer["by_tenant"]
    if len(tenants) > 1:
        shown = dict(list(tenants.items())[:TENANTS_SHOWN])
        of = f"tenant (largest {TENANTS_SHOWN} of {len(tenants):,})" if len(tenants) > TENANTS_SHOWN else "tenant"
        parts.append(_render_tallies(of, shown))
    return "\n\n".join(parts)


def _render_tallies(name: str, tallies: dict[str, dict[str, Any]]) -> str:
    rows = [
        (
            make_printable(key) or "(none)",
            f"{one['prompts']:,}",
            f"{one['prompt_tokens']:,}",
            format_percent(one["prefix_saved_tokens"] / one["prompt_tokens"], 1),
            format_percent(one["saved_tokens"] / one["prompt_tokens"], 1),
        )
        for key, one in tallies.items()
        if one["prompts"]
    ]
    head = (f"by {name}", "prompts", "tokens", "prefix cache", "up to balanced")
    return table(rows, head=head, right=(1, 2, 3, 4))


def make_printable(text: str) -> str:
    """A text of strangers for a terminal: no line ends, no control codes.

    >>> make_printable("a\\x1b[31m\\nb")
    'a·[31m b'
    """
    return "".join(char if char.isprintable() else " " if char in "\n\r\t" else "·" for char in text)
