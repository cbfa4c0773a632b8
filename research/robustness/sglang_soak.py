"""Claim: a real SGLang server survives clients who come at once, hang up and edit: no slot lost, no answer changed.

    .ci/engines/sglang-cpu python bench/sglang_soak.py --model FOLDER --seconds 240

Documents are lists of facts, each with a number. Clients ask, all at once, about a document behind another instruction,
about an edited one, about passages of several, in both modes, under a few salts. Some hang up in the middle of the
answer, some abort by name before they read anything. Then, with the server at rest:

    slots      SGLang's own counters say that as many are free or evictable as before
    books      SGLang's check of its books, which ends the server when a slot is missing, has run
    tree       each prompt once more in mode exact, which may use SGLang's tree and nothing of ours, gives the answer
               that it gives under a new salt, opted out: approximate KV in the tree would show here
    facts      no answer has the number of another version of its document, unless the cold answer has it too
"""

from __future__ import annotations

import _report  # first: it holds the numeric libraries to one thread

# isort: split
import argparse
import http.client
import json
import os
import random
import sys
import tempfile
import threading
import time
import urllib.error
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _sglang_server import CPU_FLAGS, SglangServer

WAYS = ("to the end", "to the end", "to the end", "hangs up", "aborts")
GAUGES = ("sglang:kv_available_tokens", "sglang:kv_evictable_tokens", "sglang:kv_used_tokens")
ANSWER = 8
SALTS = ("", "left", "right")


@dataclass(frozen=True)
class Ask:
    """A prompt, the number that it asks for, and numbers that other versions of its document have there."""

    kind: str
    prompt: tuple[int, ...]
    number: str
    others: tuple[str, ...]
    salt: str


