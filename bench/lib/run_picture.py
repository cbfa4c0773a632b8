"""The picture of the guide on agents: one run step by step, drawn as SVG from the table of `bench/agents.py`."""

from __future__ import annotations

from typing import Any

from semblend.web.charts import Axis, Drawing, Scale, draw_axes, write_plain_style

ONE_RUN = "One run, step by step"
ARMS = {"stock": ("cold", "stock, with its prefix cache"), "ours": ("warm", "with SemBlend")}
WIDTH, HEIGHT, TOP, LEFT, BOTTOM = 1000, 360, 96, 56, 46


def draw_run(result: dict[str, Any]) -> str:
    """A line for each engine; dashed where the history was edited."""
    table = next(table for table in result["tables"] if table["title"].startswith(ONE_RUN))
    steps = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    most = max(max(step[f"{arm} ms"] for arm in ARMS) for step in steps)
    drawing = Drawing(WIDTH, HEIGHT)
    headline = _write_headline(steps)
    drawing.add_text(20, 34, headline, "title")
    drawing.add_text(20, 54, f"{table['title'][len(ONE_RUN) + 2 :]}; {result['arguments']['measured_on']}", "faded")
    across = Scale(0.5, len(steps) + 0.5, LEFT, WIDTH - 20)
    up = Scale(0.0, most * 1.05, HEIGHT - BOTTOM, TOP)
    shown = [number for number in range(1, len(steps) + 1) if len(steps) <= 30 or number % 5 == 0]
    x = Axis(across.low, across.high, lambda value: f"{value:.0f}", ticks=shown)
    draw_axes(drawing, across, up, x, Axis(up.low, up.high, lambda value: f"{value:,.0f}"), "step")
    drawing.add_text(20, TOP - 14, "Time to first token, ms", "axis")
    for number, step in enumerate(steps, 1):
        if step["step"] == "edited":
            drawing.add_line(across(number), TOP, across(number), up.start, "ceiling")
            drawing.add_text(across(number) + 4, TOP + 10, "edited", "tick")
    for place, (arm, (kind, words)) in enumerate(ARMS.items()):
        points = [(across(number), up(step[f"{arm} ms"])) for number, step in enumerate(steps, 1)]
        drawing.add_curve(points, f"curve {kind}")
        for (at, down), step in zip(points, steps, strict=True):
            computed = f"{step[f'{arm} computes']:,} of {step['tokens']:,} tokens computed"
            drawing.add_dot(at, down, 3.5, kind, f"{words}: {step[f'{arm} ms']:,.0f} ms, {computed}")
        drawing.add_dot(WIDTH - 360 + 200 * place, TOP - 18, 4, kind)
        drawing.add_text(WIDTH - 350 + 200 * place, TOP - 14, words, "name")
    return drawing.render(headline, write_plain_style()) + "\n"


def _write_headline(steps: list[dict[str, Any]]) -> str:
    """What the edited steps take, with stock and with ours."""
    edited = [step for step in steps if step["step"] == "edited"]
    stock, ours = (sum(step[f"{arm} ms"] for step in edited) / len(edited) for arm in ARMS)
    return f"Behind an edit of its history an agent waits {ours:,.0f} ms for the first token, in stock {stock:,.0f} ms"
