"""Passes over a prompt: choose rows, run them through the engine's model, check what came out.

What a pass computes, and why that is enough. KV of a row depends on the tokens up to it. A pass writes new rows (gaps,
or tokens chosen for repair); of the rows that earlier passes computed, those behind the first new row have attended to
KV that is now different and are computed again, the question among them; those before it have not, and stay. So after
every pass each computed row is what the model computes over the KV that lies before it, and a prompt with all its
tokens chosen is a cold prefill.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from semblend.materialize.blend.blend_state import BlendState, Refused
from semblend.materialize.blend.pieces import Pace, PieceRate, Pieces, count_piece_rows
from semblend.materialize.blend.quality import Pass, QualitySettings
from semblend.materialize.blend.ranks import Ranks
from semblend.materialize.contract import QUESTION_ROWS, Model, Observer, Rows, StopPass
from semblend.materialize.gate.canary import (
    CANARY_TOLERANCE,
    DEEP_ROWS,
    DeepLook,
    canary_positions,
    choose_deep_rows,
    cut_windows,
    find_deep_deviation,
    find_largest,
    measure_rows,
)
from semblend.materialize.gate.risk import bound_risk, next_token_kl
from semblend.plan.reuse_plan import DeclineReason
from semblend.plan.selection import Positions
from semblend.span import Span


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
        self,
        state: BlendState,
        name: str,
        rows: Positions,
        observer: Observer | None,
        *,
        check: bool = False,
        deep: bool = False,
    ) -> Pieces[float]:
        """Runs the rows and waits; returns how far the next-token distribution moved, in nats.

        ``check``: the canary looks at the donor KV in layer 0; ``deep``: and above, at rows that are computed with
        these for it. It is queued behind the pass, so that a GPU is not kept idle. Raises `Refused` where the donor KV
        was wrong or the logits are not finite.
        """
        began, started = state.elapsed_ms, time.perf_counter()
        chosen = self._choose_canary_rows(state) if check else torch.empty(0, dtype=torch.long)
        look = self._make_deep_look(state, rows, chosen) if deep else None
        if look is not None:
            rows = np.union1d(rows, look.at)
        hidden = yield from self.run_layers(state, name, rows, observer, layers=self.model.layout.layers, look=look)
        if hidden is None:
            raise Refused(DeclineReason.ERROR, f"the pass {name!r} ended early")
        tail = self.model.logits(hidden)
        nothing = torch.zeros((), device=tail.device)
        canary = self._measure_canary(state, chosen).to(tail.device).float() if check else nothing
        off = look.compare() if look is not None else None
        donors = _group_by_donor(look.at, state.spans) if look is not None else {}
        windows = cut_windows(list(donors.values()))
        furthest = find_deep_deviation(off, windows).to(tail.device) if off is not None else nothing
        verdict = torch.stack((canary, furthest, (~tail.isfinite()).any().float()))
        error, deviation, broken = self.ranks.largest(verdict).tolist()
        ms = state.elapsed_ms - began
        if not self._piece_rate.rows_per_ms:
            self._note_rate(len(rows), started)
        # Small passes are slower a row than large ones: the best rate seen foretells a large one.
        self._rows_per_ms = max(self._rows_per_ms, len(rows) / max(ms, 1e-6))
        if check:
            state.canary = self._check_canary(state, bound_risk(error))
        if look is not None and off is not None:
            self._check_deep_look(state, donors, off, bound_risk(deviation))
        if broken:
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
        self,
        state: BlendState,
        name: str,
        rows: Positions,
        observer: Observer | None,
        layers: int,
        look: DeepLook | None = None,
    ) -> Pieces[Tensor | None]:
        """Runs the rows in chunks, ascending, so that each sees what the one before wrote.

        Returns the hidden states of the prompt's last tokens, None where the observer stopped the pass. The question
        stays in one chunk. Nobody waits for the last one. ``look`` hears of the begin and end of chunks, not of layers.
        """
        began, hidden, left = state.elapsed_ms, None, len(rows)
        for chunk in self._split(rows, layers):
            started, part = time.perf_counter(), self._make_rows(state, torch.from_numpy(chunk))
            watchers = [one for one in (observer, look) if one is not None]
            for one in watchers:
                one.on_begin(part, self.model.layout)
            try:
                hidden = self.model.forward(part, observer)
            except StopPass:
                hidden = None
            for one in watchers:
                one.on_end(part, self.model.layout)
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
        found = self._measure_canary(state, self._choose_canary_rows(state))
        return self._check_canary(state, bound_risk(float(self.ranks.largest(found.reshape(1)))))

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

    def _choose_canary_rows(self, state: BlendState) -> Tensor:
        """The positions at which layer 0 is looked at: other tokens of each block with every request."""
        starts, ends = (
            torch.tensor([getattr(s, name) for s in state.spans]) for name in ("target_start", "target_end")
        )
        self.prompts_checked += 1
        return canary_positions(starts, ends, seed=self.prompts_checked)

    def _measure_canary(self, state: BlendState, at: Tensor) -> Tensor:
        """On a sample: is this the KV that its tokens ask for? What a pass has overwritten is right in any case."""
        state.looked_at = at, measure_rows(self.model, self._make_rows(state, at))
        return find_largest(state.looked_at[1])

    def _make_deep_look(self, state: BlendState, rows: Positions, canary: Tensor) -> DeepLook | None:
        """Chooses the rows by which deep layers are judged; None where donors hold too little, or nobody wants it.

        They are others than those whose layer 0 is looked at: the pass overwrites them before that look.
        """
        computed = np.isin(state.reused, rows)
        kept = state.reused[~computed & ~np.isin(state.reused, canary.numpy())]
        donors = _group_by_donor(kept, state.spans).values()
        most, seed = DEEP_ROWS // max(1, len(donors)), self.prompts_checked
        at = np.sort(np.concatenate([choose_deep_rows(kept[rows], most=most, seed=seed) for rows in donors]))
        return DeepLook(at, state.reused[computed]) if len(at) and self.settings.deep_tolerance else None

    def _check_deep_look(
        self, state: BlendState, donors: Mapping[str, Positions], off: Tensor, deviation: float
    ) -> None:
        state.deep, tolerance = deviation, self.settings.deep_tolerance
        if deviation > tolerance:
            wrong = [
                name
                for name, rows in donors.items()
                if len(rows) and float(find_deep_deviation(off, cut_windows([rows]))) > tolerance
            ]
            raise Refused(
                DeclineReason.VALIDATION_FAILED,
                f"KV from donors is off by {deviation:.3g} of what tokens differ by in some layer, "
                f"another text in front explains {tolerance:g} (deep_tolerance)",
                tuple(wrong),
            )

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


def _group_by_donor(at: Positions, spans: Sequence[Span]) -> dict[str, Positions]:
    """Which of the positions ``at`` are of each donor, as indices."""
    found: dict[str, list[Positions]] = {}
    for span in spans:
        inside = np.flatnonzero((at >= span.target_start) & (at < span.target_end))
        found.setdefault(span.donor_id, []).append(inside)
    return {name: np.concatenate(parts) for name, parts in found.items()}
