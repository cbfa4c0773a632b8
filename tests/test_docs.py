"""The documentation is true: generated pages are fresh, links resolve, commands exist. test_guides.py runs the code."""

from __future__ import annotations

import argparse
import copy
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

import semantickv.cli
import sembench.cli
import semblend
from semblend import errors
from semblend.cli.commands.doctor import MODEL_LOOKS
from semblend.cli.main import build_parser
from semblend.config import SETTINGS
from semblend.confirm.events import EventKind
from semblend.confirm.metrics import METRICS
from semblend.extras import extras
from semblend.materialize.kv.rope import FAMILIES, LATENT_FAMILIES
from tools.reference.models_page import CLASSES, DECIDES
from tools.reference.semblend_pages import commands_of, main, options_of, render_all
from tools.reference.support_tables import EXTRAS

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")


@pytest.fixture(scope="module")
def rendered() -> dict[str, str]:
    return render_all()


def page(name: str) -> str:
    return (REFERENCE / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(render_all()))
def test_a_generated_page_is_what_the_code_would_write_now(name: str, rendered: dict[str, str]) -> None:
    assert page(name) == rendered[name], f"docs/reference/{name} is stale: run make docs"


def test_the_command_writes_every_page(
    tmp_path: Path, rendered: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "reference")]) == 0
    assert {path.name: path.read_text() for path in (tmp_path / "reference").iterdir()} == rendered


@pytest.mark.parametrize("family", [*FAMILIES, *sorted(set(LATENT_FAMILIES) - {"kimi_k2"})])  # which transformers lacks
def test_the_table_of_models_says_what_doctor_says_of_a_config_of_transformers(family: str) -> None:
    transformers = pytest.importorskip("transformers", reason="configs as models bring them")
    cells = next(line for line in page("models.md").splitlines() if f"`{family}`" in line).split(" | ")[1:]
    decides = copy.deepcopy(dict(DECIDES.get(family, {})))
    config = transformers.AutoConfig.for_model(family, num_hidden_layers=4, **decides).to_dict()
    config |= {"head_dim": 128, "sliding_window": decides.get("sliding_window")}  # defaults of some that no model has
    if family in CLASSES and family.endswith("_text"):
        config = {"model_type": family.removesuffix("_text"), "text_config": config}
    config["architectures"] = [CLASSES.get(family, "OtherForCausalLM")]
    why, how = MODEL_LOOKS["vllm"](config)
    assert cells[0].partition(":")[0] == ("no" if why else "with a flag" if how else "yes"), why


def test_every_setting_is_documented_with_its_variable() -> None:
    for setting in SETTINGS:
        assert f"| `{setting.name}` | `{setting.variable}` |" in page("settings.md")


def test_every_command_and_flag_is_documented_and_has_help() -> None:
    for name, command in commands_of(build_parser()).items():
        section = page("cli.md").partition(f"## semblend {name}\n")[2].partition("\n## ")[0]
        assert section, f"semblend {name} is not documented"
        for option in options_of(command):
            assert option.help, f"semblend {name} {option.dest} has no help"
            for flag in option.option_strings:
                assert f"`{flag}`" in section


def test_every_event_kind_metric_and_public_name_is_documented() -> None:
    for kind in EventKind:
        assert f"## {kind}\n" in page("events.md")
    for metric in METRICS:
        assert f"`{metric.name}`" in page("metrics.md")
    for name in semblend.__all__:
        assert f"\n## {name}\n" in page("api.md")


def test_every_error_is_documented() -> None:
    kinds = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    for kind in kinds:
        assert f"| `{kind.__name__}` |" in page("errors.md")


def test_every_extra_says_what_needs_it() -> None:
    assert set(extras()) == set(EXTRAS)
    for name in EXTRAS:
        assert f"| `{name}` |" in page("extras.md")


def prose(path: Path) -> str:
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """The anchors that a Markdown viewer makes from headings."""
    found = re.findall(r"^#+\s+(.*?)\s*$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(path: Path) -> None:
    for target in LINK.findall(prose(path)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = unquote(target).partition("#")
        goal = (path.parent / name).resolve() if name else path
        assert goal.exists(), f"{path.relative_to(ROOT)} links to {target}, which is not there"
        if anchor and goal.suffix == ".md":
            assert anchor in anchors(goal), f"{path.relative_to(ROOT)} links to {target}: no such heading"


def blocks(path: Path, language: str) -> list[str]:
    return [code for name, code in FENCE.findall(path.read_text(encoding="utf-8")) if name == language]


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """All flags of a command, those of its own commands included."""
    own = {flag for option in options_of(parser) for flag in option.option_strings}
    return own.union(*(flags_of(below) for below in commands_of(parser).values()))


@pytest.mark.parametrize(
    ("program", "parser"),
    [
        ("semblend", build_parser()),
        ("sembench", sembench.cli.build_parser()),
        ("semantickv", semantickv.cli.build_parser()),
    ],
    ids=["semblend", "sembench", "semantickv"],
)
def test_commands_shown_to_people_exist(program: str, parser: argparse.ArgumentParser) -> None:
    known = {name: flags_of(command) for name, command in commands_of(parser).items()}
    shown = 0
    for path in PAGES:
        for code in [*blocks(path, "console"), *blocks(path, "bash")]:
            found = rf"^(?:\$ )?(?:[A-Z_]+=\S+ )?(?:python -m )?{program} (.+)$"
            for line in re.findall(found, code.replace("\\\n", " "), re.MULTILINE):
                command, _, rest = line.partition(" # ")[0].strip().partition(" ")
                assert command in known or command.startswith("-"), f"{path.name}: {program} {command}"
                for flag in re.findall(r"(?<!\S)--[a-z0-9-]+", rest):
                    assert flag in known[command], f"{path.name}: {program} {command} {flag}"
                shown += 1
    assert shown > 5, f"hardly any page shows {program}"


def test_published_figures_are_those_of_the_result_files() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "publish.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_architecture_names_every_folder_of_every_package() -> None:
    page = (ROOT / "docs" / "concepts" / "architecture.md").read_text("utf-8")
    folders = [path.parent for path in (ROOT / "src").glob("*/*/__init__.py")]
    assert {str(one.relative_to(ROOT)) for one in folders if f"`{one.name}/`" not in page} == set()
