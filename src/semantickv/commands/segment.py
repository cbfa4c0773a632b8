"""``semantickv segment``: show how a prompt is cut into typed blocks."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from semantickv.traces.segmentation import Classifier, Segmenter, TextBlock, load_rules
from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import print_json, table
from semblend.errors import InputError


def add(commands: Commands) -> None:
    parser = add_command(commands, "segment", run, "show a prompt's typed blocks")
    flag = parser.add_argument
    flag("prompt", nargs="?", default="-", metavar="FILE", help="text or JSON; - reads standard input (default: -)")
    flag("--rules", metavar="FILE", help="TOML file with more rules; they come before the built-in ones")
    flag(
        "--max-block-tokens", type=int, default=0, metavar="N", help="cut longer blocks, in tokens (default: 0, never)"
    )
    flag("--show-rules", action="store_true", help="print the rules in their order, and nothing else")
    flag("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Cut a prompt (text, chat messages or an OpenAI request) into typed blocks with lengths and hashes."""
    classifier = Classifier().with_rules(load_rules(args.rules)) if args.rules else Classifier()
    if args.show_rules:
        _show_rules(classifier, as_json=args.json)
        return 0
    blocks = _cut_prompt(
        _read_prompt(args.prompt), Segmenter(classifier, max_block_tokens=max(0, args.max_block_tokens))
    )
    if args.json:
        print_json([{"semantic_type": b.type, "token_count": b.tokens, "content_hash": b.content_hash} for b in blocks])
    else:
        rows = [(b.type, b.tokens, b.content_hash, _shorten(b.text)) for b in blocks]
        print(table(rows, head=("type", "tokens", "hash", "text"), right=(1,)))
    return 0


def _show_rules(classifier: Classifier, *, as_json: bool) -> None:
    """Print the classification rules in their order."""
    rules = [
        {
            "name": rule.name,
            "type": rule.type,
            "roles": list(rule.roles),
            "labels": list(rule.labels),
            "pattern": rule.pattern,
            "min_hits": rule.min_hits,
            "min_words": rule.min_words,
        }
        for rule in classifier.rules
    ]
    if as_json:
        print_json(rules)
        return
    rows = []
    for rule in classifier.rules:
        conditions = [
            f"role {' | '.join(rule.roles)}" if rule.roles else "",
            f"label {' | '.join(rule.labels)}" if rule.labels else "",
            f"{rule.min_hits} x /{rule.pattern}/" if rule.pattern else "",
            f"at least {rule.min_words} words" if rule.min_words else "",
        ]
        rows.append((rule.name, rule.type, _shorten(", ".join(filter(None, conditions)), 100)))
    print(table(rows, head=("rule", "type", "when")))


def _read_prompt(source: str) -> str:
    """Read a file, or standard input for ``-``."""
    try:
        return sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {source}: {error.strerror}", hint="check the path") from None
    except UnicodeDecodeError:
        raise InputError(f"{source} is not UTF-8 text") from None


def _cut_prompt(text: str, segmenter: Segmenter) -> tuple[TextBlock, ...]:
    """Cut text, a list of messages or an OpenAI request into blocks."""
    if not text.strip():
        raise InputError("the prompt is empty", hint="pass a file, or text on standard input")
    try:
        value = json.loads(text)
    except ValueError:
        return segmenter.cut_text(text)
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        return segmenter.cut_messages(value["messages"])
    if isinstance(value, list) and value and all(isinstance(one, dict) and "role" in one for one in value):
        return segmenter.cut_messages(value)
    return segmenter.cut_text(text)


def _shorten(text: str, most: int = 60) -> str:
    """Put a text on one line of at most ``most`` characters."""
    one = " ".join(text.split())
    return one if len(one) <= most else one[: most - 1] + "…"
