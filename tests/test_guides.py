"""What the pages show is what a reader gets: the code of each runs in a new process and prints what it shows."""

from __future__ import annotations

import ast
import doctest
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
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
    path_of_modules = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT / "tests")]))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUNNER],
        input=json.dumps(blocks), cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": path_of_modules},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = dict(zip(blocks, json.loads(done.stdout), strict=True))
    for code, shown in shown_outputs(text):
        assert as_compared(printed[code]) == as_compared(shown), f"{path.name} shows other output than it gives"


def test_the_comparison_notices_a_wrong_figure() -> None:
    assert as_compared("align  0.1 ms  spans 3") == as_compared("align 12.75 ms  spans 3\n")
    assert as_compared("align  0.1 ms  spans 3") != as_compared("align  0.1 ms  spans 4")


CONSOLE = ("console", "bash", "shell", "sh")
HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?\s*$")
IS_PYTHON = re.compile(r"(?:\S*/)?python3?(?: -W \S+)? (?:-c |- |-$|examples/)")
NEED_A_SERVER = ("examples/ask_vllm.py", "examples/ask_sglang.py")  # asked in the test_server.py of tests/engines


def shell_commands(block: str) -> Iterator[tuple[str, str]]:
    """Each command of a console block, continued lines, quotes and here-documents included, with the output below it.

    A block without a prompt sign is read as a script: every line is a command, and no output is shown.
    """
    marked = any(line.startswith("$ ") for line in block.splitlines())
    lines = iter(block.splitlines())
    command, output = "", []
    for line in lines:
        if marked and not line.startswith("$ "):
            output.append(line)
            continue
        if command:
            yield command, "\n".join(output)
        command, output = line.removeprefix("$ "), []
        while command.endswith("\\") or not has_closed_quotes(command):
            command += "\n" + next(lines)
        if end := HEREDOC.search(command):
            for line in lines:
                command += "\n" + line
                if line.strip() == end[1]:
                    break
    if command:
        yield command, "\n".join(output)


