"""The fleet page: what a router knows of its replicas. Its files; style and helpers are the dashboard's."""

from importlib import resources

_HTML, _JS, _CSS = "text/html; charset=utf-8", "text/javascript; charset=utf-8", "text/css; charset=utf-8"


def _read(folder: str, name: str) -> bytes:
    return resources.files("semblend.web").joinpath(folder, name).read_bytes()


PAGE_FILES: dict[str, tuple[bytes, str]] = {
    "/fleet": (_read("fleet", "index.html"), _HTML),
    "/fleet/app.js": (_read("fleet", "app.js"), _JS),
    "/fleet/fleet.css": (_read("fleet", "fleet.css"), _CSS),
    "/fleet/app.css": (_read("dashboard", "app.css"), _CSS),
    "/dom.js": (_read("dashboard", "dom.js"), _JS),
}
"""Path -> bytes and type."""
