"""A day in production on one machine: three engines, two routers, Redis, four tenants, and two crashes in the middle.

    nice python bench/day.py --out bench/results/day.json --page docs/research/day.html      # 15 minutes, 2 cores

Two embedded engines and one vLLM (CPU, with our connector) serve SmolLM2-135M behind two routers that share what they
know through Redis. Four tenants send real conversations, retrieved passages and questions about documents that all of
them have, up to 1,000 tokens each, from three clients at once. After a third of the requests one engine is killed and
started again; after two thirds Redis is.

Every request is accounted for: its status, its replica, its receipt. Afterwards a sample is asked again, cold, of the
engine that answered; and of every first question of a tenant about a document that others have asked before, nothing
may have been reused.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import _report  # first: it holds the numeric libraries to one thread
from _day_fleet import Machine, get, make_engine, make_redis, make_router, make_vllm, post
from _day_page import render_day
from _day_stream import TENANTS, Ask, make_day

CLIENTS = 3
ANSWER_TOKENS = 12
TOKENS = ("exact_tokens", "reused_tokens", "recomputed_tokens")
SHARED_TOKENS = 64
"""Of a first question about a document, so much may be known to the tenant: its instruction and the chat template."""


@dataclass
class Served:
    """What became of one request. ``at_s`` since the first one; tokens as the receipt counts them."""

    number: int
    tenant: str
    kind: str
    documents: tuple[str, ...]
    at_s: float
    router: int
    seconds: float
    status: int
    replica: str = ""
    route: str = ""
    prompt_tokens: int = 0
    exact_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    outcome: str = ""
    reason: str = ""
    answer: str = ""
    error: str = ""

    @property
    def saved_tokens(self) -> int:
        return self.exact_tokens + self.reused_tokens


@dataclass
class Day:
    """The whole run."""

    served: list[Served] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, words: str) -> None:
        with self.lock:
            self.events.append((time.monotonic() - self.began, words))
        _report.progress(words)


class Production:
    """Engines, routers and Redis."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        model = self.served_name = args.model  # the embedded engine serves a folder under the name it was given
        self.engines = [make_engine(f"embedded-{n}", folder, model) for n in range(2 if args.vllm else 3)]
        if args.vllm:
            self.engines.append(make_vllm("vllm", folder, model, self.served_name))
        self.redis = make_redis(folder)
        self.routers = [make_router(f"router-{n}", folder, self.engines, self.redis) for n in range(2)]

    def __enter__(self) -> Production:
        for one in (*self.engines, self.redis):
            one.start()
        for one in (*self.engines, self.redis):
            one.wait()
        for one in self.routers:
            one.start()
            one.wait()
        return self

    def __exit__(self, *_: object) -> None:
        for one in (*self.routers, *self.engines, self.redis):
            one.stop()

    def ask(self, ask: Ask, router: int, began: float) -> Served:
        """Send a request through one of the routers."""
        body = make_body(ask, self.served_name)
        headers = {"Authorization": f"Bearer key-of-{ask.tenant}", "X-Request-Id": f"day-{ask.number}"}
        if ask.session:
            headers["X-Session-ID"] = ask.session
        at = time.monotonic()
        found = post(f"{self.routers[router].url}/v1/chat/completions", body, headers)
        served = Served(
            ask.number, ask.tenant, ask.kind, ask.documents, at - began, router, time.monotonic() - at, found["status"],
            error=found.get("error", ""),
        )  # fmt: skip
        read_answer(found, served)
        return served

    def ask_cold(self, ask: Ask, replica: str) -> str:
        """The same request of the engine that answered it, with nothing reused."""
        body = make_body(ask, self.served_name) | {"cache_salt": f"cold {ask.number} {time.monotonic_ns()}"}
        engine = self.engines[int(replica.removeprefix("r"))]
        if engine.name == "vllm":
            body["kv_transfer_params"] = {"semblend": {"opt_out": True}}
        else:
            body["semblend"] = {"reuse": False}
        found = post(f"{engine.url}/v1/chat/completions", body, {})
        return str(found["body"]["choices"][0]["message"]["content"]) if found["status"] == 200 else ""


def make_body(ask: Ask, model: str) -> dict[str, Any]:
    messages = [{"role": role, "content": text} for role, text in ask.messages]
    return {"model": model, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0}


