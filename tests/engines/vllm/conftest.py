"""One real vLLM engine on a CPU for all tests here, and eyes on both halves of the connector in it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3] / "bench")]
from late_outputs import schedule_ahead  # noqa: E402
from small_folders import write  # noqa: E402
from small_model import write_small_model  # noqa: E402
from verdicts import VerdictWatch  # noqa: E402

collect_ignore = ["slow_offload.py"]  # vLLM loads it, by its path
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None
    if importlib.util.find_spec("vllm") is None:
        reason = "vLLM is not installed here: .ci/engines/vllm-cpu makes its environment and runs these tests"
    elif not MODEL or not Path(MODEL, "config.json").exists():
        reason = "SEMBLEND_TEST_VLLM_MODEL names no model folder: .ci/engines/vllm-cpu writes one"
    for item in items:
        if reason and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


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
    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=160 << 20,
        max_num_seqs=4,
        block_size=32,
        enable_prefix_caching=True,
        disable_log_stats=False,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="SemBlendConnectorV1",
            kv_connector_module_path=MODULE,
            kv_role="kv_both",
            kv_connector_extra_config={"quality": "fast", "donor_host_bytes": 256 << 20, **connector},
        ),
        **(engine or {}),
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


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = make_world(admin_socket=str(tmp_path_factory.mktemp("admin") / "socket"))
    yield world
    world.core.shutdown()


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Random weights, and settings under which gate and canary are content: with one they never would be."""
    from semblend.materialize.gate.thresholds import Thresholds

    folder = tmp_path_factory.mktemp("small")
    write_small_model(folder, 49152, MODEL)
    (folder / "thresholds.json").write_text(Thresholds(1e9, 1e9, 1e9).to_json(), encoding="utf-8")
    return str(folder), {"thresholds": str(folder / "thresholds.json"), "deep_tolerance": 0}


@pytest.fixture(scope="session")
def small_engine(small_model: tuple[str, dict[str, Any]]) -> Iterator[World]:
    folder, connector = small_model
    world = make_world(folder, **connector)
    yield world
    world.core.shutdown()


def make_latent_engine(kind: str, folder: Path) -> Iterator[World]:
    """An engine with latent attention; gate and look into deep layers are content, as with the other small model."""
    from semblend.materialize.gate.thresholds import Thresholds

    write(kind, folder, MODEL)
    (folder / "thresholds.json").write_text(Thresholds(1e9, 1e9, 1e9).to_json(), encoding="utf-8")
    world = make_world(str(folder), thresholds=str(folder / "thresholds.json"), deep_tolerance=0)
    yield world
    world.core.shutdown()


@pytest.fixture(scope="session")
def latent_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    yield from make_latent_engine("latents", tmp_path_factory.mktemp("latents"))


@pytest.fixture(scope="session")
def expert_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    from vllm.distributed import parallel_state

    # A process has the groups of its first engine, and that of a model without experts makes none for them.
    parallel_state._EP = parallel_state._EP or parallel_state._TP
    yield from make_latent_engine("latents and experts", tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="session")
def late_engine(small_model: tuple[str, dict[str, Any]]) -> Iterator[World]:
    folder, connector = small_model
    with schedule_ahead():
        world = make_world(folder, **connector)
    yield world
    world.core.shutdown()


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


def serve_kind(kind: str, folder: Path, **settings: Any) -> Iterator[World]:
    """An engine for a model with random weights, and settings under which gate and canary are content with it."""
    from vllm.distributed import parallel_state

    from semblend.materialize.gate.thresholds import Thresholds

    # vLLM makes the groups of a process for its first engine, which may have no experts. Of one rank all are alike.
    if parallel_state.model_parallel_is_initialized() and parallel_state._EP is None:
        parallel_state._EP = parallel_state.get_tp_group()
    write(kind, folder, MODEL)
    (folder / "thresholds.json").write_text(Thresholds(1e9, 1e9, 1e9).to_json(), encoding="utf-8")
    world = make_world(str(folder), settings, thresholds=str(folder / "thresholds.json"), deep_tolerance=0)
    try:
        yield from serve(world)
    finally:
        world.core.shutdown()


@pytest.fixture
def expert_world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    yield from serve_kind(request.param, tmp_path)


@pytest.fixture
def picture_world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    pytest.importorskip("torchvision", reason="vLLM imports it for models that read images", exc_type=ImportError)
    limits = {"image": 1, "video": 0}
    yield from serve_kind(request.param, tmp_path, limit_mm_per_prompt=limits, skip_mm_profiling=True)


@pytest.fixture
def world(engine: World) -> Iterator[World]:
    yield from serve(engine)


@pytest.fixture
def small_world(small_engine: World) -> Iterator[World]:
    """As ``world``, with a model that answers in milliseconds."""
    yield from serve(small_engine)


@pytest.fixture(params=["latent_engine", "expert_engine"])
def latent_world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A test that asks for it runs in engines with latent attention, shaped as DeepSeek-V2-Lite and as DeepSeek-V3."""
    yield from serve(request.getfixturevalue(request.param))


@pytest.fixture
def late_world(late_engine: World) -> Iterator[World]:
    """As ``small_world``, in an engine that hears of each step when it has computed the next one (`late_outputs`)."""
    yield from serve(late_engine)


@pytest.fixture
def watch_verdicts() -> Iterator[Callable[[World], VerdictWatch]]:
    """Watches an engine until the test is over."""
    made: list[VerdictWatch] = []

    def watch(world: World) -> VerdictWatch:
        made.append(VerdictWatch(world.scheduler))
        return made[-1]

    yield watch
    for one in made:
        one.close()


@pytest.fixture(params=["outputs in time", "outputs one step late"])
def any_world(request: pytest.FixtureRequest) -> World:
    """A test that asks for it runs in both engines with the small model."""
    found: World = request.getfixturevalue("small_world" if request.param == "outputs in time" else "late_world")
    return found


@pytest.fixture(scope="session")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Runs a scenario of ``apart.py`` in a process of its own and returns what it tells."""

    def run(scenario: str, **settings: Any) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(scenario)
        (folder / "settings.json").write_text(json.dumps({"model": MODEL, **settings}))
        command = [sys.executable, str(Path(__file__).with_name("apart.py")), scenario]
        files = [str(folder / "settings.json"), str(folder / "answer.json")]
        found = os.pathsep.join(filter(None, (settings.get("lmcache"), os.environ.get("PYTHONPATH"))))
        done = subprocess.run(
            command + files,
            env=os.environ | {"PYTHONPATH": found},
            capture_output=True,
            text=True,
            timeout=1500,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        told: dict[str, Any] = json.loads((folder / "answer.json").read_text())
        return told | {"log": done.stdout + done.stderr}

    return run
