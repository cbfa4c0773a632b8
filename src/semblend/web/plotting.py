"""Charts as PNG: the SVG of `semblend.web.charts`, drawn by matplotlib. It is imported late, and opens no window."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from semblend.errors import InputError, MissingDependencyError
from semblend.web.charts import Drawing, write_plain_style

_POINT = 0.72  # of a pixel, at 100 pixels an inch
_SHARPNESS = 2  # pixels of the picture for one of the drawing
_RULE = re.compile(r"([^{}]+)\{([^{}]*)\}")
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}
Style = dict[str, str]


def write_picture(drawing: Drawing, path: str | Path, *, instead: str = "") -> None:
    """Write a drawing as PNG, or as what the file's name ends in; ``instead`` is what to do without matplotlib."""
    try:
        importlib.import_module("matplotlib").use("agg")
        pyplot, patches = (importlib.import_module(f"matplotlib.{name}") for name in ("pyplot", "patches"))
    except ModuleNotFoundError as error:
        hint = "pip install 'semblend-suite[lab]'" + (f", or {instead}" if instead else "")
        raise MissingDependencyError(f"pictures need the package {error.name}", hint=hint) from None
    figure = pyplot.figure(figsize=(drawing.width / 100, drawing.height / 100))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, drawing.width), ylim=(drawing.height, 0))
    axes.axis("off")
    try:
        rules = _read_rules(write_plain_style())
        for order, mark in enumerate(ElementTree.fromstring(drawing.render("", " "))):
            _draw(axes, patches, mark, _find_style(mark, rules) | {"order": str(order)})
        figure.savefig(path, dpi=100 * _SHARPNESS)
    except (OSError, ValueError) as error:  # ValueError: a format that it cannot write
        raise InputError(f"cannot write {path}: {error}", hint="name a .png in a folder that can be written") from None
    finally:
        pyplot.close(figure)


def _draw(axes: Any, patches: Any, mark: ElementTree.Element, style: Style) -> None:
    at = {name: float(value) for name, value in mark.attrib.items() if name in _NUMBERS}
    tag = mark.tag.rpartition("}")[2]
    fill, stroke = (style.get(name, "none") for name in ("fill", "stroke"))
    line = {
        "linewidth": float(style.get("stroke-width", 1)) * _POINT,
        "linestyle": _read_dashes(style.get("stroke-dasharray", "")),
        "zorder": int(style["order"]),
    }
    if tag == "text":
        words = {
            "fontsize": float(style.get("font-size", "12px")[:-2]) * _POINT,
            "fontweight": "bold" if int(style.get("font-weight", 400)) >= 600 else "normal",
            "ha": _ANCHORS[mark.attrib["text-anchor"]],
        }
        axes.text(at["x"], at["y"], mark.text, color=fill, zorder=line["zorder"], parse_math=False, **words)
    elif tag == "line" or (tag == "path" and not mark.attrib["d"].endswith("Z")):
        points = [(at["x1"], at["y1"]), (at["x2"], at["y2"])] if tag == "line" else _read_points(mark.attrib["d"])
        axes.plot(*zip(*points, strict=True), color=stroke, alpha=float(style.get("stroke-opacity", 1)), **line)
    elif tag in ("rect", "circle", "path"):
        shape = {
            "rect": lambda: patches.Rectangle((at.get("x", 0), at.get("y", 0)), at["width"], at["height"]),
            "circle": lambda: patches.Circle((at["cx"], at["cy"]), at["r"]),
            "path": lambda: patches.Polygon(_read_points(mark.attrib["d"])),
        }[tag]()
        shape.set(facecolor=fill, edgecolor=stroke, alpha=float(style.get("fill-opacity", 1)), **line)
        axes.add_patch(shape)


_NUMBERS = frozenset(("x", "y", "x1", "y1", "x2", "y2", "cx", "cy", "r", "width", "height"))


def _read_points(path: str) -> list[tuple[float, ...]]:
    return [tuple(map(float, point.split())) for point in path.strip("MZ").split("L")]


def _read_dashes(words: str) -> Any:
    return (0, [float(word) * _POINT for word in words.split()]) if words else "solid"


def _read_rules(sheet: str) -> list[tuple[str, frozenset[str], Style]]:
    """The rules of a plain style sheet as tag, classes and declarations, the more special ones last."""
    found = []
    for selectors, body in _RULE.findall(re.sub(r"/\*.*?\*/", "", sheet, flags=re.DOTALL)):
        style = _read_declarations(body)
        for selector in selectors.split(","):
            tag, *classes = selector.split()[-1].split(".")
            found.append((tag, frozenset(classes), style))
    return sorted(found, key=lambda rule: len(rule[1]))


def _read_declarations(body: str) -> Style:
    parts = (one.partition(":") for one in body.split(";") if ":" in one)
    found = {name.strip(): value.strip() for name, _, value in parts}
    if "font" in found:
        found["font-size"] = found["font"].split()[0]
    return found


def _find_style(mark: ElementTree.Element, rules: list[tuple[str, frozenset[str], Style]]) -> Style:
    classes, style = set(mark.attrib.get("class", "").split()), Style()
    for tag, wanted, declared in rules:
        if tag in ("", mark.tag.rpartition("}")[2]) and wanted <= classes:
            style |= declared
    return style | _read_declarations(mark.attrib.get("style", ""))
