"""``semblend warm``: computes donors before anybody asks, into the donor directory or on a server."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semblend.arrange.arranger import group_documents
from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import Progress, say
from semblend.cli.shared_flags import add_machine, add_model, engine_imports, read_text
from semblend.errors import ConfigError, InputError, SemBlendError, StoreError
from semblend.text.corpus import read_corpus, read_retrievals, split_text

if TYPE_CHECKING:
    from semblend.engine.core.engine import Engine
    from semblend.engine.model.tokenizer import ModelTokenizer
    from semblend.materialize.donors.store import PrivateFolder
    from semblend.prompt import Prompt

# -- where donors go -------------------------------------------------------------------------------------------------

REQUEST_TIMEOUT_S = 600.0
TEMPLATE_TOKENS = 32
"""What a chat template adds to a message, about: most say who the assistant is."""
TRIES = 5
"""How often a server that is busy (429, 503) is asked for one prompt."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is left to do; None where it is not known."""

    nbytes: int | None
    seconds: float | None

    def describe(self) -> str:
        """As a person reads it.

        >>> Estimate(3 << 20, 90.0).describe(), Estimate(None, None).describe()
        ('about 3.0 MiB and 1.5 minutes', 'bytes and time are known to the server alone')
        """
        if self.nbytes is None or self.seconds is None:
            return "bytes and time are known to the server alone"
        minutes = f"{self.seconds / 60:.1f} minutes" if self.seconds >= 60 else f"{self.seconds:.0f} seconds"
        return f"about {self.nbytes / (1 << 20):,.1f} MiB and {minutes}"


