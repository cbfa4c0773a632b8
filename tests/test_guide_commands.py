"""The commands of the README and the guides are run as they stand, where they need no server, no model and no GPU."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from test_guides import CONSOLE, FENCE, shell_commands

import semantickv.cli
import sembench.cli
from semblend.cli import main as semblend_main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
MAINS = {"semblend": semblend_main.main, "semantickv": semantickv.cli.main, "sembench": sembench.cli.main}
NOT_RUN = {  # what each needs that a test has not
    "a server": r"run-live-|run-load|verify-endpoint|warm .*--url|collect|vllm donors",
    "what a server wrote": r"summarize-engine|assert-result|report",
    "a port of its own, until it is stopped": r"serve|explore|proxy|api|router --replicas|router --policy|dynamo-",
    "a pulled model": r"demo( |$)|calibrate|warm|models pull",
    "data that is not in the checkout": r"--data-dir|longbench|--store|my_planner",
    "minutes": r"experiment|doctor",
}


def commands_of(page: Path) -> list[str]:
    """The lines that call one of our programs, without comments."""
    blocks = [code for language, code in FENCE.findall(page.read_text("utf-8")) if language in CONSOLE]
    lines = [command for block in blocks for command, _ in shell_commands(block)]
    words = [shlex.split(line.replace("\\\n", " "), comments=True) for line in lines]
    plain = [one[2:] if one[:2] == ["python", "-m"] else one for one in words]
    return [shlex.join(one) for one in plain if one and one[0] in MAINS]


def why_not(command: str) -> str:
    """The reason why a command is not run here; empty for one that is."""
    rest = command.partition(" ")[2]
    return next((reason for reason, pattern in NOT_RUN.items() if re.match(rf"({pattern})|.* ({pattern})", rest)), "")


RUN = [(page, [one for one in commands_of(page) if not why_not(one)]) for page in PAGES]


@pytest.mark.parametrize(
    ("page", "commands"), [pair for pair in RUN if pair[1]], ids=lambda one: getattr(one, "name", "")
)
def test_the_commands_of_a_page_run_in_order(
    page: Path, commands: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra lab")
    for name in ("examples", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    log = (ROOT / "examples" / "data" / "ferry_desk.jsonl").read_bytes()
    (tmp_path / "prompts.jsonl").write_bytes(log)  # a reader's own log
    (tmp_path / "requests.jsonl").write_bytes(log)
    (tmp_path / "prompt.txt").write_text("When does the ferry leave?")
    (tmp_path / "ids.json").write_text(json.dumps(list(range(40))))
    monkeypatch.chdir(tmp_path)
    for command in commands:
        program, *words = shlex.split(command)
        assert MAINS[program](words) == 0, f"{page.name}: {command}\n{capsys.readouterr().err}"


def test_most_pages_with_commands_that_can_run_are_run() -> None:
    assert sum(len(commands) for _, commands in RUN) >= 12
    assert {"README.md", "estimate.md", "lab.md", "benchmark.md", "router.md"} <= {
        page.name for page, some in RUN if some
    }


def test_the_reader_of_commands_tells_what_needs_a_server() -> None:
    assert why_not("semantickv router --replicas http://a:1") == "a port of its own, until it is stopped"
    assert why_not("sembench run-load --log a") == "a server"
    assert not why_not("semantickv router --demo")
    assert not why_not("semblend estimate prompts.jsonl --html estimate.html")


def test_the_log_beside_the_examples_saves_what_the_guide_says(tmp_path: Path) -> None:
    log = ROOT / "examples" / "data" / "handbook_desk.jsonl"
    assert MAINS["semblend"](["estimate", str(log), "--json", str(tmp_path / "answer.json")]) == 0
    answer = json.loads((tmp_path / "answer.json").read_text(encoding="utf-8"))
    assert not answer["failed_lookups"], answer["first_failure"]
    rows = answer["rows"]
    saved = {row["name"]: f"{100 * row['saved_share']:.0f} %" for row in rows}
    page = (ROOT / "docs" / "guides" / "estimate.md").read_text(encoding="utf-8")
    told = f"Moving the date saves {saved['fields']} of its tokens, and arranging the passages {saved['arrange']} more"
    assert told in page


def test_the_table_of_the_guide_is_in_its_result_file() -> None:
    result = json.loads((ROOT / "bench" / "results" / "estimate_3000.json").read_text(encoding="utf-8"))
    rows = next(table["rows"] for table in result["tables"] if table["title"] == "Log: made")
    page = (ROOT / "docs" / "guides" / "estimate.md").read_text(encoding="utf-8")
    shown = " ".join(page.split())
    for _, tokens, share, seconds, price in rows:
        assert f" {tokens:+,} {100 * share:.1f} % {seconds:+,.1f} {price:.5f} " in shown
