"""``semantickv dynamo-pin``: pins requests over HTTP, in front of a stock Dynamo frontend."""

from __future__ import annotations

import argparse

from semantickv.commands.flags import add_engine_reuse_flag, add_listen_flags, read_tls
from semantickv.settings import EdgeSettings
from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import say


def add(commands: Commands) -> None:
    parser = add_command(commands, "dynamo-pin", run, "pin requests behind a stock Dynamo frontend")
    parser.add_argument("--frontend", required=True, metavar="URL", help="Dynamo's frontend, http://127.0.0.1:8000")
    parser.add_argument("--endpoint", default="dynamo.backend.generate", help="where the workers serve")
    add_engine_reuse_flag(parser)
    add_listen_flags(parser, port=8030)


def run(args: argparse.Namespace) -> int:
    """Stand in front of a Dynamo frontend and pin every request to the worker that has computed most of its passages,
    by Dynamo's own header. Needs nothing of Dynamo but its HTTP. Load is what went through here; where Dynamo's own
    loads and KV events should count, run dynamo-router instead.
    """
    from semantickv.apps.dynamo_pin import PinGateway
    from semantickv.edge.upstream_call import EngineAddress, Upstream
    from semantickv.routing.router import EngineReuse
    from semantickv.routing.worker_evidence import WorkerEvidence
    from semblend.http.server import run_server

    settings = EdgeSettings.read()
    pool = Upstream(EngineAddress.parse(args.frontend), connect_timeout_s=settings.connect_timeout_s)
    reuse = EngineReuse.parse(args.engine_reuse or settings.engine_reuse)
    evidence = WorkerEvidence(settings.max_tracked_tokens, reuse=reuse)
    app = PinGateway(settings, pool, evidence, args.endpoint.removeprefix("dyn://"))
    tls = read_tls(args)

    def announce(url: str) -> None:
        say(f"pinning on {url}, in front of {pool.address.url}; stop with Ctrl-C")
        say(reuse.describe())

    return run_server(app, args.host, args.port, announce=announce, drain_s=args.drain, tls=tls, date_header=False)