class DirectoryTarget:
    """Donors of the embedded engine in a donor directory; what stands there already is not computed again."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: ModelTokenizer,
        args: argparse.Namespace,
        held: PrivateFolder | None = None,
        *,
        in_chat: bool = False,
    ) -> None:
        """``in_chat``: documents are computed as a user's message in the model's chat template."""
        self._engine, self._tokenizer, self._args = engine, tokenizer, args
        self._held, self._in_chat = held, in_chat
        self._there = self._read_digests()
        self._number = 0

    def count_tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(text, control=False, add_special=False))

    def count_prompt_tokens(self, text: str) -> int:
        """Tokens of a prompt that holds this text, with what a chat template adds."""
        return len(self._encode(text))

    def has(self, prompt: str) -> bool:
        from semblend.materialize.donors.directory import digest_tokens

        one = self._place(prompt)
        return digest_tokens(one.namespace, one.token_ids) in self._there

    def estimate(self, tokens: int) -> Estimate:
        """From one prompt that is computed and not kept."""
        sample = 256
        started = time.perf_counter()
        self._answer("warm-estimate", self._tokenizer.encode("estimate " * 2 * sample)[:sample], keep=False)
        nbytes = int(self._engine.reuse.count_token_bytes() * tokens)
        return Estimate(nbytes, (time.perf_counter() - started) / sample * tokens)

    def check_room(self, estimate: Estimate) -> None:
        free = shutil.disk_usage(self._args.donor_directory).free
        if estimate.nbytes is not None and estimate.nbytes > free:
            raise StoreError(
                f"{self._args.donor_directory} has {free:,} bytes left, and {estimate.nbytes:,} are needed",
                hint="name a folder with more room, or take fewer bytes with --donor-bits 8",
            )

    def compute(self, prompt: str) -> int:
        """Make it a donor; returns its tokens."""
        directory = self._engine.reuse.directory
        assert directory is not None, "it was opened with one"
        self._number += 1
        name, tokens = f"warm-{os.getpid()}-{self._number}", self._place(prompt).token_ids.tolist()
        new = len(tokens) - self._answer(name, tokens, keep=True)
        directory.publisher.flush()
        # Nobody raises where a donor is not kept or not published: a server goes on without it. Here it is the purpose.
        is_missing = new >= self._engine.config.donor_min_new_tokens and not directory.has_published(name)
        failure = directory.publisher.last_failure
        if failure is not None or is_missing:
            raise StoreError(
                f"a donor could not be written: {failure or 'the line above says why'}",
                hint="make room in the folder, or lower --prompt-tokens; the same command goes on where it stopped",
            )
        return len(tokens)

    def say_how_to_use(self) -> str:
        args = self._args
        return (
            f"semblend serve --model {args.model} --donor-directory {args.donor_directory}"
            f" --donor-bits {args.donor_bits} finds them; give it --donor-directory-bytes for all of them"
        )

    def close(self) -> None:
        self._engine.reuse.close()
        if self._held is not None:
            self._held.close()

    def _place(self, prompt: str) -> Prompt:
        """The prompt in the namespace in which a request of the tenant will look for it."""
        from semblend.prompt import Namespace, Prompt

        kv_dtype = str(self._engine.pool.dtype).removeprefix("torch.")
        namespace = Namespace(tenant=self._args.tenant, model=self._args.model, kv_dtype=kv_dtype)
        return Prompt(self._encode(prompt), namespace=namespace)

    def _encode(self, prompt: str) -> list[int]:
        """As the server encodes a message with this text, or the text."""
        if self._in_chat:
            return self._tokenizer.encode_chat([{"role": "user", "content": prompt}])
        return self._tokenizer.encode(prompt, control=False)

    def _answer(self, name: str, tokens: list[int], *, keep: bool) -> int:
        """Compute a prompt; returns how many of its tokens an earlier one has left in the prefix cache."""
        from semblend.prompt import Namespace, Prompt
        from semblend.wire.request import Request
        from semblend.wire.sampling import Sampling

        prompt = Prompt(tokens, namespace=Namespace(tenant=self._args.tenant, model=self._args.model))
        # Computed without donors: KV of a donor is exact, wherever it comes from.
        request = Request(name, prompt, Sampling(max_tokens=1, temperature=0.0), quality="exact", opt_out=not keep)
        (done,) = self._engine.generate([request])
        if done.detail:
            raise SemBlendError(f"a prompt could not be computed: {done.detail}", hint="lower --prompt-tokens")
        return done.receipt.exact_tokens if done.receipt is not None else 0

    def _read_digests(self) -> set[str]:
        """Of the donors that are whole in the folder, and of use to a server with this model, type and bits."""
        from semblend.materialize.donors.directory import LARGEST_RECORD, DirectoryListing, DonorRecord, record_name
        from semblend.materialize.donors.store import PrivateFolder

        directory = self._engine.reuse.directory
        assert directory is not None, "it was opened with one"
        folder, found = PrivateFolder(self._args.donor_directory), set()
        try:
            for key in filter(directory.kv.can_use, DirectoryListing(folder).refresh().list_complete(1)):
                try:
                    record = DonorRecord.decode(folder.read(record_name(key), LARGEST_RECORD), key)
                except (OSError, ValueError, KeyError, TypeError):
                    continue  # gone meanwhile, or damaged: its owner removes it
                found.add(record.tokens_digest)
        finally:
            folder.close()
        return found


def hold_folder(path: str) -> PrivateFolder:
    """The donor directory, held against a second `semblend warm`: both would compute and store everything.

    Two runs of ten documents at once took 103 MB where one takes 52 (2026-11-16). Servers need not hold the folder.
    """
    from semblend.materialize.donors.store import PrivateFolder

    folder = PrivateFolder(path)
    if not folder.hold():
        folder.close()
        raise StoreError(
            f"another semblend warm writes to {path}",
            hint="wait until it has ended, then run the same command: what is there is not computed again",
        )
    return folder


def open_directory_target(args: argparse.Namespace) -> DirectoryTarget:
    """Load the model and open the folder; raises before the model is loaded where the folder cannot be had."""
    from semblend.config import load_config
    from semblend.engine.server.config import ServeConfig
    from semblend.engine.server.launch import Launch

    folder = hold_folder(args.donor_directory)
    try:
        config = ServeConfig(
            model=args.model,
            device=args.device,
            dtype=args.dtype,
            threads=args.threads,
            pool_tokens=max(4096, 2 * args.prompt_tokens),
            donor_host_bytes=1 << 30,
            donor_bits=args.donor_bits,
            donor_directory=args.donor_directory,
            donor_directory_bytes=1 << 50,  # what is there stays: room is looked at before the work begins
        )
        launch = Launch(config)
        say(f"loading {launch.path.name} on {launch.chosen_device}")
        model, tokenizer = launch.load()
        in_chat = args.format == "chat" or (not args.format and tokenizer.has_chat_template)
        if in_chat and not tokenizer.has_chat_template:
            raise ConfigError(f"{args.model} has no chat template", hint="--format text")
        engine = launch.assemble(model, tokenizer, load_config(quality="exact", store=""))
    except BaseException:
        folder.close()
        raise
    return DirectoryTarget(engine, tokenizer, args, folder, in_chat=in_chat)


class ServerTarget:
    """A server with an OpenAI API: each prompt is sent once, for one token."""

    def __init__(self, url: str, model: str, key: str, state: str, *, in_chat: bool = True) -> None:
        self._in_chat = in_chat
        self._url, self._model, self._key, self._state = url.rstrip("/"), model, key, state
        self._sent = self._read_state()

    @classmethod
    def open(cls, url: str, model: str, *, key_file: str, state: str, in_chat: bool) -> ServerTarget:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url} is no address", hint="like http://127.0.0.1:8000")
        key = read_text(key_file).strip() if key_file else ""
        return cls(url, model, key, state, in_chat=in_chat)

    def count_tokens(self, text: str) -> int:
        """Tokens, about: the server alone knows its tokenizer."""
        return -(-len(text) // 4)

    def count_prompt_tokens(self, text: str) -> int:
        return self.count_tokens(text) + (TEMPLATE_TOKENS if self._in_chat else 0)

    def has(self, prompt: str) -> bool:
        return self._digest(prompt) in self._sent

    def estimate(self, tokens: int) -> Estimate:
        del tokens
        return Estimate(None, None)

    def check_room(self, estimate: Estimate) -> None:
        """The server keeps within its own budgets."""

    def compute(self, prompt: str) -> int:
        body: dict[str, Any] = {"model": self._model, "max_tokens": 1, "temperature": 0}
        if self._in_chat:
            asked = "/v1/chat/completions", body | {"messages": [{"role": "user", "content": prompt}]}
        else:
            asked = "/v1/completions", body | {"prompt": prompt}
        reply = asyncio.run(self._post(*asked))
        usage = reply.get("usage") or {}
        self._remember(prompt)
        return int(usage.get("prompt_tokens") or self.count_tokens(prompt))

    def say_how_to_use(self) -> str:
        return "the server keeps them within its donor budgets; vLLM shares them where donor_directory is set"

    def close(self) -> None:
        """Nothing is held open."""

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        import aiohttp

        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        try:
            async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
                for attempt in range(1, TRIES + 1):
                    # A redirect would carry the key and the documents to another place: it is an error.
                    async with session.post(self._url + path, json=body, allow_redirects=False) as reply:
                        if reply.status == 200:
                            answer = await reply.json(content_type=None)
                            return answer if isinstance(answer, dict) else {}
                        if reply.status not in (429, 503) or attempt == TRIES:
                            told = (await reply.content.read(2000)).decode("utf-8", "replace")
                            hint = "check --model, the key, the context, and --format"
                            raise InputError(f"the server answered {reply.status}: {told[:300]}", hint=hint)
                        asked_for = reply.headers.get("Retry-After", "")
                    await asyncio.sleep(min(30.0, float(asked_for) if asked_for.isdecimal() else 2.0 ** (attempt - 1)))
        except (aiohttp.ClientError, OSError, TimeoutError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise InputError(f"{self._url} cannot be asked: {error}", hint="is the server running?") from None
        raise AssertionError("the last try returns or raises")

    def _digest(self, prompt: str) -> str:
        asked = [self._url, self._model, self._key, prompt, self._in_chat]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:32]

    def _read_state(self) -> set[str]:
        if not self._state or not os.path.exists(self._state):
            return set()
        try:
            return set(Path(self._state).read_text(encoding="utf-8").split())
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read {self._state}: {error}", hint="name the file of an earlier run") from None

    def _remember(self, prompt: str) -> None:
        self._sent.add(self._digest(prompt))
        if not self._state:
            return
        try:
            with open(self._state, "a", encoding="utf-8") as file:
                file.write(self._digest(prompt) + "\n")
        except OSError as error:
            raise InputError(
                f"cannot write {self._state}: {error.strerror}", hint="make room, and run it again"
            ) from None


Target = DirectoryTarget | ServerTarget

# -- the command -----------------------------------------------------------------------------------------------------

SEPARATOR = "\n\n"
BEFORE = "Read the documents below. You will be asked about them.\n\n"
"""In front of documents where --before says nothing else. KV of documents at the beginning of a prompt, or behind a
first token, a blank line or a title alone, is further from cold than that of a donor from traffic; behind a sentence
that asks for something it is not (docs/research/arrange.md)."""

EXAMPLES = (
    "semblend warm --corpus handbook/ --donor-directory ./donors",
    "semblend warm --corpus handbook.jsonl --url http://127.0.0.1:8000 --state warmed.json",
)


def add(commands: Commands) -> None:
    parser = add_command(commands, "warm", run, examples=EXAMPLES)
    add = parser.add_argument
    add("--corpus", required=True, metavar="PATH", help="a folder of text files, or JSONL with a text on each line")
    add("--log", default="", metavar="FILE", help="JSONL of retrievals: documents that are asked for together")
    add_model(parser, "as the server names it: a pulled model's name, a folder, a GGUF file")
    add("--donor-directory", default="", metavar="DIR", help="write donors into this folder, for semblend serve")
    add("--url", default="", help="send the documents to the server at this address instead")
    add("--api-key-file", default="", metavar="FILE", help="with --url: a file that holds the key, and nothing else")
    add("--state", default="", metavar="FILE", help="with --url: keep here what was sent, and go on from there")
    add("--tenant", default="", help="whose donors they are (default: the nameless tenant; with --url the key says)")
    add("--before", default="", metavar="FILE", help="text in front of the documents, best as in your own prompts")
    kinds = "how your clients send prompts: as messages, or as text (default: chat where the model has a template)"
    add("--format", default="", choices=["chat", "text"], help=kinds)
    add("--prompt-tokens", type=int, default=2048, metavar="N", help="tokens computed as one donor")
    add(
        "--most-bytes",
        type=int,
        default=0,
        metavar="N",
        help="bytes that it may need; stop before it starts if it needs more (default: no limit)",
    )
    add("--donor-bits", type=int, default=16, choices=[16, 8], help="as the server's --donor-bits")
    add_machine(parser)
    add("--dry-run", action="store_true", help="say what it would take, and stop")


def run(args: argparse.Namespace) -> int:
    """Compute the KV of documents before anybody asks, so that the first question about them already finds it.

    Documents that a log says are retrieved together are computed in one prompt, the others alone: behind a short
    instruction and in the model's chat template, as users send them.

    With --donor-directory the embedded engine computes and writes donors into the folder that `semblend serve
    --donor-directory` reads. With --url the documents are sent to a running server (vLLM with SemBlend, or semblend
    serve), which keeps them as it keeps any prompt; vLLM shares them through its own donor_directory. Run it again to
    go on.
    """
    if bool(args.url) == bool(args.donor_directory):
        raise ConfigError("warm needs one place to put donors", hint="--donor-directory DIR, or --url URL")
    if args.prompt_tokens < 64:
        raise InputError(f"--prompt-tokens {args.prompt_tokens} is too few", hint="64 or more; 2048 is a good size")
    documents = read_corpus(args.corpus)
    retrievals = read_retrievals(args.log, documents) if args.log else []
    before = read_text(args.before) if args.before else BEFORE
    target = _open_target(args)
    try:
        room = args.prompt_tokens - target.count_prompt_tokens(before)
        if room < 32:
            raise InputError("--before leaves no room for documents", hint="raise --prompt-tokens")
        prompts = _write_prompts([document.text for document in documents], retrievals, before, target, room)
        return _compute(prompts, len(documents), target, args)
    finally:
        target.close()


def _open_target(args: argparse.Namespace) -> Target:
    if args.url:
        in_chat = args.format != "text"
        return ServerTarget.open(args.url, args.model, key_file=args.api_key_file, state=args.state, in_chat=in_chat)
    with engine_imports():
        return open_directory_target(args)


def _write_prompts(
    texts: Sequence[str], retrievals: Sequence[Sequence[int]], before: str, target: Target, room: int
) -> list[str]:
    """The prompts to compute: documents that are retrieved together in one, long ones in pieces."""
    whole, pieces = [], []
    sizes = [target.count_tokens(text + SEPARATOR) for text in texts]
    for number, size in enumerate(sizes):
        if size <= room:
            whole.append(number)
        else:
            pieces += split_text(texts[number], target.count_tokens, room)
    renamed = {number: place for place, number in enumerate(whole)}
    kept = [[renamed[number] for number in one if number in renamed] for one in retrievals]
    groups = group_documents([sizes[number] for number in whole], [one for one in kept if one], room)
    grouped = [SEPARATOR.join(texts[whole[place]] for place in group) for group in groups]
    return [before + text for text in [*grouped, *pieces]]


def _compute(prompts: Sequence[str], documents: int, target: Target, args: argparse.Namespace) -> int:
    todo = [prompt for prompt in prompts if not target.has(prompt)]
    tokens = sum(target.count_prompt_tokens(prompt) for prompt in todo)
    estimate = target.estimate(tokens)
    say(f"{documents} documents in {len(prompts)} prompts; {len(prompts) - len(todo)} are there already")
    say(f"to compute: {len(todo)} prompts, {tokens:,} tokens, {estimate.describe()}")
    if args.most_bytes and (estimate.nbytes or 0) > args.most_bytes:
        raise InputError(
            f"{estimate.nbytes:,} bytes are more than --most-bytes {args.most_bytes}",
            hint="raise it, leave documents out, or take fewer bytes with --donor-bits 8",
        )
    target.check_room(estimate)
    if args.dry_run:
        print(f"{len(todo)} prompts, {tokens} tokens, {estimate.describe()}")
        return 0
    done = _compute_all(todo, tokens, target)
    print(f"{len(todo)} prompts computed, {done} tokens")
    say(target.say_how_to_use())
    return 0


def _compute_all(todo: Sequence[str], tokens: int, target: Target) -> int:
    progress, started, done = Progress(), time.monotonic(), 0
    try:
        for number, prompt in enumerate(todo):
            done += target.compute(prompt)
            if progress.due():
                left = (time.monotonic() - started) / max(done, 1) * max(tokens - done, 0)
                progress.show(f"{number + 1} of {len(todo)} prompts, {done:,} of {tokens:,} tokens, {left:.0f} s left")
    finally:
        progress.clear()
    return done
