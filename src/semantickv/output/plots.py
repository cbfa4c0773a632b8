"""Pictures of simulated results, all in one style and all marked as simulated."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from semblend.errors import InputError
from semblend.web.plotting import FAINT, GRID, INK, PAPER
from semblend.web.plotting import pyplot as pyplot_of

# Classic policies have pale colours, semantic ones strong colours, bounds dark ones.
POLICY_COLOURS = {
    "lru": "#4c78a8", "fifo": "#b8bdc4", "lfu": "#72b7b2", "size_aware_lru": "#9ecae9", "static_semantic": "#eeca3b",
    "adaptive_semantic": "#e45756", "sieve": "#9d755d", "s3fifo": "#54a24b", "gdsf": "#ff9da6", "lfuda": "#b279a2",
    "arc": "#f58518", "tinylfu": "#7b8c3c", "belady": "#22262b", "belady_bypass": "#6b7280",
}  # fmt: skip
TYPE_COLOURS = {
    "system": "#4c78a8", "user": "#b8bdc4", "retrieved_context": "#f58518", "tool_output": "#72b7b2",
    "assistant": "#9d755d", "template": "#e45756", "code": "#54a24b", "legal_evidence": "#b279a2", "other": "#d9d4c7",
}  # fmt: skip
_SPARE = ("#2f4b7c", "#a05195", "#ffa600", "#665191", "#003f5c", "#ff7c43")
NOTE = "Simulated"
Bars = Sequence[tuple[str, float]]


def choose_colour(name: str) -> str:
    """Return the colour of a policy or block type, the same in every picture."""
    known = POLICY_COLOURS | TYPE_COLOURS
    return known.get(name, _SPARE[sum(name.encode()) % len(_SPARE)])


def draw_bars(
    path: Path, title: str, panels: Mapping[str, Bars], *, unit: str, best: str = "high", note: str = "",
    one_scale: bool = True,
) -> None:  # fmt: skip
    """Draw one bar for each policy and one panel for each mode; the best value is bold and in full colour.

    With ``one_scale`` bars of the same length mean the same in all panels. ``best`` says whether low or high is better.
    """
    rows = max(len(values) for values in panels.values())
    widest = max([value for values in panels.values() for _, value in values] + [1e-9])
    with open_figure(path, len(panels), (5.2 * len(panels) + 1.2, 0.36 * rows + 1.7), title, note) as axes:
        for at, (axis, (name, values)) in enumerate(zip(axes, panels.items(), strict=True)):
            names, numbers = [label for label, _ in values], [value for _, value in values]
            top = (min if best == "low" else max)((v for label, v in values if not _is_bound(label)), default=0.0)
            longest = widest if one_scale else max([*numbers, 1e-9])
            for row, (label, value) in enumerate(values):
                first = not _is_bound(label) and abs(value - top) <= 1e-9 * max(1.0, abs(top))
                face, edge = (PAPER, 1.0) if _is_bound(label) else (choose_colour(label), 0.0)
                axis.barh(row, value, height=0.68, color=face, alpha=1.0 if first or _is_bound(label) else 0.62,
                          edgecolor=choose_colour(label), linestyle="--", linewidth=edge)  # fmt: skip
                axis.text(value + 0.015 * longest, row, _format_number(value, unit), va="center", fontsize=9,
                          color=INK, fontweight="bold" if first else "normal")  # fmt: skip
            axis.set_yticks(range(len(names)), names if at == 0 else [""] * len(names))
            axis.invert_yaxis()
            axis.set_xlim(0, longest * (1.34 if unit == "tokens" else 1.2))
            axis.set_title(name, fontsize=10, loc="left", color=FAINT)
            style_axis(axis, grid="x")
            axis.set_xticks([])
            axis.spines["bottom"].set_visible(False)


def draw_policies(
    records: Mapping[str, Sequence[Mapping[str, Any]]], *, ttft: Path, tokens_saved: Path, hit_rate: Path, note: str
) -> None:
    """Draw average TTFT, prompt tokens saved and block hit rate of all policies; ``records`` are by mode."""
    for path, title, key, unit in (
        (ttft, "Average time to first token (estimated)", "avg_ttft_ms", "ms"),
        (tokens_saved, "Prompt tokens not computed", "tokens_saved", "tokens"),
        (hit_rate, "Block hit rate", "block_hit_rate", "%"),
    ):
        panels = {f"{mode} mode": [(row["policy"], row[key]) for row in rows] for mode, rows in records.items()}
        draw_bars(path, title, panels, unit=unit, best="low" if unit == "ms" else "high", note=note)


def draw_stacked_bars(
    path: Path, title: str, panels: Mapping[str, Mapping[str, Mapping[str, float]]], *, note: str = ""
) -> None:
    """Draw one bar for each policy, divided by block type, and one panel for each mode."""
    kinds = list(dict.fromkeys(k for rows in panels.values() for parts in rows.values() for k in parts))
    most = max(len(rows) for rows in panels.values())
    widest = max([sum(parts.values()) for rows in panels.values() for parts in rows.values()] + [1.0])
    with open_figure(path, len(panels), (5.2 * len(panels) + 1.2, 0.36 * most + 2.3), title, note) as axes:
        for at, (axis, (name, rows)) in enumerate(zip(axes, panels.items(), strict=True)):
            for row, parts in enumerate(rows.values()):
                left = 0.0
                for kind in kinds:
                    axis.barh(row, parts.get(kind, 0), left=left, height=0.68, color=choose_colour(kind), label=kind)
                    left += parts.get(kind, 0)
                axis.text(left, row, f" {left:,.0f}", va="center", fontsize=9, color=INK)
            axis.set_yticks(range(len(rows)), list(rows) if at == 0 else [""] * len(rows))
            axis.invert_yaxis()
            axis.set_title(name, fontsize=10, loc="left", color=FAINT)
            style_axis(axis, grid="x")
            axis.set_xlim(0, widest * 1.15)
            axis.set_xlabel("blocks evicted", fontsize=9, color=FAINT)
        _draw_legend(axes[0], kinds)


def draw_lines(
    path: Path, title: str, panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]], *,
    x: str, y: str, note: str = "", share: bool = False, empty: str = "nothing to show",
) -> None:  # fmt: skip
    """Draw lines over x with their names at the right end; a panel without lines shows ``empty``."""
    with open_figure(path, len(panels), (5.6 * len(panels) + 1.4, 4.4), title, note) as axes:
        for axis, (name, series) in zip(axes, panels.items(), strict=True):
            for label, (at, values) in series.items():
                axis.plot(at, values, color=choose_colour(label), linewidth=1.8)
            axis.set_title(name, fontsize=10, loc="left", color=FAINT)
            axis.set_xlabel(x, fontsize=9, color=FAINT)
            style_axis(axis, grid="y")
            if share:
                axis.set_ylim(0, 1.02)
                axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
            if series:
                _name_ends(axis, {label: (at[-1], values[-1]) for label, (at, values) in series.items()})
            else:
                axis.text(0.5, 0.5, empty, transform=axis.transAxes, ha="center", color=FAINT, fontsize=10)
                axis.set_xticks([])
                axis.set_yticks([])
        axes[0].set_ylabel(y, fontsize=9, color=FAINT)


def draw_points(
    path: Path, title: str, series: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, x: str, y: str,
    line: tuple[float, float] | None, note: str = "",
) -> None:  # fmt: skip
    """Draw clouds of points and a line ``base, slope``."""
    with open_figure(path, 1, (7.6, 5.2), title, note) as axes:
        axis = axes[0]
        for label, (at, values) in series.items():
            axis.scatter(at, values, s=14, color=choose_colour(label), alpha=0.45, linewidths=0, label=label)
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        if line is not None:
            low, high = axis.get_xlim()
            axis.plot([low, high], [line[0] + line[1] * low, line[0] + line[1] * high], color=INK, linewidth=1.2)
            axis.set_xlim(low, high)
        axis.set_xlabel(x, fontsize=9, color=FAINT)
        axis.set_ylabel(y, fontsize=9, color=FAINT)
        style_axis(axis, grid="y")
        if len(series) > 1:
            axis.legend(frameon=False, fontsize=9, labelcolor=INK, markerscale=1.6)


def draw_residuals(path: Path, fitted: Any, tokens: Any, times: Any) -> None:
    """Draw the observed times with the fitted line (left) and the residuals against length (right), in ms."""
    left = np.asarray(times) - fitted.base_ttft_ms - fitted.token_latency_ms * np.asarray(tokens)
    note = f"{fitted.requests} observed requests; line and 95 % intervals by {fitted.method}"
    low, high = fitted.token_interval_ms
    title = (
        f"TTFT = {fitted.base_ttft_ms:.1f} ms [{fitted.base_interval_ms[0]:.1f}, {fitted.base_interval_ms[1]:.1f}] "
        f"+ {fitted.token_latency_ms:.4f} ms [{low:.4f}, {high:.4f}] a token"
    )
    with open_figure(path, 2, (11.5, 4.6), title, note, label="Fitted") as axes:
        grid = np.linspace(0, float(np.max(tokens)), 50)
        for slope in fitted.token_interval_ms:
            middle = float(np.median(tokens))
            centre = fitted.base_ttft_ms + fitted.token_latency_ms * middle
            axes[0].plot(grid, centre + slope * (grid - middle), color=FAINT, linewidth=0.8, linestyle="--")
        axes[0].scatter(tokens, times, s=12, color="#4c78a8", alpha=0.45, linewidths=0)
        axes[0].plot(grid, fitted.base_ttft_ms + fitted.token_latency_ms * grid, color=INK, linewidth=1.4)
        axes[0].set_ylabel("observed TTFT, ms", fontsize=9, color=FAINT)
        axes[0].set_ylim(bottom=0)
        limit = 8 * max(fitted.residual_mad_ms, 1e-6)
        beyond = np.abs(left) > limit
        axes[1].scatter(np.asarray(tokens)[~beyond], left[~beyond], s=12, color="#e45756", alpha=0.45, linewidths=0)
        edge = np.clip(left[beyond], -0.97 * limit, 0.97 * limit)
        axes[1].scatter(np.asarray(tokens)[beyond], edge, s=26, marker="^", color="#e45756", linewidths=0)
        if beyond.any():
            axes[1].set_title(f"{int(beyond.sum())} beyond the edge (triangles)", fontsize=9, loc="right", color=FAINT)
        axes[1].set_ylim(-limit, limit)
        axes[1].axhline(0, color=INK, linewidth=1.0)
        axes[1].set_ylabel("residual, ms", fontsize=9, color=FAINT)
        for axis in axes:
            axis.set_xlabel("computed prompt tokens", fontsize=9, color=FAINT)
            style_axis(axis, grid="y")


@contextmanager
def open_figure(
    path: Path, panels: int, size: tuple[float, float], title: str, note: str, *, label: str = NOTE
) -> Iterator[Any]:
    """Open a figure and yield its axes; save it to ``path`` at the end, with the title above and the note below."""
    pyplot = pyplot_of("the plots need", "pass --no-plots")
    drawn, axes = pyplot.subplots(1, panels, figsize=size, facecolor=PAPER, squeeze=False, layout="constrained")
    drawn.get_layout_engine().set(w_pad=0.14, h_pad=0.1)
    try:
        drawn.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
        yield axes[0]
        text = textwrap.fill(f"{label}: {note}" if note else label, int(size[0] * 13))  # about 13 letters an inch
        drawn.supxlabel(text, x=0.01, ha="left", fontsize=8.5, color=FAINT)
        drawn.savefig(path, dpi=130, facecolor=PAPER)
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror}", hint="check the folder and its permissions"
        ) from None
    finally:
        pyplot.close(drawn)


def style_axis(axis: Any, grid: str) -> None:
    """Remove the frame of an axis and draw a faint grid along ``grid``."""
    axis.set_facecolor(PAPER)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(FAINT)
    axis.tick_params(length=0, labelsize=9, colors=INK)
    axis.grid(axis=grid, color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)


def _name_ends(axis: Any, ends: Mapping[str, tuple[float, float]]) -> None:
    """Write the names right of the last points, moved apart where they would overlap."""
    low, high = axis.get_ylim()
    left, right = axis.get_xlim()
    step = (high - low) * 0.052
    names = sorted(ends, key=lambda name: ends[name][1])
    places = [ends[name][1] for name in names]
    for at in range(1, len(places)):
        places[at] = max(places[at], places[at - 1] + step)
    places[-1] = min(places[-1], high)
    for at in range(len(places) - 2, -1, -1):
        places[at] = min(places[at], places[at + 1] - step)
    for label, place in zip(names, places, strict=True):
        # Ink for the letters: pale colours can be told apart as lines and not read as text.
        for words, colour, at in (("━", choose_colour(label), 4), (label, INK, 17)):
            axis.annotate(words, (right, place), xytext=(at, 0), textcoords="offset points", fontsize=8.5,
                          color=colour, va="center", annotation_clip=False)  # fmt: skip
    axis.set_xlim(left, right)


def _draw_legend(axis: Any, kinds: Sequence[str]) -> None:
    """Draw one legend for the whole figure."""
    handles, labels = axis.get_legend_handles_labels()
    chosen = {label: handle for handle, label in zip(handles, labels, strict=True)}
    axis.figure.legend(
        [chosen[kind] for kind in kinds if kind in chosen], [kind for kind in kinds if kind in chosen],
        loc="outside upper right", ncols=5, frameon=False, fontsize=9, labelcolor=INK,
    )  # fmt: skip


def _is_bound(name: str) -> bool:
    """Whether a policy knows the future: such a policy is drawn hollow and never called the best."""
    return name.startswith("belady")


def _format_number(value: float, unit: str) -> str:
    """Format a value with its unit."""
    if unit == "%":
        return f"{value:.1%}"
    return f"{value:,.0f} {unit}" if abs(value) >= 1000 else f"{value:.1f} {unit}"
