"""Notices that the model's weights are others than before: donors hold KV of the old ones.

Engines tell a cache little or nothing about new weights: vLLM is silent about ``update_weights``, ``reload_weights``
and a function that somebody runs in the worker. So a sample of every parameter is compared, bit by bit, before anything
is computed on donor KV and before a donor is published: two stretches of 128 numbers each, all of them gathered and
compared by a few kernels, which a GPU replays as one launch. Torch's own counters of versions are no help: vLLM writes
weights through ``.data``, which does not move them. An update that moves one number in a thousand somewhere in the
model is missed with a chance below e^-10 for a model of 40 parameter tensors, and with less for larger ones.

An update of a handful of numbers can be missed. Whoever makes one resets the prefix cache, which drops donors too.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from semblend.materialize.kv.layout import Record, record_launches

log = logging.getLogger("semblend.materialize")
Look = Callable[[], bool]
"""Says whether the weights differ; waits for the device."""
STRETCHES = 2
STRETCH_NUMBERS = 128


class WeightsWatch:
    """Samples of the parameters of ``model``, as they were when it was last looked at.

    ``record`` makes a function that does again what it was given, in fewer launches; by default on a GPU only.
    """

    def __init__(self, model: torch.nn.Module, record: Record | None = None) -> None:
        self._model, self._record = model, record
        self._take_sample()

    @property
    def digest(self) -> str:
        """16 hex digits that stand for the sampled weights; equal weights have equal digests in every process."""
        return self._digest

    def have_changed(self, look: Look | None = None) -> bool:
        """Whether the weights differ from those of the last call; waits for the device.

        ``look``: one that was begun when nothing of what matters had been computed yet.
        """
        if not (look or self.begin_look())():
            return False
        self._take_sample()
        return True

    def begin_look(self) -> Look:
        """Queue a comparison with the weights that were sampled, as they are now; the answer waits for it.

        It may be asked for in another thread.
        """
        # A parameter that was replaced counts as changed: some CPU kernels keep the numbers where we cannot look.
        if not self._are_in_place():
            return lambda: True
        differ = [compare() for compare in self._comparisons]
        queued = [torch.cuda.current_stream(flag.device).record_event() for flag in differ if flag.is_cuda]

        def wait_for_answer() -> bool:
            for event in queued:
                event.synchronize()
            return any(bool(flag) for flag in differ)

        return wait_for_answer

    def _take_sample(self) -> None:
        self._places: list[tuple[torch.nn.Module, str, Tensor, int]] = []
        stretches: dict[torch.device, list[Tensor]] = {}
        for _, module in self._model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                self._places.append((module, name, parameter, parameter.data_ptr()))
                if parameter.numel():  # some CPU kernels keep weights of their own and leave an empty parameter
                    stretches.setdefault(parameter.device, []).extend(_cut_stretches(parameter.detach()))
        digest = hashlib.sha256()
        self._comparisons: list[Callable[[], Tensor]] = []
        for device in sorted(stretches, key=str):
            sample = torch.cat(stretches[device])
            digest.update(sample.cpu().numpy().tobytes())
            record = record_launches if self._record is None and sample.is_cuda else self._record
            self._comparisons.append(_make_comparison(stretches[device], sample, record))
        self._digest = digest.hexdigest()[:16]

    def _are_in_place(self) -> bool:
        """Whether every parameter is the tensor that was sampled, at the address that it had."""
        return all(
            module._parameters.get(name) is parameter and parameter.data_ptr() == address
            for module, name, parameter, address in self._places
        )


def _make_comparison(stretches: list[Tensor], sample: Tensor, record: Record | None) -> Callable[[], Tensor]:
    """Says, on their device, whether the stretches differ from the sample by now.

    It is recorded, where that works: hundreds of views of memory take 0.9 ms to gather anew. Their addresses are
    checked before each look, so a recording reads what a plain comparison would.
    """

    def compare() -> Tensor:
        return torch.ne(torch.cat(stretches), sample).any()

    if record is not None:
        try:
            with torch.cuda.device(sample.device) if sample.is_cuda else nullcontext():
                return _try_recording(record(compare), sample)
        except Exception as error:  # whatever it is, the plain way stands
            log.warning("the look at the weights is not recorded, and takes longer: %s", error)
    return compare


def _try_recording(compare: Callable[[], Tensor], sample: Tensor) -> Callable[[], Tensor]:
    """The recorded comparison, once it has told a sample with two wrong bits from the right one; else RuntimeError."""
    ends = sample[:: max(1, len(sample) - 1)]  # the first and the last byte
    ends.bitwise_xor_(1)
    try:
        sees_change = bool(compare())
    finally:
        ends.bitwise_xor_(1)
    if not sees_change or bool(compare()):
        raise RuntimeError("the recording does not see what changes")
    return compare


def _cut_stretches(parameter: Tensor) -> list[Tensor]:
    """Views of a parameter's memory, spread evenly over it, whatever the order of its dimensions.

    As bytes, because a weight that is not a number is not equal to itself.
    """
    origin = parameter.storage_offset()
    held = parameter.untyped_storage().nbytes() // parameter.element_size() - origin
    numbers = min(parameter.numel(), held)
    size = min(STRETCH_NUMBERS, numbers)
    starts = {(numbers - size) * part // STRETCHES for part in range(1, STRETCHES + 1)}
    return [parameter.as_strided((size,), (1,), origin + start).view(torch.uint8) for start in sorted(starts)]
