"""``semblend donors`` and ``semblend vllm``: the donors of a store file, and those of a running vLLM."""

from __future__ import annotations

import argparse
import re
import time
from typing import TYPE_CHECKING, Any

from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import print_json, say, table
from semblend.cli.shared_flags import find_store, read_text
from semblend.errors import InputError, SemBlendError

if TYPE_CHECKING:
    from semblend.discover.donor import Donor
    from semblend.discover.journal import SqliteJournal

# -- a store file ----------------------------------------------------------------------------------------------------

ACTIONS = ("list", "show", "forget")

EXAMPLES = ("semblend donors --store donors.db", "semblend donors forget --store donors.db --older-than 7d")


def add(commands: Commands) -> None:
    _add_vllm(commands)
    parser = add_command(commands, "donors", run, examples=EXAMPLES)
    flag = parser.add_argument
    flag("action", nargs="?", choices=ACTIONS, default="list", help="what to do (default: list)")
    flag("donor_id", nargs="?", metavar="ID", help="the donor to show")
    flag("--store", required=True, metavar="FILE", help="the store file")
    flag("--donor", metavar="ID", help="forget this donor")
    flag("--tenant", help="forget or list the donors of this tenant")
    flag("--older-than", type=age, metavar="AGE", help="forget or list donors older than this: 90s, 30m, 12h or 7d")
    flag("--limit", type=int, default=50, metavar="N", help="list at most N donors; 0 = all")
    flag("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """List, show and forget the donors of a store file."""
    from semblend.discover.journal import SqliteJournal

    _check(args)
    # The file itself, not a SemBlend over it: a donor that no longer fits in its limits is still in the file,
    # and "forget" must mean that it is not.
    journal = SqliteJournal(find_store(args.store), create=False)
    try:
        code = {"list": _list, "show": _show, "forget": _forget}[args.action](journal, args)
        if journal.bad_rows:
            say(f"warning: {journal.bad_rows:,} damaged donors in {args.store} are left out; they are never served")
        return code
    finally:
        journal.close()


def _check(args: argparse.Namespace) -> None:
    if args.action == "show" and not args.donor_id:
        raise InputError("donors show needs an id", hint="semblend donors --store FILE lists them")
    if args.action != "show" and args.donor_id:
        raise InputError(f"donors {args.action} takes no id", hint=f"semblend donors --store FILE show {args.donor_id}")
    if args.action != "forget" and args.donor:
        raise InputError("--donor belongs to donors forget", hint=f"semblend donors --store FILE show {args.donor}")
    wants = [args.donor is not None, args.tenant is not None or args.older_than is not None]
    if args.action == "forget" and sum(wants) != 1:
        raise InputError("donors forget needs --donor, or --tenant and --older-than", hint="say which donors are to go")


def _list(journal: SqliteJournal, args: argparse.Namespace) -> int:
    now = time.time()
    donors = _choose_donors(journal, args, now)
    shown = donors[: args.limit] if args.limit > 0 else donors
    if args.json:
        print_json({"donors": [as_row(donor) for donor in shown], "total": len(donors)})
        return 0
    if not donors:
        say("no donors")
        return 0
    rows = [
        (d.donor_id, d.namespace.tenant or "-", f"{d.token_count:,}", _ago(now - d.created_unix_s), _left(d, now))
        for d in shown
    ]
    print(table(rows, head=("donor", "tenant", "tokens", "age", "expires in"), right=(2, 3, 4)))
    total = sum(donor.token_count for donor in donors)
    say(f"{len(donors):,} donors, {total:,} tokens" + (f"; {len(shown):,} shown" if len(shown) < len(donors) else ""))
    return 0


def _show(journal: SqliteJournal, args: argparse.Namespace) -> int:
    donor = next((donor for donor, _ in journal.load() if donor.donor_id == args.donor_id), None)
    if donor is None:
        raise InputError(f"no donor {args.donor_id!r} in {args.store}", hint="semblend donors --store FILE lists them")
    row = as_row(donor)
    if args.json:
        print_json(row)
    else:
        print(
            table(
                [(name, "-" if value in (None, "") else value) for name, value in row.items()], head=("field", "value")
            )
        )
    return 0


def _forget(journal: SqliteJournal, args: argparse.Namespace) -> int:
    donors = _choose_donors(journal, args, time.time())
    if args.donor is not None and not donors:
        raise InputError(f"no donor {args.donor!r} in {args.store}", hint="semblend donors --store FILE lists them")
    journal.record(None, donors)
    journal.scrub()
    gone = len(donors)
    if args.json:
        print_json({"forgotten": gone})
    else:
        print(f"forgot {gone:,} donor{'' if gone == 1 else 's'}")
    return 0


def _choose_donors(journal: SqliteJournal, args: argparse.Namespace, now: float) -> list[Donor]:
    return [
        donor
        for donor, _ in journal.load()
        if (args.donor is None or donor.donor_id == args.donor)
        and (args.tenant is None or donor.namespace.tenant == args.tenant)
        and (args.older_than is None or now - donor.created_unix_s >= args.older_than)
    ]


def as_row(donor: Donor) -> dict[str, Any]:
    """A donor as data; of its namespace only what is no secret."""
    namespace = donor.namespace
    return {
        "donor_id": donor.donor_id,
        "tenant": namespace.tenant,
        "model": namespace.model,
        "namespace": namespace.digest,
        "generation": donor.generation,
        "token_count": donor.token_count,
        "created_unix_s": donor.created_unix_s,
        "expires_unix_s": donor.expires_unix_s,
        "pinned": donor.pinned,
    }


def age(text: str) -> float:
    """Seconds from 90s, 30m, 12h or 7d.

    >>> age("2h")
    7200.0
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age such as 90s, 30m, 12h or 7d")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}[found[2]]


def _left(donor: Donor, now: float) -> str:
    return "-" if donor.expires_unix_s is None else _ago(max(0.0, donor.expires_unix_s - now))


def _ago(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


# -- a running vLLM --------------------------------------------------------------------------------------------------

VLLM_ACTIONS = ("list", "tenants", "pin", "unpin", "forget")

VLLM_EXAMPLES = (
    "semblend vllm donors --socket /run/user/1000/semblend.sock",
    "semblend vllm donors pin --socket /run/user/1000/semblend.sock --donor req-17",
)


def _add_vllm(commands: Commands) -> None:
    parser = add_command(commands, "vllm", manage_vllm_donors, examples=VLLM_EXAMPLES)
    flag = parser.add_argument
    flag("subject", choices=("donors",), help="what it is about")
    flag("action", nargs="?", choices=VLLM_ACTIONS, default="list", help="what to do (default: list)")
    flag("--socket", required=True, metavar="FILE", help="the engine's admin_socket")
    flag("--tenant", metavar="DIGITS", help="donors of this tenant; 'none' = of requests without a salt")
    flag("--salt-file", metavar="FILE", help="donors of the cache_salt in this file; - = standard input")
    flag("--donor", metavar="ID", help="this donor")
    flag("--all", action="store_true", help="every donor")
    flag("--limit", type=int, default=50, metavar="N", help="list at most N donors an engine")
    flag("--json", action="store_true", help="print JSON")


def manage_vllm_donors(args: argparse.Namespace) -> int:
    """List, pin and forget the donors of a running vLLM.

    The engine is started with "admin_socket": "/run/user/1000/semblend.sock" in kv_connector_extra_config; give the
    same path here. A tenant is a cache_salt and is shown as 16 hex digits: --salt-file finds the digits of a salt that
    you know.
    """
    from semblend.integration.vllm.scheduler.admin import ask, find_sockets

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
