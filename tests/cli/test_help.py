"""``--help`` of every command, read as a stranger reads it."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator

import pytest

import semantickv.cli
import sembench.cli
from semblend.cli.main import build_parser
from semblend.integration.sglang import launcher as sglang
from semblend.integration.trtllm import launcher as trtllm

PROGRAMS = {
    "semblend": build_parser(),
    "semantickv": semantickv.cli.build_parser(),
    "sembench": sembench.cli.build_parser(),
}
LAUNCHERS = {"semblend-sglang": sglang.build_parser(), "semblend-trtllm": trtllm.build_parser()}


def list_parsers() -> dict[str, argparse.ArgumentParser]:
    """Every command of every program, by what a person types."""
    found: dict[str, argparse.ArgumentParser] = {**PROGRAMS, **LAUNCHERS}
    for program, parser in PROGRAMS.items():
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                found |= {f"{program} {name}": command for name, command in action.choices.items()}
    return found


PARSERS = list_parsers()


def list_options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [one for one in parser._actions if not isinstance(one, argparse._SubParsersAction)]


@pytest.mark.parametrize("name", PARSERS)
def test_help_says_what_the_command_is_for_and_what_each_flag_means(name: str) -> None:
    parser = PARSERS[name]
    assert parser.description
    for option in list_options(parser):
        text = (option.help or "") % (vars(option) | {"prog": ""})
        assert text, f"{name} {option.dest}"
        assert "%%" not in text
    assert "%%" not in parser.format_help()


@pytest.mark.parametrize("name", [name for name in PARSERS if name not in LAUNCHERS])
def test_a_flag_with_a_default_says_it(name: str) -> None:
    for option in list_options(PARSERS[name]):
        if option.nargs != 0 and option.default not in (None, "", [], argparse.SUPPRESS):
            assert "default" in (option.help or ""), f"{name} {option.dest}"


def commands_in(parser: argparse.ArgumentParser) -> Iterator[list[str]]:
    """The commands of the lines that end a help text, words as a shell splits them."""
    lines = (parser.epilog or "").replace("\\\n", " ").splitlines()[1:]
    for line in lines:
        for part in re.split(r"&&|\|", line):
            words = shlex.split(part, comments=True)
            if words and words[0] in PROGRAMS:
                yield words


@pytest.mark.parametrize("name", [name for name, parser in PARSERS.items() if parser.epilog])
def test_the_examples_of_a_help_text_are_commands_that_exist(name: str) -> None:
    shown = list(commands_in(PARSERS[name]))
    assert shown
    for program, *words in shown:
        args = PROGRAMS[program].parse_args(words)
        assert args.command


def test_the_same_thing_has_the_same_flag_in_all_programs() -> None:
    """Where two programs grew two names, either name is taken by both."""
    for flags in (("--drain", "--drain-seconds"), ("--hour-cost", "--gpu-hour"), ("--gateway-url", "--base-url")):
        for name, parser in PARSERS.items():
            given = {flag for option in list_options(parser) for flag in option.option_strings}
            alone = given & set(flags)
            if alone and alone != {"--base-url"} and alone != {"--gpu-hour"}:
                assert alone == set(flags), f"{name} knows {alone} alone"


def test_a_usage_of_many_flags_shows_those_that_must_be_given() -> None:
    assert PARSERS["sembench run-offline"].format_usage() == (
        "usage: sembench run-offline --manifest FILE --output FILE [options]\n"
    )


def test_long_choices_become_a_word_and_a_list() -> None:
    text = " ".join(PARSERS["sembench build"].format_help().split())
    assert "--profile NAME where the documents come from; one of fixture, synthetic-v1" in text