def read_answer(found: dict[str, Any], served: Served) -> None:
    """What the router's headers and the engine's receipt say."""
    headers = {name.lower(): value for name, value in found["headers"].items()}
    served.replica, served.route = headers.get("x-replica-id", ""), headers.get("x-semantic-route", "")
    body = found["body"]
    if served.status != 200:
        return
    served.answer = body["choices"][0]["message"]["content"] or ""
    served.prompt_tokens = body["usage"]["prompt_tokens"]
    receipt = body.get("semblend") or (body.get("kv_transfer_params") or {}).get("semblend") or {}
    for name in TOKENS:
        setattr(served, name, int(receipt.get(name) or 0))
    served.outcome, served.reason = str(receipt.get("outcome") or ""), str(receipt.get("reason") or "")


def live(production: Production, asked: list[Ask], args: argparse.Namespace) -> Day:
    """Send everything; kill one engine and Redis on the way."""
    day = Day()
    crashes = {
        len(asked) // 3: lambda: crash(day, production.engines[1], args.down_s),
        2 * len(asked) // 3: lambda: crash(day, production.redis, args.down_s),
    }
    started: list[threading.Thread] = []

    def work(ask: Ask) -> None:
        if ask.number in crashes:
            thread = threading.Thread(target=crashes[ask.number])
            thread.start()
            started.append(thread)
        served = production.ask(ask, ask.number % 2, day.began)
        with day.lock:
            day.served.append(served)
            done = len(day.served)
        if done % 20 == 0:
            _report.progress(f"{done} of {len(asked)} requests, {time.monotonic() - day.began:.0f} s")

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(work, asked))
    for thread in started:
        thread.join()
    day.served.sort(key=lambda one: one.number)
    return day


def crash(day: Day, machine: Machine, down_s: float) -> None:
    machine.kill()
    day.note(f"{machine.name} is killed")
    time.sleep(down_s)
    machine.start()
    machine.wait()
    day.note(f"{machine.name} is back")


def check_tenants(day: Day) -> dict[str, Any]:
    """Whether anything of one tenant reached another: reuse in first questions, and codes in answers."""
    seen: dict[str, set[str]] = defaultdict(set)
    firsts, wrong = 0, []
    for one in sorted(day.served, key=lambda served: served.at_s):
        own, others = seen[one.tenant], set().union(*(seen[name] for name in TENANTS if name != one.tenant))
        if one.status == 200 and one.documents and not own & set(one.documents) and set(one.documents) <= others:
            firsts += 1
            if one.saved_tokens > SHARED_TOKENS:
                wrong.append(one.number)
        own.update(one.documents)
    leaks = [
        one.number
        for one in day.served
        if any(code in one.answer for name, code in TENANTS.items() if name != one.tenant)
    ]
    return {"first_questions": firsts, "with_reuse": wrong, "answers_with_a_foreign_code": leaks}


def check_answers(production: Production, asked: list[Ask], day: Day, every: int) -> list[dict[str, Any]]:
    """Every so many requests that reused something, asked again cold."""
    reusing = [one for one in day.served if one.status == 200 and one.saved_tokens]
    checked = []
    for one in reusing[::every]:
        cold = production.ask_cold(asked[one.number], one.replica)
        kept = {name: getattr(one, name) for name in ("number", "tenant", "kind", "replica", "answer", *TOKENS)}
        checked.append(kept | {"cold": cold, "equal": cold == one.answer})
    return checked


def describe_documents(day: Day) -> list[list[Any]]:
    """Where documents lived: how many engines answered about each, of those asked for four times and more."""
    homes: dict[str, Counter[str]] = defaultdict(Counter)
    for one in day.served:
        for name in one.documents if one.status == 200 else ():
            homes[f"{one.tenant}, {name}"][one.replica] += 1
    often = [(name, counts) for name, counts in homes.items() if sum(counts.values()) >= 4]
    often.sort(key=lambda pair: -sum(pair[1].values()))
    return [[name, sum(counts.values()), len(counts), ", ".join(f"{r} {n}" for r, n in counts.most_common())]
            for name, counts in often]  # fmt: skip


