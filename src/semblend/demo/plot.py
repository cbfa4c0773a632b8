"""The demo as a picture: how long the first token took, and where the prompt's tokens came from."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from semblend.confirm.receipt import TOKEN_KINDS
from semblend.demo.runner import COLD, Arm, DemoOutcome
from semblend.errors import InputError
from semblend.web.plotting import COLOURS, FAINT, INK, PAPER
from semblend.web.plotting import pyplot as pyplot_of

KINDS = {
    "exact": "exact prefix",
    "reused": "moved from a donor",
    "recomputed": "a donor's, computed again",
    "prefill": "computed",
}
ARMS = {COLD: COLOURS["rule"], "fast": COLOURS["accent"], "balanced": COLOURS["reused"]}
BAR, GAP = 0.72, 1.15  # height of a bar, and room between two workloads, in rows


def draw(outcome: DemoOutcome, path: str) -> None:
    """Write the picture as PNG (or whatever the file's name ends in)."""
    pyplot = pyplot_of("the picture needs")
    groups = list(_groups(outcome.arms))
    heights, y = [], 0.0
    for _, arms in groups:
        heights.append([y + row for row in range(len(arms))])
        y += len(arms) + GAP
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(13, 0.4 * y + 0.6), facecolor=PAPER, gridspec_kw={"width_ratios": (1.05, 1), "wspace": 0.05}
    )
    try:
        for (title, arms), rows in zip(groups, heights, strict=True):
            left.text(0, rows[0] - 0.72, title, fontsize=11, fontweight="bold", color=INK, va="center")
            for arm, row in zip(arms, rows, strict=True):
                _bar(left, arm, row, longest=max(a.ttft_ms for a in outcome.arms))
                _strip(right, arm, row)
        for axes in (left, right):
            _bare(axes, y - GAP)
        left.set_xlim(0, max(arm.ttft_ms for arm in outcome.arms) * 1.34)
        right.set_xlim(0, 1.02)
        _words(figure, left, right, outcome)
        figure.savefig(path, dpi=150, facecolor=PAPER, bbox_inches="tight", pad_inches=0.35)
    except (OSError, ValueError) as error:  # ValueError: a format that it cannot write
        raise InputError(f"cannot write {path}: {error}", hint="name a .png in a folder that exists") from None
    finally:
        pyplot.close(figure)


def _groups(arms: Sequence[Arm]) -> Iterator[tuple[str, list[Arm]]]:
    for key in dict.fromkeys(arm.workload for arm in arms):
        found = [arm for arm in arms if arm.workload == key]
        yield found[0].title, found


def _bar(axes: Any, arm: Arm, row: float, *, longest: float) -> None:
    axes.barh(row, arm.ttft_ms, height=BAR, color=ARMS.get(arm.name, INK), linewidth=0)
    said = f"{arm.ttft_ms:,.0f} ms"
    axes.text(arm.ttft_ms + longest * 0.012, row, said, va="center", fontsize=9.5, color=INK)
    if arm.name != COLD:
        at = arm.ttft_ms + longest * (0.055 + 0.0205 * len(said))
        axes.text(at, row, f"{arm.times_faster:.1f}×", va="center", fontsize=11.5, fontweight="bold", color=INK)
    axes.text(-longest * 0.012, row, arm.name, va="center", ha="right", fontsize=9.5, color=FAINT)


def _strip(axes: Any, arm: Arm, row: float) -> None:
    """The prompt as one strip, a piece for each kind of token."""
    total, start = arm.receipt.prompt_tokens, 0.0
    for kind in TOKEN_KINDS:
        count = arm.receipt.tokens[kind]
        if not count:
            continue
        share = count / total
        axes.barh(row, share, left=start, height=BAR, color=COLOURS[kind], edgecolor=PAPER, linewidth=0.8)
        if share > 0.055:
            ink = "white" if kind in ("exact", "recomputed") else INK
            axes.text(start + share / 2, row, f"{count:,}", va="center", ha="center", fontsize=8.5, color=ink)
        start += share
    if arm.name != COLD:
        said = f"same words {arm.agreement:.0%}   KL {arm.kl:.4f}"
        axes.text(1.02, row, said, va="center", fontsize=9, color=FAINT)


def _bare(axes: Any, rows: float) -> None:
    axes.set_facecolor(PAPER)
    axes.set_ylim(rows - 0.4, -1.2)
    axes.set_yticks([])
    axes.set_xticks([])
    for side in axes.spines.values():
        side.set_visible(False)


def write_headline(arms: Sequence[Arm]) -> str:
    """What the picture shows, in a line; of times that other programs disturbed it claims nothing."""
    if any(arm.disturbed for arm in arms):
        return "Disturbed by other programs: times are no measurement, tokens are"
    best = {name: max((arm.times_faster for arm in arms if arm.name == name), default=1.0) for name in ARMS}
    return f"First token up to {best['fast']:.1f}× sooner in fast mode, {best['balanced']:.1f}× in balanced"


def _words(figure: Any, left: Any, right: Any, outcome: DemoOutcome) -> None:
    left.set_title("Time to the first token", loc="left", fontsize=10.5, color=FAINT, pad=8)
    right.set_title("Where the prompt's tokens came from", loc="left", fontsize=10.5, color=FAINT, pad=8)
    figure.subplots_adjust(top=1, bottom=0)
    inch = 1 / figure.get_figheight()
    figure.text(
        0.125, 1 + 0.78 * inch, write_headline(outcome.arms), fontsize=17, fontweight="bold", color=INK, va="bottom"
    )
    machine = outcome.machine
    threads = machine.get("threads", "?")
    under = f"{outcome.model} · {machine.get('device', '')} · {threads} thread{'' if threads == 1 else 's'}"
    figure.text(0.125, 1 + 0.68 * inch, under, fontsize=10, color=FAINT, va="top")
    patches = importlib.import_module("matplotlib.patches")
    handles = [patches.Patch(color=COLOURS[kind], label=label) for kind, label in KINDS.items()]
    right.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0, 0), ncol=4, frameon=False, fontsize=9,
        handlelength=1, handleheight=1, columnspacing=1.4, labelcolor=INK, borderaxespad=0.2,
    )  # fmt: skip
