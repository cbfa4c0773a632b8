"""Passes over a prompt: choose rows, run them through the engine's model, check what came out.

What a pass computes, and why that is enough. KV of a row depends on the tokens up to it. A pass writes new rows (gaps,
or tokens chosen for repair); of the rows that earlier passes computed, those behind the first new row have attended to
KV that is now different and are computed again, the question among them; those before it have not, and stay. So after
every pass each computed row is what the model computes over the KV that lies before it, and a prompt with all its
tokens chosen is a cold prefill.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from semblend.materialize.blend.blend_state import BlendState, Refused
from semblend.materialize.blend.pieces import Pace, PieceRate, Pieces, count_piece_rows
from semblend.materialize.blend.quality import Pass, QualitySettings
from semblend.materialize.blend.ranks import Ranks
from semblend.materialize.contract import QUESTION_ROWS, Model, Observer, Rows, StopPass
from semblend.materialize.gate.canary import CANARY_TOLERANCE, canary_positions, find_largest, measure_rows
from semblend.materialize.gate.risk import bound_risk, next_token_kl
from semblend.plan.reuse_plan import DeclineReason
from semblend.plan.selection import Positions


class PassRunner:
    """Runs passes of one prompt at a time through a model; remembers how fast they were.

    Passes are `Pieces`: they stop after about so much work as ``pace`` says, when the device has done it.
    """

    def __init__(self, model: Model, settings: QualitySettings, ranks: Ranks, pace: Pace) -> None:
        self.model, self.settings, self.ranks, self.pace = model, settings, ranks, pace
        self.prompts_checked = 0
        self._rows_per_ms = 0.0
        self._piece_rate = PieceRate(settings.piece_rows)

    def compute(
        self, state: BlendState, name: str, rows: Positions, observer: Observer | None, *, check: bool = False
    ) -> Pieces[float]:
        """Runs the rows and waits; returns how far the next-token distribution moved, in nats.

        ``check``: the canary looks at the donor KV. It is queued behind the pass, so that a GPU is not kept idle.
        Raises `Refused` where the donor KV was wrong or the logits are not finite.
        """
        began, started = state.elapsed_ms, time.perf_counter()
        hidden = yield from self.run_layers(state, name, rows, observer, layers=self.model.layout.layers)
        if hidden is None:
            raise Refused(DeclineReason.ERROR, f"the pass {name!r} ended early")
        tail = self.model.logits(hidden)
        canary = self._measure_canary(state).to(tail.device) if check else torch.zeros((), device=tail.device)
        error, finite = torch.stack((canary.float(), tail.isfinite().all().float())).tolist()
        ms = state.elapsed_ms - began
        if not self._piece_rate.rows_per_ms:
            self._note_rate(len(rows), started)
        # Small passes are slower a row than large ones: the best rate seen foretells a large one.
        self._rows_per_ms = max(self._rows_per_ms, len(rows) / max(ms, 1e-6))
        if check:
            state.canary = self._check_canary(state, bound_risk(error))
        if not finite:
            # NaN reaches rows before it too (0 x NaN behind a mask), so no further pass of ours can mend it.
            raise Refused(DeclineReason.VALIDATION_FAILED, f"logits after the pass {name!r} are not numbers")
        before, state.tail = state.tail, tail
        moved = 0.0 if before is None else next_token_kl(state.tail[-1], before[-1])
        state.computed[rows] = True
        state.first_tail = state.tail if before is None else state.first_tail
        state.passes[-1] = replace(state.passes[-1], ms=ms, kl=None if before is None else moved)
        if state.on_pass is not None:
            state.on_pass(state.passes[-1], state.tail)
        return moved

    def run_layers(
        self, state: BlendState, name: str, rows: Positions, observer: Observer | None, layers: int
    ) -> Pieces[Tensor | None]:
        """Runs the rows in chunks, ascending, so that each sees what the one before wrote.

        Returns the hidden states of the prompt's last tokens, None where the observer stopped the pass. The question
        stays in one chunk. Nobody waits for the last one.
        """
        began, hidden, left = state.elapsed_ms, None, len(rows)
        for chunk in self._split(rows, layers):
            started, part = time.perf_counter(), self._make_rows(state, torch.from_numpy(chunk))
            if observer is not None:
                observer.on_begin(part, self.model.layout)
            try:
                hidden = self.model.forward(part, observer)
            except StopPass:
                hidden = None
            if observer is not None:
                observer.on_end(part, self.model.layout)
            left -= len(chunk)
            if left and self.pace.piece_ms:
                self._wait_for_device()
                self._note_rate(len(chunk) * layers / self.model.layout.layers, started)
                yield from self.put_aside(state)
        if hidden is not None:
            hidden = hidden[-self._tail_rows(state) :].clone()
        state.passes.append(Pass(name, len(rows), int((rows + 1).sum()), layers, state.elapsed_ms - began))
        return hidden

    def put_aside(self, state: BlendState) -> Pieces[None]:
        """The end of a piece, if work goes in pieces: waits for the device, and lets the engine do something else.

        Only then is it known how long the piece took. What the engine does meanwhile is no time of this request.
        """
        if not self.pace.piece_ms:
            return
        self._wait_for_device()
        since = time.perf_counter()
        yield
        state.started += time.perf_counter() - since

    def prefill(self, state: BlendState) -> Pieces[None]:
        """Computes everything from the first donor token on: a cold prefill over what lies before it."""
        rows = np.arange(len(state.tokens) - self.prefill_rows(state), len(state.tokens))
        yield from self.compute(state, "prefill", rows, None)

    def prefill_rows(self, state: BlendState) -> int:
        """How many rows a full prefill has to compute now."""
        # What lies before the first donor token attended to nothing of a donor, once the first pass has computed it.
        first = int(state.reused[0]) if len(state.reused) and state.passes else state.exact
        return len(state.tokens) - first

    def is_affordable(self, state: BlendState, rows: int) -> bool:
        """Whether so many rows more fit into the request's latency budget, by the best rate seen."""
        budget = self.settings.latency_budget_ms
        if not budget:
            return True
        return self.ranks.mean(state.elapsed_ms + rows / max(self._rows_per_ms, 1e-9)) <= budget

    def check_donor_kv(self, state: BlendState) -> float:
        """The canary alone, waited for; raises `Refused` where the donor KV is wrong."""
        return self._check_canary(state, bound_risk(float(self._measure_canary(state))))

    def _split(self, rows: Positions, layers: int) -> Iterator[Positions]:
        """The rows as one pass takes them: in chunks, and run by run for a model that cannot take scattered rows."""
        end = 0
        while not end or end < len(rows):
            start, end = end, end + self._choose_chunk_rows(layers, len(rows) - end)
            end = len(rows) if end + QUESTION_ROWS >= len(rows) else end
            chunk = rows[start:end]
            if self.model.capabilities.scattered_rows:
                yield chunk
            else:
                yield from np.split(chunk, np.flatnonzero(np.diff(chunk) != 1) + 1)

    def _choose_chunk_rows(self, layers: int, left: int) -> int:
        """Rows of a chunk: as many as a piece has time for, by the pieces done last; all ranks choose alike."""
        if not self.pace.piece_ms:
            return self.settings.chunk_tokens
        rate = self.ranks.mean(self._piece_rate.rows_per_ms) * self.model.layout.layers / layers
        return count_piece_rows(
            rate, self.pace.piece_ms, self.settings.chunk_tokens, left, least=self.settings.piece_rows
        )

    def _note_rate(self, rows: float, started: float) -> None:
        self._piece_rate.note(rows, (time.perf_counter() - started) * 1e3)

    def _wait_for_device(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.current_stream(self.model.device).synchronize()

    def _make_rows(self, state: BlendState, at: Tensor) -> Rows:
        """Rows at these positions. They come from the host, so that asking where they are is no wait for a GPU.

        Taken by numpy: torch would wake all its threads for a few thousand tokens, which takes milliseconds.
        """
        return Rows.of(torch.from_numpy(state.tokens.numpy()[at.numpy()]), at, state.context)

    def _tail_rows(self, state: BlendState) -> int:
        """Rows at the end that every pass computes: their next-token distributions can be compared."""
        return max(1, min(self.settings.question_tokens, len(state.tokens) - state.exact))

    def _measure_canary(self, state: BlendState) -> Tensor:
        """On a sample: is this the KV that its tokens ask for? What a pass has overwritten is right in any case."""
        starts, ends = (
            torch.tensor([getattr(s, name) for s in state.spans]) for name in ("target_start", "target_end")
        )
        self.prompts_checked += 1  # other tokens of each block with every request
        at = canary_positions(starts, ends, seed=self.prompts_checked)
        state.looked_at = at, measure_rows(self.model, self._make_rows(state, at))
        return self.ranks.largest(find_largest(state.looked_at[1]))

    def _check_canary(self, state: BlendState, error: float) -> float:
        tolerance = self.settings.canary_tolerance
        tolerance = CANARY_TOLERANCE[self.model.layout.dtype] if tolerance is None else tolerance
        if error > tolerance:
            raise Refused(
                DeclineReason.VALIDATION_FAILED,
                f"layer-0 KV from donors is off by {error:.3g} of its size, at most {tolerance:g} is rounding",
                state.find_faulty_donors(tolerance),
            )
        return error
