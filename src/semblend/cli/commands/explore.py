"""Open the explorer: a local page that shows which tokens of a prompt earlier prompts already hold."""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

from semblend.cli.output import say
from semblend.cli.shared_flags import add_tokenizer
from semblend.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)"
    )
    parser.add_argument(
        "--port", type=int, default=8765, metavar="PORT", help="port to listen on; 0 takes any free one (default: 8765)"
    )
    parser.add_argument("--store", default="", metavar="FILE", help="keep donors in this file across restarts")
    add_tokenizer(parser)


def run(args: argparse.Namespace) -> int:
    from semblend.config import load_config
    from semblend.explorer.app import ExplorerApp
    from semblend.explorer.server import ExplorerServer
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
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            server.serve_forever()
    except KeyboardInterrupt:
        say("stopped")
    finally:
        app.close()
    return 0
