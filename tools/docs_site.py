"""Hooks of MkDocs: the navigation is read from docs/index.md, and files outside docs/ that pages link to become pages.

So there is one list of pages, and every link of a page works in the site as it does in a checkout. The built site asks
no other host for anything, and carries the icon of our live pages.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(\]\()(<?)([^)\s>]+)(>?)")
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
OUTSIDE = "source"
"""Folder of the site with pages of files that lie outside docs/."""
ICON = ROOT / "src" / "semblend" / "web" / "static" / "icon.svg"
FOREIGN_WORKER = "https://unpkg.com/iframe-worker/shim"
LANGUAGES = {".py": "python", ".json": "json", ".md": "markdown", ".yaml": "yaml", ".toml": "toml", ".sh": "bash"}

Nav = list[dict[str, Any]]


def on_config(config: Any) -> Any:
    """Sets the navigation."""
    config.nav = read_nav()
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds a page for every file outside docs/ that some page links to."""
    from mkdocs.structure.files import File

    for target in find_outside():
        files.append(File.generated(config, page_of(target), content=show(target)))
    files.append(File.generated(config, config.theme["favicon"], content=ICON.read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Points links that leave docs/ to the pages made of their files."""
    if page.file.src_uri.startswith(OUTSIDE + "/"):
        return markdown
    return redirect(markdown, page.file.src_uri)


def on_post_build(config: Any) -> None:
    """Puts our own script in the place of the one that the theme loads from elsewhere, to search on the disk."""
    site = Path(config.site_dir)
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        if FOREIGN_WORKER in text:
            own = os.path.relpath(site / "site-worker.js", page.parent).replace(os.sep, "/")
            page.write_text(text.replace(FOREIGN_WORKER, own), "utf-8")


def read_nav() -> Nav:
    """The sections of docs/index.md as MkDocs wants them: their pages in order; research with all its decisions."""
    nav: Nav = [{"Home": "index.md"}]
    for section in re.split(r"^## ", (DOCS / "index.md").read_text("utf-8"), flags=re.MULTILINE)[1:]:
        name, _, body = section.partition("\n")
        linked = re.findall(r"\[([^\]]+)\]\(([^)#\s]+\.md)\)", body)
        pages: list[Any] = [{title.replace("`", ""): target} for title, target in linked]
        nav.append({name.strip(): list_research() if name.strip() == "Research" else pages})
    nav.append({"Sources": [page_of(target) for target in find_outside()]})
    return nav


def list_research() -> list[Any]:
    """The pages under docs/research, its README first, the decisions last."""
    pages = sorted(path for path in (DOCS / "research").glob("*.md") if path.name != "README.md")
    decisions = sorted((DOCS / "research" / "decisions").glob("*.md"))
    found: list[Any] = [path.relative_to(DOCS).as_posix() for path in (DOCS / "research" / "README.md", *pages)]
    return [*found, {"Decisions": [path.relative_to(DOCS).as_posix() for path in decisions]}]


def find_outside() -> list[Path]:
    """Files and folders outside docs/ that pages link to, and the files of those folders."""
    found: set[Path] = set()
    for page in sorted(DOCS.rglob("*.md")):
        for part in FENCE.split(page.read_text("utf-8"))[::2]:
            found |= {target for link in LINK.findall(part) if (target := leave(link[2], page.parent)) is not None}
    for folder in [one for one in found if one.is_dir()]:
        found |= {file for file in folder.rglob("*") if file.suffix in LANGUAGES}
    return sorted(found)


def leave(link: str, folder: Path) -> Path | None:
    """The file that a link leads to where that lies outside docs/; None for every other link."""
    if re.match(r"[a-z]+:|#", link):
        return None
    target = (folder / link.partition("#")[0]).resolve()
    return target if target.exists() and not target.is_relative_to(DOCS) and target.is_relative_to(ROOT) else None


def page_of(target: Path) -> str:
    """The page of a file outside docs/.

    >>> page_of(ROOT / "examples" / "quickstart.py")
    'source/examples/quickstart.py.md'
    """
    return f"{OUTSIDE}/{target.relative_to(ROOT).as_posix().lstrip(chr(46))}.md"  # MkDocs leaves out hidden folders


def show(target: Path) -> str:
    """A file as a page: its text; a folder: its files, each with the first line that it has to say."""
    name = target.relative_to(ROOT).as_posix()
    if target.is_dir():
        files = sorted(file for file in target.rglob("*") if file.suffix in LANGUAGES)
        lines = [f"- [{file.name}]({os.path.relpath(page_of(file), OUTSIDE)})" for file in files]
        return f"# {name}/\n\n" + "\n".join(lines) + "\n"
    text = target.read_text("utf-8").replace("````", "```")
    return f"# {name}\n\n````{LANGUAGES.get(target.suffix, 'bash')}\n{text}\n````\n"


def redirect(markdown: str, source: str) -> str:
    """The text of a page with links that leave docs/ led to the pages made of their files."""
    folder = (DOCS / source).parent

    def lead(match: re.Match[str]) -> str:
        target = leave(match[3], folder)
        if target is None:
            return match[0]
        return match[1] + os.path.relpath(page_of(target), Path(source).parent).replace(os.sep, "/")

    parts = FENCE.split(markdown)
    return "".join(part if at % 2 else LINK.sub(lead, part) for at, part in enumerate(parts))
