"""``semblend serve``."""

from __future__ import annotations

import argparse
import contextlib
import signal
from collections.abc import Iterator

from semblend.cli.commandline import INTERRUPTED, Commands, add_command
from semblend.cli.output import say
from semblend.cli.shared_flags import add_dtype
from semblend.config import load_config, read_key_variables
from semblend.engine.server.config import ServeConfig
from semblend.engine.server.keys import KeyRing, read_keys_file, read_pairs
from semblend.engine.server.tenants import Tenants
from semblend.errors import ConfigError, MissingDependencyError
from semblend.wire.loopback import is_loopback

DEFAULTS = ServeConfig()
EXAMPLES = (
    "semblend models pull smollm2-135m && semblend serve",
    "semblend serve --model ./Qwen2.5-0.5B-Instruct --port 8080 --quality fast",
    "semblend serve --host 0.0.0.0 --keys-file keys.toml",
)


def add(commands: Commands) -> None:
    parser = add_command(commands, "serve", run, examples=EXAMPLES)
    _add_model(parser)
    _add_room(parser)
    _add_callers(parser)
    _add_limits(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="a pulled model's name, a folder or a GGUF file")
    add("--device", default="", help="cpu or cuda (default: cuda where there is one)")
    add_dtype(parser)
    limit = "CPU threads, at most (default: the cores this process may use)"
    add("--threads", type=int, default=0, metavar="N", help=limit)
    quality = "exact, fast, balanced, or how far an answer may move, in nats (default: SEMBLEND_QUALITY, else balanced)"
    add("--quality", default="", metavar="MODE", help=quality)
    add(
        "--thresholds", default="", metavar="FILE", help="thresholds of the quality gate, written by semblend calibrate"
    )


def _add_room(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    for name, default, text in (
        ("--pool-tokens", DEFAULTS.pool_tokens, "size of the KV pool, in tokens (default: 32768)"),
        ("--step-tokens", DEFAULTS.step_tokens, "tokens computed in one scheduler step, at most (default: 512)"),
        ("--donor-bytes", DEFAULTS.donor_host_bytes, "host memory for donor KV, in bytes (default: 2 GiB)"),
        ("--donor-device-bytes", DEFAULTS.donor_device_bytes, "device memory for donor KV, in bytes (default: 0)"),
        ("--donor-disk-bytes", DEFAULTS.donor_disk_bytes, "limit of --donor-dir, in bytes (default: 8 GiB)"),
        (
            "--donor-directory-bytes",
            DEFAULTS.donor_directory_bytes,
            "limit of --donor-directory, in bytes (default: 4 GiB)",
        ),
    ):
        flag(name, type=int, default=default, help=text)
    work = "milliseconds that a step works on prompts while answers of other tenants run, about (default: 40)"
    flag("--step-work-ms", type=float, default=DEFAULTS.step_work_ms, metavar="MS", help=work)
    flag("--donor-dir", default="", metavar="DIR", help="keep donor KV that falls out of memory here")
    shared = "share donors in this folder with other servers of the machine and with semblend warm"
    flag("--donor-directory", default="", metavar="DIR", help=shared)
    orders = "keep the orders of passages over a restart here, see docs/guides/arrange.md"
    flag("--arrange-file", default="", metavar="FILE", help=orders)
    bits = "bits of a number of donor KV in memory and on disk; 8 halves the bytes (default: 16)"
    flag("--donor-bits", type=int, default=DEFAULTS.donor_bits, choices=[16, 8], help=bits)


def _add_callers(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8000, metavar="PORT", help="port to listen on; 0 takes any free one")
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


def _add_limits(parser: argparse.ArgumentParser) -> None:
    for name, count, text in (
        ("--max-running", DEFAULTS.max_running, "requests answered at once, at most (default: 32)"),
        ("--max-waiting", DEFAULTS.max_waiting, "requests that may wait; more are answered with 429 (default: 256)"),
        ("--max-connections", DEFAULTS.max_connections, "open connections, at most (default: 1024)"),
    ):
        parser.add_argument(name, type=int, default=count, help=text)
    for flags, seconds, text in (
        (
            ("--header-timeout",),
            DEFAULTS.header_timeout_s,
            "seconds for the headers of a request to arrive (default: 10)",
        ),
        (("--idle-timeout",), DEFAULTS.idle_timeout_s, "seconds that a connection may stay idle (default: 75)"),
        (
            ("--drain-seconds", "--drain"),
            DEFAULTS.drain_s,
            "seconds for running requests after a stop signal (default: 20)",
        ),
    ):
        parser.add_argument(*flags, type=float, default=seconds, metavar="SECONDS", help=text)


def run(args: argparse.Namespace) -> int:
    """Serve a model: an OpenAI-compatible API with semantic KV reuse, and a dashboard."""
    try:
        from semblend.engine.server.launch import Launch
        from semblend.engine.server.routes import create_app, listen, serve
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"the engine needs the package {error.name}", hint="pip install 'semblend-suite[local]'"
        ) from None
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
        model=args.model,
        device=args.device,
        dtype=args.dtype,
        threads=args.threads,
        thresholds=args.thresholds,
        pool_tokens=args.pool_tokens,
        donor_device_bytes=args.donor_device_bytes,
        donor_host_bytes=args.donor_bytes,
        donor_disk_bytes=args.donor_disk_bytes,
        donor_dir=args.donor_dir,
        donor_bits=args.donor_bits,
        donor_directory=args.donor_directory,
        donor_directory_bytes=args.donor_directory_bytes,
        arrange_file=args.arrange_file,
        step_tokens=args.step_tokens,
        step_work_ms=args.step_work_ms,
        max_running=args.max_running,
        max_waiting=args.max_waiting,
        max_connections=args.max_connections,
        header_timeout_s=args.header_timeout,
        idle_timeout_s=args.idle_timeout,
        drain_s=args.drain_seconds,
        tenants=tenants,
        public_metrics=args.public_metrics,
        local_only=is_loopback(args.host),
    )
