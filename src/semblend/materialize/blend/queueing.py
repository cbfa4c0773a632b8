"""Mode fast without a wait: on a GPU everything is queued, what computes next is queued behind it, and then one looks.

A wait between our work and the engine's would leave the device idle for as long as the host needs to launch the next
thing. So `begin` queues the move, the canary and the pass, and `Begun.finish`, called when the engine has queued its
own work too, says whether the KV was right. If it was not, what the engine computed from it must be thrown away.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from semblend.materialize.blend.blend_state import Refused, Work
from semblend.materialize.blend.blender import Blender
from semblend.materialize.blend.quality import Blended, Target
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan

log = logging.getLogger("semblend.materialize")


@dataclass(slots=True, eq=False)
class Begun:
    """A prompt whose KV is being prepared; its donors are held until `finish`, which must be called once."""

    blender: QueueingBlender
    prompt: Work
    held: ExitStack
    verdict: Tensor  # on the host: the canary's error, and whether the logits are numbers
    done: Any  # an event behind the verdict's copy; None where nothing is queued

    def finish(self) -> Blended | Decline:
        """Waits for our part of the work, not for what was queued behind it."""
        return self.blender.finished(self)


class QueueingBlender(Blender):
    """A blender that can leave mode fast to the device."""

    def begin(self, sequence: Target, plan: ReusePlan) -> Begun | Decline:
        """Queues everything; a refusal that is known before that is a `Decline`, as from `prepare`."""
        with ExitStack() as held:
            try:
                prompt = Work.of(sequence, plan, self.pool.k.device, spans=plan.spans)
                rows = prompt.first_rows(self.settings)
                held.enter_context(self._loaded(prompt))
                hidden = self._forward(prompt, "fast", rows, None, int(self.pool.k.shape[0]))
                if hidden is None:
                    raise Refused(DeclineReason.ERROR, "the pass ended early")
                prompt.tail = self.model.logits(hidden)
                prompt.computed[rows] = True
                error = self._canary(prompt).to(prompt.tail.device)
                seen = torch.stack((error.float(), prompt.tail.isfinite().all().float()))
                verdict, done = _queued_to_host(seen)
            except Refused as refused:
                return refused.decline
            except Exception as problem:  # the border of reuse: whatever fails in here costs time, never the request
                return _failure(problem)
            return Begun(self, prompt, held.pop_all(), verdict, done)

    def finished(self, begun: Begun) -> Blended | Decline:
        prompt = begun.prompt
        with begun.held:
            try:
                if begun.done is not None:
                    begun.done.synchronize()
                canary, finite = begun.verdict.tolist()
                if not finite:
                    raise Refused(DeclineReason.VALIDATION_FAILED, "logits after the pass 'fast' are not numbers")
                prompt.canary = self._checked_canary(torch.tensor(canary))
                prompt.passes[-1] = replace(prompt.passes[-1], ms=prompt.elapsed_ms - prompt.load_ms)
                return self._result(prompt, "fast")
            except Refused as refused:
                return refused.decline
            except Exception as problem:  # as in begin
                return _failure(problem)


def _queued_to_host(values: Tensor) -> tuple[Tensor, Any]:
    if values.device.type != "cuda":
        return values, None
    there = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    there.copy_(values, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    return there, done


def _failure(error: Exception) -> Decline:
    log.warning("reuse failed, the prompt is computed cold: %s", error, exc_info=True)
    return Decline(DeclineReason.ERROR, f"{type(error).__name__}: {error}".splitlines()[0])
