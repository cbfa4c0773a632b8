"""The figure of the advice: hit rate against memory for all policies, and the advised point."""

from __future__ import annotations

from semantickv.analysis.advice import Advice
from semantickv.analysis.latency import BOUNDS
from semantickv.output.advise_words import format_gib
from semblend.web.figures import WIDE, Axis, Figure, begin_plot, draw_both, is_narrow
from semblend.web.palette import write_plain_style
from semblend.web.svg import Drawing, thin_out

ANYWHERE = "at any position"
_NAMES, _STEP = 210.0, 15.0  # room for the names at the right, and from one to the next, in pixels


def build_figure(advice: Advice) -> Figure:
    """Build the token hit rates of all policies against memory, with the advised size and reuse at any position."""
    kinds = {_choose_kind(name, advice): name for name in [*advice.curves, *([ANYWHERE] if advice.anywhere else [])]}
    words = {
        "curve warm": advice.policy, "curve cold": "lru", "curve bound": "knows the future",
        "curve anywhere": "reuse at any position", "curve other": "other policies",
    }  # fmt: skip
    return Figure(
        "curves",
        "Prompt tokens from cache, against memory",
        draw_both(lambda width: draw_curves(advice, width), _write_label(advice)),
        tuple((kind, told) for kind, told in words.items() if kind in kinds),
        f"Simulated: {advice.trace.name}, prefix semantics; memory is {advice.model} {advice.dtype} KV.",
    )


def write_picture(advice: Advice) -> str:
    """Return the figure as an SVG file."""
    return draw_curves(advice, WIDE).render(_write_label(advice), write_plain_style())


def draw_curves(advice: Advice, width: float) -> Drawing:
    """Draw a curve for each policy; on a wide page names stand at the right, the best at the advised size first."""
    memory = [advice.to_gib(size) for size in advice.sizes]
    rates = {name: [point.token_hit_rate for point in points] for name, points in advice.curves.items()}
    if advice.anywhere:
        rates[ANYWHERE] = [point.token_hit_rate for point in advice.anywhere]
    narrow = is_narrow(width)
    top = max(0.01, *(max(values) for values in rates.values())) * 1.08
    ticks = thin_out(memory, 4 if narrow else 8)
    x = Axis(memory[0], max(memory[-1], memory[0] * 1.01), format_gib, log=True, ticks=ticks)
    y = Axis(0.0, top, lambda rate: f"{rate:.0%}")
    height = 300.0 if narrow else max(380.0, 80 + _STEP * len(rates))
    right = 18.0 if narrow else _NAMES
    drawing, across, up = begin_plot(width, height, x, y, "memory for cached prompts", left=46, right=right)
    here = across(memory[advice.chosen])
    drawing.add_line(here, up.end, here, up.start, "rule")
    late = here > (across.start + across.end) / 2
    told = f"{'with what is added' if advice.choice.adds else 'the engine has'}: {format_gib(memory[advice.chosen])}"
    drawing.add_text(here - 5 if late else here + 5, up.start - 8, told, "tick", "end" if late else "start")
    loud_last = sorted(rates, key=lambda name: (_choose_kind(name, advice) != "curve other", name == advice.policy))
    for name in loud_last:
        points = [(across(size), up(rate)) for size, rate in zip(memory, rates[name], strict=True)]
        drawing.add_curve(points, _choose_kind(name, advice), name)
    best = rates[advice.policy][advice.chosen]
    drawing.add_dot(here, up(best), 5.5, "warm", f"{advice.policy}, {format_gib(memory[advice.chosen])}: {best:.1%}")
    if not narrow:
        _name_curves(drawing, advice, {name: values[advice.chosen] for name, values in rates.items()}, across.end + 14)
    return drawing


def _name_curves(drawing: Drawing, advice: Advice, rates: dict[str, float], left: float) -> None:
    """Write the names with their rates at the advised size, the highest first."""
    for row, name in enumerate(sorted(rates, key=lambda name: -rates[name])):
        y = 18 + _STEP * row
        drawing.add_curve([(left, y), (left + 22, y)], _choose_kind(name, advice))
        drawing.add_text(left + 28, y + 4, f"{name} {rates[name]:.1%}", "strong" if name == advice.policy else "label")
    size = format_gib(advice.to_gib(advice.sizes[advice.chosen]))
    drawing.add_text(left + 28, 22 + _STEP * len(rates), f"at {size}", "tick")


def _choose_kind(name: str, advice: Advice) -> str:
    if name == advice.policy:
        return "curve warm"
    if name == ANYWHERE:
        return "curve anywhere"
    return "curve bound" if name in BOUNDS else "curve cold" if name == "lru" else "curve other"


def _write_label(advice: Advice) -> str:
    return f"Curves: share of prompt tokens from cache against memory, one for each of {len(advice.curves)} policies"
