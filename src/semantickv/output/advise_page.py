"""The advice as a page to print: the headline, one figure, the numbers behind it, and the limits."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path

from semantickv.analysis.advice import Advice, count_hits_by_type
from semantickv.analysis.latency import BOUNDS
from semantickv.output import advise_words as words
from semantickv.output.advise_figure import draw_curves, draw_svg
from semantickv.output.advise_words import format_gib, format_share
from semblend.cli.output import write_json, write_text

FIGURE = "hit_rate_against_memory.png"
_STYLE = """
:root { --ink: #22262b; --faint: #6b7280; --paper: #fbfaf7; --line: #e6e3dc; --mark: #e45756; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 900px; margin: 0 auto; padding: 28px 28px 40px; }
h1 { font-size: 25px; line-height: 1.25; margin: 6px 0 10px; }
h2 { font-size: 16px; margin: 26px 0 8px; }
.tag { color: var(--mark); font-weight: 600; font-size: 13px; letter-spacing: .04em; text-transform: uppercase; }
.verdict { color: var(--mark); font-weight: 600; margin: 0 0 10px; }
.lead { font-size: 16px; margin: 0 0 14px; }
.cards { display: grid; grid-template-columns: repeat(4, 1fr); gap: 10px; margin: 16px 0 10px; }
.card { border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; background: #fff; }
.card b { display: block; font-size: 21px; line-height: 1.3; }
.card span { color: var(--faint); font-size: 13px; }
figure { margin: 14px 0 0; } figure svg { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { text-align: right; padding: 4px 10px; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; } th { color: var(--faint); font-weight: 500; }
tr.chosen td { background: #fdeeec; }
td b { font-weight: 700; } tr.bound td { color: var(--faint); font-style: italic; }
code { background: #f1eee7; padding: 1px 4px; border-radius: 4px; font-size: 13px; overflow-wrap: anywhere; }
ul { padding-left: 20px; margin: 6px 0; } li { margin: 3px 0; }
footer { color: var(--faint); font-size: 13px; margin-top: 26px; border-top: 1px solid var(--line); padding-top: 10px; }
@media (max-width: 640px) { .cards { grid-template-columns: repeat(2, 1fr); } main { padding: 16px; }
  table { display: block; overflow-x: auto; } }
@media print { body { background: #fff; font-size: 12px; } main { max-width: none; padding: 0; }
  h2 { break-after: avoid; } table, figure, .cards { break-inside: avoid; } }
"""


def write_advice(advice: Advice, folder: Path) -> None:
    """Write advice.html, advice.md, advice.json and, where the trace can tell, the figure into ``folder``."""
    write_json(folder / "advice.json", advice.as_json())
    if advice.can_tell:
        draw_curves(advice, folder / FIGURE)
    write_text(folder / "advice.md", format_markdown(advice))
    write_text(folder / "advice.html", format_html(advice))


def build_policy_rows(advice: Advice, strong: str = "**{}**") -> list[tuple[str, ...]]:
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
        return strong.format(text) if best else text

    return [(p, *(format_cell(p, at, top) for at, top in zip(columns, tops, strict=True))) for p in order]


def choose_columns(advice: Advice) -> list[int]:
    """Choose the indices of the sizes to show: both ends and those around the advised one."""
    last, here = len(advice.sizes) - 1, advice.chosen
    return sorted({0, max(0, here - 2), max(0, here - 1), here, min(last, here + 1), last})


def format_markdown(advice: Advice) -> str:
    """Format the whole advice as Markdown."""
    limits = [f"- {limit}" for limit in words.list_limits(advice)]
    if not advice.can_tell:
        lead = [f"# {words.format_headline(advice)}", "", words.format_lead(advice), "", *limits, ""]
        return "\n".join([*lead, f"{advice.trace.name}: {words.describe_traffic(advice)}"]) + "\n"
    heads = [
        format_gib(advice.to_gib(advice.sizes[at])) + (" (advised)" if at == advice.chosen and advice.pays else "")
        for at in choose_columns(advice)
    ]
    types = [
        (name, f"{total:,}", format_share(hit, total)) for name, (total, hit) in count_hits_by_type(advice).items()
    ]
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
    lines += [*_format_table(("policy", *heads), build_policy_rows(advice)), "", "## By type", ""]
    lines += [*_format_table(("type", "prompt tokens", "from cache"), types), "", "## What this does not say", ""]
    return "\n".join([*lines, *limits]) + "\n"


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
    esc = html.escape
    limits = "".join(f"<li>{_mark_code(esc(limit))}</li>" for limit in words.list_limits(advice))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{esc(words.format_headline(advice))}</title><style>{_STYLE}</style></head><body><main>
<div class="tag">Simulated</div>
<h1>{esc(words.format_headline(advice))}</h1>
<p class="lead">{_mark_code(esc(words.format_lead(advice)))}</p>
{_format_figures(advice) if advice.can_tell else ""}
<ul>{limits}</ul>
<footer>{esc(advice.trace.name)}: {esc(words.describe_traffic(advice))} Made by semantickv advise.</footer>
</main></body></html>
"""


def _format_figures(advice: Advice) -> str:
    """The figure, the sections and the tables, in HTML."""
    esc = html.escape
    heads = [
        format_gib(advice.to_gib(advice.sizes[at])) + ("<br>advised" if at == advice.chosen and advice.pays else "")
        for at in choose_columns(advice)
    ]
    rows = "".join(
        f'<tr class="{"chosen" if row[0] == advice.policy else "bound" if row[0] in BOUNDS else ""}">'
        + f"<td>{esc(row[0])}</td>"
        + "".join(f"<td>{cell}</td>" for cell in row[1:])
        + "</tr>"
        for row in build_policy_rows(advice, "<b>{}</b>")
    )
    types = "".join(
        f"<tr><td>{esc(name)}</td><td>{total:,}</td><td>{format_share(hit, total)}</td></tr>"
        for name, (total, hit) in count_hits_by_type(advice).items()
    )
    shown = "".join(
        f'<div class="card"><b>{esc(v)}</b><span>{esc(told)}</span></div>' for v, told in words.build_cards(advice)
    )
    sections = "".join(f"<h2>{title}</h2><p>{_mark_code(esc(told))}</p>\n" for title, told in _list_sections(advice))
    return f"""<div class="cards">{shown}</div>
<figure>{draw_svg(advice)}</figure>
{sections}{_format_tiers(advice)}
<h2>Token hit rate by policy and memory (best of a size in bold)</h2>
<table><tr><th>policy</th>{"".join(f"<th>{head}</th>" for head in heads)}</tr>{rows}</table>
<h2>What hits, by type, at {format_gib(advice.to_gib(advice.sizes[advice.chosen]))}</h2>
<table><tr><th>type</th><th>prompt tokens</th><th>from cache</th></tr>{types}</table>
<h2>What this page does not say</h2>"""


def _format_tiers(advice: Advice) -> str:
    """The table of the kinds of memory; empty where prices decide nothing."""
    rows = words.build_tier_rows(advice)
    if not rows:
        return ""
    cells = "".join(
        f'<tr class="{"chosen" if row[0].lower() == advice.costs.tier.name else ""}">'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    heads = "".join(f"<th>{head}</th>" for head in words.TIER_HEADS)
    title = f"By kind of memory, each alone ({advice.costs.currency})"
    return f"<h2>{title}</h2>\n<table><tr>{heads}</tr>{cells}</table>"


def _mark_code(text: str) -> str:
    """Put what stands between backticks into code elements; the text is escaped already."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", text)
