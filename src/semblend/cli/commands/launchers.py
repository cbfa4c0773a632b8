"""`semblend-sglang` and `semblend-trtllm`: their names are taken, their engines' integrations are not in this version.

A launcher that started the plain engine instead would look as if it worked; these say what is missing and stop.
"""

from __future__ import annotations

import sys
from typing import NoReturn


def _refuse(command: str, engine: str) -> NoReturn:
    print(f"error: {command} needs the {engine} integration, which this version does not contain", file=sys.stderr)
    print("hint: lookup, claim and confirm can be called from your own adapter: see docs/guides", file=sys.stderr)
    raise SystemExit(2)


def sglang() -> NoReturn:
    _refuse("semblend-sglang", "SGLang")


def trtllm() -> NoReturn:
    _refuse("semblend-trtllm", "TensorRT-LLM")
