"""vLLM's async scheduling on a CPU: each step is scheduled and computed before the last one's output is processed.

On a GPU that is vLLM's default; its CPU platform switches it off, so a test on a CPU does not see what it does to a
connector. Everything that takes part is vLLM's own: `AsyncScheduler`, the engine core's queue of two batches, and the
model runner that fills in sampled tokens which the scheduler has not heard of. Ours is the switch, and streams and
events that do nothing: a CPU computes in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any


class _DoneAtOnce:
    """A CUDA stream or event on a machine without CUDA: whatever it would wait for is done."""

    def __init__(self, *args: Any, **named: Any) -> None:
        import torch

        del args, named
        self.device = torch.device("cpu")

    def record(self, *args: Any) -> None:
        """Nothing to mark."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait_stream(self, *args: Any) -> None:
        """Nothing to wait for."""


@contextmanager
def schedule_ahead() -> Iterator[None]:
    """Engines that are made inside this context schedule one step ahead of the outputs they have processed."""
    import torch
    from vllm.platforms.cpu import CpuPlatform

    # For good: the model runner asks for them in every step.
    torch.cuda.Event = torch.cuda.Stream = _DoneAtOnce
    torch.cuda.current_stream, torch.cuda.stream = _DoneAtOnce, nullcontext
    kept = CpuPlatform.__dict__["check_and_update_config"]

    def check_and_switch_on(cls: type, vllm_config: Any) -> None:
        kept.__func__(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_switch_on)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = kept
