"""The colours of the style sheet as plain values, for pictures that no browser draws."""

from __future__ import annotations

import re
from typing import Literal

from semblend.web.site import read_static

_COLOUR = re.compile(r"--([a-z0-9-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)")


def read_palette(theme: Literal["light", "dark"] = "light") -> dict[str, str]:
    """Return the colours of a theme by their names in the style sheet.

    >>> read_palette()["reused"]
    '#e0803c'
    """
    found = _COLOUR.findall(read_static("base.css", "report.css"))
    return {name: light if theme == "light" else dark for name, light, dark in found}


def write_plain_style() -> str:
    """Return the style of charts with the light theme's colours in place of their names: few programs know names."""
    colours = read_palette()
    return re.sub(r"var\(--([a-z0-9-]+)\)", lambda found: colours[found[1]], read_static("chart.css"))