def has_closed_quotes(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return True


def python_commands(text: str) -> list[tuple[str, str]]:
    """The commands of a page that run Python code the page shows, or one of our examples."""
    blocks = [code for language, code in FENCE.findall(text) if language in CONSOLE]
    found = [pair for code in blocks for pair in shell_commands(code)]
    return [pair for pair in found if IS_PYTHON.match(pair[0]) and not any(name in pair[0] for name in NEED_A_SERVER)]


def python_sessions(text: str) -> list[str]:
    """Blocks with ``>>>`` lines, in whatever language they are marked."""
    return [code for _, code in FENCE.findall(text) if re.search(r"^\s*>>> ", code, re.MULTILINE)]


def run_shown(command: str, folder: Path) -> str:
    """Standard output of a command that a page shows, run by this Python in a folder where ``examples`` is at hand."""
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize(
    "path", [path for path in PAGES if python_commands(path.read_text("utf-8"))], ids=lambda path: path.name
)
def test_python_inside_console_blocks_runs_and_prints_what_is_shown(path: Path, tmp_path: Path) -> None:
    for command, shown in python_commands(path.read_text("utf-8")):
        printed = run_shown(command, tmp_path)
        if shown.strip():
            assert as_compared(printed) == as_compared(shown), f"{path.name}: {command} prints something else"


@pytest.mark.parametrize(
    "path", [path for path in PAGES if python_sessions(path.read_text("utf-8"))], ids=lambda path: path.name
)
def test_interactive_sessions_answer_as_shown(path: Path) -> None:
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(verbose=False)
    for code in python_sessions(path.read_text("utf-8")):
        runner.run(parser.get_doctest(code, {}, path.name, str(path), 0))
    assert runner.summarize(verbose=False).failed == 0


@pytest.mark.parametrize(
    ("block", "commands"),
    [
        ("$ make test\n$ python -c 'print(1)'\n1\n", [("make test", ""), ("python -c 'print(1)'", "1")]),
        ('$ python -c "\nprint(2)"\n2\n', [('python -c "\nprint(2)"', "2")]),
        ("$ python - <<'E'\nprint(3)\nE\n3\n", [("python - <<'E'\nprint(3)\nE", "3")]),
        ("semblend doctor\npython -c 'x = 1'\n", [("semblend doctor", ""), ("python -c 'x = 1'", "")]),
        ("$ sembench build \\\n    --profile fixture\n", [("sembench build \\\n    --profile fixture", "")]),
    ],
)
def test_a_console_block_is_read_as_a_shell_reads_it(block: str, commands: list[tuple[str, str]]) -> None:
    assert list(shell_commands(block)) == commands


def test_wrong_code_in_a_console_block_is_noticed(tmp_path: Path) -> None:
    page = "```console\n$ python -c 'print(1 + 1)'\n3\n$ python -c 'raise SystemExit(1)'\n```\n"
    (wrong, shown), (failing, _) = python_commands(page)
    assert as_compared(run_shown(wrong, tmp_path)) != as_compared(shown)
    with pytest.raises(AssertionError):
        run_shown(failing, tmp_path)


def names_defined_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    return {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }


def stops_of_a_request() -> list[list[tuple[str, str]]]:
    """The tables of the page: for each, the file and the calls of every stop."""
    text = (ROOT / "docs" / "concepts" / "life-of-a-request.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| `([^`]+)` \| ([^|]+) \|", text, re.MULTILINE)
    tables: list[list[tuple[str, str]]] = []
    for number, file, calls in rows:
        if number == "1":
            tables.append([])
        tables[-1].append((file, calls))
    return tables


@pytest.mark.parametrize(("file", "calls"), [stop for stops in stops_of_a_request() for stop in stops])
def test_every_stop_of_a_request_is_in_the_code(file: str, calls: str) -> None:
    path = ROOT / "src" / "semblend" / file
    assert path.exists(), f"{file} is not there"
    for call in re.findall(r"`([^`]+)`", calls):
        assert call.rpartition(".")[2] in names_defined_in(path), f"{file} does not define {call}"


USER_PAGES = [path for path in PAGES if not {"research", "reference"} & set(path.parts)]  # decisions speak of what was
DOTTED = re.compile(r"`((?:semblend|sembench|semantickv)(?:\.[a-zA-Z_]\w*)+)")
FILES = re.compile(r"`((?:[\w-]+/)+[\w-]+\.py)`")


def is_there(dotted: str) -> bool:
    """Whether a dotted name is a module of ours, or a name that stands in one."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        stem = ROOT.joinpath("src", *parts[:end])
        module = stem.with_suffix(".py") if stem.with_suffix(".py").exists() else stem / "__init__.py"
        if module.exists():
            return all(re.search(rf"\b{name}\b", module.read_text("utf-8")) for name in parts[end:])
    return False


@pytest.mark.parametrize("path", USER_PAGES, ids=lambda path: path.name)
def test_modules_and_files_that_a_user_page_names_exist(path: Path) -> None:
    text = path.read_text("utf-8")
    for dotted in DOTTED.findall(text):
        assert is_there(dotted) or dotted == "semblend.events", f"{path.name} names {dotted}, which is not there"
    if path.name == "migration.md":
        return  # its first column names another project's files
    for name in FILES.findall(text):
        places = (
            ROOT / name,
            ROOT / "src" / name,
            ROOT / "src" / "semblend" / name,
            ROOT / "src" / "semblend" / "integration" / "vllm" / name,
        )
        assert any(place.exists() for place in places), f"{path.name} names {name}, which is not there"


def test_every_page_is_reachable_from_the_index() -> None:
    docs = ROOT / "docs"
    linked = {docs / "index.md"}
    for page in (docs / "index.md", docs / "research" / "README.md"):
        linked |= {
            (page.parent / target).resolve() for target in re.findall(r"\(([\w./-]+\.md)", page.read_text("utf-8"))
        }
    for path in sorted(docs.rglob("*.md")):
        assert path in linked, f"{path.relative_to(docs)} is linked from neither index.md nor research/README.md"


def test_every_benchmark_is_listed_with_its_question() -> None:
    listed = (ROOT / "bench" / "README.md").read_text("utf-8")
    scripts = {path.name for path in (ROOT / "bench").glob("*.py")} - {"publish.py", "run.py"}
    assert {name for name in scripts if f"| `{name}` |" not in listed} == set()
