"""Flags that more than one command takes, what they mean, and what they read."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semblend.errors import InputError, MissingDependencyError

if TYPE_CHECKING:
    from semblend.prompt import Namespace

LOG_HELP = "JSONL file of logged prompts, .gz too; - reads standard input"
MANY: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
"""For a flag that takes several values and may be given several times."""
DTYPES = ("float32", "bfloat16", "float16")
TOKENIZER_HELP = "stable (built in), a tokenizer.json, its folder, or a model in the local Hugging Face cache"


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokenizer", default="stable", metavar="NAME", help=f"{TOKENIZER_HELP} (default: stable)")


def add_model(parser: argparse.ArgumentParser, help: str = "a pulled model's name, a folder or a GGUF file") -> None:
    parser.add_argument("--model", default="smollm2-135m", help=help)


def add_machine(parser: argparse.ArgumentParser) -> None:
    """What the engine computes with; where a flag is left out, the engine chooses."""
    add = parser.add_argument
    add("--device", default="", help="cpu or cuda (default: cuda where there is one)")
    types = f"number type of the weights: {', '.join(DTYPES)} (default: float32 on a CPU, else the model's)"
    add("--dtype", default="", choices=["", *DTYPES], metavar="TYPE", help=types)
    add_threads(parser)


def add_threads(parser: argparse.ArgumentParser) -> None:
    limit = "CPU threads, at most (default: the cores this process may use)"
    parser.add_argument("--threads", type=int, default=0, metavar="N", help=limit)


@contextmanager
def engine_imports() -> Iterator[None]:
    """Around the imports of a command that computes: a missing package becomes one line and a hint."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"the engine needs the package {error.name}", hint="pip install 'semblend-suite[local]'"
        ) from None


def add_namespace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", default="", help="look only at donors of this tenant")
    parser.add_argument(
        "--namespace",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="another namespace field, such as model=llama-3; may be given several times",
    )


def namespace_of(args: argparse.Namespace) -> Namespace:
    from semblend.prompt import Namespace

    known = [field.name for field in fields(Namespace)]
    values = {"tenant": args.tenant} if args.tenant else {}
    for pair in args.namespace:
        name, equals, value = pair.partition("=")
        if not equals or name not in known:
            raise InputError(f"--namespace {pair!r} is not FIELD=VALUE", hint="the fields are " + ", ".join(known))
        values[name] = value
    return Namespace(**values)


def find_store(path: str) -> str:
    """A store that is only to be looked at must be there: opening would make an empty one out of a typing slip."""
    if not os.path.isfile(path):
        raise InputError(
            f"there is no store {path}", hint="a store is written by SemBlendConfig(store=...) or serve --store"
        )
    return path


def read_text(path: str) -> str:
    try:
        raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", hint="check the path and the permissions") from None
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start})", hint="convert it to UTF-8") from None


def read_token_ids(path: str) -> Any:
    """A JSON list of ids, or an object that holds one under token_ids or prompt_token_ids."""
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is not JSON", hint="write the token ids as a list: [1, 2, 3]") from None
    if isinstance(value, dict):
        value = value.get("token_ids", value.get("prompt_token_ids"))
    if not isinstance(value, list):
        raise InputError(f"{path} holds no list of token ids", hint="write the token ids as a list: [1, 2, 3]")
    return value


def parse_count(text: str) -> int:
    """An argparse type: a whole number above 0, also as 10_000, 64k, 2M or 1G (bytes and counts, powers of 1000)."""
    factors = {"k": 10**3, "m": 10**6, "g": 10**9}
    digits = text.strip().lower()
    factor = factors.get(digits[-1:], 1)
    try:
        value = int(digits.rstrip("kmg") if factor > 1 else digits) * factor
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def parse_rate(text: str) -> float:
    """An argparse type: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value
