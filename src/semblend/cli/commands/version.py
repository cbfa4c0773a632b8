"""Tell which version of semblend this is, and on what it runs."""

from __future__ import annotations

import argparse
import platform

from semblend._version import __version__
from semblend.cli.output import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    if args.json:
        print_json({"semblend": __version__, "python": platform.python_version(), "platform": platform.platform()})
    else:
        print(f"semblend {__version__}")
    return 0
