"""The demo as a picture: how long the first token took, and where the prompt's tokens came from."""

from __future__ import annotations

from collections.abc import Sequence

from semblend.confirm.receipt import TOKEN_KINDS
from semblend.demo.runner import COLD, Arm, DemoOutcome
from semblend.formatting import format_plural
from semblend.web.charts import Drawing, Scale, read_palette
from semblend.web.plotting import write_picture

KINDS = {
    "exact": "exact prefix",
    "reused": "moved from a donor",
    "recomputed": "a donor's, computed again",
    "prefill": "computed",
}
COLOURS = read_palette()
ARMS = {COLD: COLOURS["rule"], "fast": COLOURS["accent"], "balanced": COLOURS["reused"]}
_WIDTH, _TOP, _ROW, _BAR = 1240.0, 118.0, 26.0, 19.0


def draw(outcome: DemoOutcome, path: str) -> None:
    """Write the picture as PNG (or whatever the file's name ends in)."""
    groups = {arm.workload: [one for one in outcome.arms if one.workload == arm.workload] for arm in outcome.arms}
    rows = sum(len(arms) + 1.2 for arms in groups.values())
    drawing = Drawing(_WIDTH, _TOP + _ROW * rows + 40)
    drawing.add_bar(0, 0, _WIDTH, drawing.height, "ground")
    machine, threads = outcome.machine, outcome.machine.get("threads", "?")
    counted = format_plural(threads, "thread") if isinstance(threads, int) else f"{threads} threads"
    drawing.add_text(20, 36, write_headline(outcome.arms), "title")
    drawing.add_text(20, 58, f"{outcome.model} · {machine.get('device', '')} · {counted}", "faded")
    times = Scale(0.0, max(arm.ttft_ms for arm in outcome.arms), 90, 430)
    shares = Scale(0.0, 1.0, 590, 1030)
    drawing.add_text(times.start, 92, "Time to the first token", "faded")
    drawing.add_text(shares.start, 92, "Where the prompt's tokens came from", "faded")
    y = _TOP
    for arms in groups.values():
        drawing.add_text(times.start, y + 6, arms[0].title, "strong")
        for arm in arms:
            y += _ROW
            _draw_arm(drawing, arm, y, times, shares)
        y += 1.2 * _ROW
    x = shares.start
    for kind, words in KINDS.items():
        drawing.add_bar(x, y, 12, 12, f"fill:{COLOURS[kind]}")
        drawing.add_text(x + 17, y + 10, words)
        x += 40 + 6.4 * len(words)
    write_picture(drawing, path)


def _draw_arm(drawing: Drawing, arm: Arm, y: float, times: Scale, shares: Scale) -> None:
    """Draw a bar of the time, and the prompt as one strip with a piece for each kind of token."""
    drawing.add_text(times.start - 8, y + 4, arm.name, "label", "end")
    end, said = times(arm.ttft_ms), f"{arm.ttft_ms:,.0f} ms"
    drawing.add_bar(times.start, y - _BAR / 2, end - times.start, _BAR, f"fill:{ARMS.get(arm.name, COLOURS['ink'])}")
    drawing.add_text(end + 7, y + 4, said)
    done = 0
    for kind in TOKEN_KINDS:
        count = arm.receipt.tokens[kind]
        left, right = (shares(tokens / arm.receipt.prompt_tokens) for tokens in (done, done + count))
        drawing.add_bar(left, y - _BAR / 2, right - left, _BAR, f"fill:{COLOURS[kind]};stroke:{COLOURS['paper']}")
        if right - left > 0.055 * (shares.end - shares.start):
            ink = "#ffffff" if kind in ("exact", "recomputed") else COLOURS["ink"]
            drawing.add_text((left + right) / 2, y + 4, f"{count:,}", f"fill:{ink};font-size:11px", "middle")
        done += count
    if arm.name != COLD:
        drawing.add_text(end + 14 + 7 * len(said), y + 5, f"{arm.times_faster:.1f}×", "big")
        drawing.add_text(shares.end + 10, y + 4, f"same words {arm.agreement:.0%}   KL {arm.kl:.4f}", "tick")


def write_headline(arms: Sequence[Arm]) -> str:
    """What the picture shows, in a line; of times that other programs disturbed it claims nothing."""
    if any(arm.disturbed for arm in arms):
        return "Disturbed by other programs: times are no measurement, tokens are"
    best = {name: max((arm.times_faster for arm in arms if arm.name == name), default=1.0) for name in ARMS}
    return f"First token up to {best['fast']:.1f}× sooner in fast mode, {best['balanced']:.1f}× in balanced"
