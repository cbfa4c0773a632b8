"""The three live pages: they load nothing from elsewhere, ask only for what is there, and can be read."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path
from typing import Literal

import pytest

from semblend.web.charts import read_palette
from semblend.web.site import HEADERS, PageFiles, build_dashboard, build_explorer, build_fleet, read_static

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "src" / "semblend" / "web" / "static"


@pytest.fixture(params=[build_dashboard, build_explorer, build_fleet], ids=["dashboard", "explorer", "fleet"])
def files(request: pytest.FixtureRequest) -> PageFiles:
    return request.param()


def read_page(files: PageFiles) -> tuple[str, str]:
    """The page's HTML and its own script."""
    (html,) = [body.decode() for body, kind in files.values() if "html" in kind]
    (script,) = [body.decode() for path, (body, _) in files.items() if path.endswith("/app.js")]
    return html, script


def test_a_page_loads_nothing_from_elsewhere_and_has_no_inline_script(files: PageFiles) -> None:
    for path, (body, _) in files.items():
        text = body.decode()
        outside = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]+", text)) - {"http://www.w3.org"}
        assert not outside, f"{path} points at {outside}"
        for way_in in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "@import", "url("):
            assert way_in not in text, f"{path} uses {way_in}"
    html, _ = read_page(files)
    assert len(re.findall(r"<script", html)) == 1
    assert " style=" not in html
    assert not re.findall(r"\son[a-z]+=", html)
    assert "default-src 'none'" in HEADERS["Content-Security-Policy"]
    assert "unsafe" not in HEADERS["Content-Security-Policy"]


def test_every_file_that_a_page_asks_for_is_served_with_it(files: PageFiles) -> None:
    html, _ = read_page(files)
    asked = set(re.findall(r'(?:src|href)="(/[^"]+)"', html))
    folder = next(path for path in files if path.endswith("/app.js")).removesuffix("/app.js")
    for body, kind in files.values():
        if "javascript" in kind:
            asked |= {f"{folder}/{name}" for name in re.findall(r'from "\./([a-z.]+)"', body.decode())}
            assert not re.findall(r'from "/', body.decode())
    assert asked
    assert asked <= set(files)


def test_every_id_that_a_script_asks_for_is_on_the_page(files: PageFiles) -> None:
    html, script = read_page(files)
    asked = set(re.findall(r'(?:\$|put)\("([a-z0-9-]+)"', script + read_static("strip.js")))
    if "keepKey(" in script:
        asked |= {"key-form", "key"}
    if "drawMix(" in script:
        asked |= {"mix", "legend"}
    assert asked
    assert {name for name in asked if f'id="{name}"' not in html} == set()


def test_every_field_of_a_page_has_a_label(files: PageFiles) -> None:
    html, _ = read_page(files)
    wrapped = "".join(re.findall(r"<label[^>]*>.*?</label>", html, re.DOTALL))
    for tag in re.findall(r"<(?:input|textarea|select)[^>]*>", html):
        (name,) = re.findall(r'id="([^"]+)"', tag)
        assert f'for="{name}"' in html or f'id="{name}"' in wrapped, tag
    ids = re.findall(r'id="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'aria-labelledby="([^"]+)"', html)) <= set(ids)
    assert set(re.findall(r'href="#([^"]+)"', html)) <= set(ids)


def test_every_colour_that_is_used_has_a_name_in_the_palette(files: PageFiles) -> None:
    (sheet,) = [body.decode() for body, kind in files.values() if "css" in kind]
    _, script = read_page(files)
    named = set(re.findall(r"(--[a-z0-9-]+):", sheet))
    set_by_scripts = {"--c", "--w", "--n"}
    used = set(re.findall(r"var\((--[a-z0-9-]+)", sheet + script + read_static("strip.js"))) - {"--", "--d"}
    assert used <= named | set_by_scripts


def test_every_static_file_is_packaged() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["semblend"]
    for path in STATIC.rglob("*.*"):
        name = path.relative_to(ROOT / "src" / "semblend").as_posix()
        assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns), f"{name} is left out"


# -- contrast: WCAG 2 asks for 4.5 of text, 3 of what is drawn -----------------------------------------------------


def measure_light(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def measure_contrast(one: str, other: str) -> float:
    low, high = sorted((measure_light(one), measure_light(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_measured_as_the_standard_says() -> None:
    assert measure_contrast("#000000", "#ffffff") == pytest.approx(21)
    assert measure_contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_marks_stand_out_from_every_ground(theme: Literal["light", "dark"]) -> None:
    palette = read_palette(theme)
    for ground in ("paper", "card", "field"):
        for text in ("ink", "dim", "accent", "bad", "good"):
            assert measure_contrast(palette[text], palette[ground]) >= 4.5, f"{text} on {ground}"
    for mark in ("cold", "warm", "bad", "confirmed"):
        assert measure_contrast(palette[mark], palette["paper"]) >= 3, mark
    assert measure_contrast(palette["accent-ink"], palette["accent"]) >= 4.5
