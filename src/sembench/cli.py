"""The ``sembench`` command: in this version it only tells what is there."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from semblend._version import __version__

DESCRIPTION = """Did reuse really help, and did it do no harm.

This version contains no sembench commands yet. What is there today is the library and the
command semblend: semblend estimate shows what reuse would save on logged prompts, semblend explore
opens the explorer, semblend explain tells why a prompt would or would not be reused."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sembench", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"sembench {__version__}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print help without arguments; refuse anything that this version can't do."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    known, unknown = parser.parse_known_args(arguments)
    del known  # --help and --version have left already
    if unknown:
        print(f"error: sembench {__version__} has no command {unknown[0]!r}", file=sys.stderr)
        print("hint: see sembench --help for what this version contains", file=sys.stderr)
    else:
        parser.print_help(sys.stderr)
    return 2
