"""Compute the KV of documents before anybody asks, so that the first question about them already finds it.

Documents that a log says are retrieved together are computed in one prompt, the others alone: behind a short
instruction and in the model's chat template, as users send them.

With --donor-directory the embedded engine computes and writes donors into the folder that `semblend serve
--donor-directory` reads. With --url the documents are sent to a running server (vLLM with SemBlend, or semblend serve),
which keeps them as it keeps any prompt; vLLM shares them through its own donor_directory. Run it again to go on.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from semblend.arrange.corpus_prompts import group_documents
from semblend.cli.engine_parts import engine_imports
from semblend.cli.output import Progress, say
from semblend.cli.shared_flags import add_dtype
from semblend.cli.warm_targets import ServerTarget, Target, open_directory_target
from semblend.errors import ConfigError, InputError
from semblend.text.corpus import read_corpus, read_retrievals, split_text

SEPARATOR = "\n\n"
BEFORE = "Read the documents below. You will be asked about them.\n\n"
"""In front of documents where --before says nothing else. KV of documents at the beginning of a prompt, or behind a
first token, a blank line or a title alone, is further from cold than that of a donor from traffic; behind a sentence
that asks for something it is not (docs/research/arrange.md)."""

EXAMPLES = (
    "semblend warm --corpus handbook/ --donor-directory ./donors",
    "semblend warm --corpus handbook.jsonl --url http://127.0.0.1:8000 --state warmed.json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--corpus", required=True, metavar="PATH", help="a folder of text files, or JSONL with a text on each line")
    add("--log", default="", metavar="FILE", help="JSONL of retrievals: documents that are asked for together")
    add("--model", default="smollm2-135m", help="as the server names it: a pulled model's name, a folder, a GGUF file")
    add("--donor-directory", default="", metavar="DIR", help="write donors into this folder, for semblend serve")
    add("--url", default="", help="send the documents to the server at this address instead")
    add("--api-key-file", default="", metavar="FILE", help="with --url: a file that holds the key, and nothing else")
    add("--state", default="", metavar="FILE", help="with --url: keep here what was sent, and go on from there")
    add("--tenant", default="", help="whose donors they are (default: the nameless tenant; with --url the key says)")
    add("--before", default="", metavar="FILE", help="text in front of the documents, best as in your own prompts")
    kinds = "how your clients send prompts: as messages, or as text (default: chat where the model has a template)"
    add("--format", default="", choices=["chat", "text"], help=kinds)
    add("--prompt-tokens", type=int, default=2048, metavar="N", help="tokens computed as one donor (default: 2048)")
    add(
        "--most-bytes",
        type=int,
        default=0,
        metavar="N",
        help="bytes that it may need; stop before it starts if it needs more (default: no limit)",
    )
    add("--donor-bits", type=int, default=16, choices=[16, 8], help="as the server's --donor-bits (default: 16)")
    add("--device", default="", help="cpu or cuda (default: cuda where there is one)")
    add_dtype(parser)
    add("--threads", type=int, default=0, metavar="N", help="CPU threads, at most (default: as torch chooses)")
    add("--dry-run", action="store_true", help="say what it would take, and stop")


def run(args: argparse.Namespace) -> int:
    if bool(args.url) == bool(args.donor_directory):
        raise ConfigError("warm needs one place to put donors", hint="--donor-directory DIR, or --url URL")
    if args.prompt_tokens < 64:
        raise InputError(f"--prompt-tokens {args.prompt_tokens} is too few", hint="64 or more; 2048 is a good size")
    documents = read_corpus(args.corpus)
    retrievals = read_retrievals(args.log, documents) if args.log else []
    before = _read_before(args.before)
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


def _read_before(path: str) -> str:
    if not path:
        return BEFORE
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}", hint="a text file in UTF-8") from None


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
