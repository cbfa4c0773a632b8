"""A real vLLM engine with our connector in this process, and eyes on both halves of the connector in it."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Iterator
from typing import Any

MODEL = os.environ.get("SEMBLEND_TEST_VLLM_MODEL", "")
MODULE = "semblend.integration.vllm.connector_v1"
POISON = 1000.0
WORDS = [
    "amber",
    "basin",
    "cedar",
    "delta",
    "ember",
    "flint",
    "grove",
    "harbor",
    "island",
    "jungle",
    "kettle",
    "lantern",
]


class World:
    """The engine, its connector's two halves, and what was seen of them."""

    def __init__(self, llm: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.connector = self.scheduler.connector
        self.half = self.connector._ours
        self.worker_connector = get_kv_transfer_group()
        self.worker = self.worker_connector._worker
        self.block_tokens = self.worker._model.block_tokens
        self.tokenizer = llm.get_tokenizer()
        self.kv: dict[str, list[Any]] = {}
        self.loads: list[Any] = []
        self.events: list[Any] = []
        self.kv_events: list[Any] = []
        self._real = {"load": self.worker.load, "capture": self.worker.capture}
        self._stats = self.connector.get_kv_connector_stats

    # -- prompts ---------------------------------------------------------------------------------------------------

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def document(self, seed: int, items: int = 48) -> list[int]:
        rng = random.Random(seed)
        return self.ids("\n" + " ".join(f"{rng.choice(WORDS)} {rng.randint(10, 99)}" for _ in range(items)) + ".\n")

    def instruction(self, number: int) -> list[int]:
        text = f"<|im_start|>system\nYou are assistant number {number}. " + "Be brief. " * (number % 7)
        return self.ids(text + "<|im_end|>\n<|im_start|>user\n")

    def question(self, text: str = "What is the first word?") -> list[int]:
        return self.ids(f"{text}<|im_end|>\n<|im_start|>assistant\n")

    # -- requests --------------------------------------------------------------------------------------------------

    def ask(self, *prompts: Any, tokens: int = 4, salt: str | None = None, **asked: Any) -> list[Any]:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": {"semblend": asked}} if asked else None
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, extra_args=extra)
        asked_for = [p if isinstance(p, dict) else {"prompt_token_ids": p} for p in prompts]
        given = [p | ({"cache_salt": salt} if salt else {}) for p in asked_for]
        answers = list(self.llm.generate(given, params, use_tqdm=False))
        if tokens == 1:  # what has no step after its answer is copied in the next one; an engine of its own has it
            self.settle()
        return answers

    def receipt(self, output: Any) -> dict[str, Any]:
        found: dict[str, Any] = output.kv_transfer_params["semblend"]
        return found

    def audited(self, output: Any) -> dict[str, Any]:
        """The whole receipt of a request, from the audit stream: the caller's has no spans and no donors."""
        name = self.receipt(output)["request_id"]
        found = [event.fields.get("receipt") for event in self.events if event.request_id == name]
        (whole,) = [receipt.to_dict() for receipt in found if receipt is not None]
        return dict(whole)

    def cold(self, prompt: list[int], **asked: Any) -> Any:
        """Computed by vLLM alone: nothing of ours, nothing from its prefix cache, and nothing kept of it."""
        self.forget_prefixes()
        (output,) = self.ask(prompt, opt_out=True, **asked)
        self.forget_prefixes()
        return output

    def forget_prefixes(self) -> None:
        """Empty vLLM's own cache, behind our back: what people call drops donors too."""
        self.settle()
        assert self.scheduler.kv_cache_manager.reset_prefix_cache()
        self.half.donors.resets.was_reset()

    def settle(self) -> None:
        """Step until nothing is under way: an engine that schedules ahead has a step more than it has answers."""
        while self.core.batch_queue or self.scheduler.has_requests():
            self.llm.llm_engine.step()

    def count_free_blocks(self) -> int:
        """Blocks that no request holds."""
        free: int = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return free

    def kv_of(self, output: Any) -> list[Any]:
        """KV of the whole prompt when its prefill was done, a (keys, values) pair for each layer."""
        names = [name for name in self.kv if name.startswith(f"{output.request_id}-")]
        return self.kv[names[-1]]

    # -- eyes ------------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        from semblend.materialize.contract import slots_of_blocks

        served: list[str] = []

        def load(orders: Any) -> None:
            layout = self.worker._model.layout
            served[:] = (
                orders.served
            )  # they are told, and gone from the orders, before an engine that speculates captures
            for order in orders.loads:
                self.loads.append(order)
                # Freed blocks may still hold the right KV, which would prove nothing.
                size = self.block_tokens
                slots = slots_of_blocks(order.block_ids, size, len(order.block_ids) * size)[order.exact_tokens :]
                for layer in range(layout.layers):
                    k, v = layout.gather(layer, slots)
                    layout.scatter(layer, slots, k.fill_(POISON), v.fill_(POISON))
            self._real["load"](orders)

        def capture(orders: Any) -> None:
            for request_id in served:
                record = self.half._records[request_id]
                slots = slots_of_blocks(record.block_ids, self.block_tokens, len(record.prompt))
                layout = self.worker._model.layout
                self.kv[request_id] = [layout.gather(layer, slots) for layer in range(layout.layers)]
            self._real["capture"](orders)

        self.worker.load, self.worker.capture = load, capture

    def take_turn(self) -> None:
        """vLLM knows one worker half in a process: from now on it is this engine's."""
        from vllm.distributed.kv_transfer import kv_transfer_state

        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker_connector

    def start(self) -> None:
        """Everything as at the beginning; then the eyes open."""
        from semblend.confirm.sinks import CallbackSink, EventStream

        self.take_turn()
        self.half.reset()
        self.forget_prefixes()
        self.worker.load, self.worker.capture = self._real["load"], self._real["capture"]
        self.half.semblend.config = dataclasses.replace(self.half.semblend.config, discovery_only=False)
        stream = EventStream([CallbackSink(self.events.append)])
        self.half.semblend.events = self.half.semblend._reporter._stream = stream
        for seen in (self.kv, self.loads, self.events, self.kv_events):
            seen.clear()
        self.ask(self.ids("flush the drops"), tokens=1, opt_out=True)
        self.forget_prefixes()
        self.kv_events.clear()
        self.events.clear()
        self.watch()


