"""What a command reads from its arguments is a flag that it declares: a typo there breaks it for everybody."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from semantickv import cli as semantickv
from sembench import cli as sembench
from semblend.cli import main as semblend

SRC = Path(__file__).parents[2] / "src"
COMMANDS = {
    "semblend": (semblend.build_parser, "semblend/cli/commands"),
    "semantickv": (semantickv.build_parser, "semantickv/commands"),
    "sembench": (sembench.build_parser, "sembench/commands"),
}
MODULES = [(name, path) for name, (_, folder) in COMMANDS.items() for path in sorted((SRC / folder).rglob("*.py"))]


def list_flags(parser: argparse.ArgumentParser) -> set[str]:
    """The names under which a parser and the commands below it put what was typed."""
    found = set(parser._defaults)
    for action in parser._actions:
        found.add(action.dest)
        if isinstance(action, argparse._SubParsersAction):
            found |= {name for one in action.choices.values() for name in list_flags(one)}
    return found


def list_names_read(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """``args.NAME`` wherever ``args`` is what argparse made; names that the module itself sets are left out."""
    made = {
        node.attr for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }  # fmt: skip
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        typed = [one.arg for one in function.args.args if "Namespace" in ast.unparse(one.annotation or ast.Constant(0))]
        for node in ast.walk(function):
            if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
                continue
            if node.value.id in typed and node.attr not in made:
                yield node.attr, node.lineno


@pytest.mark.parametrize(("command", "path"), MODULES, ids=lambda one: str(one).removeprefix(f"{SRC}/"))
def test_a_command_reads_only_flags_that_are_declared(command: str, path: Path) -> None:
    flags = list_flags(COMMANDS[command][0]())
    for name, line in list_names_read(ast.parse(path.read_text(encoding="utf-8"))):
        assert name in flags, f"{path.relative_to(SRC)}:{line} reads args.{name}: no flag of {command}"
