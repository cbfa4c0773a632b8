"""``semblend demo``."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import Progress, check_target, say, table, write_json
from semblend.cli.shared_flags import add_model, add_threads, engine_imports
from semblend.config import load_config

if TYPE_CHECKING:
    from semblend.demo.runner import Arm, DemoOutcome

HEAD = ("workload", "arm", "first token", "faster", "exact", "reused", "again", "computed", "same words", "KL")
RIGHT = tuple(range(2, len(HEAD)))
PATIENCE_S = 45.0  # on a quiet machine every workload begins before this and is measured twice
POOL_TOKENS = {False: 8192, True: 24_576}

EXAMPLES = (
    "semblend models pull smollm2-135m && semblend demo",
    "semblend demo --long --json demo.json --plot demo.png",
)


def add(commands: Commands) -> None:
    parser = add_command(commands, "demo", run, examples=EXAMPLES)
    flag = parser.add_argument
    add_model(parser)
    flag("--long", action="store_true", help="documents of about 4,000 tokens instead of 1,000")
    flag("--json", metavar="FILE", help="write all figures, answers and receipts here")
    flag("--plot", metavar="FILE.png", help="draw the figures here (needs the extra lab)")
    add_threads(parser)


def run(args: argparse.Namespace) -> int:
    """Show on a real small model what reuse gains, and what it changes in the answers."""
    with engine_imports():
        from semblend.demo import plot
        from semblend.engine.server.config import ServeConfig
        from semblend.engine.server.launch import Launch
    for path in filter(None, (args.json, args.plot)):
        check_target(path)
    launch = Launch(ServeConfig(model=args.model, pool_tokens=POOL_TOKENS[args.long], threads=args.threads))
    outcome = _measure(launch, long=args.long)
    print(table([_row(arm) for arm in outcome.arms], head=HEAD, right=RIGHT))
    print()
    print(table([(arm.title, arm.name, _one_line(arm.answer)) for arm in outcome.arms], head=("", "", "answer")))
    if any(arm.disturbed for arm in outcome.arms):
        say("runs of one prompt differ by more than half: other programs were computing; fewer --threads may help")
    if args.json:
        write_json(args.json, outcome.to_dict())
    if args.plot:
        plot.draw(outcome, args.plot)  # last: where its package is missing, all else is there
        say(f"wrote {args.plot}")
    return 0


def _measure(launch: Any, *, long: bool) -> DemoOutcome:
    from semblend.demo.runner import Demo, DemoOutcome, Watched, describe_machine
    from semblend.demo.workloads import dialogue, workloads

    path = launch.path
    say(f"loading {path.name}")
    model, tokenizer = launch.load()
    # Variables that tune or switch off reuse hold here too; files of donors and events are not the demo's business.
    config = load_config(quality="balanced", embedder="none", store="", events="", nats_url="", metrics=False)
    engine = launch.assemble(Watched.of(model), tokenizer, config)
    progress = Progress()

    def tell(what: str) -> None:
        if progress.due():
            progress.show(what)

    try:
        demo = Demo(engine, tokenizer, repeats=1 if long else 2, patience_s=PATIENCE_S, say=tell)
        arms = demo.run(workloads(long=long), dialogue(long=long))
    finally:
        progress.clear()
        engine.close()
    machine = describe_machine(model) | {"long": long, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    return DemoOutcome(launch.config.model, machine, arms)


def _row(arm: Arm) -> tuple[str, ...]:
    cold = arm.name == "cold"
    kinds = (f"{count:,}" if count else "-" for count in arm.receipt.tokens.values())
    against_cold = ("", "") if cold else (f"{arm.agreement:.0%}", f"{arm.kl:.4f}")
    faster = "" if cold else f"{arm.times_faster:.1f}x"
    return (arm.title if cold else "", arm.name, f"{arm.ttft_ms:,.0f} ms", faster, *kinds, *against_cold)


def _one_line(text: str) -> str:
    return " ".join(text.split())
