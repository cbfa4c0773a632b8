"""Tell what of a prompt could be reused from donors, and why, stage by stage.

Donors come from a store file or from a log of earlier prompts. Only token equality makes a span reusable.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from semblend.cli.output import print_json, say
from semblend.cli.shared_flags import (
    LOG_HELP,
    add_namespace,
    add_tokenizer,
    find_store,
    namespace_of,
    read_text,
    read_token_ids,
)
from semblend.errors import CapacityError, InputError

if TYPE_CHECKING:
    from semblend import SemBlend
    from semblend.prompt import Prompt
    from semblend.text.tokenization import Tokenizer

EXAMPLES = ('semblend explain --donors prompts.jsonl --text "Summarize: ..."',)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt-file", metavar="FILE", help="text file with the prompt; - reads standard input")
    prompt.add_argument("--text", help="the prompt itself")
    prompt.add_argument(
        "--tokens", metavar="FILE", help="JSON file with the prompt's token ids; - reads standard input"
    )
    donors = parser.add_mutually_exclusive_group()
    donors.add_argument("--store", metavar="FILE", help="donor store to look into")
    donors.add_argument("--donors", metavar="FILE", help=f"earlier prompts to look into: {LOG_HELP}")
    add_tokenizer(parser)
    add_namespace(parser)
    parser.add_argument("--skip-bad", action="store_true", help="pass over malformed lines of --donors")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from semblend import SemBlend
    from semblend.text.tokenization import load_tokenizer

    if args.donors == "-" and "-" in (args.prompt_file, args.tokens):
        raise InputError("standard input cannot be both the prompt and the donors", hint="put one of them in a file")
    tokenizer = load_tokenizer(args.tokenizer)
    prompt = _prompt(args, tokenizer)
    overrides: dict[str, Any] = {"store": find_store(args.store)} if args.store else {"store": ""}
    semblend = SemBlend.from_env(**overrides)
    try:
        if args.donors:
            _register(semblend, tokenizer, args)
        semblend.warm_up()  # or the first call's loading of kernels would pass for time spent on the prompt
        explanation = semblend.explain(prompt)
    finally:
        semblend.close()
    if args.json:
        print_json(explanation.to_dict())
    else:
        print(explanation)
    return 0


def _prompt(args: argparse.Namespace, tokenizer: Tokenizer) -> Prompt:
    from semblend.prompt import Prompt

    namespace = namespace_of(args)
    if args.tokens is not None:
        return Prompt(read_token_ids(args.tokens), namespace=namespace)
    text = args.text if args.text is not None else read_text(args.prompt_file)
    if not text:
        raise InputError("the prompt is empty", hint="a prompt needs at least one character")
    return Prompt(tokenizer.encode(text), text=text, namespace=namespace)


def _register(semblend: SemBlend, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Every logged prompt becomes a donor, under its request id where it has one of its own.

    A log's tenant and model count only where the question names them, else all of the log is one namespace.
    """
    from semblend.prompt import Namespace, Prompt
    from semblend.text.logs import PromptLog

    asked = namespace_of(args)
    log = PromptLog(args.donors, skip_bad=args.skip_bad)
    seen: set[str] = set()
    for logged in log:
        namespace = Namespace(tenant=logged.tenant if asked.tenant else "", model=logged.model if asked.model else "")
        ids = tokenizer.encode(logged.text) if logged.text is not None else logged.token_ids
        donor_id = logged.request_id or f"line-{logged.line}"
        if donor_id in seen:
            donor_id = f"{donor_id}@line-{logged.line}"
        seen.add(donor_id)
        try:
            semblend.register(Prompt(ids, text=logged.text, namespace=namespace), donor_id=donor_id)
        except CapacityError as error:
            say(f"skipped: {log.label}, line {logged.line}: {error.message}")
    for example in log.skipped_examples:
        say(f"skipped: {example}")