def make_world(model: str = MODEL, engine: dict[str, Any] | None = None, **connector: Any) -> World:
    """A new engine, beside those that are there already; ``engine``: more of its own settings."""
    from vllm import LLM
    from vllm.config import KVEventsConfig, KVTransferConfig
    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.platforms import current_platform

    kv_transfer_state._KV_CONNECTOR_AGENT = None
    settings = {
        "dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": 160 << 20, "max_num_seqs": 4, "block_size": 32, "enable_prefix_caching": True,
    }  # fmt: skip
    llm = LLM(
        model=model,
        disable_log_stats=False,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="SemBlendConnectorV1",
            kv_connector_module_path=MODULE,
            kv_role="kv_both",
            kv_connector_extra_config={"quality": "fast", "donor_host_bytes": 256 << 20, **connector},
        ),
        **settings | (engine or {}),
    )
    # It is the process that has them from now on, and vLLM cannot register them twice.
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
    world = World(llm)
    manager = world.scheduler.kv_cache_manager
    take = manager.take_events

    def taken() -> Any:
        found = take()
        world.kv_events.extend(found or ())
        return found

    manager.take_events = taken
    return world


def serve(engine: World) -> Iterator[World]:
    """One test's turn with an engine, and what must hold when it is over."""
    engine.start()
    free = engine.count_free_blocks()
    yield engine
    engine.settle()
    assert not [event.fields for event in engine.events if event.kind == "error" and event.fields["where"] == "confirm"]
    assert engine.half.semblend._claims == {}, "every claim ends with its request"
    assert not engine.half._records
    assert engine.count_free_blocks() == free, "every request gives its blocks back"


def worst(ours: Any, theirs: Any, positions: slice = slice(None)) -> float:
    """How far the KV of two prompts is apart, of all layers, at these positions."""
    return max(
        float((a[positions] - b[positions]).abs().max())
        for pair, other in zip(ours, theirs, strict=True)
        for a, b in zip(pair, other, strict=True)
    )


def in_pieces(lookup: Any) -> Any:
    """Plans whose only span is cut in three, with holes between that no donor holds."""

    def wrapped(*args: Any, **named: Any) -> Any:
        plan = lookup(*args, **named)
        if not getattr(plan, "spans", ()):
            return plan
        (span,) = plan.spans
        cuts = [(0, 40), (61, 50), (133, 70)]
        pieces = [
            dataclasses.replace(
                span, donor_start=span.donor_start + at, target_start=span.target_start + at, length=length
            )
            for at, length in cuts
        ]
        return dataclasses.replace(plan, spans=tuple(pieces))

    return wrapped
