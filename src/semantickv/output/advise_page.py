"""The advice as a page to print: the headline, one figure, the numbers behind it, and the limits."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from semantickv.analysis.advice import Advice, count_hits_by_type
from semantickv.analysis.latency import BOUNDS
from semantickv.output import advise_words as words
from semantickv.output.advise_figure import build_figure, write_picture
from semantickv.output.advise_words import format_gib, format_share
from semblend.cli.output import write_json, write_text
from semblend.web.report import Tile, render_document, render_figure, render_tiles
from semblend.web.tables import Strong, render_table

FIGURE = "hit_rate_against_memory.svg"
TYPE_HEADS = ("type", "prompt tokens", "from cache")


def write_advice(advice: Advice, folder: Path) -> None:
    """Write advice.html, advice.md, advice.json and, where the trace can tell, the figure into ``folder``."""
    write_json(folder / "advice.json", advice.as_json())
    if advice.can_tell:
        write_text(folder / FIGURE, write_picture(advice))
    write_text(folder / "advice.md", format_markdown(advice))
    write_text(folder / "advice.html", format_html(advice))


def build_policy_rows(advice: Advice, strong: Callable[[str], str] = "**{}**".format) -> list[tuple[str, ...]]:
    """Build the table: each policy with its token hit rates at some sizes; best first, bounds last.

    At each size the best policy that does not know the future is written as ``strong``.
    """
    columns = choose_columns(advice)
    order = sorted(
        advice.curves, key=lambda p: (p in BOUNDS, -advice.curves[p][advice.chosen].token_hit_rate, p != "lru")
    )
    tops = [max(points[at].token_hit_rate for p, points in advice.curves.items() if p not in BOUNDS) for at in columns]

    def format_cell(policy: str, at: int, top: float) -> str:
        rate = advice.curves[policy][at].token_hit_rate
        text = f"{rate:.1%}"
        best = policy not in BOUNDS and rate >= top - 1e-4 and at != len(advice.sizes) - 1  # at the end all are equal
        return strong(text) if best else text

    return [(p, *(format_cell(p, at, top) for at, top in zip(columns, tops, strict=True))) for p in order]


def choose_columns(advice: Advice) -> list[int]:
    """Choose the indices of the sizes to show: both ends, the engine's own and those around the advised one."""
    last, here = len(advice.sizes) - 1, advice.chosen
    own = advice.sizes.index(advice.room.cache)
    return sorted({0, own, max(0, here - 1), here, min(last, here + 1), last})


def format_markdown(advice: Advice) -> str:
    """Format the whole advice as Markdown."""
    limits = [f"- {limit}" for limit in words.list_limits(advice)]
    if not advice.can_tell:
        lead = [f"# {words.format_headline(advice)}", "", words.format_lead(advice), "", *limits, ""]
        return "\n".join([*lead, f"{advice.trace.name}: {words.describe_traffic(advice)}"]) + "\n"
    lines = [
        f"# {words.format_headline(advice)} (simulated)",
        "",
        f"{advice.trace.name}: {words.describe_traffic(advice)}",
        "",
        words.format_lead(advice),
        "",
        *(f"- **{value}** {told}" for value, told in words.build_cards(advice)),
        "",
        f"![Hit rate against memory]({FIGURE})",
        "",
    ]
    for title, told in _list_sections(advice):
        lines += [f"## {title}", "", told, ""]
    rows = words.build_tier_rows(advice)
    if rows:
        lines += ["## By kind of memory", "", *_format_table(words.TIER_HEADS, rows), ""]
    lines += ["## Token hit rate by policy and memory", ""]
    lines += [*_format_table(_list_heads(advice), build_policy_rows(advice)), "", "## By type", ""]
    lines += [*_format_table(TYPE_HEADS, _list_types(advice)), "", "## What this does not say", ""]
    return "\n".join([*lines, *limits]) + "\n"


def _list_heads(advice: Advice) -> list[str]:
    sizes = [format_gib(advice.to_gib(advice.sizes[at])) + _name_size(advice, at) for at in choose_columns(advice)]
    return ["policy", *sizes]


def _name_size(advice: Advice, at: int) -> str:
    if advice.sizes[at] == advice.room.cache:
        return " (the GPU's own)"
    return " (with what is added)" if at == advice.chosen else ""


def _list_types(advice: Advice) -> list[tuple[str, str, str]]:
    return [(name, f"{total:,}", format_share(hit, total)) for name, (total, hit) in count_hits_by_type(advice).items()]


def _list_sections(advice: Advice) -> list[tuple[str, str]]:
    """The sections that are one paragraph each, with their titles."""
    found = [
        ("How to set it", words.describe_how_to_set_it(advice)),
        ("What it saves", words.describe_money(advice)),
        ("Beyond prefixes", words.describe_reuse_at_any_position(advice)),
        ("Arranging", words.describe_arranging(advice)),
    ]
    return [(title, told) for title, told in found if told]


def _format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(heads) + " |",
        "|---|" + "---:|" * (len(heads) - 1),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def format_html(advice: Advice) -> str:
    """Format the whole advice as one self-contained HTML file."""
    title = words.format_headline(advice)
    body = [
        '<div class="tag">Simulated</div>',
        f'<h1>{escape(title)}</h1><p class="verdict">{_mark_code(words.format_lead(advice))}</p>',
        *(_list_figures(advice) if advice.can_tell else ()),
        f"<ul>{''.join(f'<li>{_mark_code(limit)}</li>' for limit in words.list_limits(advice))}</ul>",
        f"<footer>{escape(advice.trace.name)}: {escape(words.describe_traffic(advice))} "
        "Made by semantickv advise.</footer>",
    ]
    return render_document(title, body)


def _list_figures(advice: Advice) -> list[str]:
    """The figure, the sections and the tables, in HTML."""
    rows, tiers = build_policy_rows(advice, Strong), words.build_tier_rows(advice)
    marks = {at: "best" if row[0] == advice.policy else "bound" for at, row in enumerate(rows)
             if row[0] == advice.policy or row[0] in BOUNDS}  # fmt: skip
    tier = {at: "best" for at, row in enumerate(tiers) if row[0].lower() == advice.costs.tier.name}
    kinds = (
        f"<h2>By kind of memory, each alone beside the GPU's ({escape(advice.costs.currency)})</h2>" if tiers else ""
    )
    return [
        render_tiles(Tile(value, told) for value, told in words.build_cards(advice)),
        render_figure(build_figure(advice)),
        *(f"<h2>{escape(title)}</h2><p>{_mark_code(told)}</p>" for title, told in _list_sections(advice)),
        kinds + (render_table(words.TIER_HEADS, tiers, marks=tier) if tiers else ""),
        "<h2>Token hit rate by policy and memory (best of a size in bold)</h2>",
        render_table(_list_heads(advice), rows, marks=marks),
        f"<h2>What hits, by type, at {format_gib(advice.to_gib(advice.sizes[advice.chosen]))}</h2>",
        render_table(TYPE_HEADS, _list_types(advice)),
        "<h2>What this page does not say</h2>",
    ]


def _mark_code(text: str) -> str:
    """Escape text and put what stands between backticks into code elements."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))
