"""What TensorRT-LLM loads: ``kv_connector_config`` names this module and the two classes in it.

Never run on the real engine: see docs/guides/tensorrt_llm.md for what was checked in place of it.
"""

from __future__ import annotations

import importlib
from typing import Any

from semblend.errors import MissingDependencyError, SemBlendError
from semblend.integration.trtllm.engine_support import (
    MODULES,
    SCHEDULER_BASE,
    SCHEDULER_HOOKS,
    WORKER_BASE,
    WORKER_HOOKS,
    find_differences,
)
from semblend.integration.trtllm.halves import SchedulerHalf, WorkerHalf


def load_bases() -> tuple[Any, Any]:
    """TensorRT-LLM's two base classes; raises where they are missing, or demand what we do not have."""
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("tensorrt_llm"):
                raise
            continue
        scheduler, worker = getattr(module, SCHEDULER_BASE), getattr(module, WORKER_BASE)
        told = find_differences(scheduler, SCHEDULER_HOOKS) + find_differences(worker, WORKER_HOOKS)
        if told:
            raise SemBlendError(told[0], hint="run TensorRT-LLM without kv_connector_config, or another version of it")
        return scheduler, worker
    raise MissingDependencyError("TensorRT-LLM is not installed", hint="pip install 'semblend-suite[trtllm]'")


_scheduler_base, _worker_base = load_bases()


class SemBlendConnectorScheduler(SchedulerHalf, _scheduler_base):  # type: ignore[misc, valid-type]
    """Decides; see `semblend.integration.trtllm`."""


class SemBlendConnectorWorker(WorkerHalf, _worker_base):  # type: ignore[misc, valid-type]
    """Copies; see `semblend.integration.trtllm`."""
