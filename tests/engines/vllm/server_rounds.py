"""Two vLLM servers share a donor directory, both under requests; one is killed, the other must stay right.

A round: clients make server A compute documents, which it publishes, and make server B answer about them, with reuse
and without. A is killed (SIGKILL) at a random moment or in the middle of a write: all its processes at once, or one of
them and the others a little later. B goes on. A starts again on what it left, and answers about the same documents.

Every answer is compared, token by token and by its log probabilities:

    nothing was reused   with the answer that B computes cold, behind a salt of its own
    donor KV was reused  with the answer that B gives from a donor that it computed itself and has in its own memory.
                         The spans have to be the same, and so does the KV then: where it is wrong, the answer differs.
                         Where B had to compute a document of A's itself, under an instruction of its own, there are two
                         donors of it, and two right answers

`check_controls` proves that it does: with files whose checksums are right and whose KV is not, an answer has to be
called wrong.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lib.vllm_server import VllmServer

VOCABULARY = 1000
DOCUMENT_TOKENS, LEAD_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 600, 24, 16, 8
TOLERANCE = 1e-3
"""Of a log probability. Float32 in batches of other sizes differs by 1e-5; donor KV of noise by more than 1e-1."""
FLAGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-batched-tokens", "1024",
         "--kv-cache-memory-bytes", str(512 << 20), "--block-size", "32", "--max-num-seqs", "4",
         "--skip-tokenizer-init")  # fmt: skip
SETTLED_S = 2.5
"""A donor is in the directory and known to a neighbour this long after its prompt was answered, as a rule."""
CLIENTS = 2
PATIENCE_S = 900.0
"""On a machine that others use too."""
WHO = ("all", "all", "VLLM::Worker", "VLLM::EngineCore")
"""Which process of A dies first; the others follow within a second."""


@dataclass(frozen=True, slots=True)
class Question:
    """About document ``document``. ``kind`` decides the instruction in front of it and the question behind it."""

    document: int
    kind: str

    @property
    def tokens(self) -> list[int]:
        """Random, and the same in every run.

        >>> len(Question(1, "a").tokens), Question(1, "a").tokens[100] == Question(1, "b").tokens[100]
        (640, True)
        """
        lead, question = (self._draw(f"{part}/{self.kind}/{self.document}", count)
                          for part, count in (("lead", LEAD_TOKENS), ("question", QUESTION_TOKENS)))  # fmt: skip
        return lead + self._draw(f"document/{self.document}", DOCUMENT_TOKENS) + question

    @staticmethod
    def _draw(seed: str, count: int) -> list[int]:
        chance = random.Random(seed)
        return [chance.randrange(10, VOCABULARY) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Served:
    """One answer and its receipt. ``spans``: ``(donor_start, target_start, length)`` of what was reused."""

    server: str
    question: Question
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reused_tokens: int
    spans: tuple[tuple[int, int, int], ...]
    donors: tuple[str, ...]

    def explain_difference(self, other: Served) -> str:
        """What differs from the answer that it should be; empty where nothing does."""
        if self.spans != other.spans:
            return f"other spans: {self.spans} instead of {other.spans}"
        if self.tokens != other.tokens:
            return f"other tokens: {self.tokens} instead of {other.tokens}"
        worst = max(abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True))
        return f"a log probability differs by {worst:.3g}" if not worst <= TOLERANCE else ""


@dataclass(slots=True)
class KillRound:
    """What one kill led to.

    ``who``: the process that was killed first. ``unfinished``: donors and files that the kill left incomplete. ``cut``:
    requests to A that got no answer. ``served``: answers that were compared, ``reused`` of them with donor KV.
    ``problems``: answers that were wrong, and requests that B did not answer.
    """

    number: int
    how: str
    who: str
    killed_after_s: float = 0.0
    unfinished: int = 0
    donors_left: int = 0
    cut: int = 0
    served: int = 0
    reused: int = 0
    reused_after_kill: int = 0
    reused_by_restarted: int = 0
    restart_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    def to_row(self) -> dict[str, Any]:
        return asdict(self)


def write_model(folder: Path) -> None:
    """A model with random weights that is quick, and whose KV is large: 16 KiB a token, so that writing takes time."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=512, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=VOCABULARY, max_position_embeddings=4096, initializer_range=0.1,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)


