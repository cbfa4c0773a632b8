"""Writes docs/reference/sembench-cli.md from the parser.

Run ``python -m tools.reference.sembench_pages docs/reference``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sembench.cli import build_parser
from sembench.settings import VARIABLES
from tools.reference import command_page

PAGE = "sembench-cli.md"
INTRO = (
    "Standard output is data, standard error is talk. Exit codes: 0 done, 1 a gate or a check failed, 2 usage, "
    "130 interrupted. A mistake is one line `error:` and one line `hint:`; `--debug` adds the traceback.",
)


def render() -> str:
    return command_page.page(build_parser(), INTRO, VARIABLES)


def main(argv: Sequence[str] | None = None) -> int:
    return command_page.write(render(), PAGE, argv)


if __name__ == "__main__":
    sys.exit(main())
