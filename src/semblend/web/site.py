"""The live pages: dashboard, explorer and fleet page, as paths with their bytes, and the headers that all of them have.

A page is one shell around its own middle, one style sheet (base, live, its own) and one set of scripts. Three servers
carry them: the embedded server, the explorer's own and the router. A server looks a path up and sends ``HEADERS``.
"""

from __future__ import annotations

from importlib import resources
from string import Template
from typing import Final
from urllib.parse import quote

HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""A page loads nothing from elsewhere and runs no inline script, and nobody may frame it."""

PageFiles = dict[str, tuple[bytes, str]]
"""Path -> bytes and type."""


def read_static(*names: str) -> str:
    """Return the text of files under ``static``, one after the other."""
    folder = resources.files(__package__).joinpath("static")
    return "".join(folder.joinpath(*name.split("/")).read_text(encoding="utf-8") for name in names)


def write_icon() -> str:
    """Return the tag of the icon in a browser's tab. It holds the picture itself: no page asks for another file."""
    return f'<link rel="icon" href="data:image/svg+xml,{quote(read_static("icon.svg").strip(), safe="")}">'


def build_page(name: str, tagline: str, path: str) -> PageFiles:
    """Return the files of the live page ``name``; the page itself is at ``path``, all else is below it."""
    root = path.rstrip("/")
    shell, body = Template(read_static("shell.html")), read_static(f"{name}/page.html")
    texts = {
        path: (shell.substitute(name=name, tagline=tagline, root=root, icon=write_icon(), body=body), "html"),
        f"{root}/app.css": (read_static("base.css", "live.css", f"{name}/page.css"), "css"),
        f"{root}/app.js": (read_static(f"{name}/app.js"), "javascript"),
        f"{root}/dom.js": (read_static("dom.js"), "javascript"),
        f"{root}/strip.js": (read_static("strip.js"), "javascript"),
    }
    return {at: (text.encode(), f"text/{kind}; charset=utf-8") for at, (text, kind) in texts.items()}


def build_dashboard() -> PageFiles:
    """Return the files of the page of ``semblend serve``."""
    return build_page("dashboard", "What of each prompt was already paid for?", "/")


def build_explorer() -> PageFiles:
    """Return the files of the page of ``semblend explore``."""
    return build_page("explorer", "Which tokens of this prompt have earlier prompts already paid for?", "/")


def build_fleet() -> PageFiles:
    """Return the files of the router's page."""
    return build_page("fleet", "Where does each prompt go, and why?", "/fleet")
