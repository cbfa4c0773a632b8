"""Completion, asked of the shells themselves: bash, zsh and fish, where they are installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from semblend.cli import main as semblend_main

LINES = {
    "semblend doc": "semblend doctor",
    "semblend doctor --j": "semblend doctor --json",
    "semblend --debug models pu": "semblend --debug models pull",
}
# A zsh in a terminal of its own, without a start-up file. The program is a function that prints its words; they are
# read up to the mark at the end of the answer, so that nothing waits for a clock.
ZSH = """
zmodload zsh/zpty
zpty inner zsh -f -i
zpty -w inner "PS1=; source $1; semblend() { print -r -- got \\"<semblend \\$*>\\" }; print -r -- rea''dy"
zpty -r inner out '*ready*'
zpty -w -n inner "$2"$'\\t\\n'
zpty -r inner out '*got <*>*'
print -r -- "$out"
"""


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(sys.platform == "win32" or not shutil.which(shell), reason=f"needs {shell}")


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Path:
    """The file that a shell reads."""
    assert semblend_main.main(["--completion", request.param]) == 0
    path = tmp_path / "completion"
    path.write_text(capsys.readouterr().out)
    return path


def ask(*command: str, home: Path) -> str:
    environment = {"HOME": str(home), "PATH": "/usr/local/bin:/usr/bin:/bin", "TERM": "dumb"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs("bash")
@pytest.mark.parametrize("script", ["bash"], indirect=True)
@pytest.mark.parametrize("line", LINES)
def test_bash_completes_commands_and_the_flags_of_each(script: Path, line: str) -> None:
    words = line.split(" ")
    asked = [
        f"source {script}",
        f"COMP_WORDS=({line})",
        f"COMP_CWORD={len(words) - 1}",
        "_semblend_complete",
        'printf "%s\\n" "${COMPREPLY[@]}"',
    ]
    assert ask("bash", "-c", "; ".join(asked), home=script.parent).split() == [LINES[line].split(" ")[-1]]


@needs("zsh")
@pytest.mark.parametrize("script", ["zsh"], indirect=True)
@pytest.mark.parametrize("line", LINES)
def test_zsh_completes_the_same_where_nobody_has_started_its_completion(script: Path, line: str) -> None:
    assert f"got <{LINES[line]}>" in ask("zsh", "-f", "-c", ZSH, "zsh", str(script), line, home=script.parent)


@needs("fish")
@pytest.mark.parametrize("script", ["fish"], indirect=True)
@pytest.mark.parametrize("line", LINES)
def test_fish_completes_the_same(script: Path, line: str) -> None:
    asked = f"source {script}; complete -C '{line}'"
    offered = [one.split("\t")[0] for one in ask("fish", "--no-config", "-c", asked, home=script.parent).splitlines()]
    assert offered == [LINES[line].split(" ")[-1]]


@pytest.mark.parametrize("program", ["semblend", "semantickv", "sembench"])
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_program_prints_completion_for_every_shell(
    program: str, shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = __import__(f"{program}.cli.main" if program == "semblend" else f"{program}.cli", fromlist=["main"]).main
    assert run(["--completion", shell]) == 0
    shown = capsys.readouterr().out
    assert program in shown
    assert shown.count("\n") > 10