class Pair:
    """The two servers, their directory, and the answers that they should give."""

    def __init__(self, model: str, folder: Path, directory: Path, directory_bytes: int = 160 << 20) -> None:
        self._model, self._folder = model, folder
        self.directory = directory
        self._extra = {
            "quality": "fast",
            "donor_directory": str(directory),
            "donor_host_bytes": 512 << 20,
            "donor_directory_bytes": directory_bytes,
            "deep_tolerance": 0,  # random weights
        }
        self.computed_by_b: set[int] = set()  # documents of which B has made a donor too
        self._right: dict[tuple[Question, str], Served] = {}
        self._donated: set[Question] = set()
        self.a, self.b = self._start("a"), self._start("b")
        try:
            self.a.wait(PATIENCE_S)
            self.b.wait(PATIENCE_S)
        except BaseException:
            self.close()
            raise

    def _start(self, name: str) -> VllmServer:
        return VllmServer(self._model, self._folder / name, FLAGS, self._extra)

    def restart_a(self) -> None:
        """Returns at once; `VllmServer.wait` waits."""
        self.a = self._start("a")

    def close(self) -> None:
        for server in (self.a, self.b):
            if server.process.poll() is None:
                server.kill()

    # -- requests --------------------------------------------------------------------------------------------------

    def ask(self, server: VllmServer, question: Question, *, salt: str = "", **asked: Any) -> Served:
        """Greedy; raises OSError or ValueError where no whole answer came."""
        body = {"model": "m", "prompt": question.tokens, "max_tokens": ANSWER_TOKENS, "temperature": 0,
                "ignore_eos": True, "logprobs": 0, "return_token_ids": True,
                "return_tokens_as_token_ids": True}  # fmt: skip
        if salt:
            body["cache_salt"] = salt
        if asked:
            body["kv_transfer_params"] = {"semblend": asked}
        answer = server.post("/v1/completions", body, timeout=PATIENCE_S)
        (choice,) = answer["choices"]
        tokens, logprobs = tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"])
        if not len(tokens) == len(logprobs) == ANSWER_TOKENS:
            raise ValueError(f"{len(tokens)} tokens and {len(logprobs)} log probabilities")
        brief = answer["kv_transfer_params"]["semblend"]
        spans = self._find_spans(server, brief["request_id"]) if brief["reused_tokens"] else []
        return Served(
            "a" if server is self.a else "b",
            question,
            tokens,
            logprobs,
            brief["reused_tokens"],
            tuple((one["donor_start"], one["target_start"], one["length"]) for one in spans),
            tuple(one["donor_id"] for one in spans),
        )

    @staticmethod
    def _find_spans(server: VllmServer, request_id: str, seconds: float = 10) -> list[dict[str, Any]]:
        """From the audit stream: a client is not told where donors lie. It may come a little later than the answer."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := server.read_receipts().get(request_id):
                return list(found["spans"])
            time.sleep(0.05)
        raise ValueError(f"no receipt of {request_id} in {server.events}")

    def explain_wrong(self, served: Served) -> str:
        """Why an answer is not what it should be; empty where it is."""
        question, differences = served.question, []
        for kind in self._list_donor_kinds(served):
            if (right := self._right.get((question, kind))) is None:
                right = self._right[question, kind] = self._answer_rightly(question, kind)
            if not (difference := served.explain_difference(right)):
                return ""
            differences.append(difference)
        how = "reused" if served.reused_tokens else "cold"
        return f"{served.server}, {question}, {how}: {' and '.join(differences)}"

    def _list_donor_kinds(self, served: Served) -> list[str]:
        """The kinds of question that the donor may have been; "" where nothing was reused."""
        if not served.reused_tokens:
            return [""]
        return ["donor", "b"] if served.question.document in self.computed_by_b else ["donor"]

    def _answer_rightly(self, question: Question, donor_kind: str) -> Served:
        if not donor_kind:
            return self.ask(self.b, question, salt=f"cold {question.kind}", opt_out=True)
        donor, salt = Question(question.document, donor_kind), f"right {donor_kind}"
        if donor not in self._donated:
            self.ask(self.b, donor, salt=salt)
            self._donated.add(donor)
        right = self.ask(self.b, question, salt=salt)
        if not right.reused_tokens or any("-" in one and len(one) == 25 for one in right.donors):
            raise ValueError(f"no reference for {question}: {right}")
        return right

    # -- files -----------------------------------------------------------------------------------------------------

    def list_donors(self) -> tuple[int, int]:
        """How many donors are whole, and how many files are not."""
        names = os.listdir(self.directory)
        records = {name[:25] for name in names if name.endswith(".donor")}
        whole = {name[:25] for name in names if name.endswith(".kv")} & records
        parts = sum(name.endswith(".part") for name in names)
        return len(whole), parts + len(records - whole)

    def wait_for_write(self, seconds: float) -> bool:
        """Until a file is being written; False where none was in that time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if any(
                name.endswith(".kv") or ".kv." in name for name in os.listdir(self.directory) if name.endswith(".part")
            ):
                return True
        return False


