"""Serve a model: an OpenAI-compatible API with semantic KV reuse, and a dashboard."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import signal
from collections.abc import Iterator

from semblend.cli.commandline import INTERRUPTED
from semblend.cli.output import say
from semblend.config import QUALITY_MODES, load_config, read_key_variables
from semblend.engine.server.config import DTYPES, ServeConfig
from semblend.engine.server.edge.keys import KeyRing, read_keys_file, read_pairs
from semblend.engine.server.tenants import Tenants
from semblend.errors import ConfigError, MissingDependencyError

DEFAULTS = ServeConfig()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="a pulled model's name, a folder or a GGUF file")
    parser.add_argument("--device", default="", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--dtype", default="", choices=["", *DTYPES], help="of the weights")
    parser.add_argument(
        "--threads",
        type=int,
        default=0,
        metavar="N",
        help="CPU threads at most (default: the cores this process may use)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--insecure-open", action="store_true", help="serve beyond this machine without keys: everyone is admin"
    )
    parser.add_argument("--port", type=int, default=8000, help="port (default: 8000)")
    parser.add_argument("--quality", default="", choices=["", *QUALITY_MODES], help="overrides SEMBLEND_QUALITY")
    parser.add_argument("--thresholds", default="", metavar="FILE", help="of the quality gate, from semblend calibrate")
    parser.add_argument(
        "--pool-tokens", type=int, default=DEFAULTS.pool_tokens, help="KV pool, in tokens (default: 32768)"
    )
    parser.add_argument(
        "--step-tokens", type=int, default=DEFAULTS.step_tokens, help="tokens computed in one step (default: 512)"
    )
    parser.add_argument(
        "--donor-bytes", type=int, default=DEFAULTS.donor_host_bytes, help="host memory for donor KV (default: 2 GiB)"
    )
    parser.add_argument("--donor-device-bytes", type=int, default=0, help="device memory for donor KV (default: 0)")
    parser.add_argument("--donor-dir", default="", metavar="DIR", help="keep donor KV that falls out of memory here")
    parser.add_argument(
        "--donor-disk-bytes", type=int, default=DEFAULTS.donor_disk_bytes, help="limit of --donor-dir (default: 8 GiB)"
    )
    parser.add_argument("--keys-file", default="", metavar="FILE", help="TOML file of keys, see docs/guides/serve.md")
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="TENANT=KEY",
        help="a tenant's key; may be given often; other users of the machine can see it",
    )
    parser.add_argument("--admin-key", action="append", default=[], metavar="KEY", help="sees all tenants, may flush")
    parser.add_argument(
        "--trusted-front", action="append", default=[], metavar="ADDRESS", help="whose X-Tenant-ID is believed"
    )
    parser.add_argument(
        "--trusted-tenant",
        action="append",
        default=[],
        metavar="TENANT",
        help="whose prompts may spell control tokens; may be given often",
    )
    parser.add_argument(
        "--public-metrics", action="store_true", help="/metrics shows everybody's figures to anyone, without a key"
    )
    parser.add_argument(
        "--max-running", type=int, default=DEFAULTS.max_running, help="requests answered at once (default: 32)"
    )
    parser.add_argument(
        "--max-waiting", type=int, default=DEFAULTS.max_waiting, help="requests in line before 429 (default: 256)"
    )
    parser.add_argument(
        "--max-connections", type=int, default=DEFAULTS.max_connections, help="open connections (default: 1024)"
    )
    parser.add_argument(
        "--header-timeout",
        type=float,
        default=DEFAULTS.header_timeout_s,
        metavar="SECONDS",
        help="time for a request's headers (default: 10)",
    )
    parser.add_argument(
        "--idle-timeout",
        type=float,
        default=DEFAULTS.idle_timeout_s,
        metavar="SECONDS",
        help="time between two requests of a connection (default: 75)",
    )
    parser.add_argument(
        "--drain-seconds",
        type=float,
        default=DEFAULTS.drain_s,
        metavar="SECONDS",
        help="time for running requests after a signal (default: 20)",
    )


def run(args: argparse.Namespace) -> int:
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
    # A port that is taken must not cost the time to load a model.
    with _leave_in_order(), listen(args.host, args.port) as sock:
        say(f"loading {path.name} on {launch.chosen_device}")
        engine = launch.engine(library)
        try:
            engine.start()
            say(f"{engine.model} is ready; dashboard and API, Ctrl-C stops it")
            print(f"http://{args.host}:{sock.getsockname()[1]}", flush=True)
            ended_by = serve(create_app(engine, config), sock)
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
    if tenants.is_open and not _on_loopback(args.host) and not args.insecure_open:
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
        step_tokens=args.step_tokens,
        max_running=args.max_running,
        max_waiting=args.max_waiting,
        max_connections=args.max_connections,
        header_timeout_s=args.header_timeout,
        idle_timeout_s=args.idle_timeout,
        drain_s=args.drain_seconds,
        tenants=tenants,
        public_metrics=args.public_metrics,
        local_only=_on_loopback(args.host),
    )


def _on_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
