"""One vLLM engine under load, in a process of its own: the worker of `bench/vllm_load.py`.

    python bench/_vllm_load_engine.py KIND ROWS.jsonl '{"shape": "qwen2.5-7b", "document": 24000, ...}'

KIND is ``stock``, ``fast``, ``balanced``, or one of the last two with ``-host``: donors in host memory. A row is
appended to ROWS as soon as it is measured.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from _vllm_engine import Engine

HEAD, OTHER_HEAD, QUESTION = 64, 40, 32
LOADS = (("one a second", 8, 1.0), ("eight at once", 8, 0.0), ("four a second", 24, 0.25))
LONGEST_S = 60.0


class Load:
    """Requests that decode, arrivals on a timetable, and the time of every token."""

    def __init__(self, engine: Engine, name: str, task: dict[str, Any]) -> None:
        self.engine, self.core, self.name, self.task = engine, engine.llm.llm_engine, name, task
        self.last_token: dict[str, float] = {}
        self.gaps: list[float] = []
        self.arrived: dict[str, float] = {}
        self.ttft_ms: dict[str, float] = {}
        self.opted_out = {} if engine.kind == "stock" else {"opt_out": True}

    def step(self) -> None:
        for output in self.core.step():
            now, name = time.perf_counter(), output.request_id
            if name.startswith("decode"):
                if name in self.last_token:
                    self.gaps.append(now - self.last_token[name])
                self.last_token[name] = now
            elif name not in self.ttft_ms and output.outputs[0].token_ids:
                self.ttft_ms[name] = (now - self.arrived[name]) * 1e3

    def run(self, arrivals: list[list[int]], every_s: float, asked: dict[str, Any]) -> dict[str, Any]:
        """Serve the arrivals while others decode; what happened, in ms."""
        names = [f"decode-{self.name}-{number}" for number in range(self.task["decoders"])]
        for name in names:
            ids = self.engine.tokens(self.task["decode_prompt"])
            self.core.add_request(name, {"prompt_token_ids": ids}, self.engine.params(4000, **self.opted_out))
        for _ in range(self.task["decoders"] + 88):  # until all of them decode
            self.step()
        self.gaps.clear()
        begun, waiting = time.perf_counter(), list(enumerate(arrivals))
        while len(self.ttft_ms) < len(arrivals) and time.perf_counter() - begun < LONGEST_S:
            while waiting and time.perf_counter() - begun >= waiting[0][0] * every_s:
                number, ids = waiting.pop(0)
                name = f"arrival-{self.name}-{number}"
                self.arrived[name] = time.perf_counter()
                self.core.add_request(name, {"prompt_token_ids": ids}, self.engine.params(2, **asked))
            self.step()
        wall_s, gaps = time.perf_counter() - begun, sorted(self.gaps)
        self.core.abort_request(names)
        for _ in range(5):
            self.step()
        itl = {f"itl_p{p}": gaps[min(len(gaps) - 1, len(gaps) * p // 100)] * 1e3 for p in (50, 95, 99)}
        ttft = list(self.ttft_ms.values())
        return {
            "what": "load", "name": self.name, "n": len(arrivals), "every": every_s, "served": len(ttft),
            "wall_s": wall_s, "decode_tok_s": len(gaps) / wall_s, **itl, "itl_max": gaps[-1] * 1e3,
            "ttft_p50": statistics.median(ttft), "ttft_max": max(ttft),
        }  # fmt: skip


def main() -> None:
    kind, rows, task = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    mode, _, tier = kind.partition("-")
    where = "stock" if kind == "stock" else tier or "device"
    engine = Engine(where, task | {"lengths": [task["document"] + 1600]})
    asked = {} if kind == "stock" else {"quality": mode}
    for _ in range(2):
        engine.ask(engine.tokens(task["decode_prompt"]))
    documents = [engine.tokens(task["document"]) for _ in range(8)]
    for document in documents:
        engine.ask(engine.tokens(HEAD) + document + engine.tokens(QUESTION))

    def make_arrival(number: int) -> list[int]:
        return engine.tokens(OTHER_HEAD) + documents[number % 8] + engine.tokens(QUESTION)

    for number in range(3):  # warm
        engine.ask(make_arrival(number), **asked)
    for name, count, every_s in LOADS:
        row = {"kind": kind} | Load(engine, name, task).run([make_arrival(n) for n in range(count)], every_s, asked)
        with rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
