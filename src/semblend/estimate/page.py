"""The estimate as one HTML page with its charts. It needs no network and no scripts; text of prompts is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from semblend.arrange.arranger import CHARS_PER_TOKEN
from semblend.estimate.answer import describe_history, describe_left_out, list_history, list_rows, list_tallies
from semblend.formatting import format_count, format_plural, format_price, format_seconds, format_share
from semblend.web.charts import Axis, Drawing, Figure, RowFrame, begin_plot, draw_both, is_narrow, spread_out
from semblend.web.report import Tile, render_document, render_figure, render_head, render_table, render_tiles


def write_headline(answer: Mapping[str, Any]) -> str:
    """Say what the cache does now, which two steps help most, and which ones hurt."""
    rows = answer["rows"]
    first, steps = rows[0], rows[1:]
    if answer["total"]["prompts"] < 2:
        return "One prompt has nothing to share with: replay a longer log."
    words = [f"As it is, an exact prefix cache holds {format_share(first['saved_share'])} of the prompt tokens."]
    best = sorted((row for row in steps if row["saved_share"] >= 0.005), key=lambda row: -row["saved_tokens"])[:2]
    if best:
        named = " and ".join(f"“{row['title']}” ({_add_sign(row['saved_share'])})" for row in best)
        words.append(f"What adds most: {named}.")
    else:
        words.append("No step adds as much as half a percent: leave things as they are.")
    worse = [row["title"] for row in steps if row["saved_share"] <= -0.005]
    if worse:
        words.append(f"Leave out what computes more than it saves: {', '.join(f'“{title}”' for title in worse)}.")
    return " ".join(words)


def _add_sign(share: float) -> str:
    return f"+{format_share(share)}" if share > 0 else format_share(share)


_BAR = 18.0


def draw_steps(answer: Mapping[str, Any]) -> tuple[str, str]:
    """One bar for each step, from what the steps before saved to what is saved with it."""

    def draw(width: float) -> Drawing:
        rows = answer["rows"]
        most = 44 if is_narrow(width) else 36
        frame = RowFrame([_shorten(str(row["title"]), most) for row in rows], width, row=_BAR + 8, beside=250.0)
        drawing, scale = frame.begin(0.0, 1.0, format_share, "of all prompt tokens")
        before = 0.0
        for at, row in enumerate(rows):
            middle = frame.find_middle(at)
            after = before + row["saved_share"]
            low, high = sorted((before, after))
            if at:
                drawing.add_bar(scale(0), middle - _BAR / 2, scale(low) - scale(0), _BAR, "step-before")
            kind = "step-prefix" if at == 0 else "step-gain" if after >= before else "step-loss"
            hover = f"{row['title']}: {row['saved_tokens']:+,} tokens"
            drawing.add_bar(scale(low), middle - _BAR / 2, max(1.0, scale(high) - scale(low)), _BAR, kind, hover)
            sign = "+" if at and row["saved_tokens"] > 0 else ""
            drawing.add_text(scale(high) + 6, middle + 4, f"{sign}{format_share(row['saved_share'])}")
            before = after
        return drawing

    return draw_both(draw, "Bars: share of the prompt tokens that each step saves on top of those before it")


def draw_memory(answer: Mapping[str, Any]) -> tuple[str, str]:
    """Two curves over the size of the cache: prompts as they are, and as the steps would send them."""
    curves, whole = answer["curves"], max(1, answer["total"]["prompt_tokens"])
    sizes = curves["cache_tokens"]

    def draw(width: float) -> Drawing:
        narrow = is_narrow(width)
        x = Axis(sizes[0], max(sizes[-1], sizes[0] + 1), format_count, log=True, ticks=sizes[::2] if narrow else sizes)
        words = "tokens of KV in the cache, by ratio"
        drawing, across, up = begin_plot(
            width, 250, x, Axis(0.0, 1.0, format_share), words, left=44, right=16 if narrow else 96
        )
        now = across(answer["options"]["cache_tokens"])
        drawing.add_line(now, up.end, now, up.start, "ceiling")
        drawing.add_text(now + 4, up.end + 10, "now", "tick")
        ends = []
        for name, kind, told in (("as_it_is", "before", "as it is"), ("after_steps", "after", "with the steps")):
            shares = [hits / whole for hits in curves[name]]
            points = [(across(size), up(share)) for size, share in zip(sizes, shares, strict=True)]
            drawing.add_curve(points, f"curve {kind}")
            for (left, down), size, share in zip(points, sizes, shares, strict=True):
                drawing.add_dot(left, down, 4, kind, f"{told}, {size:,} tokens: {format_share(share)}")
            ends.append((points[-1][1], told))
        if not narrow:
            ends.sort()
            for place, (_, told) in zip(spread_out([y for y, _ in ends], 14, up.start), ends, strict=True):
                drawing.add_text(across.end + 10, place + 4, told)
        return drawing

    return draw_both(draw, "Curves: share of the prompt tokens in an exact prefix cache, by its size")


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


TENANTS_SHOWN = 20


def render_page(answer: Mapping[str, Any]) -> str:
    """Return the whole page."""
    title = "What each step would have saved"
    steps = Figure(
        "steps",
        "Step by step",
        draw_steps(answer),
        (
            ("step-prefix", "exact prefix cache"),
            ("step-gain", "gained"),
            ("step-loss", "lost"),
            ("step-before", "before"),
        ),
        "Each step stands on those above it.",
    )
    memory = Figure(
        "memory",
        "The exact prefix cache by its size",
        draw_memory(answer),
        (("curve before", "as it is"), ("curve after", "with the steps"), ("ceiling", "the size in use")),
        "Share of the prompt tokens that an exact prefix cache alone holds: of the prompts as they are, and with "
        "fields moved, tools sorted, repeats dropped and passages arranged for the size in use.",
    )
    body = [
        render_head(title, _list_subtitle(answer), write_headline(answer)),
        render_tiles(_list_tiles(answer)),
        render_figure(steps),
        _render_rows(answer),
        _render_history(answer),
        _render_breaks(answer["breaks"]),
        render_figure(memory),
        _render_groups(answer),
        _render_assumptions(answer),
        _render_sources(answer),
    ]
    return render_document(f"{title}: {_name_log(answer)}", body)


def _name_log(answer: Mapping[str, Any]) -> str:
    return str(answer["source"]).rsplit("/", 1)[-1]


def _list_subtitle(answer: Mapping[str, Any]) -> list[str]:
    total = answer["total"]
    return [
        _name_log(answer),
        format_plural(total["prompts"], "prompt"),
        f"{format_count(total['prompt_tokens'])} tokens",
        "" if answer["sample"] == 1 else f"a sample of {answer['sample']:.0%}",
        "" if answer["complete"] else "stopped before the end",
        f"{failed:,} lookups failed: reuse is counted too low" if (failed := answer["failed_lookups"]) else "",
        describe_left_out(answer["left_out"]),
        "replayed, not measured",
    ]


def _list_tiles(answer: Mapping[str, Any]) -> list[Tile]:
    total, rates, first = answer["total"], answer["rates"], answer["rows"][0]
    saved, price = (format_price(total[name], total["price"]) for name in ("saved_price", "price"))
    return [
        Tile(format_share(first["saved_share"]), "of the tokens", "from the exact prefix cache as it is"),
        Tile(format_share(total["saved_share"]), "of the tokens", "with every step on this page"),
        Tile(
            format_seconds(total["saved_s"]), "of prefill saved", f"of {format_seconds(total['prefill_s'])}, one engine"
        ),
        Tile(f"{saved} {rates['currency']}", "saved on this log", f"of {price} {rates['currency']}"),
    ]


def _render_rows(answer: Mapping[str, Any]) -> str:
    currency, total = answer["rates"]["currency"], answer["total"]
    rows = [
        (
            str(row["title"]),
            f"{row['saved_tokens']:+,}",
            format_share(row["saved_share"]),
            format_seconds(row["saved_s"]),
            format_price(row["saved_price"], total["price"]),
            str(row["rank"] or "–"),
        )
        for row in list_rows(answer)
    ]
    head = ("step", "tokens saved", "of all", "prefill", currency, "rank")
    notes = [f"<li><b>{escape(row['title'])}.</b> {escape(row['note'])}</li>" for row in answer["rows"] if row["note"]]
    shown = f'<ul class="notes">{"".join(notes)}</ul>' if notes else ""
    return render_table(head, rows, marks={len(rows) - 1: "sum"}, kind="wrapped") + shown


def _render_history(answer: Mapping[str, Any]) -> str:
    rows = list_history(answer, format_share)
    if not rows:
        return ""
    shown = render_table(("edits", "tokens", "of all", "prefill s", answer["rates"]["currency"]), rows)
    return f'<h2 id="history">Edits of histories</h2>{shown}<p>{escape(describe_history(answer))}</p>'


def _render_breaks(breaks: Mapping[str, Any]) -> str:
    if not breaks:
        return ""
    ordered = sorted(breaks.items(), key=lambda item: -item[1]["tokens"])
    return '<h2 id="breaks">What ended the hits</h2>' + "".join(_render_break(kind, one) for kind, one in ordered)


def _render_break(kind: str, one: Mapping[str, Any]) -> str:
    first, *rest = [_render_example(example) for example in one["examples"]]
    more = f"<details><summary>{len(rest)} more</summary>{''.join(rest)}</details>" if rest else ""
    return (
        f'<section class="card break"><h3>{escape(kind)}</h3><p class="dim">{format_plural(one["prompts"], "prompt")}, '
        f"{format_count(one['tokens'])} tokens</p>{first}{more}</section>"
    )


def _render_example(example: Mapping[str, Any]) -> str:
    name = f" ({example['request_id']})" if example["request_id"] else ""
    held = f"{example['position_tokens']:,} of {example['prompt_tokens']:,} tokens were held"
    where = f"Line {example['line']:,}{name}: {held}"
    if example["position_chars"] is None:
        return f'<p class="dim">{escape(where)}. The log holds no text.</p>'
    same = f'<span class="same">{escape(example["before"])}</span>'
    lines = [f'<b>this prompt</b>{same}<span class="here">{escape(example["here"])}</span>']
    if example["earlier"] is not None:
        lines.append(f'<b>earlier one</b>{same}<span class="there">{escape(example["earlier"])}</span>')
    quotes = "".join(f'<div class="quote">{line}</div>' for line in lines)
    return f'<p class="dim">{escape(where)}; the texts part at character {example["position_chars"]:,}.</p>{quotes}'


def _render_groups(answer: Mapping[str, Any]) -> str:
    parts = [_render_tallies("prompt length", answer["by_length"])]
    if len(answer["by_tenant"]) > 1:
        shown = dict(list(answer["by_tenant"].items())[:TENANTS_SHOWN])
        parts.append(_render_tallies("tenant", shown))
    return f'<h2 id="groups">Who gains</h2>{"".join(parts)}'


def _render_tallies(name: str, tallies: Mapping[str, Mapping[str, int]]) -> str:
    head = (name, "prompts", "tokens", "prefix cache", "up to balanced")
    return render_table(head, list_tallies(tallies, format_share))


def _render_assumptions(answer: Mapping[str, Any]) -> str:
    items = [f"<li><b>{escape(row['title'])}.</b> {escape(row['assumes'])}</li>" for row in _unique(answer["rows"])]
    items.append(
        "<li><b>Not counted.</b> Queues and batches, decoding, the time to look donors up and to load them, prefill "
        "that grows faster than its length, and whether answers stay as good. Only an engine's receipt counts as "
        "reuse.</li>"
    )
    return f'<h2 id="assumptions">What each row assumes</h2><ul>{"".join(items)}</ul>'


def _unique(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows, of those about memory the first."""
    return list({row["assumes"]: row for row in reversed(rows)}.values())[::-1]


