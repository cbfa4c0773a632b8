"""``semantickv dynamo-router``: a component of a Dynamo deployment that places requests where their passages are."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from semantickv.commands.flags import add_engine_reuse_flag
from semantickv.settings import EdgeSettings
from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import say

if TYPE_CHECKING:
    from semantickv.routing.worker_evidence import WorkerEvidence
    from semantickv.shared_state.evidence_sync import SharedEvidence


def add(commands: Commands) -> None:
    parser = add_command(commands, "dynamo-router", run, "place requests on the workers of a Dynamo deployment")
    flag = parser.add_argument
    flag("--model-name", required=True, metavar="NAME", help="the model, as clients will call it")
    flag("--model-path", required=True, metavar="DIR", help="its folder or hub name, for the tokenizer")
    flag("--endpoint", default="dynamo.backend.generate", help="where the workers serve, under another model name")
    flag("--block-size", type=int, default=16, metavar="TOKENS", help="the workers' block size")
    add_engine_reuse_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Serve a model inside a Dynamo deployment. The frontend sends its requests here, and each goes on to the worker
    that has computed most of its passages, as long as that one has room. Dynamo's own KvRouter chooses for all
    others. Discovery, request plane and event plane are Dynamo's: the DYN_* variables of the deployment. Several of
    these routers share what they know through SEMANTICKV_REDIS_URL.
    """
    from semantickv.routing.fingerprint import load_cutter
    from semantickv.routing.router import EngineReuse
    from semantickv.routing.worker_evidence import WorkerEvidence
    from semantickv.shared_state import open_link
    from semblend.integration.dynamo.serve import RouterOptions, read_version, run_router

    options = RouterOptions(args.model_name, args.model_path, args.endpoint.removeprefix("dyn://"), args.block_size)
    settings = EdgeSettings.read()
    reuse = EngineReuse.parse(args.engine_reuse or settings.engine_reuse)
    say(read_version())
    say(reuse.describe())
    load_cutter()  # takes seconds the first time; no request waits for it
    evidence = WorkerEvidence(settings.max_tracked_tokens, reuse=reuse, secret=settings.hash_key)
    link = open_link(settings, lambda: _share(evidence))
    if link is None:
        run_router(options, evidence)
    else:
        run_router(options, link.sync, link)
    return 0


def _share(evidence: WorkerEvidence) -> SharedEvidence:
    from semantickv.shared_state.evidence_sync import SharedEvidence

    return SharedEvidence(evidence)
