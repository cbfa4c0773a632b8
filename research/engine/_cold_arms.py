"""One engine in a process of its own, for `cold_speed.py`: JSON commands on stdin, one JSON answer a line on stdout.

    python bench/_cold_arms.py '{"arm": "ours", "model": "model.gguf", "threads": 2, "room": 4300}'

An arm can `prefill` a prompt, `decode` behind a prompt, `decode_batch` behind several, give the `logits` of a prompt's
last token and the greedy `answer` to it. Times are of the work alone, without what this process reads and writes.
Nothing but the standard library is imported before an arm is chosen, so llama.cpp may lie in another environment.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

Answer = dict[str, Any]


class Watch:
    """Wall and CPU seconds of a stretch; the CPU time is that of all threads of this process."""

    def __enter__(self) -> Watch:
        self.wall, self.cpu, self.all = time.perf_counter(), time.process_time(), read_busy_s()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall, self.cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        self.all = read_busy_s() - self.all

    def of(self, tokens: int, wall_s: float | None = None) -> Answer:
        """The stretch as an answer; ``others`` is how many cores other processes used meanwhile."""
        others = max(0.0, self.all - self.cpu) / self.wall
        return {"tokens": tokens, "wall_s": wall_s or self.wall, "cpu_s": self.cpu, "others": others}


def read_busy_s() -> float:
    """CPU seconds that this machine has worked, all cores together; 0 where there is no /proc."""
    try:
        with open("/proc/stat", encoding="ascii") as stat:
            ticks = [int(word) for word in stat.readline().split()[1:9]]
    except OSError:
        return 0.0
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # without idle and waiting for disks


class OurArm:
    """The embedded engine as `semblend serve` puts it together, without HTTP and without donors."""

    def __init__(self, asked: Answer) -> None:
        import torch

        from semblend.engine.core.config import EngineConfig
        from semblend.engine.core.engine import Engine
        from semblend.engine.core.threads import ThreadGovernor, prepare_cpu
        from semblend.engine.model.model import DecoderModel

        if asked.get("adapts", True):
            prepare_cpu(asked["threads"])
        torch.set_num_threads(asked["threads"])
        self.governor = ThreadGovernor(asked["threads"] if asked.get("adapts", True) else 1)
        model = DecoderModel.load(asked["model"], dtype=getattr(torch, asked["dtype"]))
        steps = {"step_tokens": asked["step_tokens"]} if asked.get("step_tokens") else {}
        self.engine = Engine(model, model.new_pool(asked["room"]), config=EngineConfig(**steps))
        self.model = model
        model.warm_up()

    def prefill(self, tokens: list[int]) -> Answer:
        self.engine.reset_prefix_cache()
        with Watch() as watch:
            self._begin([tokens], 1)
            self._finish()
        return watch.of(len(tokens))

    def decode(self, tokens: list[int], steps: int) -> Answer:
        return self.decode_batch([tokens], steps)

    def decode_batch(self, prompts: list[list[int]], steps: int) -> Answer:
        streams = self._begin(prompts, steps + 1)
        while not all(stream.chunks for stream in streams):
            self._step()
        before = sum(len(stream.chunks) for stream in streams)
        with Watch() as watch:
            self._finish()
        return watch.of(sum(len(stream.chunks) for stream in streams) - before)

    def answer(self, tokens: list[int], steps: int) -> Answer:
        (stream,) = self._begin([tokens], steps)
        self._finish()
        return {"answer": list(stream.completion().tokens)}

    def logits(self, tokens: list[int], path: str) -> Answer:
        import numpy as np

        from semblend.materialize.contract import Rows

        pool = self.model.new_pool(len(tokens))
        context = pool.slots_of(pool.allocate(pool.blocks_for(len(tokens))), 0, len(tokens))
        hidden = self.model.forward(Rows.of(tokens, range(len(tokens)), context), pool)
        np.save(path, self.model.logits(hidden[-1:])[0].numpy())
        return {}

    def _begin(self, prompts: list[list[int]], steps: int) -> list[Any]:
        from semblend.prompt import Prompt
        from semblend.wire.request import Request
        from semblend.wire.sampling import Sampling

        sampling = Sampling(temperature=0, max_tokens=steps, ignore_eos=True)
        return [
            self.engine.submit(Request(f"{time.perf_counter()}-{at}", Prompt(prompt), sampling))
            for at, prompt in enumerate(prompts)
        ]

    def _finish(self) -> None:
        while self.engine.has_work:
            self._step()

    def _step(self) -> None:
        self.engine.step()
        self.governor.look()


class TransformersArm:
    """transformers with SDPA; its own forward, token by token, without what `generate` adds to each."""

    def __init__(self, asked: Answer) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        from pathlib import Path

        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(asked["threads"])
        path = Path(asked["model"])
        dtype = getattr(torch, asked["dtype"])
        self.model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=dtype, attn_implementation="sdpa"
        ).eval()
        self.torch = torch

    def _forward(self, rows: Any, past: Any = None) -> Any:
        with self.torch.inference_mode():
            return self.model(rows, past_key_values=past, use_cache=True, logits_to_keep=1)

    def _start(self, prompts: list[list[int]]) -> tuple[Any, Any]:
        found = self._forward(self.torch.tensor(prompts))
        return found.logits[:, -1].argmax(-1), found.past_key_values

    def prefill(self, tokens: list[int]) -> Answer:
        with Watch() as watch:
            self._start([tokens])
        return watch.of(len(tokens))

    def decode(self, tokens: list[int], steps: int) -> Answer:
        return self.decode_batch([tokens], steps)

    def decode_batch(self, prompts: list[list[int]], steps: int) -> Answer:
        """Prompts of one length, so that no padding is computed."""
        best, past = self._start(prompts)
        with Watch() as watch:
            for _ in range(steps):
                best = self._forward(best[:, None], past).logits[:, -1].argmax(-1)
                best.tolist()
        return watch.of(steps * len(prompts))

    def answer(self, tokens: list[int], steps: int) -> Answer:
        best, past = self._start([tokens])
        said = [int(best)]
        while len(said) < steps:
            best = self._forward(best[:, None], past).logits[:, -1].argmax(-1)
            said.append(int(best))
        return {"answer": said}

    def logits(self, tokens: list[int], path: str) -> Answer:
        import numpy as np

        np.save(path, self._forward(self.torch.tensor([tokens])).logits[0, -1].float().numpy())
        return {}


class LlamaArm:
    """llama.cpp from the package ``xllamacpp``; it times itself, so the way through its request queue costs nothing."""

    def __init__(self, asked: Answer) -> None:
        import xllamacpp

        wanted = xllamacpp.CommonParams()
        wanted.model.path = asked["model"]
        wanted.n_parallel = asked.get("answers", 1)
        wanted.n_ctx = asked["room"]
        wanted.kv_unified = True
        wanted.cpuparams.n_threads = wanted.cpuparams_batch.n_threads = asked["threads"]
        wanted.n_gpu_layers, wanted.verbosity = 0, 0
        wanted.cache_ram_mib = 0
        if asked["dtype"] == "float32":  # else K and V stay as llama.cpp keeps them, in float16
            wanted.cache_type_k = wanted.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        self.server = xllamacpp.Server(wanted)

    def _complete(self, tokens: list[int], steps: int, *, cached: bool) -> Answer:
        found: Answer = self.server.handle_completions(
            {
                "prompt": tokens,
                "n_predict": steps,
                "cache_prompt": cached,
                "temperature": 0,
                "ignore_eos": True,
                "return_tokens": True,
            }
        )
        if "timings" not in found:
            raise RuntimeError(json.dumps(found))
        return found

    def prefill(self, tokens: list[int]) -> Answer:
        with Watch() as watch:
            found = self._complete(tokens, 1, cached=False)["timings"]
        return watch.of(found["prompt_n"], found["prompt_ms"] / 1e3)

    def decode(self, tokens: list[int], steps: int) -> Answer:
        self._complete(tokens, 1, cached=True)
        with Watch() as watch:
            found = self._complete(tokens, steps + 1, cached=True)["timings"]
        return watch.of(steps, steps / found["predicted_per_second"])  # the first token counts as the prompt's

    def decode_batch(self, prompts: list[list[int]], steps: int) -> Answer:
        """As many threads ask at once; the time is that of the slowest answer behind its first token."""
        found: list[Answer] = []

        def ask(prompt: list[int], count: int) -> None:
            found.append(self._complete(prompt, count, cached=True)["timings"])

        for count in (1, steps + 1):
            found.clear()
            threads = [threading.Thread(target=ask, args=(prompt, count)) for prompt in prompts]
            with Watch() as watch:
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
        slowest = max(one["predicted_ms"] for one in found) / 1e3
        return watch.of(steps * len(prompts), slowest)

    def answer(self, tokens: list[int], steps: int) -> Answer:
        return {"text": self._complete(tokens, steps, cached=False)["choices"][0]["text"]}


class ServedArm:
    """`semblend serve` as it comes, reuse switched on, asked over HTTP by a client in this process."""

    def __init__(self, asked: Answer) -> None:
        import subprocess

        run = "import sys; from semblend.cli.main import main; sys.exit(main())"
        words = ["serve", "--model", asked["model"], "--dtype", asked["dtype"], "--port", "0"]
        words += ["--threads", str(asked["threads"]), "--pool-tokens", str(asked["room"])]
        self.process = subprocess.Popen([sys.executable, "-c", run, *words], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip().removeprefix("http://")

    def prefill(self, tokens: list[int]) -> Answer:
        return self._stream(tokens, 1)[0].of(len(tokens))

    def decode(self, tokens: list[int], steps: int) -> Answer:
        watch, times = self._stream(tokens, steps + 1)
        return watch.of(steps, times[-1] - times[0])

    def answer(self, tokens: list[int], steps: int) -> Answer:
        self._stream(tokens, steps)
        return {"answer": None}

    def _stream(self, tokens: list[int], steps: int) -> tuple[Watch, list[float]]:
        """When each piece of the answer came; the CPU time is the server's."""
        import http.client

        wanted = {"prompt": tokens, "max_tokens": steps, "temperature": 0, "stream": True, "ignore_eos": True}
        line = http.client.HTTPConnection(self.address)
        times: list[float] = []
        before = self._read_cpu_s()
        with Watch() as watch:
            line.request("POST", "/v1/completions", json.dumps(wanted), {"Content-Type": "application/json"})
            answer = line.getresponse()
            if answer.status != 200:
                raise RuntimeError(answer.read().decode())
            has_text = (b'"choices": [{' in event or b'"choices":[{' in event for event in answer)
            times.extend(time.perf_counter() for found in has_text if found)
        line.close()
        watch.cpu = self._read_cpu_s() - before
        return watch, times

    def _read_cpu_s(self) -> float:
        with open(f"/proc/{self.process.pid}/stat", encoding="ascii") as stat:
            words = stat.read().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


ARMS: dict[str, Callable[[Answer], Any]] = {
    "ours": OurArm,
    "served": ServedArm,
    "transformers": TransformersArm,
    "llama.cpp": LlamaArm,
}


def main() -> None:
    asked = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")  # ours alone: what libraries print goes to stderr
    os.dup2(2, 1)
    arm = ARMS[asked["arm"]](asked)
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:  # the end of it ends the arm
        command = json.loads(line)
        found = getattr(arm, command.pop("do"))(**command)
        print(json.dumps(found), file=out, flush=True)
    if isinstance(arm, ServedArm):
        arm.process.terminate()


if __name__ == "__main__":
    main()