def tabulate(report: _report.Report, day: Day, checks: dict[str, Any], names: list[str]) -> None:
    def row(label: str, group: list[Served]) -> list[Any]:
        good = [one for one in group if one.status == 200]
        total = sum(one.prompt_tokens for one in good)
        seconds = sorted(one.seconds for one in good) or [0.0]
        return [
            label, len(group), len(group) - len(good), total, sum(one.exact_tokens for one in good),
            sum(one.reused_tokens for one in good), sum(one.saved_tokens for one in good) / max(1, total),
            _report.percentile(seconds, 50), _report.percentile(seconds, 95),
        ]  # fmt: skip

    columns = ["", "requests", "errors", "prompt tokens", "exact", "moved", "share saved", "p50 s", "p95 s"]
    report.table("The day", columns, [row("all", day.served)])
    for title, attribute in (("By kind", "kind"), ("By tenant", "tenant"), ("By replica", "replica")):
        groups: dict[str, list[Served]] = defaultdict(list)
        for one in day.served:
            groups[getattr(one, attribute) or "none"].append(one)
        named = {f"r{at}": f"r{at} ({name})" for at, name in enumerate(names)}
        report.table(title, columns, [row(named.get(key, key), groups[key]) for key in sorted(groups)])
    spread = describe_documents(day)
    report.table("Where documents lived", ["document", "questions", "engines", "answers by engine"], spread[:16])
    moved, exact = ([one["equal"] for one in checks["answers"] if bool(one["reused_tokens"]) == kind]
                    for kind in (True, False))  # fmt: skip
    report.table("Checks", ["check", "looked at", "wrong"], [
        ["requests without an answer", len(day.served), sum(one.status != 200 for one in day.served)],
        ["first questions about documents of others, with reuse", checks["tenants"]["first_questions"],
         len(checks["tenants"]["with_reuse"])],
        ["answers with another tenant's code", len(day.served), len(checks["tenants"]["answers_with_a_foreign_code"])],
        ["answers with exact reuse alone that differ from cold ones", len(exact), exact.count(False)],
        ["answers with moved KV that differ from cold ones", len(moved), moved.count(False)],
    ])  # fmt: skip


def fill_report(report: _report.Report, day: Day, checks: dict[str, Any], names: list[str]) -> None:
    tabulate(report, day, checks, names)
    report.note(f"{CLIENTS} clients at once, answers of {ANSWER_TOKENS} tokens, greedy; the machine had other work")
    report.note(f"engines: {', '.join(names)}; mode balanced; times are of whole answers and include the routers")
    report.add("requests", [asdict(one) for one in day.served])
    report.add("events", day.events)
    report.add("checks", checks)
    report.add("engines", names)


def show_again(path: Path, args: argparse.Namespace) -> int:
    """The tables and the page of a run that is over; where it was made stays as it was."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    day = Day([Served(**one) for one in kept["requests"]], [tuple(one) for one in kept["events"]])
    report = _report.Report("day", args)
    fill_report(report, day, kept["checks"], kept["engines"])
    made = kept | {name: value for name, value in report.as_dict().items() if name not in ("provenance", "arguments")}
    path.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if args.page:
        Path(args.page).write_text(render_day(made), encoding="utf-8")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "day")
    parser.add_argument("--model", default=".engines/models/smollm2-135m", help="a folder that both engines can read")
    parser.add_argument("--requests", type=int, default=320)
    parser.add_argument("--no-vllm", dest="vllm", action="store_false", help="a third embedded engine in its place")
    parser.add_argument("--down-s", type=float, default=10.0, help="for which a killed process stays down")
    parser.add_argument("--check-every", type=int, default=6, help="one in so many answers with reuse is asked again")
    parser.add_argument("--page", default="", help="the HTML page")
    parser.add_argument("--finished-only", action="store_true", help="measure nothing, write the tables of --out anew")
    args = parser.parse_args()
    if args.finished_only:
        return show_again(Path(args.out), args)
    if args.quick:
        args.requests, args.vllm, args.down_s = 24, False, 2.0
    report = _report.Report("day", args)
    asked = make_day(_report.data_dir(args), args.requests, args.seed)
    with tempfile.TemporaryDirectory(prefix="day-") as folder:
        try:
            with Production(Path(folder), args) as production:
                day = live(production, asked, args)
                checks = {"tenants": check_tenants(day)}
                fleet = [get(f"{one.url}/v1/replicas") for one in production.routers]
                checks["answers"] = check_answers(production, asked, day, args.check_every)
        except RuntimeError:
            for log in sorted(Path(folder).glob("*.log")):
                print(f"== {log.name}\n{log.read_text(errors='replace')[-1500:]}", file=sys.stderr)
            raise
    names = [one.name for one in production.engines]
    fill_report(report, day, checks, names)
    report.add("routers", [json.loads(json.dumps(one).replace("127.0.0.1", "localhost")) for one in fleet])
    if args.page:
        Path(args.page).write_text(render_day(report.as_dict()), encoding="utf-8")
    report.write(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
