"""One real vLLM engine on a CPU for all tests here."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3] / "bench")]
from apart import begin  # noqa: E402
from late_outputs import schedule_ahead  # noqa: E402
from small_folders import write  # noqa: E402
from small_model import write_small_model  # noqa: E402
from verdicts import VerdictWatch  # noqa: E402
from vllm_world import MODEL, World, make_world, serve  # noqa: E402

collect_ignore = ["slow_offload.py"]  # vLLM loads it, by its path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None
    if importlib.util.find_spec("vllm") is None:
        reason = "vLLM is not installed here: .ci/engines/vllm-cpu makes its environment and runs these tests"
    elif not MODEL or not Path(MODEL, "config.json").exists():
        reason = "SEMBLEND_TEST_VLLM_MODEL names no model folder: .ci/engines/vllm-cpu writes one"
    for item in items:
        if reason and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


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


PLAIN_LATENTS = {"attention_backend": "CPU_MLA"}
"""On a CPU with AMX vLLM takes a backend that packs weights: we decline that one, and it knows no float32."""


def make_latent_engine(kind: str, folder: Path) -> Iterator[World]:
    """An engine with latent attention; gate and look into deep layers are content, as with the other small model."""
    from semblend.materialize.gate.thresholds import Thresholds

    write(kind, folder, MODEL)
    (folder / "thresholds.json").write_text(Thresholds(1e9, 1e9, 1e9).to_json(), encoding="utf-8")
    world = make_world(str(folder), PLAIN_LATENTS, thresholds=str(folder / "thresholds.json"), deep_tolerance=0)
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
    more = {"disable_hybrid_kv_cache_manager": True} if request.param == "gemma4_text" else {}
    yield from serve_kind(request.param, tmp_path, **more)


def read_attributes(value: Any) -> Any:
    found: Any = vars(value)
    return found if isinstance(found, Mapping) else {}


@pytest.fixture
def picture_world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    if request.param == "kimi_k25":
        # Its class imports numba, and vLLM's search for kernels falls over an object of llvmlite that has no dict.
        monkeypatch.setattr("vllm.triton_utils.dispatcher.vars", read_attributes, raising=False)
    else:
        pytest.importorskip("torchvision", reason="vLLM imports it for models that read images", exc_type=ImportError)
    limits = {"image": 1, "vision_chunk": 1, "video": 0}
    more: dict[str, Any] = PLAIN_LATENTS if request.param == "kimi_k25" else {}
    more = {"disable_hybrid_kv_cache_manager": True} if request.param in ("gemma3", "gemma4") else more
    yield from serve_kind(request.param, tmp_path, limit_mm_per_prompt=limits, skip_mm_profiling=True, **more)


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
def apart(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Runs a scenario of ``apart.py`` in a process of its own and returns what it tells, or else what it printed."""

    def run(scenario: str, **settings: Any) -> Any:
        folder = tmp_path_factory.mktemp(scenario)
        given, answer, log = (folder / name for name in ("settings.json", "answer.json", "log"))
        given.write_text(json.dumps({"model": MODEL, **settings}))
        process = begin(scenario, given, answer, log, settings.get("lmcache", ""))
        process.join(1500)
        if process.is_alive():
            process.kill()
            process.join()
        said = log.read_text(errors="replace")
        assert process.exitcode == 0, said[-4000:]
        told = json.loads(answer.read_text())
        return told | {"log": said} if isinstance(told, dict) else told or said

    return run
