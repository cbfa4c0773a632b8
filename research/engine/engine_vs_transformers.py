"""Claim: the embedded engine computes what transformers computes from the same GGUF file, and how fast on this CPU.

    semblend models pull smollm2-135m
    PYTHONPATH=src:bench python bench/engine_vs_transformers.py            # needs transformers, accelerate and gguf
    PYTHONPATH=src:bench python bench/engine_vs_transformers.py --quick    # three prompts

Real first turns of chats, float32, one thread. For each prompt: the largest difference of any logit at any position,
with the prompt computed at once and in chunks of 16; and whether 32 greedy tokens are the same. Then tokens per second
of prefill and decode at one and two threads, and at two threads in bfloat16.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

import _report  # first: it holds the numeric libraries to one thread
from _report import Report, fail, progress

GREEDY_TOKENS = 32
CHUNK = 16  # below the shortest chat prompt, so that every prompt is really cut


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "engine_vs_transformers")
    parser.add_argument("--model", default="smollm2-135m", help="name or GGUF file (default: smollm2-135m)")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--most-tokens", type=int, default=400, help="longer prompts are left out")
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    from semblend.engine.model.model import DecoderModel
    from semblend.engine.model.tokenizer import ModelTokenizer
    from semblend.models import resolve

    path = resolve(args.model)
    prompts = first_turns(_report.data_dir(args), ModelTokenizer.load(path), args)
    theirs = reference(path, torch)
    ours = DecoderModel.load(path, dtype=torch.float32)
    report = Report("engine_vs_transformers", args)
    rows = []
    for number, ids in enumerate(prompts):
        rows.append(compare(torch, ours, theirs, ids))
        progress(f"prompt {number + 1} of {len(prompts)}: {rows[-1]}")
    prompt_tokens, whole, chunked, same = zip(*rows, strict=True)
    report.table(
        "Against transformers, float32",
        ["prompts", "tokens", "max logit diff", "max diff in chunks", f"same {GREEDY_TOKENS} greedy tokens"],
        [[len(rows), sum(prompt_tokens), max(whole), max(chunked), f"{sum(same)} of {len(rows)}"]],
    )
    report.add("per_prompt", rows)
    speed_table(report, torch, path, args.quick)
    report.write(args.out)


def first_turns(folder: Path, tokenizer: Any, args: argparse.Namespace) -> list[list[int]]:
    found: list[list[int]] = []
    with gzip.open(folder / "chat" / "sharegpt_multiturn.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            turn = json.loads(line)["conversations"][0]
            ids = tokenizer.encode_chat([{"role": "user", "content": turn["content"]}])
            if turn["role"] == "user" and len(ids) <= args.most_tokens:
                found.append(ids)
            if len(found) == (3 if args.quick else args.prompts):
                break
    return found


def reference(path: Path, torch: Any) -> Any:
    try:
        import accelerate  # noqa: F401 - transformers wants it for GGUF
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        fail(f"{error.name} is not installed", hint="pip install transformers accelerate gguf")
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def compare(torch: Any, ours: Any, theirs: Any, ids: list[int]) -> tuple[int, float, float, bool]:
    tokens = torch.tensor(ids)
    with torch.inference_mode():
        want = theirs(tokens[None]).logits[0]
        their_tokens = theirs.generate(
            tokens[None],
            attention_mask=torch.ones_like(tokens[None]),
            do_sample=False,
            min_new_tokens=GREEDY_TOKENS,
            max_new_tokens=GREEDY_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(ids) :].tolist()
    whole = (forward(ours, tokens, len(ids)) - want).abs().max().item()
    chunked = (forward(ours, tokens, CHUNK) - want).abs().max().item()
    return len(ids), whole, chunked, greedy(torch, ours, tokens) == their_tokens


def forward(model: Any, tokens: Any, chunk: int) -> Any:
    import torch

    from semblend.materialize.contract import Rows

    pool = model.new_pool(len(tokens))
    context = pool.slots_of(pool.allocate(pool.blocks_for(len(tokens)))[::-1], 0, len(tokens))
    parts = []
    for start in range(0, len(tokens), chunk):
        end = min(len(tokens), start + chunk)
        parts.append(model.logits(model.forward(Rows.of(tokens[start:end], range(start, end), context), pool)))
    return torch.cat(parts)


def greedy(torch: Any, model: Any, tokens: Any) -> list[int]:
    from semblend.materialize.contract import Rows

    length = len(tokens) + GREEDY_TOKENS
    pool = model.new_pool(length)
    context = pool.slots_of(pool.allocate(pool.blocks_for(length)), 0, length)
    rows = Rows.of(tokens, range(len(tokens)), context)
    made: list[int] = []
    for position in range(len(tokens), length):
        made.append(int(model.logits(model.forward(rows, pool)[-1:]).argmax()))
        rows = Rows.of(torch.tensor(made[-1:]), [position], context)
    return made


def speed_table(report: Report, torch: Any, path: Path, quick: bool) -> None:
    """Best of a few runs: what this machine does while nobody else uses it."""
    from semblend.engine.model.model import DecoderModel

    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        model = DecoderModel.load(path, dtype=dtype)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            runs = [speed(torch, model) for _ in range(1 if quick else 4)]
            best = [max(column) for column in zip(*runs, strict=True)]
            rows.append([str(dtype).removeprefix("torch."), threads, *best])
    report.table(
        "Tokens per second on the CPU",
        [
            "dtype",
            "threads",
            "prefill 512",
            "prefill 2048",
            "last 256 of 2048",
            "scattered 256 of 2048",
            "decode at 512",
        ],
        rows,
    )
    torch.set_num_threads(1)


def speed(torch: Any, model: Any) -> list[float]:
    from semblend.materialize.contract import Rows

    tokens = torch.arange(2048) * 17 % model.spec.vocab
    pool = model.new_pool(2048)
    context = pool.slots_of(pool.allocate(128), 0, 2048)

    def rate(positions: Any, times: int = 1) -> float:
        started = time.perf_counter()
        for shift in range(times):
            at = [position + shift for position in positions]
            model.logits(model.forward(Rows.of(tokens[at], at, context), pool)[-1:])
        return round(len(positions) * times / (time.perf_counter() - started), 1)

    rate(range(64))
    cases = [range(512), range(2048), range(1792, 2048), range(0, 2048, 8)]
    return [*(rate(positions) for positions in cases), rate([512], times=16)]


if __name__ == "__main__":
    main()
