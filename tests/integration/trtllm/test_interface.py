"""Our classes against TensorRT-LLM's published interface, and against the real one where it is installed."""

from __future__ import annotations

import importlib
import inspect
import sys
from abc import ABC, abstractmethod
from types import ModuleType, SimpleNamespace

import fake_trtllm
import numpy as np
import pytest

from semblend.errors import MissingDependencyError, SemBlendError
from semblend.integration.trtllm.engine_support import (
    MODULES,
    SCHEDULER_HOOKS,
    WORKER_HOOKS,
    find_differences,
    list_parameters,
    refusal,
)
from semblend.integration.trtllm.halves import SchedulerHalf, WorkerHalf
from semblend.integration.trtllm.reuse_service import read_request
from semblend.integration.versions import TRTLLM, VersionEvidence
from semblend.prompt import Namespace

CONNECTOR = "semblend.integration.trtllm.connector"


@pytest.fixture
def install(monkeypatch):
    """Put modules where TensorRT-LLM would be; gone after the test."""

    def put(name: str, **names: object) -> None:
        parts = name.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
        module = ModuleType(name)
        for key, value in names.items():
            setattr(module, key, value)
        monkeypatch.setitem(sys.modules, name, module)

    monkeypatch.delitem(sys.modules, CONNECTOR, raising=False)
    yield put
    sys.modules.pop(CONNECTOR, None)


@pytest.mark.parametrize(
    ("half", "base", "hooks"),
    [
        (SchedulerHalf, fake_trtllm.KvCacheConnectorScheduler, SCHEDULER_HOOKS),
        (WorkerHalf, fake_trtllm.KvCacheConnectorWorker, WORKER_HOOKS),
    ],
)
def test_a_half_and_the_fake_have_every_published_hook_with_its_parameters(half, base, hooks):
    assert find_differences(base, hooks) == []
    assert base.__abstractmethods__ == set(hooks)
    for name, parameters in hooks.items():
        assert list_parameters(inspect.getattr_static(half, name)) == parameters


@pytest.mark.parametrize("place", MODULES)
def test_the_connector_loads_from_either_place_and_can_be_made(install, place):
    install(
        place,
        KvCacheConnectorScheduler=fake_trtllm.KvCacheConnectorScheduler,
        KvCacheConnectorWorker=fake_trtllm.KvCacheConnectorWorker,
    )
    connector = importlib.import_module(CONNECTOR)
    args = SimpleNamespace(model="m")
    scheduler, worker = connector.SemBlendConnectorScheduler(args), connector.SemBlendConnectorWorker(args)
    assert scheduler._service is worker._service
    assert isinstance(scheduler, fake_trtllm.KvCacheConnectorScheduler)


def test_without_tensorrt_llm_the_connector_says_what_to_install(install):
    del install
    if importlib.util.find_spec("tensorrt_llm"):
        pytest.skip("it is installed")
    with pytest.raises(MissingDependencyError, match="trtllm"):
        importlib.import_module(CONNECTOR)


def test_a_version_that_demands_more_is_refused_by_the_name_of_the_hook(install):
    class Demanding(fake_trtllm.KvCacheConnectorScheduler, ABC):
        @abstractmethod
        def cancel_load(self, request): ...

    install(MODULES[0], KvCacheConnectorScheduler=Demanding, KvCacheConnectorWorker=fake_trtllm.KvCacheConnectorWorker)
    with pytest.raises(SemBlendError, match="cancel_load"):
        importlib.import_module(CONNECTOR)


def test_a_hook_with_other_parameters_is_refused():
    class Other:
        def start_load_kv(self, forward_context, stream): ...

    told = find_differences(Other, {"start_load_kv": ("stream",), "wait_for_save": ("stream",)})
    assert told == ["Other.start_load_kv takes forward_context, stream and not stream", "Other has no wait_for_save"]


def test_the_real_classes_are_as_published():
    pytest.importorskip("tensorrt_llm")
    connector = importlib.import_module(CONNECTOR)
    assert not inspect.isabstract(connector.SemBlendConnectorScheduler)
    assert not inspect.isabstract(connector.SemBlendConnectorWorker)


def make_args(**more):
    cache = SimpleNamespace(enable_block_reuse=True, **more.pop("kv_cache_config", {}))
    return SimpleNamespace(model="m", kv_cache_config=cache, **more)


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"enable_attention_dp": True}, "enable_attention_dp"),
        ({"speculative_config": object()}, "speculative_config"),
        ({"enable_lora": True}, "enable_lora"),
        ({"cache_transceiver_config": object()}, "cache_transceiver_config"),
        ({"quant_config": SimpleNamespace(quant_algo="FP8", kv_cache_quant_algo=None)}, "quant_config"),
        ({"max_beam_width": 4}, "max_beam_width"),
        ({"kv_cache_config": {"max_attention_window": [128]}}, "max_attention_window"),
        ({"kv_cache_config": {"dtype": "fp8"}}, "kv_cache_config.dtype"),
    ],
)
def test_an_engine_that_cannot_be_served_is_refused_by_the_name_of_its_setting(more, word):
    assert word in (refusal(make_args(**more), "1.2.1") or "")


def test_a_plain_engine_is_served_and_an_unknown_version_is_not():
    assert refusal(make_args(quant_config=SimpleNamespace(quant_algo=None, kv_cache_quant_algo=None)), "1.2.1") is None
    assert "never looked at" in (refusal(make_args(), "0.19.0") or "")


@pytest.mark.parametrize(
    "more",
    [
        {"lora_task_id": 3},
        {"lora_task_id": 0},
        {"multimodal_hashes": [[1]]},
        {"prompt_embedding_table": np.ones((2, 3), np.float32)},
        {"return_context_logits": True},
        {"is_generation_only_request": lambda: True},
        {"is_context_only_request": True},
        {"cache_salt": None, "cache_salt_id": 77},
    ],
)
def test_a_request_of_another_kind_is_declined(more):
    request = SimpleNamespace(request_id=1, get_tokens=lambda beam: [1, 2, 3], **({"cache_salt": None} | more))
    assert read_request(request, Namespace()).unsupported


def test_a_plain_request_is_not_declined_and_its_salt_names_its_tenant():
    request = SimpleNamespace(
        request_id=1, get_tokens=lambda beam: [1, 2, 3], cache_salt="acme", lora_task_id=None, multimodal_hashes=None,
        is_generation_only_request=lambda: False,
    )  # fmt: skip
    waiting = read_request(request, Namespace(model="m"), require_cache_salt=True)
    assert (waiting.unsupported, waiting.prompt.namespace.salt) == ("", "acme")
    request.cache_salt = None
    assert read_request(request, Namespace(), require_cache_salt=True).unsupported


def test_no_row_of_the_tables_claims_that_the_engine_was_run():
    assert {row.evidence for row in TRTLLM.rows} == {VersionEvidence.STATIC}
    assert all("never run" in row.note for row in TRTLLM.rows)
