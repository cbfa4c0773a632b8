"""What a request costs over HTTP, hit or miss, with default settings; and where its time goes.

    python research/http_look/http_look.py prepare MODEL.gguf DATA CONTEXTS.pkl.gz
    python research/http_look/http_look.py convert MODEL.gguf FOLDER
    python research/http_look/http_look.py run FOLDER CONTEXTS.pkl.gz OUT --budget-s 420

Three servers on one GPU take turns, one request at a time: `stock` (no connector), `ours` (our connector, nothing set:
donors in 4 GiB of host memory) and `roomy` (host memory for every donor of the run; only for misses). Each arm of a case
has a salt of its own:

    cold           the prompt, for the first time (ours: opted out)
    exact          the same prompt again
    exact_question the same prompt with another question at its end: what a prefix cache gives to a document that comes
                   first; the limit of any reuse
    fast, balanced the context under another instruction with another question, after one donor
    miss           another context, nothing to reuse

OUT gets rows.jsonl and the servers' traces (see trace/sitecustomize.py).
"""

from __future__ import annotations

import argparse
import gzip
import json
import pickle
import random
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "bench")]
DATASETS = {"XSum": "summ/xsum", "CNN/DailyMail": "summ/cnndm", "MultiNews": "longbench/multi_news",
            "SAMSum": "dialogue/samsum"}  # fmt: skip
INSTRUCTIONS = (
    "You are a careful assistant. Read the following texts.\n\n",
    "You work in the archive of a newspaper and help readers who ask for old stories. Here is what you have found.\n\n",
)
QUESTIONS = ("\n\nSummarize the texts above in two sentences.\nSummary:", "\n\nWho is named in the texts?\nAnswer:")
LENGTHS = (8192, 24576, 2048)
ROUNDS = 13


def prepare(model: str, data: str, out: str) -> None:
    import _documents

    from semblend.engine.model.tokenizer import ModelTokenizer

    tokenizer = ModelTokenizer.load(model)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False)

    folder = Path(data)
    texts = [*_documents.articles(folder), *_documents.dialogues(folder), *_documents.longbench(folder)]
    articles = {
        name: [encode(t.text + "\n\n") for t in texts if t.source == source] for name, source in DATASETS.items()
    }
    kept = {name: [one for one in some if len(one) < 20000][:700] for name, some in articles.items()}
    words = {"lead": [encode(text) for text in INSTRUCTIONS], "ask": [encode(text) for text in QUESTIONS]}
    with gzip.open(out, "wb") as file:
        pickle.dump({"articles": kept, **words}, file)
    print({name: (len(some), sum(map(len, some))) for name, some in kept.items()})


def convert(gguf: str, folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(gguf)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder + ".partial")
    tokenizer.save_pretrained(folder + ".partial")
    Path(folder + ".partial").rename(folder)


