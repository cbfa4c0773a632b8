"""One cell of the time-to-first-token benchmark: a length, a donor tier, fresh caches, and every arm in every round."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lib import real_texts
from semblend import Prompt, SemBlend, SemBlendConfig
from semblend.engine.core.assemble import assemble
from semblend.engine.core.config import EngineConfig
from semblend.engine.core.engine import Engine
from semblend.engine.model.model import DecoderModel
from semblend.engine.model.spec import ModelSpec
from semblend.materialize.blend.quality import QualitySettings, Step
from semblend.materialize.contract import Rows
from semblend.materialize.gate.thresholds import Thresholds
from semblend.wire.request import Request
from semblend.wire.sampling import Sampling

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
    "qwen2.5-1.5b": {
        "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 131072, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    },
    "tiny": {
        "model_type": "qwen2", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 5000, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 131072, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    },
}  # fmt: skip
ARMS = ("cold", "miss", "exact", "fast", "balanced")
INSTRUCTION_A, INSTRUCTION_B, QUESTION = 64, 24, 32
REPEATS = 7  # of the two parts of the floor

# A random model's distributions never stand still: accept after the first repair, so that 10 % is what is timed.
FIXED = QualitySettings(steps=(Step(10, "attended"),), thresholds=Thresholds(1e9, 1e9, 1e9), deep_tolerance=1e9)

Draw = Callable[[int], np.ndarray]
"""So many token ids that nobody has seen before."""


def load(name: str, device: str) -> DecoderModel:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if name.startswith("shape:"):
        spec = ModelSpec.from_hf_config(SHAPES[name.removeprefix("shape:")])
        return random_model(spec, device, dtype)
    from semblend.models import resolve

    return DecoderModel.load(resolve(name), device, dtype)


def random_model(spec: ModelSpec, device: str, dtype: torch.dtype) -> DecoderModel:
    """Random weights, one layer's used again for all: a 7B shape takes seconds instead of minutes."""
    first = DecoderModel.random(replace(spec, layers=1), 0, device, dtype)
    return DecoderModel(spec, replace(first.weights, layers=first.weights.layers * spec.layers))


def random_tokens(vocab: int, seed: int) -> Draw:
    rng = np.random.default_rng(seed)
    return lambda count: rng.integers(10, vocab - 10, count)


def real_text(model: str, folder: Path) -> Draw:
    """Documents people ask questions about, end to end, each token once."""
    from semblend.engine.model.tokenizer import ModelTokenizer
    from semblend.models import resolve

    tokenizer = ModelTokenizer.load(resolve(model))
    texts = iter(real_texts.leval(folder) + real_texts.qmsum(folder))
    held: list[int] = []

    def draw(count: int) -> np.ndarray:
        while len(held) < count:
            held.extend(tokenizer.encode(next(texts).text, add_special=False))
        taken = np.array(held[:count])
        del held[:count]
        return taken

    return draw


