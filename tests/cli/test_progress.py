"""Progress: a line on a terminal and nothing anywhere else; data stays data."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import pytest

import sembench.cli
from semantickv.cli import main
from semblend.cli.output import Progress

pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")
TRACE = Path(__file__).parents[2] / "examples" / "traces" / "rag_serving_trace.jsonl"
ERASE = "\r\x1b[2K"
MARK = "\0"


@contextmanager
def open_terminal() -> Iterator[Callable[[], str]]:
    """Make standard error a terminal; the call gives what was written to it."""
    outer, inner = pty.openpty()
    with os.fdopen(inner, "w", encoding="utf-8") as stream, redirect_stderr(stream):

        def read() -> str:
            stream.write(MARK)  # a terminal may hand over what was written in parts, and later
            stream.flush()
            seen = b""
            while not seen.endswith(MARK.encode()):
                seen += os.read(outer, 1 << 16)
            return seen.decode().removesuffix(MARK)

        yield read
    os.close(outer)


def fail_midway() -> None:
    with Progress() as progress:
        progress.show("one of two")
        raise ValueError("oh")


def test_on_a_terminal_the_line_moves_and_is_gone_at_the_end() -> None:
    with open_terminal() as read:
        with Progress() as progress:
            progress.show("one of two")
            progress.show("two of two")
        assert read() == f"{ERASE}one of two{ERASE}two of two{ERASE}"


def test_a_line_that_is_wider_than_the_terminal_is_cut() -> None:
    with open_terminal() as read:
        with Progress() as progress:
            progress.show("x" * 5000)
        assert read().count("x") == 79  # this terminal does not tell its width


@pytest.mark.parametrize("quiet", [True, False])
def test_elsewhere_nothing_is_shown(quiet: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(quiet) as progress:
        progress.show("one of two")
        assert not progress.due()
    assert capsys.readouterr().err == ""


def test_a_quiet_command_shows_nothing_on_a_terminal() -> None:
    with open_terminal() as read:
        with Progress(quiet=True) as progress:
            progress.show("one of two")
        print("end", file=sys.stderr)
        assert read().strip() == "end"


def test_the_line_goes_when_the_work_fails() -> None:
    with open_terminal() as read:
        with pytest.raises(ValueError, match="oh"):
            fail_midway()
        assert read().endswith(ERASE)


def test_a_replay_names_its_policies_on_a_terminal_and_prints_clean_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--cache-token-budget", "9000", "--policies", "lru", "fifo", "--no-plots", "--json"]
    with open_terminal() as read:
        assert main(["replay", "--trace", str(TRACE), *flags, "--output-dir", str(tmp_path)]) == 0
        shown = read()
    assert "lru: 1 of 2 policies" in shown
    assert "fifo: 2 of 2 policies" in shown
    assert shown.rindex(ERASE) > shown.rindex("fifo: 2 of 2")
    assert "\x1b" not in capsys.readouterr().out


def test_a_replay_into_a_pipe_is_silent_about_its_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--cache-token-budget", "9000", "--policies", "lru", "--no-plots", "--json"]
    assert main(["replay", "--trace", str(TRACE), *flags, "--output-dir", str(tmp_path)]) == 0
    done = capsys.readouterr()
    assert json.loads(done.out)
    assert "policies" not in done.err


def test_nothing_of_ours_writes_colours() -> None:
    """One escape code is used, the one that erases a line; so NO_COLOR has nothing to forbid."""
    source = Path(__file__).parents[2] / "src"
    users = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if "\\x1b[" in path.read_text(encoding="utf-8") or "\\033[" in path.read_text(encoding="utf-8")
    }
    assert users == {"semblend/cli/output.py", "semblend/cli/commands/estimate.py"}  # the latter takes them out


def test_compare_and_report_say_which_part_is_under_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases, result, page = (str(tmp_path / name) for name in ("cases.jsonl", "result.json", "page.html"))
    assert sembench.cli.main(["build", "--profile", "synthetic-v1", "--output", cases]) == 0
    assert sembench.cli.main(["run-offline", "--manifest", cases, "--output", result, "--quiet"]) == 0
    capsys.readouterr()
    with open_terminal() as read:
        assert sembench.cli.main(["compare", result, result]) == 0
        shown = read()
        assert sembench.cli.main(["report", "--result", result, "--output", page]) == 0
        shown += read()
    for part in ("1 of 3: reading", "3 of 3: drawing documents", "reading", "examining", "drawing"):
        assert f"{ERASE}{part}" in shown
    assert shown.rindex(ERASE) > shown.rindex("drawing")
    assert "\x1b" not in capsys.readouterr().out
