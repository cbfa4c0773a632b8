"""``semblend explain`` and ``semblend explore``: what of a prompt could be reused, printed and on a local page."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from semblend.cli.commandline import Commands, add_command
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

# -- explain ---------------------------------------------------------------------------------------------------------

EXAMPLES = ('semblend explain --donors prompts.jsonl --text "Summarize: ..."',)


def add(commands: Commands) -> None:
    _add_explore(commands)
    parser = add_command(commands, "explain", run, examples=EXAMPLES)
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
    """Tell what of a prompt could be reused from donors, and why, stage by stage.

    Donors come from a store file or from a log of earlier prompts. Only token equality makes a span reusable.
    """
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


# -- explore ---------------------------------------------------------------------------------------------------------


def _add_explore(commands: Commands) -> None:
    parser = add_command(commands, "explore", explore)
    flag = parser.add_argument
    flag("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)")
    flag("--port", type=int, default=8765, metavar="PORT", help="port to listen on; 0 takes any free one")
    flag("--store", default="", metavar="FILE", help="keep donors in this file across restarts")
    add_tokenizer(parser)


def explore(args: argparse.Namespace) -> int:
    """Open the explorer: a local page that shows which tokens of a prompt earlier prompts already hold."""
    from semblend.config import load_config
    from semblend.explorer import ExplorerApp, ExplorerServer
    from semblend.text.tokenization import load_tokenizer

    if os.path.isdir(args.store):
        raise InputError(f"{args.store} is a folder", hint="--store names a file; it is made where it is not there")
    tokenizer = load_tokenizer(args.tokenizer)
    overrides: dict[str, Any] = {"store": args.store} if args.store else {}
    app = ExplorerApp(load_config(**overrides), tokenizer)
    try:
        with ExplorerServer(app, args.host, args.port) as server:
            app.semblend.warm_up()
            if not server.on_loopback:
                say(f"warning: {args.host} can be reached from other machines; whoever reaches it sees the donors")
            say("semblend explorer; Ctrl-C stops it")
            print(server.url, flush=True)
            server.serve_forever()
            say("stopped")
    finally:
        app.close()
    return 0