class Look:
    def __init__(self, folder: str, contexts: str, out: str, budget_s: float, *, cpu: bool) -> None:
        self.lengths, self.rounds, self.misses, self.cpu = (
            (LENGTHS, ROUNDS, 60, False) if not cpu else ((300,), 1, 3, True)
        )
        with gzip.open(contexts) as file:
            self.words: dict[str, Any] = pickle.load(file)
        self.out, self.end = Path(out), time.monotonic() + budget_s
        self.out.mkdir(parents=True, exist_ok=True)
        self.model = folder
        self.rows = (self.out / "rows.jsonl").open("a")

    def draw(self, dataset: str, tokens: int, rng: random.Random) -> list[int]:
        some = self.words["articles"][dataset]
        order, drawn = rng.sample(some, len(some)), []
        while len(drawn) < tokens:
            drawn += order.pop() if order else rng.choice(some)
        return [token % 40000 for token in drawn[:tokens]] if self.cpu else drawn[:tokens]

    def start(self) -> None:
        from _vllm_server import VllmServer

        flags = ["--dtype", "bfloat16", "--max-model-len", "25600", "--gpu-memory-utilization", "0.25",
                 "--kv-cache-memory-bytes", str(16 << 30)]  # fmt: skip
        if self.cpu:
            flags = [
                "--dtype",
                "float32",
                "--max-model-len",
                "1024",
                "--enforce-eager",
                "--kv-cache-memory-bytes",
                "200000000",
            ]
        extras: dict[str, dict[str, Any] | None] = {
            "stock": None,
            "ours": {},
            "roomy": {"donor_host_bytes": 34 << 30 if not self.cpu else 1 << 30},
        }
        self.servers = {}
        import os

        self.flag = Path("/tmp/look-profile")
        for name, extra in extras.items():
            more = {}
            if name != "stock":
                path = f"{HERE / 'trace'}:{os.environ.get('PYTHONPATH', '')}"
                more = {
                    "LOOK_TRACE": str(self.out / f"trace-{name}"),
                    "LOOK_PROFILE": str(self.flag),
                    "PYTHONPATH": path,
                }
            self.servers[name] = VllmServer(self.model, self.out / name, flags, extra, **more)
        begun = time.monotonic()
        for name, server in self.servers.items():
            server.wait()
            print(f"{name} answers after {time.monotonic() - begun:.0f} s", flush=True)

    def ask(self, server: str, ids: list[int], name: str, salt: str, **asked: Any) -> dict[str, Any]:
        wish = {"kv_transfer_params": {"semblend": asked}} if asked else {}
        began = time.monotonic()
        answer = self.servers[server].stream(ids, 4, name, cache_salt=salt, **wish)
        return {"ttft_ms": answer.ttft_ms, "cached": answer.cached_tokens, "began": began}

    def write(self, row: dict[str, Any]) -> None:
        self.rows.write(json.dumps(row) + "\n")
        self.rows.flush()

    def run_case(self, dataset: str, length: int, number: int | str, *, phase: str = "arms") -> None:
        rng = random.Random(f"{dataset} {length} {number}")
        name = f"{phase}-{dataset}-{length}-{number}".replace("/", "")
        context, other, third = (self.draw(dataset, length, rng) for _ in range(3))
        lead, ask = self.words["lead"], self.words["ask"]
        target, again = lead[1] + context + ask[1], lead[1] + context + ask[0]
        donor, miss = lead[0] + context + ask[0], lead[1] + other + ask[1]
        found = {}
        for server in ("stock", "ours"):
            opt = {"opt_out": True} if server == "ours" else {}
            found[f"{server}:cold"] = self.ask(server, target, f"{name}-cold", f"{name}-c", **opt)
            found[f"{server}:exact"] = self.ask(server, target, f"{name}-exact", f"{name}-c")
            found[f"{server}:exact_question"] = self.ask(server, again, f"{name}-exactq", f"{name}-c", **opt)
        for mode in ("fast", "balanced"):
            self.ask("ours", donor, f"{name}-donor-{mode}", f"{name}-{mode}")
            found[f"ours:{mode}"] = self.ask("ours", target, f"{name}-hit-{mode}", f"{name}-{mode}",
                                             **({"quality": "fast"} if mode == "fast" else {}))  # fmt: skip
            found[f"stock:cold2-{mode}"] = self.ask("stock", target, f"{name}-cold2-{mode}", f"{name}-c2{mode}")
        found["ours:miss"] = self.ask("ours", miss, f"{name}-miss", f"{name}-m")
        found["stock:miss"] = self.ask("stock", miss, f"{name}-miss", f"{name}-m")
        found["roomy:miss"] = self.ask("roomy", miss, f"{name}-miss", f"{name}-m")
        del third
        self.write({"phase": phase, "name": name, "dataset": dataset, "length": length, "number": number,
                    "tokens": len(target), "arms": found})  # fmt: skip

    def run_misses(self, length: int, count: int) -> None:
        """Back to back on one server: a stall shows, and what it was."""
        for server in ("ours", "roomy", "stock"):
            for number in range(count):
                dataset = list(DATASETS)[number % 4]
                rng = random.Random(f"misses {server} {length} {number}")
                ids = self.words["lead"][1] + self.draw(dataset, length, rng) + self.words["ask"][1]
                name = f"row-{server}-{length}-{number}"
                self.write({"phase": "misses", "name": name, "server": server, "length": length, "number": number,
                            **self.ask(server, ids, name, name)})  # fmt: skip

    def run(self) -> None:
        self.start()
        try:
            for dataset in DATASETS:
                for length in self.lengths:
                    self.run_case(dataset, length, "warm", phase="warm")
            self.run_misses(self.lengths[0], self.misses)
            for number in range(self.rounds):
                for length in self.lengths:
                    for dataset in DATASETS:
                        if time.monotonic() < self.end:
                            self.run_case(dataset, length, number)
                print(f"round {number}, {self.end - time.monotonic():.0f} s left", flush=True)
            self.flag.touch()
            for dataset in DATASETS:
                for length in self.lengths:
                    self.run_case(dataset, length, "profile", phase="profile")
            self.flag.unlink()
            receipts = self.servers["ours"].read_receipts()
            with gzip.open(self.out / "receipts.json.gz", "wt") as file:
                json.dump(receipts, file)
        finally:
            for server in self.servers.values():
                server.stop()


def main() -> None:
    if sys.argv[1] == "prepare":
        prepare(*sys.argv[2:])
    elif sys.argv[1] == "convert":
        convert(*sys.argv[2:])
    else:
        parser = argparse.ArgumentParser()
        for name in ("do", "folder", "contexts", "out"):
            parser.add_argument(name)
        parser.add_argument("--budget-s", type=float, default=400)
        parser.add_argument("--cpu", action="store_true", help="short prompts and one round: shows that it runs")
        args = parser.parse_args()
        Look(args.folder, args.contexts, args.out, args.budget_s, cpu=args.cpu).run()


if __name__ == "__main__":
    main()
