"""``semantickv segment``: show how a prompt is cut into typed blocks."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from semantickv.traces.classification import Classifier, load_rules
from semantickv.traces.segmentation import Block, Segmenter
from semblend.cli.output import print_json, table
from semblend.errors import InputError

ABOUT = "Cut a prompt (text, chat messages or an OpenAI request) into typed blocks with lengths and hashes."


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser("segment", help="show a prompt's typed blocks", description=ABOUT)
    parser.add_argument("prompt", nargs="?", default="-", metavar="FILE", help="text or JSON; - is standard input")
    parser.add_argument("--rules", metavar="FILE", help="TOML file with more rules; they come before the built-in ones")
    parser.add_argument("--max-block-tokens", type=int, default=0, metavar="N", help="cut longer blocks (0: never)")
    parser.add_argument("--show-rules", action="store_true", help="print the rules in their order, and nothing else")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    classifier = Classifier().with_rules(load_rules(args.rules)) if args.rules else Classifier()
    if args.show_rules:
        _show(classifier, as_json=args.json)
        return 0
    blocks = _blocks(_read(args.prompt), Segmenter(classifier, max_block_tokens=max(0, args.max_block_tokens)))
    if args.json:
        print_json([{"semantic_type": b.type, "token_count": b.tokens, "content_hash": b.content_hash} for b in blocks])
    else:
        rows = [(b.type, b.tokens, b.content_hash, _short(b.text)) for b in blocks]
        print(table(rows, head=("type", "tokens", "hash", "text"), right=(1,)))
    return 0


def _show(classifier: Classifier, *, as_json: bool) -> None:
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
        rows.append((rule.name, rule.type, _short(", ".join(filter(None, conditions)), 100)))
    print(table(rows, head=("rule", "type", "when")))


def _read(source: str) -> str:
    try:
        return sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {source}: {error.strerror}", hint="check the path") from None
    except UnicodeDecodeError:
        raise InputError(f"{source} is not UTF-8 text") from None


def _blocks(text: str, segmenter: Segmenter) -> tuple[Block, ...]:
    if not text.strip():
        raise InputError("the prompt is empty", hint="pass a file, or text on standard input")
    try:
        value = json.loads(text)
    except ValueError:
        return segmenter.text(text)
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        return segmenter.messages(value["messages"])
    if isinstance(value, list) and value and all(isinstance(one, dict) and "role" in one for one in value):
        return segmenter.messages(value)
    return segmenter.text(text)


def _short(text: str, most: int = 60) -> str:
    one = " ".join(text.split())
    return one if len(one) <= most else one[: most - 1] + "…"