@dataclass
class Seen:
    """What clients saw."""

    ways: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    answers: list[tuple[Ask, str]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Library:
    """Documents of numbered facts, in versions that differ in one number."""

    def __init__(self, model: str, seed: int, documents: int, facts: int) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
        rng = random.Random(seed)
        self.documents = [
            [(f"locker {d * facts + at}", str(rng.randint(1000, 9999))) for at in range(facts)]
            for d in range(documents)
        ]

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def write(self, facts: list[tuple[str, str]]) -> list[int]:
        """Encoded fact by fact, so that equal facts are equal tokens in every version."""
        return [token for name, code in facts for token in self.encode(f" The code of {name} is {code}.\n")]

    def draw(self, rng: random.Random) -> Ask:
        """A prompt of a random kind."""
        kind, salt = rng.choice(("shifted", "edited", "several")), rng.choice(SALTS)
        facts, others = list(rng.choice(self.documents)), []
        if kind == "several":
            second = rng.choice(self.documents)
            facts = facts[len(facts) // 2 :] + list(second[: len(second) // 2])
        at = rng.randrange(len(facts))
        name, code = facts[at]
        if kind == "edited":
            others, code = [code], str(rng.randint(1000, 9999))
            facts[at] = (name, code)
        head = f"You are helper {rng.randint(1, 40)}." + " Be brief." * rng.randint(0, 6) + "\n"
        question = f"\nQuestion: what is the code of {name}?\nAnswer: The code of {name} is"
        prompt = (*self.encode(head), *self.write(facts), *self.encode(question))
        return Ask(kind, prompt, code, tuple(others), salt)


def run_client(server: SglangServer, library: Library, seen: Seen, end: float, seed: int) -> None:
    """One client after another until the time is over."""
    rng, count = random.Random(seed), 0
    while time.monotonic() < end:
        ask, way, mode = library.draw(rng), rng.choice(WAYS), rng.choice(("fast", "fast", "balanced"))
        count += 1
        name = f"soak-{seed}-{count}"
        try:
            text = None
            if way == "to the end":
                text = server.stream(ask.prompt, ANSWER, name, ask.salt, quality=mode).text
            elif way == "hangs up":
                hang_up(server, ask, name, mode, rng.random() * 6)
            else:
                abort(server, ask, name, mode, rng.random() * 6)
        except (urllib.error.URLError, OSError, RuntimeError, http.client.HTTPException) as error:
            with seen.lock:
                seen.errors.append(f"{way} {name}: {type(error).__name__}: {error}")
            continue
        receipt = server.find_receipt(name)
        with seen.lock:
            seen.ways[way] += 1
            if text is not None:
                seen.answers.append((ask, text))
                seen.outcomes[str(receipt.get("reason") or receipt.get("outcome"))] += 1


def hang_up(server: SglangServer, ask: Ask, name: str, mode: str, seconds: float) -> None:
    """Close the connection whatever the server is doing."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/generate", make_body(ask, name, mode), {"Content-Type": "application/json"})
    time.sleep(seconds)
    connection.close()


def abort(server: SglangServer, ask: Ask, name: str, mode: str, seconds: float) -> None:
    """Abort by the request's name while another thread waits for its answer."""
    waiting = threading.Thread(target=read_anything, args=(server, ask, name, mode))
    waiting.start()
    time.sleep(seconds)
    server.call("/abort_request", {"rid": name})
    waiting.join(300)
    if waiting.is_alive():
        raise RuntimeError("an aborted request never ends")


def read_anything(server: SglangServer, ask: Ask, name: str, mode: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=290)
    try:
        connection.request("POST", "/generate", make_body(ask, name, mode), {"Content-Type": "application/json"})
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        pass  # an aborted request may be answered in any way
    finally:
        connection.close()


def make_body(ask: Ask, name: str, mode: str) -> bytes:
    asked = {
        "temperature": 0,
        "max_new_tokens": 40,
        "ignore_eos": True,
        "custom_params": {"semblend": {"quality": mode}},
    }
    body: dict[str, Any] = {"input_ids": list(ask.prompt), "stream": True, "rid": name, "sampling_params": asked}
    return json.dumps(body | ({"extra_key": ask.salt} if ask.salt else {})).encode()


def read_slots(server: SglangServer) -> dict[str, float]:
    """SGLang's gauges of its slots, after a request has brought them up to date and the server is at rest."""
    server.stream([5, 6, 7], 2, f"gauge-{time.monotonic_ns()}", opt_out=True)
    time.sleep(3)
    lines = server.call("/metrics").decode().splitlines()
    return {name: float(line.rpartition(" ")[2]) for name in GAUGES for line in lines if line.startswith(name + "{")}


def check_tree(server: SglangServer, seen: Seen, count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Prompts of the storm in mode exact, against the same under a new salt, opted out."""
    found = []
    picked = rng.sample(seen.answers, min(count, len(seen.answers)))
    for number, (ask, said) in enumerate(picked):
        exact = server.stream(ask.prompt, ANSWER, f"tree-{number}", ask.salt, quality="exact")
        cold = server.stream(ask.prompt, ANSWER, f"cold-{number}", f"nobody {number}", opt_out=True)
        wrong = any(other in said and other not in cold.text for other in ask.others)
        found.append({"kind": ask.kind, "equal": exact.text == cold.text, "cached": exact.cached_tokens, "wrong": wrong,
                      "said": said == cold.text, "right": ask.number in said,
                      "cold_right": ask.number in cold.text})  # fmt: skip
        _report.progress(f"checked {number + 1} of {len(picked)}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "sglang_soak")
    parser.add_argument("--model", default=os.environ.get("SEMBLEND_TEST_SGLANG_MODEL", ""), help="a folder")
    parser.add_argument("--seconds", type=float, default=240.0, help="of the storm")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--documents", type=int, default=5)
    parser.add_argument("--facts", type=int, default=14, help="of a document")
    parser.add_argument("--checked", type=int, default=12, help="prompts that are asked again at the end")
    if "--quick" in sys.argv:
        parser.set_defaults(seconds=20.0, clients=3, checked=3)
    args = parser.parse_args()
    if not args.model:
        _report.fail("no weights given", hint="--model is a Hugging Face folder")
    report, seen = _report.Report("sglang_soak", args), Seen()
    library = Library(args.model, args.seed, args.documents, args.facts)
    flags = [*CPU_FLAGS, "--context-length", "2048", "--max-total-tokens", "4096", "--max-running-requests", "4",
             "--enable-metrics", "--enable-cache-report"]  # fmt: skip
    server = SglangServer(args.model, Path(tempfile.mkdtemp(prefix="sglang-soak-")), flags, {})
    try:
        server.wait()
        before = read_slots(server)
        end = time.monotonic() + args.seconds
        clients = [
            threading.Thread(target=run_client, args=(server, library, seen, end, args.seed * 100 + number))
            for number in range(args.clients)
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        after = read_slots(server)
        checked = check_tree(server, seen, args.checked, random.Random(args.seed))
        server.call("/flush_cache", {})
        emptied = read_slots(server)
        alive = server.process.poll() is None
    finally:
        server.stop()
        _report.progress(f"log: {server.log}")
    log = server.log.read_text(errors="replace")
    failures = [line for line in log.splitlines() if "SemBlend:" in line and " failed for " in line]
    totals = [sum(slots.values()) for slots in (before, after, emptied)]
    report.table(
        "A storm on a real SGLang server",
        ["what", "found"],
        [
            ["requests to the end", seen.ways["to the end"]],
            ["clients who hung up", seen.ways["hangs up"]],
            ["requests aborted by name", seen.ways["aborts"]],
            ["outcomes", ", ".join(f"{name} {count}" for name, count in seen.outcomes.most_common())],
            ["errors at clients", len(seen.errors)],
            ["hooks of ours that failed", len(failures)],
            ["slots before, after, after a flush", ", ".join(f"{total:.0f}" for total in totals)],
            ["free slots after a flush", f"{emptied.get(GAUGES[0], -1):.0f} of {before.get(GAUGES[0], -1):.0f}"],
            ["server alive, its own check of slots never raised", alive and "leak" not in log],
            ["prompts asked again", len(checked)],
            ["exact answers equal to cold ones", sum(one["equal"] for one in checked)],
            ["answers in the storm equal to cold ones", sum(one["said"] for one in checked)],
            ["answers with another version's number", sum(one["wrong"] for one in checked)],
        ],
    )
    report.add("slots", {"before": before, "after": after, "emptied": emptied})
    report.add("checked", checked)
    report.add("errors", seen.errors[:20] + failures[:20])
    report.write(args.out)
    bad = seen.errors or failures or not alive or not all(one["equal"] and not one["wrong"] for one in checked)
    return 1 if bad or len(set(totals)) > 1 else 0


if __name__ == "__main__":
    sys.exit(main())
