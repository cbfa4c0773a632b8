"""Writes docs/reference/semantickv-cli.md from the parser.

Run ``python -m tools.reference.semantickv_pages docs/reference``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from semantickv.cli import build_parser
from semantickv.settings import VARIABLES
from tools.reference import command_page

PAGE = "semantickv-cli.md"
INTRO = (
    "What these commands report of caches is simulated; `proxy` and `router` serve real traffic. Standard output is "
    "data, standard error is talk. Exit "
    "codes: 0 done, 1 a check failed, 2 usage, 130 interrupted. A mistake is one line `error:` and one line "
    "`hint:`; `--debug` adds the traceback.",
)


def render() -> str:
    """Render the reference page of the ``semantickv`` command."""
    return command_page.page(build_parser(), INTRO, VARIABLES)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page into the folder that the arguments name."""
    return command_page.write(render(), PAGE, argv)


if __name__ == "__main__":
    sys.exit(main())
