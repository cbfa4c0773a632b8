"""List, pin and forget the donors of a running vLLM.

The engine is started with "admin_socket": "/run/user/1000/semblend.sock" in kv_connector_extra_config; give the same
path here. A tenant is a cache_salt and is shown as 16 hex digits: --salt-file finds the digits of a salt that you know.
"""

from __future__ import annotations

import argparse
from typing import Any

from semblend.cli.output import print_json, say, table
from semblend.cli.shared_flags import read_text
from semblend.errors import InputError, SemBlendError

ACTIONS = ("list", "tenants", "pin", "unpin", "forget")

EXAMPLES = (
    "semblend vllm donors --socket /run/user/1000/semblend.sock",
    "semblend vllm donors pin --socket /run/user/1000/semblend.sock --donor req-17",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("subject", choices=("donors",), help="what it is about")
    parser.add_argument("action", nargs="?", choices=ACTIONS, default="list", help="what to do (default: list)")
    parser.add_argument("--socket", required=True, metavar="FILE", help="the engine's admin_socket")
    parser.add_argument("--tenant", metavar="DIGITS", help="donors of this tenant; 'none' = of requests without a salt")
    parser.add_argument("--salt-file", metavar="FILE", help="donors of the cache_salt in this file; - = standard input")
    parser.add_argument("--donor", metavar="ID", help="this donor")
    parser.add_argument("--all", action="store_true", help="every donor")
    parser.add_argument(
        "--limit", type=int, default=50, metavar="N", help="list at most N donors an engine (default: 50)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from semblend.integration.vllm.scheduler.admin_socket import ask, find_sockets

    command = _make_command(args)
    engines = find_sockets(args.socket)
    if not engines:
        raise InputError(f"no engine serves at {args.socket}", hint="start vLLM with admin_socket, and give its path")
    answers = {str(path): ask(path, command) for path in engines}
    for path, answer in answers.items():
        if not answer.get("ok"):
            raise SemBlendError(f"{path}: {answer.get('error')}", hint=str(answer.get("hint") or ""))
    if args.json:
        print_json({"engines": [{"socket": path, **answer} for path, answer in answers.items()]})
        return 0
    {"list": _print_donors, "tenants": _print_tenants}.get(args.action, _print_done)(list(answers.values()))
    return 0


def _make_command(args: argparse.Namespace) -> dict[str, Any]:
    from semblend.prompt import name_tenant

    if args.tenant is not None and args.salt_file is not None:
        raise InputError("--tenant and --salt-file name the same thing", hint="give one of them")
    tenant = "" if args.tenant == "none" else args.tenant
    if args.salt_file is not None:
        tenant = name_tenant(_read_salt(args.salt_file))
    named = sum((tenant is not None, args.donor is not None, args.all))
    if args.action in ("pin", "unpin", "forget") and named != 1:
        raise InputError(f"donors {args.action} needs --tenant, --salt-file, --donor or --all", hint="say which donors")
    return {
        "action": args.action,
        "tenant": tenant,
        "donor_id": args.donor,
        "everything": args.all,
        "limit": args.limit,
    }


def _read_salt(name: str) -> str:
    salt = read_text(name).rstrip("\r\n")
    if not salt:
        raise InputError(f"{name} is empty", hint="a text file with the salt")
    return salt


def _print_donors(answers: list[dict[str, Any]]) -> None:
    donors = [donor for answer in answers for donor in answer["donors"]]
    rows = [
        (
            d["donor_id"],
            d["tenant"] or "none",
            f"{d['tokens']:,}",
            f"{d['age_s']:,.0f} s",
            "pinned" if d["pinned"] else "",
        )
        for d in donors
    ]
    if rows:
        print(table(rows, head=("donor", "tenant", "tokens", "age", ""), right=(2, 3)))
    total = sum(answer["total"] for answer in answers)
    say(f"{total:,} donors" + (f"; {len(donors):,} shown" if len(donors) < total else ""))


def _print_tenants(answers: list[dict[str, Any]]) -> None:
    rows = [
        (t["tenant"] or "none", f"{t['donors']:,}", f"{t['tokens']:,}", f"{t['pinned']:,}")
        for answer in answers
        for t in answer["tenants"]
    ]
    if rows:
        print(table(rows, head=("tenant", "donors", "tokens", "pinned"), right=(1, 2, 3)))
    say(f"{len(rows):,} tenants")


def _print_done(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        later = "; the engine is idle and does it before its next request" if answer["queued"] else ""
        print(f"{answer['action']}: {answer['donors']:,} donors{later}")