class _Load:
    """Clients of both servers, until A is gone and B has answered about all that A had computed."""

    def __init__(self, pair: Pair, documents: Sequence[int], churn: int) -> None:
        self._pair, self._lock = pair, threading.Lock()
        self._todo, self._churn = list(documents), churn
        self.computed: dict[int, float] = {}  # by A, and when
        self._asked: set[int] = set()
        self.answers: list[tuple[float, Served]] = []
        self.cut = 0
        self.failures: list[str] = []
        self._killed = threading.Event()
        self._threads = [threading.Thread(target=self._feed_a, daemon=True) for _ in range(CLIENTS)]
        self._threads += [threading.Thread(target=self._ask_b, args=(n,), daemon=True) for n in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """A was killed; wait for B's clients."""
        self._killed.set()
        for thread in self._threads:
            thread.join()

    def _feed_a(self) -> None:
        while not self._killed.is_set():
            with self._lock:
                self._churn += 1
                document = self._todo.pop(0) if self._todo else self._churn
            try:
                served = self._pair.ask(self._pair.a, Question(document, "donor"))
            except (OSError, ValueError, KeyError):
                self.cut += 1
                return
            with self._lock:
                self.answers.append((time.monotonic(), served))
                self.computed[document] = time.monotonic()

    def _ask_b(self, client: int) -> None:
        exact = 0
        while True:
            with self._lock:
                settled = time.monotonic() - SETTLED_S
                ready = [one for one in self.computed if one not in self._asked and self.computed[one] < settled]
                done = self._killed.is_set() and len(self._asked) == len(self.computed)
                self._asked.update(ready[:1])
            if done:
                return
            try:
                if ready:
                    served = self._pair.ask(self._pair.b, Question(ready[0], "b"))
                    if not served.reused_tokens:
                        self._pair.computed_by_b.add(ready[0])
                elif self._killed.is_set():
                    time.sleep(0.1)
                    continue
                else:  # computed in full, beside loads
                    exact += 1
                    question = Question(-(10 * (exact % 4) + client + 1), "exact")
                    served = self._pair.ask(self._pair.b, question, salt=f"{exact}", opt_out=True)
            except (OSError, ValueError, KeyError) as error:
                self.failures.append(f"b did not answer: {type(error).__name__}: {error}")
                continue
            with self._lock:
                self.answers.append((time.monotonic(), served))


def run_round(pair: Pair, number: int, *, documents: int = 4, seed: int = 0, restart: bool = True) -> KillRound:
    """Load, kill, compare, start again, compare; without ``restart`` A stays dead."""
    chance = random.Random(f"{seed}/{number}")
    in_write = bool(number % 2)
    one = KillRound(number, "in a write" if in_write else "at random", chance.choice(WHO))
    first = number * 1000
    load = _Load(pair, range(first, first + documents), first + 100)
    begun = time.monotonic()
    while not load.computed and not load.cut and time.monotonic() - begun < 60:
        time.sleep(0.01)
    time.sleep(chance.uniform(SETTLED_S, 2 * SETTLED_S))
    if in_write and pair.wait_for_write(20):
        time.sleep(chance.uniform(0, 0.01))
    if one.who != "all":
        pair.a.kill_one(one.who)
        time.sleep(chance.uniform(0, 1))
    pair.a.kill()
    killed = time.monotonic()
    one.killed_after_s = killed - begun
    one.donors_left, one.unfinished = pair.list_donors()
    load.end()
    one.cut = load.cut
    restarted = time.monotonic()
    if restart:
        pair.restart_a()
    for when, served in load.answers:
        _compare(one, pair.explain_wrong, served)
        one.reused_after_kill += bool(served.server == "b" and served.reused_tokens and when > killed)
    one.problems += load.failures
    if not restart:
        return one
    pair.a.wait(PATIENCE_S)
    one.restart_s = time.monotonic() - restarted
    for document in sorted(load.computed)[-documents:]:  # the youngest: what was being written when it was killed
        served = pair.ask(pair.a, Question(document, "a again"))
        one.reused_by_restarted += bool(served.reused_tokens)
        _compare(one, pair.explain_wrong, served)
    return one


def _compare(one: KillRound, explain: Callable[[Served], str], served: Served) -> None:
    one.served += 1
    one.reused += bool(served.reused_tokens)
    if problem := explain(served):
        one.problems.append(problem)


@dataclass(frozen=True, slots=True)
class Controls:
    """What the comparison made of donors that are known to be wrong.

    ``right``: an answer from the directory, to show that it is reached. ``damaged``: noise in a file as it lies there.
    ``forged``: the same noise under checksums that are right; only the comparison is left to notice it.
    """

    right: Served
    right_problem: str
    damaged: Served
    damaged_problem: str
    forged: Served
    forged_problem: str

    def list_failures(self) -> list[str]:
        """What is not as it must be; empty if the rounds mean something."""
        failures = []
        if not self.right.reused_tokens or self.right_problem:
            failures.append(f"a right donor of A was not reused by B, or wrongly: {self.right_problem or self.right}")
        if self.damaged.reused_tokens or self.damaged_problem:
            failures.append(f"a damaged file was used: {self.damaged_problem or self.damaged}")
        if not self.forged.reused_tokens or not self.forged_problem:
            failures.append(f"a forged file was not used, or nobody noticed: {self.forged}")
        return failures


def check_controls(pair: Pair, first: int = 900_000) -> Controls:
    """Make A publish three donors, spoil two of them, and let B use them."""
    found = []
    for document, spoil in ((first, None), (first + 1, False), (first + 2, True)):
        before = set(pair.directory.glob("*.kv"))
        with pausing(pair.b):  # or it verifies a file that is about to be another
            pair.ask(pair.a, Question(document, "donor"))
            end = time.monotonic() + 30
            while not (new := set(pair.directory.glob("*.kv")) - before) and time.monotonic() < end:
                time.sleep(0.05)
            if spoil is not None:
                for path in new:
                    spoil_kv(path, seal=spoil)
        for nudge in range(2):  # by other requests B hears of donors, and verifies their files meanwhile
            time.sleep(SETTLED_S)
            pair.ask(pair.b, Question(-100 - nudge, "exact"), salt=f"{document}-{nudge}", opt_out=True)
        time.sleep(SETTLED_S)
        served = pair.ask(pair.b, Question(document, "control"))
        found += [served, pair.explain_wrong(served)]
    return Controls(*found)


@contextmanager
def pausing(server: VllmServer) -> Iterator[None]:
    """Nothing of a server runs meanwhile."""
    processes = server.list_processes()
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in processes:
            os.kill(pid, signal.SIGCONT)


def spoil_kv(path: Path, *, seal: bool) -> None:
    """Put noise into a KV file, in all layers but the first, which the canary looks at.

    ``seal``: as a new file with checksums that are right. Otherwise the bytes change in place.
    """
    import torch

    from semblend.materialize.donors.store import map_tensors, read_header, write_donor_file

    with path.open("rb") as file:
        header = read_header(file.fileno())
        parts = map_tensors(file.fileno(), header)
    for part in parts.values():
        part[1:] = torch.randn_like(part[1:])
    if seal:
        temporary = path.with_suffix(".forged")
        with open(os.open(temporary, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as out:
            write_donor_file(out, parts, header["about"])
        os.replace(temporary, path)
        return
    with path.open("rb+") as file:
        for name, part in parts.items():
            file.seek(header["start"] + header["tensors"][name]["at"])
            file.write(part.contiguous().view(torch.uint8).numpy().tobytes())