class Cell:
    """The engine with donors, the same engine without, and the arms' times."""

    def __init__(self, model: DecoderModel, draw: Draw, length: int, tier: str, *, gated: bool) -> None:
        self.model, self.draw, self.length, self.tier = model, draw, length, tier
        config = EngineConfig(quality="fast", step_tokens=1 << 20, max_running=4)
        self.plain = Engine(model, model.new_pool(2 * (length + 512)), config=config)
        donors = self.plain.pool.bytes_per_token * (length + 256) * 8
        self.engine = assemble(
            model,
            pool_tokens=3 * (length + 512),
            config=config,
            semblend=SemBlend(SemBlendConfig(embedder="none", metrics=False)),
            quality=QualitySettings() if gated else FIXED,
            donor_device_bytes=donors if tier == "device" else 0,
            donor_host_bytes=donors,
        )
        self.count = 0

    def ask(self, engine: Engine, ids: np.ndarray, quality: str) -> dict[str, Any]:
        """One request to its first token, and until the engine is ready for the next: its donor is kept by then."""
        self.count += 1
        request = Request(f"r{self.count}", Prompt(ids), Sampling(temperature=0.0, max_tokens=1), quality=quality)
        wait(self.model.device)
        started, cpu = time.perf_counter(), time.process_time()
        stream = engine.submit(request)
        while engine.has_work:
            engine.step()
        wait(self.model.device)
        wall_ms, cpu_ms = (time.perf_counter() - started) * 1e3, (time.process_time() - cpu) * 1e3
        receipt = stream.completion().receipt
        if receipt is None:
            raise RuntimeError(f"request {request.request_id} ended without a receipt")
        names = ("ttft_ms", "lookup_ms", "load_ms", "compute_ms", "exact_tokens", "reused_tokens", "recomputed_tokens",
                 "prefill_tokens", "escalations", "risk")  # fmt: skip
        reason = None if receipt.reason is None else receipt.reason.value
        return {
            "wall_ms": wall_ms,
            "cpu_ms": cpu_ms,
            "reason": reason,
            **{name: getattr(receipt, name) for name in names},
        }

    def round(self, number: int) -> dict[str, dict[str, Any]]:
        """A donor, then every arm once. Cold, with and without reuse, asks the same and takes turns in going first."""
        document = self.draw(self.length - INSTRUCTION_B - QUESTION)
        unseen = self.draw(self.length)
        self.engine.reset_prefix_cache()
        self.ask(self.engine, np.concatenate([self.draw(INSTRUCTION_A), document]), "exact")
        found: dict[str, dict[str, Any]] = {}

        def cold() -> None:
            self.plain.reset_prefix_cache()
            found["cold"] = self.ask(self.plain, unseen, "exact")
            found["exact"] = self.ask(self.plain, np.concatenate([unseen, self.draw(1)]), "exact")

        def hit(arm: str) -> None:
            self.engine.reset_prefix_cache()
            ids = unseen if arm == "miss" else np.concatenate([self.draw(INSTRUCTION_B), document, self.draw(QUESTION)])
            found[arm] = self.ask(self.engine, ids, "fast" if arm == "miss" else arm)

        pair = [cold, lambda: hit("miss")]
        work = [pair if number % 2 else pair[::-1], [lambda: hit("fast")], [lambda: hit("balanced")]]
        for some in random.Random(number).sample(work, len(work)):
            for one in some:
                one()
        return found

    def floor(self, moved_tokens: int) -> dict[str, Any]:
        """What no engine can save: a plain copy of the donor's bytes, and one pass over the gap tokens."""
        device = self.model.device
        nbytes = moved_tokens * self.plain.pool.bytes_per_token
        on_host = self.tier == "host"
        source = torch.empty(nbytes, dtype=torch.uint8, device="cpu" if on_host else device)
        source = source.pin_memory() if on_host and device.type == "cuda" else source
        target = torch.empty(nbytes, dtype=torch.uint8, device=device)
        copy_ms = timed(lambda: target.copy_(source), device)
        gap_ms = timed(self._gap_pass(), device)
        return {
            "bytes": nbytes,
            "copy_ms": copy_ms,
            "gb_per_s": nbytes / copy_ms / 1e6,
            "gap_tokens": INSTRUCTION_B + QUESTION,
            "gap_ms": gap_ms,
        }

    def _gap_pass(self) -> Callable[[], object]:
        pool, device = self.plain.pool, self.model.device
        self.plain.reset_prefix_cache()
        blocks = pool.allocate(pool.blocks_for(self.length))
        context = pool.slots_of(blocks, 0, self.length)
        pool.free(blocks)  # nobody else asks while we measure
        ends = (torch.arange(INSTRUCTION_B), torch.arange(self.length - QUESTION, self.length))
        positions = torch.cat(ends).to(device)
        tokens = torch.full_like(positions, 11)

        def run() -> object:
            hidden = self.model.forward(Rows.of(tokens, positions, context), pool)
            return self.model.logits(hidden[-1:]).argmax().item()

        return run

    def measure(self, rounds: int, warm_up: int) -> dict[str, Any]:
        """All there is to know about this cell, as plain values."""
        for number in range(warm_up):
            self.round(number)
        taken = [self.round(number) for number in range(rounds)]
        arms = {arm: {name: [one[arm][name] for one in taken] for name in taken[0][arm]} for arm in ARMS}
        moved = int(statistics.median(a + b for a, b in zip(
            arms["fast"]["reused_tokens"], arms["fast"]["recomputed_tokens"], strict=True)))  # fmt: skip
        return {"tokens": self.length, "tier": self.tier, "arms": arms, "floor": self.floor(max(1, moved))}


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Milliseconds, the median of a few."""
    work()
    times = []
    for _ in range(REPEATS):
        wait(device)
        started = time.perf_counter()
        work()
        wait(device)
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
