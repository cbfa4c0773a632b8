"""`semblend-sglang` starts SGLang with our cache. `semblend-trtllm`: its name is taken, its integration is not here.

A launcher that started the plain engine instead would look as if it worked; that one says what is missing and stops.
"""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn


def _refuse(command: str, engine: str) -> NoReturn:
    """Answer ``--help`` without the engine; refuse everything else with exit code 2."""
    parser = argparse.ArgumentParser(
        prog=command,
        usage=f"{command} [-h] [arguments of {engine} ...]",
        description=f"Start {engine} with semantic KV reuse. This version does not contain the {engine} integration: "
        "the command stops with an error. `semblend serve`, vLLM and SGLang work.",
        allow_abbrev=False,
    )
    parser.parse_known_args()
    print(f"error: {command} needs the {engine} integration, which this version does not contain", file=sys.stderr)
    print("hint: lookup, claim and confirm can be called from your own adapter: see docs/guides", file=sys.stderr)
    raise SystemExit(2)


def sglang() -> None:
    from semblend.integration.sglang.launcher import main

    main()


def trtllm() -> NoReturn:
    _refuse("semblend-trtllm", "TensorRT-LLM")
