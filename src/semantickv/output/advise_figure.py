"""The figure of the advice: hit rate against memory for all policies, and the advised point."""

from __future__ import annotations

import io
from typing import Any

from semantickv.analysis.advice import Advice
from semantickv.analysis.latency import BOUNDS
from semantickv.output import plots
from semantickv.output.advise_words import format_gib


def draw_curves(advice: Advice, target: Any, *, kind: str = "png") -> None:
    """Draw the token hit rate of all policies against memory, with the advised size and reuse at any position."""
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
        at = advice.chosen
        axis.axvline(memory[at], color=plots.FAINT, linewidth=1.0, linestyle=(0, (2, 3)))
        rate = advice.get_advised_point(advice.policy).token_hit_rate
        axis.plot([memory[at]], [rate], "o", color=plots.choose_colour(advice.policy), markersize=9, zorder=5,
                  markeredgecolor="white")  # fmt: skip
        axis.set_ylim(bottom=0, top=max(0.01, *(max(rates) for rates in ends.values())) * 1.08)
        label = f"{'advised' if advice.pays else 'smallest'}: {format_gib(memory[at])}"
        axis.annotate(label, (memory[at], axis.get_ylim()[1]), xytext=(5, -4), fontsize=9,
                      textcoords="offset points", color=plots.INK, va="top")  # fmt: skip
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axis.xaxis.set_major_formatter(lambda value, _: format_gib(value))
        axis.minorticks_off()
        axis.set_xlabel("memory for cached prompts", fontsize=9, color=plots.FAINT)
        plots.style_axis(axis, grid="y")
        _draw_legend(axis, advice, ends)


def _draw_legend(axis: Any, advice: Advice, rates: dict[str, list[float]]) -> None:
    """Draw the names right of the figure, in the order of the curves at the advised size."""
    order = sorted(rates, key=lambda name: -rates[name][advice.chosen])
    for row, name in enumerate(order):
        style = ":" if name == "at any position" else "--" if name in BOUNDS else "-"
        colour = plots.INK if name == "at any position" else plots.choose_colour(name)
        y = 0.98 - row * 0.058
        axis.plot([1.015, 1.05], [y, y], transform=axis.transAxes, color=colour, linestyle=style, linewidth=2,
                  clip_on=False)  # fmt: skip
        label = f"{name}  {rates[name][advice.chosen]:.1%}"
        axis.text(1.06, y, label, transform=axis.transAxes, va="center", fontsize=9, color=plots.INK,
                  fontweight="bold" if name == advice.policy else "normal")  # fmt: skip
    size = format_gib(advice.to_gib(advice.sizes[advice.chosen]))
    axis.text(1.06, 0.98 - len(order) * 0.058, f"at {size}", transform=axis.transAxes, va="center", fontsize=8,
              color=plots.FAINT)  # fmt: skip


def draw_svg(advice: Advice) -> str:
    """Draw the figure as SVG text."""
    out = io.StringIO()
    draw_curves(advice, out, kind="svg")
    text = out.getvalue()
    return text[text.index("<svg") :]