def _render_sources(answer: Mapping[str, Any]) -> str:
    rates, options = answer["rates"], answer["options"]
    about = ", an approximation of a model's tokens" if answer["tokens_are_approximate"] else ""
    rows = [
        ("log", f"{answer['source']}, format {answer['format']}, {answer['lines_skipped']:,} lines skipped"),
        ("tokenizer", f"{answer['tokenizer']}{about}"),
        ("prefix cache", f"{options['cache_tokens']:,} tokens in blocks of {options['block_tokens']}, LRU"),
        (
            "arranger",
            f"told that it holds {options['cache_tokens'] * CHARS_PER_TOKEN:,} characters (exact_size)",
        ),
        ("donors", f"{options['donor_tokens']:,} tokens"),
        ("KV", f"{rates['kv_bytes_per_token']:,} bytes a token ({rates['model']}, 16 bits)"),
        ("prefill", f"{rates['prefill_tokens_per_s']:,.0f} tokens/s ({rates['prefill_source']})"),
        ("price", f"{rates['price_per_million']:.4g} {rates['currency']} a million tokens ({rates['price_source']})"),
        ("passages", f"{answer['passages']['marked']:,} marked, {answer['passages']['assumed']:,} recognised"),
        *((f"field: {one['name']}", ", ".join(one["values"])) for one in answer["fields"]),
        *(("skipped", words) for words in answer["skipped_examples"]),
        ("semblend", str(answer["semblend"])),
    ]
    shown = render_table(("what", "value"), rows, classes={0: "key", 1: "value"})
    return f'<h2 id="sources">Where the numbers come from</h2>{shown}'
