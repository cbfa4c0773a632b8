"""What the pages show is what a reader gets: the code of each runs in a new process and prints what stands below it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("guides/*.md")),
    *sorted((ROOT / "docs").glob("concepts/*.md")),
]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
TIMES = re.compile(r"\d+\.\d+ ms")

# Takes a list of blocks on stdin; runs them in one namespace; answers with what each of them printed.
RUNNER = """
import contextlib, io, json, sys
shared, printed = {"__name__": "__main__"}, []
for number, code in enumerate(json.load(sys.stdin)):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, f"block {number}", "exec"), shared)
    printed.append(out.getvalue())
json.dump(printed, sys.stdout)
"""


def python_blocks(text: str) -> list[str]:
    """Also those marked ``py``: they change their process for good, so only a process of their own may run them."""
    return [code for language, code in FENCE.findall(text) if language in ("python", "py")]


def shown_outputs(text: str) -> list[tuple[str, str]]:
    """Each block of code that is directly followed by a ``text`` block, with that block."""
    found = list(FENCE.finditer(text))
    return [
        (code[2], output[2])
        for code, output in pairwise(found)
        if code[1] in ("python", "py") and output[1] == "text" and not text[code.end() : output.start()].strip()
    ]


def as_compared(text: str) -> str:
    """Without what differs from run to run: times, and the width of the columns they stand in."""
    return re.sub(r"[ \t]+", " ", TIMES.sub("… ms", text)).strip()


@pytest.mark.parametrize(
    "path", [path for path in PAGES if python_blocks(path.read_text("utf-8"))], ids=lambda path: path.name
)
def test_a_page_run_in_a_new_process_prints_what_it_shows(path: Path, tmp_path: Path) -> None:
    text = path.read_text("utf-8")
    blocks = python_blocks(text)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUNNER],
        input=json.dumps(blocks), cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = dict(zip(blocks, json.loads(done.stdout), strict=True))
    for code, shown in shown_outputs(text):
        assert as_compared(printed[code]) == as_compared(shown), f"{path.name} shows other output than it gives"


def test_the_comparison_notices_a_wrong_figure() -> None:
    assert as_compared("align  0.1 ms  spans 3") == as_compared("align 12.75 ms  spans 3\n")
    assert as_compared("align  0.1 ms  spans 3") != as_compared("align  0.1 ms  spans 4")


def test_every_guide_and_concept_is_reachable_from_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    for path in sorted((ROOT / "docs").rglob("*.md")):
        name = path.relative_to(ROOT / "docs").as_posix()
        assert name == "index.md" or f"({name})" in index, f"docs/{name} is not linked from docs/index.md"
