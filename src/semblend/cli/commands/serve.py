"""``semblend serve``."""

from __future__ import annotations

import argparse
import contextlib
import signal
from collections.abc import Iterator
from dataclasses import fields

from semblend.cli.commandline import INTERRUPTED, Commands, add_command
from semblend.cli.output import say
from semblend.cli.shared_flags import add_machine, add_model, engine_imports
from semblend.config import load_config, read_key_variables
from semblend.engine.server.config import ServeConfig
from semblend.engine.server.tenants import KeyRing, Tenants, read_keys_file, read_pairs
from semblend.errors import ConfigError
from semblend.wire.callers import is_loopback

SETTINGS = [setting for setting in fields(ServeConfig) if setting.metadata]
EXAMPLES = (
    "semblend models pull smollm2-135m && semblend serve",
    "semblend serve --model ./Qwen2.5-0.5B-Instruct --port 8080 --quality fast",
    "semblend serve --host 0.0.0.0 --keys-file keys.toml",
)


def add(commands: Commands) -> None:
    parser = add_command(commands, "serve", run, examples=EXAMPLES)
    add = parser.add_argument
    add_model(parser)
    add_machine(parser)
    quality = "exact, fast, balanced, or how far an answer may move, in nats (default: SEMBLEND_QUALITY, else balanced)"
    add("--quality", default="", metavar="MODE", help=quality)
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8000, metavar="PORT", help="port to listen on; 0 takes any free one")
    for setting in SETTINGS:
        shape = dict(setting.metadata)
        names = shape.pop("names") or (f"--{setting.name.replace('_', '-')}",)
        add(*names, dest=setting.name, type=type(setting.default), default=setting.default, **shape)
    add("--insecure-open", action="store_true", help="serve beyond this machine without keys: everyone is admin")
    add("--keys-file", default="", metavar="FILE", help="TOML file of keys, see docs/guides/serve.md")
    for name, value, text in (
        ("--api-key", "TENANT=KEY", "a tenant's key; may be given often; other users of the machine can see it"),
        ("--admin-key", "KEY", "a key that sees all tenants and may flush the cache"),
        ("--trusted-front", "ADDRESS", "address of a proxy whose X-Tenant-ID header is believed; may be given often"),
        ("--trusted-tenant", "TENANT", "a tenant whose prompts may spell control tokens; may be given often"),
    ):
        add(name, action="append", default=[], metavar=value, help=text)
    add("--public-metrics", action="store_true", help="/metrics shows everybody's figures to anyone, without a key")


def run(args: argparse.Namespace) -> int:
    """Serve a model: an OpenAI-compatible API with semantic KV reuse, and a dashboard."""
    with engine_imports():
        from semblend.engine.server.launch import Launch
        from semblend.engine.server.routes import create_app, listen, serve
    config = _make_config(args)
    library = load_config(**({"quality": args.quality} if args.quality else {}))
    launch = Launch(config)
    path = launch.path
    # A port or a file that is taken must not cost the time to load a model.
    with _leave_in_order(), listen(args.host, args.port) as sock, config.make_arranger() as arranger:
        say(f"loading {path.name} on {launch.chosen_device}")
        engine = launch.engine(library)
        try:
            engine.start()
            if engine.gate is not None:
                say(f"quality gate: {engine.gate.describe()}")
            say(f"{engine.model} is ready; dashboard and API, Ctrl-C stops it")
            print(f"http://{args.host}:{sock.getsockname()[1]}", flush=True)
            ended_by = serve(create_app(engine, config, arranger), sock)
        finally:
            engine.close()
    say("stopped")
    return INTERRUPTED if ended_by is signal.SIGINT else 0


@contextlib.contextmanager
def _leave_in_order() -> Iterator[None]:
    """Let SIGTERM end the command as an exception does: what was opened is closed."""

    def leave(number: int, frame: object) -> None:
        del frame
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _gather_keys(args: argparse.Namespace) -> KeyRing:
    """The keys of the file, the variables and the flags together; warns of those that others may see."""
    ring = read_keys_file(args.keys_file) if args.keys_file else KeyRing()
    ring += read_pairs(*read_key_variables(), "SEMBLEND_API_KEYS")
    ring += read_pairs(args.api_key, args.admin_key, "--api-key")
    for warning in ring.warnings:
        say(f"warning: {warning}")
    if args.api_key or args.admin_key:
        say("warning: other users of this machine can see keys on a command line (hint: use --keys-file)")
    return ring


def _make_config(args: argparse.Namespace) -> ServeConfig:
    tenants = Tenants(ring=_gather_keys(args).keys, fronts=args.trusted_front, trusted=args.trusted_tenant)
    if tenants.is_open and not is_loopback(args.host) and not args.insecure_open:
        raise ConfigError(
            f"--host {args.host} without keys makes everyone admin who can reach this machine",
            hint="give keys (--keys-file), name a --trusted-front, or say --insecure-open",
        )
    return ServeConfig(
        **{setting.name: getattr(args, setting.name) for setting in SETTINGS},
        model=args.model,
        device=args.device,
        dtype=args.dtype,
        threads=args.threads,
        tenants=tenants,
        public_metrics=args.public_metrics,
        local_only=is_loopback(args.host),
    )
