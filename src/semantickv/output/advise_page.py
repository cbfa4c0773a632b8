"""The advice as a page to print: the headline, one figure, the numbers behind it, and the limits."""

from __future__ import annotations

import html
import io
import re
from pathlib import Path
from typing import Any

from semantickv.analysis.advise import NOISE, Advice, count_hits_by_type
from semantickv.analysis.engines import ENGINES, list_engines_with
from semantickv.analysis.latency import BOUNDS, SIMULATED_NOTE
from semantickv.output import plots
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
ul { padding-left: 20px; margin: 6px 0; } li { margin: 3px 0; }
footer { color: var(--faint); font-size: 13px; margin-top: 26px; border-top: 1px solid var(--line); padding-top: 10px; }
@media (max-width: 640px) { .cards { grid-template-columns: repeat(2, 1fr); } main { padding: 16px; }
  table { display: block; overflow-x: auto; } }
@media print { body { background: #fff; font-size: 12px; } main { max-width: none; padding: 0; }
  h2 { break-after: avoid; } table, figure, .cards { break-inside: avoid; } }
"""


def write_advice(advice: Advice, folder: Path) -> None:
    """Write advice.html, advice.md, advice.json and the figure into ``folder``."""
    write_json(folder / "advice.json", advice.as_json())
    draw_curves(advice, folder / FIGURE)
    write_text(folder / "advice.md", format_markdown(advice))
    write_text(folder / "advice.html", format_html(advice))


# -- words -----------------------------------------------------------------------------------------------------------


def format_headline(advice: Advice) -> str:
    """Write the advice in one sentence: policy, memory and hit rate."""
    if not advice.can_tell:
        return "This trace cannot tell whether a cache would help"
    size, rate = advice.sizes[advice.knee], advice.get_point_at_knee(advice.policy).token_hit_rate
    if advice.ceiling.token_hit_rate < NOISE:
        return "A prefix cache would not help this traffic"
    if not advice.pays:
        return "At these prices no memory for a cache pays"
    memory = _format_gib(advice.to_gib(size))
    return f"{_format_policy(advice.policy)} with {memory} of KV: {rate:.0%} of prompt tokens from cache"


def format_lead(advice: Advice) -> str:
    """Compare the advised point with unlimited memory, with LRU and with the bound, in words."""
    here, lru, ceiling = advice.get_point_at_knee(advice.policy), advice.get_point_at_knee("lru"), advice.ceiling
    if not advice.can_tell:
        return (
            "It says how long prompts were and not what they held, so nothing is known about what they share. Collect "
            "one with `semantickv collect`, or record the engine's KV events."
        )
    if ceiling.token_hit_rate < NOISE:
        return f"Even with room for everything, {ceiling.token_hit_rate:.1%} of the prompt tokens would come from it."
    words = [
        f"That is {_format_share(here.token_hit_rate, ceiling.token_hit_rate)} of what any amount of memory could give "
        f"({ceiling.token_hit_rate:.0%}; all of the trace fits into {_format_gib(advice.to_gib(ceiling.tokens))})."
    ]
    if advice.policy == "lru":
        words.append(f"No other policy beats LRU there by more than {NOISE:.1%}, so the simplest one is advised.")
    else:
        words.append(f"LRU would give {lru.token_hit_rate:.1%} in the same memory.")
    bound = next((name for name in reversed(BOUNDS) if name in advice.curves), None)
    if bound and advice.get_point_at_knee(bound).token_hit_rate > here.token_hit_rate:
        words.append(f"Knowing the future ({bound}) would give {advice.get_point_at_knee(bound).token_hit_rate:.1%}.")
    return " ".join(words)


def describe_how_to_set_it(advice: Advice) -> str:
    """Say what to type for the chosen engine, or which engines have the advised policy."""
    if not advice.can_tell or advice.ceiling.token_hit_rate < NOISE:
        return "Nothing to set."
    if advice.engine:
        return f"In {advice.engine} ({ENGINES[advice.engine].tier} memory): `{advice.command}`."
    engines = list_engines_with(advice.policy)
    if not engines:
        return (
            f"No engine that we know has {advice.policy}: `--engine {'|'.join(ENGINES)}` advises what one of them has."
        )
    return f"{_format_policy(advice.policy)} is what {', '.join(engines)} have; `--engine` prints the flags."


def build_cards(advice: Advice) -> list[tuple[str, str]]:
    """Build the four key figures, each with its explanation; none where the trace cannot tell."""
    if not advice.can_tell:
        return []
    found = [
        (
            _format_gib(advice.to_gib(advice.sizes[advice.knee])),
            f"{advice.sizes[advice.knee]:,} tokens of {advice.model} KV",
        ),
        (f"{advice.get_point_at_knee(advice.policy).token_hit_rate:.1%}", "of prompt tokens from cache"),
        (f"{advice.ttft_ms:.0f} ms", f"average TTFT, {advice.ttft_cold_ms:.0f} ms without a cache"),
    ]
    hours = _format_hours(advice.saved_a_day)
    found.append((hours, "of prefill saved a day") if advice.hour_cost is None else
                 (f"{advice.saved_a_day * advice.hour_cost:,.2f}", f"saved a day: {hours} of prefill"))  # fmt: skip
    return found


def describe_reuse_at_any_position(advice: Advice) -> str:
    """Describe how many tokens reuse of blocks at any position would add."""
    if not advice.can_tell:
        return "This trace cannot tell."
    if not advice.anywhere:
        return (
            "This trace cannot tell: its ids stand for a block and everything before it. Collect one with "
            "`semantickv collect` to see it."
        )
    here, there = advice.get_point_at_knee(advice.policy), advice.anywhere[advice.knee]
    gain = there.token_hit_rate - here.token_hit_rate
    if gain <= NOISE:
        return (
            f"Reuse of blocks at any position would add {gain:+.1%} of the prompt tokens at this size: prefixes are "
            "all that is shared."
        )
    saved = (there.tokens_saved - here.tokens_saved) * advice.latency.token_latency_ms / 3.6e6
    a_day = saved * 24 / advice.hours if advice.hours else 0.0
    return (
        f"If blocks could be reused at any position, {there.token_hit_rate:.1%} of the prompt tokens would come from "
        f"the cache in the same memory: {gain * 100:.1f} points more, another {_format_hours(a_day)} of prefill a day. "
        "An upper bound: it counts every equal block, and pays nothing for moving it or for checking its quality."
    )


def list_limits(advice: Advice) -> list[str]:
    """List what the figures do not say, one sentence each."""
    latency = advice.latency
    found = [
        SIMULATED_NOTE,
        f"TTFT = {latency.base_ttft_ms:.1f} ms + uncached tokens x {latency.token_latency_ms:.4f} ms "
        f"({latency.source}): no queue, no batch. Hours of prefill are tokens times that line's slope.",
        *(
            ["Those two numbers are defaults, not yours: see --calibrate-from-trace."]
            if latency.source == "default"
            else []
        ),
        "Capacity is counted for cached prompts only: running requests need their own KV.",
        f"Hit rates within {NOISE:.1%} of each other are called equal. Belady knows the future and is no policy to "
        "run; with blocks of different length it is a guide, not a strict bound.",
    ]
    found.append(describe_stability(advice))
    if 0 < advice.hours < 24:
        found.append(
            f"A day is taken to be {24 / advice.hours:,.0f} times this trace of {advice.hours * 60:,.0f} minutes."
        )
    if advice.rate < 1:
        worst = max(point.error for points in advice.curves.values() for point in points)
        found.append(
            f"The curves come from samples of {advice.rate:.1%} of the blocks (standard error up to {worst:.1%}); "
            "block hit rates stand for token hit rates."
        )
    if advice.trace.skipped:
        found.append(f"{advice.trace.skipped:,} bad lines of the trace were skipped.")
    return found


def describe_stability(advice: Advice) -> str:
    """Say whether the first half of the trace, on its own, asks for the same memory."""
    half = "no memory at all" if advice.half is None else _format_gib(advice.to_gib(advice.half))
    if advice.is_stable:
        return f"The first half of the trace, on its own, asks for {half}: about the same."
    return f"The trace is too short to choose a size: its first half, on its own, asks for {half}."


def build_policy_rows(advice: Advice, strong: str = "**{}**") -> list[tuple[str, ...]]:
    """Build the table: each policy with its token hit rates at some sizes; best first, bounds last.

    At each size the best policy that does not know the future is written as ``strong``.
    """
    columns = choose_columns(advice)
    order = sorted(
        advice.curves, key=lambda p: (p in BOUNDS, -advice.curves[p][advice.knee].token_hit_rate, p != "lru")
    )
    tops = [max(points[at].token_hit_rate for p, points in advice.curves.items() if p not in BOUNDS) for at in columns]

    def format_cell(policy: str, at: int, top: float) -> str:
        rate = advice.curves[policy][at].token_hit_rate
        text = f"{rate:.1%}"
        best = policy not in BOUNDS and rate >= top - 1e-4 and at != len(advice.sizes) - 1  # at the end all are equal
        return strong.format(text) if best else text

    return [(p, *(format_cell(p, at, top) for at, top in zip(columns, tops, strict=True))) for p in order]


def choose_columns(advice: Advice) -> list[int]:
    """Choose the indices of the sizes to show: both ends and those around the knee."""
    last = len(advice.sizes) - 1
    return sorted({0, max(0, advice.knee - 2), max(0, advice.knee - 1), advice.knee, min(last, advice.knee + 1), last})


def format_markdown(advice: Advice) -> str:
    """Format the whole advice as Markdown."""
    heads = [
        _format_gib(advice.to_gib(advice.sizes[at])) + (" (knee)" if at == advice.knee else "")
        for at in choose_columns(advice)
    ]
    lines = [
        f"# {format_headline(advice)} (simulated)",
        "",
        f"{advice.trace.name}: {_describe_traffic(advice)}",
        "",
        format_lead(advice),
        "",
        *(f"- **{value}** {words}" for value, words in build_cards(advice)),
        "",
        f"![Hit rate against memory]({FIGURE})",
        "",
        "## How to set it",
        "",
        describe_how_to_set_it(advice),
        "",
        "## Token hit rate by policy and memory",
        "",
        "| policy | " + " | ".join(heads) + " |",
        "|---|" + "---:|" * len(heads),
        *("| " + " | ".join(row) + " |" for row in build_policy_rows(advice)),
        "",
        "## Beyond prefixes",
        "",
        describe_reuse_at_any_position(advice),
        "",
        "## By type",
        "",
        "| type | prompt tokens | from cache |",
        "|---|---:|---:|",
        *(
            f"| {name} | {total:,} | {_format_share(hit, total)} |"
            for name, (total, hit) in count_hits_by_type(advice).items()
        ),
        "",
        "## What this does not say",
        "",
        *(f"- {limit}" for limit in list_limits(advice)),
    ]
    return "\n".join(lines) + "\n"


# -- page ------------------------------------------------------------------------------------------------------------


def format_html(advice: Advice) -> str:
    """Format the whole advice as one self-contained HTML file."""
    esc = html.escape
    heads = [
        _format_gib(advice.to_gib(advice.sizes[at])) + ("<br>knee" if at == advice.knee else "")
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
        f"<tr><td>{esc(name)}</td><td>{total:,}</td><td>{_format_share(hit, total)}</td></tr>"
        for name, (total, hit) in count_hits_by_type(advice).items()
    )
    shown = "".join(
        f'<div class="card"><b>{esc(v)}</b><span>{esc(words)}</span></div>' for v, words in build_cards(advice)
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{esc(format_headline(advice))}</title><style>{_STYLE}</style></head><body><main>
<div class="tag">Simulated</div>
<h1>{esc(format_headline(advice))}</h1>
<p class="lead">{esc(format_lead(advice))}</p>
<div class="cards">{shown}</div>
<figure>{_draw_svg(advice)}</figure>
<h2>How to set it</h2><p>{_mark_code(esc(describe_how_to_set_it(advice)))}</p>
<h2>Token hit rate by policy and memory (best of a size in bold)</h2>
<table><tr><th>policy</th>{"".join(f"<th>{head}</th>" for head in heads)}</tr>{rows}</table>
<h2>Beyond prefixes</h2><p>{esc(describe_reuse_at_any_position(advice)).replace("`", "")}</p>
<h2>What hits, by type, at the knee</h2>
<table><tr><th>type</th><th>prompt tokens</th><th>from cache</th></tr>{types}</table>
<h2>What this page does not say</h2>
<ul>{"".join(f"<li>{esc(limit)}</li>" for limit in list_limits(advice))}</ul>
<footer>{esc(advice.trace.name)}: {esc(_describe_traffic(advice))} Made by semantickv advise.</footer>
</main></body></html>
"""


def _describe_traffic(advice: Advice) -> str:
    """Describe the trace: requests, hours, tokens and block accesses."""
    facts = advice.facts
    over = f" over {advice.hours:.1f} h" if advice.hours >= 0.1 else ""
    return (
        f"{facts['requests']:,} requests{over}, {facts['prompt_tokens']:,} prompt tokens, "
        f"{facts['block_accesses']:,} block accesses."
    )


def _mark_code(text: str) -> str:
    """Put what stands between backticks into code elements; the text is escaped already."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", text)


def _format_policy(policy: str) -> str:
    """Write well-known acronyms in capitals."""
    return policy.upper() if policy in ("lru", "fifo", "lfu", "arc", "gdsf") else policy


def _format_gib(gib: float) -> str:
    """Format a size in GiB; below 0.1 GiB in MiB.

    >>> _format_gib(0.004), _format_gib(1.234), _format_gib(140.2)
    ('4.1 MiB', '1.2 GiB', '140 GiB')
    """
    if gib < 0.1:
        return f"{gib * 1024:.1f} MiB"
    return f"{gib:.1f} GiB" if gib < 100 else f"{gib:,.0f} GiB"


def _format_hours(hours: float) -> str:
    """Format a time in hours; below one hour in minutes.

    >>> _format_hours(0.02), _format_hours(3.21)
    ('1.2 min', '3.2 h')
    """
    return f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.1f} min"


def _format_share(some: float, total: float) -> str:
    """Format ``some`` as a percentage of ``total``."""
    return f"{some / total:.0%}" if total else "0%"


# -- figure ----------------------------------------------------------------------------------------------------------


def draw_curves(advice: Advice, target: Any, *, kind: str = "png") -> None:
    """Draw the token hit rate of all policies against memory, with the knee and reuse at any position."""
    memory = [advice.to_gib(size) for size in advice.sizes]
    note = f"{advice.trace.name}, prefix semantics; memory is {advice.model} {advice.dtype} KV"
    with plots.open_figure(target, 1, (10.0, 5.4), "Prompt tokens from cache, against memory", note, kind=kind) as axes:
        axis = axes[0]
        axis.set_xscale("log", base=2)
        ends = {}
        for policy, points in advice.curves.items():
            rates = [point.token_hit_rate for point in points]
            loud = policy in (advice.policy, "lru", *BOUNDS)
            axis.plot(memory, rates, color=plots.choose_colour(policy),
                      linewidth=2.4 if policy == advice.policy else 1.5, alpha=1.0 if loud else 0.75,
                      linestyle="--" if policy in BOUNDS else "-", zorder=3 if loud else 2)  # fmt: skip
            ends[policy] = rates
        if advice.anywhere:
            rates = [point.token_hit_rate for point in advice.anywhere]
            axis.plot(memory, rates, color=plots.INK, linewidth=1.6, linestyle=":", zorder=3)
            ends["at any position"] = rates
        at = advice.knee
        axis.axvline(memory[at], color=plots.FAINT, linewidth=1.0, linestyle=(0, (2, 3)))
        rate = advice.get_point_at_knee(advice.policy).token_hit_rate
        axis.plot([memory[at]], [rate], "o", color=plots.choose_colour(advice.policy), markersize=9, zorder=5,
                  markeredgecolor="white")  # fmt: skip
        axis.set_ylim(bottom=0, top=max(0.01, *(max(rates) for rates in ends.values())) * 1.08)
        axis.annotate(f"knee: {_format_gib(memory[at])}", (memory[at], axis.get_ylim()[1]), xytext=(5, -4), fontsize=9,
                      textcoords="offset points", color=plots.INK, va="top")  # fmt: skip
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axis.xaxis.set_major_formatter(lambda value, _: _format_gib(value))
        axis.minorticks_off()
        axis.set_xlabel("memory for cached prompts", fontsize=9, color=plots.FAINT)
        plots.style_axis(axis, grid="y")
        _draw_legend(axis, advice, ends)


def _draw_legend(axis: Any, advice: Advice, rates: dict[str, list[float]]) -> None:
    """Draw the names right of the figure, in the order of the curves at the knee: at the right end they all meet."""
    order = sorted(rates, key=lambda name: -rates[name][advice.knee])
    for row, name in enumerate(order):
        style = ":" if name == "at any position" else "--" if name in BOUNDS else "-"
        colour = plots.INK if name == "at any position" else plots.choose_colour(name)
        y = 0.98 - row * 0.058
        axis.plot([1.015, 1.05], [y, y], transform=axis.transAxes, color=colour, linestyle=style, linewidth=2,
                  clip_on=False)  # fmt: skip
        axis.text(1.06, y, f"{name}  {rates[name][advice.knee]:.1%}", transform=axis.transAxes, va="center", fontsize=9,
                  color=plots.INK, fontweight="bold" if name == advice.policy else "normal")  # fmt: skip
    axis.text(1.06, 0.98 - len(order) * 0.058, "at the knee", transform=axis.transAxes, va="center", fontsize=8,
              color=plots.FAINT)  # fmt: skip


def _draw_svg(advice: Advice) -> str:
    """Draw the figure as SVG text."""
    out = io.StringIO()
    draw_curves(advice, out, kind="svg")
    text = out.getvalue()
    return text[text.index("<svg") :]
