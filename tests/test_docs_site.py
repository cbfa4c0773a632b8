"""The site of the documentation: every page is in its navigation, and links that leave docs/ lead to pages too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.docs_site import DOCS, ROOT, find_outside, page_of, read_nav, redirect, show


def list_pages(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in list_pages(part)]


def test_every_page_is_in_the_navigation_once() -> None:
    pages = [page for page in list_pages(read_nav()) if not page.startswith("source/")]
    assert sorted(pages) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_a_link_out_of_the_docs_leads_to_a_page_of_its_file() -> None:
    text = (
        "[this](../../examples/quickstart.py) [that](vllm.md#x) ![p](../images/a.png)\n```\n[no](../../Makefile)\n```\n"
    )
    led = redirect(text, "guides/one.md")
    assert led == text.replace("../../examples/quickstart.py", "../source/examples/quickstart.py.md")
    assert "def main" in show(ROOT / "examples" / "quickstart.py")
    assert "(examples/quickstart.py.md)" in show(ROOT / "examples")


def test_files_of_hidden_folders_have_pages_that_are_not_hidden() -> None:
    assert not [page for page in map(page_of, find_outside()) if "/." in page]


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr.strip(), done.stderr
    assert (tmp_path / "site" / "guides" / "vllm.html").exists()
    for page in (tmp_path / "site").rglob("*.html"):
        tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text("utf-8"))
        assert not [tag for tag in tags if re.search(r'(?:src|href)="(?:https?:)?//', tag)], page
