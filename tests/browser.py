"""A real browser for the tests of pages: Chromium without a window, where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


def read_dom(url: str, profile: Path) -> str:
    """Return the page as it stands after eight seconds of the browser's own clock."""
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
        f"--user-data-dir={profile}", "--virtual-time-budget=8000", "--dump-dom", url,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout


def read_text(page: str, id: str) -> str:
    """Return the text of the element with this id."""
    found = re.search(rf'id="{id}"[^>]*>(.*?)</(?:p|span|h2)>', page, re.DOTALL)
    assert found, f"the page has no #{id}"
    return re.sub(r"<[^>]+>", "", found[1])
